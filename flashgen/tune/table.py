"""Tables of tuned configs: `<gpu>/<spec>.json`, read strictly, written whole or not at all.

A table is what people review and commit: entries sorted, a small object a line, the same bytes for
the same content. Reading names the first thing that is wrong, with its place. This module is read
by the warm path and imports nothing heavy; whether an entry still fits is `lookup`'s question.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

from flashgen.errors import FlashgenError, TableError
from flashgen.runtime.artifact import replace_file
from flashgen.schedule.model import KV_LEN_LIMITS, Q_LEN_LIMITS, Bucket, Schedule, field_names
from flashgen.spec.parts import Shape
from flashgen.tune.toolchain import Device, Toolchain

SCHEMA_VERSION = 1
PASSES = ("forward",)
UNITS = ("TFLOP/s", "GB/s")
LINE_LENGTH = 190  # a schedule is one line, so that a diff shows it whole
_T = TypeVar("_T")
LONGEST_FILE = 4 << 20  # bytes; with an entry for each of 48 buckets a table has 50 KiB
MAKE_READABLE = "make it a file that can be read, or remove it."
RETUNE = "run `flashgen tune` for this spec again, or delete the file."


@dataclass(frozen=True)
class Entry:
    """One tuned schedule: for which lengths, how fast, against what, measured how and with what.

    time_us: the median of a launch on `shape`; low_us, high_us: its 20th and 80th percentile; rate:
    of the work of `shape`, in `unit` (TFLOP/s of visible matmuls where compute is the limit, GB/s
    of the least traffic where memory is). bound_us: the roofline's time. default_us: the untuned
    schedule's time in the same run (None: it could not be timed). trials: schedules that were timed
    or failed, of `feasible`. kernel_digest: of the kernel that was timed, by
    `toolchain.kernel_digest`.
    """

    direction: str
    bucket: Bucket
    shape: Shape
    schedule: Schedule
    time_us: float
    low_us: float
    high_us: float
    rate: float
    unit: str
    bound_us: float
    default: Schedule
    default_us: float | None
    trials: int
    feasible: int
    kernel_digest: str
    device: Device
    toolchain: Toolchain

    @property
    def place(self) -> str:
        """How messages name it."""
        return f"{self.direction}, {self.bucket}"

    @property
    def speedup(self) -> float | None:
        """How often faster than the untuned schedule; None where that could not be timed."""
        return self.default_us and self.default_us / self.time_us

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Forward before backward, short before long; None is longest."""
        last = max(*Q_LEN_LIMITS, *KV_LEN_LIMITS) + 1
        return (
            PASSES.index(self.direction),
            self.bucket.q_len_max or last,
            self.bucket.kv_len_max or last,
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "pass": self.direction,
            "bucket": self.bucket.to_dict(),
            "shape": asdict(self.shape),
            "schedule": self.schedule.to_dict(),
            "measured": {
                "time_us": _rounded(self.time_us),
                "low_us": _rounded(self.low_us),
                "high_us": _rounded(self.high_us),
                "rate": _rounded(self.rate),
                "unit": self.unit,
            },
            "bound_us": _rounded(self.bound_us),
            "default": {
                "schedule": self.default.to_dict(),
                "time_us": None if self.default_us is None else _rounded(self.default_us),
            },
            "search": {"trials": self.trials, "feasible": self.feasible},
            "measured_with": {
                **self.device.to_dict(),
                **self.toolchain.to_dict(),
                "kernel_digest": self.kernel_digest,
            },
        }


@dataclass(frozen=True)
class Table:
    """All tuned configs of one spec on one GPU; `gpu` is a target's id, `spec` a spec's name."""

    spec: str
    fingerprint: str
    gpu: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.entries, key=lambda entry: entry.sort_key))
        object.__setattr__(self, "entries", ordered)

    def entry(self, bucket: Bucket, direction: str = "forward") -> Entry | None:
        """The entry of exactly this bucket."""
        return next(
            (e for e in self.entries if (e.direction, e.bucket) == (direction, bucket)), None
        )

    def with_entries(self, new: Iterable[Entry]) -> Table:
        """`new` in the place of what there was for the same pass and bucket."""
        found = {(entry.direction, entry.bucket): entry for entry in (*self.entries, *new)}
        return Table(self.spec, self.fingerprint, self.gpu, tuple(found.values()))

    def to_json(self) -> str:
        """The file's text."""
        newest = max(
            (entry.toolchain for entry in self.entries),
            key=lambda tools: (_version(tools.triton), _version(tools.torch)),
            default=None,
        )
        value = {
            "schema": SCHEMA_VERSION,
            "spec": self.spec,
            "fingerprint": self.fingerprint,
            "gpu": self.gpu,
            "toolchain": newest and newest.to_dict(),
            "entries": [entry.to_dict() for entry in self.entries],
        }
        return _laid_out(value, 0) + "\n"


def table_path(folder: Path, gpu: str, spec: str) -> Path:
    """Where the table of a spec on a GPU is, inside a folder of tuned configs."""
    return folder / gpu / f"{spec}.json"


def write_table(path: Path, table: Table) -> None:
    """Readers see the old file or the new one. TableError where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, table.to_json(), shared=True)
    except OSError as error:
        raise TableError(
            str(path),
            f"cannot be written ({error.strerror or type(error).__name__})",
            "choose another folder with --out, or set FLASHGEN_CONFIG_DIR; "
            "the trials are kept, so that tuning again costs no measurement.",
        ) from error


def read_table(path: Path) -> Table:
    """The table in a file. TableError: not there, not readable, not a table, another version."""
    return parse_table(read_data(path), str(path))


def read_data(path: Path) -> bytes:
    """The bytes of a table's file. TableError where they cannot be had, also from what is no file:
    reading a pipe waits for ever, reading a device may never end."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise TableError(str(path), "cannot be read (is no regular file)", MAKE_READABLE)
        with path.open("rb") as stream:
            data = stream.read(LONGEST_FILE + 1)
    except OSError as error:
        why = error.strerror or type(error).__name__
        hint = None if isinstance(error, FileNotFoundError) else MAKE_READABLE
        raise TableError(str(path), f"cannot be read ({why})", hint) from error
    if len(data) > LONGEST_FILE:
        most = f"more than {LONGEST_FILE >> 20} MiB, as no table is"
        raise TableError(str(path), f"cannot be read ({most})", MAKE_READABLE)
    return data


def parse_table(data: bytes, place: str) -> Table:
    """The table in the text of a file; `place` is its name in errors."""
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer)
    except UnicodeDecodeError:
        raise TableError(place, "is not text in UTF-8", RETUNE) from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = f":{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TableError(f"{place}{where}", "is no JSON, or half of it", RETUNE) from None
    return _Reader(place).table(value)


# **** reading ****


class _Reader:
    """Takes JSON values apart; every complaint has the file's name and the path of the field."""

    def __init__(self, place: str) -> None:
        self._place = place

    def table(self, value: object) -> Table:
        if not isinstance(value, dict):
            raise self._wrong("the file", "an object", value)
        if "schema" not in value:
            raise self._error("schema", "is missing: this is no table of tuned configs", None)
        version = value["schema"]
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise self._error(
                "schema",
                f"got version {version!r}, this flashgen reads {SCHEMA_VERSION}",
                "it was written by another version of flashgen: use that one, or tune again.",
            )
        self._keys("", value, ("schema", "spec", "fingerprint", "gpu", "toolchain", "entries"))
        entries = value["entries"]
        if not isinstance(entries, list):
            raise self._wrong("entries", "a list", entries)
        found = Table(
            spec=self._text("spec", value["spec"]),
            fingerprint=self._hex("fingerprint", value["fingerprint"], 64),
            gpu=self._text("gpu", value["gpu"]),
            entries=tuple(self._entry(f"entries[{i}]", e) for i, e in enumerate(entries)),
        )
        places = [(entry.direction, entry.bucket) for entry in found.entries]
        for number, place in enumerate(places):
            if place in places[:number]:
                raise self._error(f"entries[{number}]", f"a second one for {place[1]}", RETUNE)
        return found

    def _entry(self, at: str, value: object) -> Entry:
        names = [
            *("pass", "bucket", "shape", "schedule", "measured"),
            *("bound_us", "default", "search", "measured_with"),
        ]
        found = self._keys(at, value, names)
        measured = self._keys(
            f"{at}.measured", found["measured"], ("time_us", "low_us", "high_us", "rate", "unit")
        )
        default = self._keys(f"{at}.default", found["default"], ("schedule", "time_us"))
        search = self._keys(f"{at}.search", found["search"], ("trials", "feasible"))
        tools = [f.name for f in fields(Toolchain)]
        device = [f.name for f in fields(Device)]
        used = f"{at}.measured_with"
        with_ = self._keys(used, found["measured_with"], (*device, *tools, "kernel_digest"))
        numbers = {
            name: self._number(f"{at}.measured.{name}", measured[name])
            for name in ("time_us", "low_us", "high_us", "rate")
        }
        return Entry(
            direction=self._word(f"{at}.pass", found["pass"], PASSES),
            bucket=self._bucket(f"{at}.bucket", found["bucket"]),
            shape=self._shape(f"{at}.shape", found["shape"]),
            schedule=self._schedule(f"{at}.schedule", found["schedule"]),
            **numbers,
            unit=self._word(f"{at}.measured.unit", measured["unit"], UNITS),
            bound_us=self._number(f"{at}.bound_us", found["bound_us"], least=0.0),
            default=self._schedule(f"{at}.default.schedule", default["schedule"]),
            default_us=None
            if default["time_us"] is None
            else self._number(f"{at}.default.time_us", default["time_us"]),
            trials=self._whole(f"{at}.search.trials", search["trials"]),
            feasible=self._whole(f"{at}.search.feasible", search["feasible"]),
            kernel_digest=self._hex(f"{used}.kernel_digest", with_["kernel_digest"], 16),
            device=Device(
                name=self._text(f"{used}.name", with_["name"]),
                compute_capability=self._text(
                    f"{used}.compute_capability", with_["compute_capability"]
                ),
                sm_count=self._whole(f"{used}.sm_count", with_["sm_count"]),
                smem_per_block_bytes=self._whole(
                    f"{used}.smem_per_block_bytes", with_["smem_per_block_bytes"]
                ),
                driver=self._text(f"{used}.driver", with_["driver"]),
            ),
            toolchain=Toolchain(**{n: self._text(f"{used}.{n}", with_[n]) for n in tools}),
        )

    def _bucket(self, at: str, value: object) -> Bucket:
        if not isinstance(value, dict):
            raise self._wrong(at, "an object", value)
        return self._made(at, lambda: Bucket.from_dict(value))

    def _schedule(self, at: str, value: object) -> Schedule:
        if not isinstance(value, dict):
            raise self._wrong(at, "an object", value)
        self._keys(at, value, field_names(value.get("family")))
        return self._made(at, lambda: Schedule.from_dict(value))

    def _shape(self, at: str, value: object) -> Shape:
        names = [f.name for f in fields(Shape)]
        found = self._keys(at, value, names)
        return Shape(**{name: self._whole(f"{at}.{name}", found[name]) for name in names})

    def _made(self, at: str, make: Callable[[], _T]) -> _T:
        try:
            return make()
        except FlashgenError as error:
            raise self._error(at, str(error), RETUNE) from None

    def _keys(self, at: str, value: object, names: Sequence[str]) -> Mapping[str, object]:
        """`value` as an object with these fields and no others."""
        if not isinstance(value, dict):
            raise self._wrong(at, "an object", value)
        for name in names:
            if name not in value:
                raise self._error(f"{at}.{name}".lstrip("."), "is missing", RETUNE)
        for name in value:
            if name not in names:
                known = f"unknown field, known: {', '.join(names)}"
                raise self._error(f"{at}.{name}".lstrip("."), known)
        return value

    def _text(self, at: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self._wrong(at, "text", value)
        return value

    def _hex(self, at: str, value: object, digits: int) -> str:
        if not isinstance(value, str) or len(value) != digits or set(value) - _HEX:
            raise self._wrong(at, f"{digits} hex digits", value)
        return value

    def _word(self, at: str, value: object, allowed: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(at, f"one of {', '.join(allowed)}", value)
        return value

    def _number(self, at: str, value: object, least: float = math.ulp(0.0)) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(at, "a number", value)
        if not math.isfinite(value) or value < least:
            raise self._wrong(at, "a finite number above 0", value)
        return float(value)

    def _whole(self, at: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(at, "a whole number", value)
        return value

    def _wrong(self, at: str, expected: str, got: object) -> TableError:
        shown = repr(got)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        return self._error(at, f"expected {expected} (got {shown})", RETUNE)

    def _error(self, at: str, problem: str, hint: str | None = RETUNE) -> TableError:
        return TableError(f"{self._place}: {at}", problem, hint)


def _integer(digits: str) -> int | float:
    """A whole number, or where no counter holds it a float: infinity past 1e308. `int` refuses
    thousands of digits, and a float of hundreds overflows, neither with the place in the file."""
    return int(digits) if len(digits) <= LONGEST_WHOLE else float(digits)


_HEX = set("0123456789abcdef")
_SHOWN = 60
LONGEST_WHOLE = 18  # digits that 64 bits hold


# **** writing ****


def _rounded(number: float) -> float:
    """Five digits: more than a clock's drift leaves meaningful, and short lines."""
    return float(f"{number:.5g}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split(r"[.+]", text) if part.isdecimal())


def _laid_out(value: object, indent: int) -> str:
    """JSON with an object of plain values on one line, if it fits in `LINE_LENGTH`."""
    inner = " " * (indent + 1)
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, dict) and value:
        nested = any(isinstance(v, (dict, list)) for v in value.values())
        if not nested and indent and indent + len(flat) <= LINE_LENGTH:
            return flat
        parts = [f"{json.dumps(k)}: {_laid_out(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + "}"
    if isinstance(value, list) and value:
        parts = [_laid_out(each, indent + 1) for each in value]
        return "[\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + "]"
    return flat
