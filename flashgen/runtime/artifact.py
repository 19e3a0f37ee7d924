"""The disk cache of generated modules: one folder a plan, written whole or not at all.

A folder is named `<spec>-<key>`, where the key covers everything the text depends on. It holds
`kernel.py`, the module, and `plan.json`, which says how to call it and carries the digests of the
module and of itself. Anything unreadable, truncated or altered is a miss: rebuilt, and said once.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flashgen import settings
from flashgen.errors import FlashgenError
from flashgen.fingerprint import fingerprint, fingerprint_text
from flashgen.runtime.said import say_once
from flashgen.schedule.model import Bucket, Schedule, all_buckets

PLAN_VERSION = 4
Choice = tuple[Bucket, Schedule]


@dataclass(frozen=True)
class Plan:
    """A generated module and the schedule of every shape bucket; all that a call needs.

    entries: kernel kind -> kernel name; arguments: keyword arguments beyond q, k, v, in the order
    of the module's `run`; origin, origins: who chose the schedules, in all and of each choice;
    notes: what is to be said whenever the plan is used; hopper_digest: of its kernel of the family
    gluon_sm90, which verdicts are kept by ("": none, or not worked out).
    """

    name: str
    text: str
    entries: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    has_lse: bool
    choices: tuple[Choice, ...]
    origin: str
    origins: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hopper_digest: str = ""

    @property
    def digest(self) -> str:
        return fingerprint_text(self.text)

    def only(self, schedule: Schedule) -> Plan:
        """The same module with one schedule, of a kind in `entries`, for all lengths."""
        return replace(self, choices=tuple((bucket, schedule) for bucket in all_buckets()))

    def to_json(self) -> str:
        told: dict[str, object] = {
            "version": PLAN_VERSION,
            "name": self.name,
            "module_digest": self.digest,
            "entries": dict(self.entries),
            "arguments": list(self.arguments),
            "has_lse": self.has_lse,
            "origin": self.origin,
            "origins": list(self.origins),
            "notes": list(self.notes),
            "hopper_digest": self.hopper_digest,
            "choices": [[b.to_dict(), s.to_dict()] for b, s in self.choices],
        }
        return json.dumps({"digest": fingerprint(told), **told}, indent=1)

    @classmethod
    def from_json(cls, text: str, module: str) -> Plan:
        """The inverse of `to_json`, with the text of the module; ValueError for either if it is not
        as it was written."""
        told = json.loads(text)
        if not isinstance(told, dict) or told.get("version") != PLAN_VERSION:
            raise ValueError("its version differs")
        if told.pop("digest", None) != fingerprint(told):
            raise ValueError("its plan was altered")
        if told["module_digest"] != fingerprint_text(module):
            raise ValueError("its module was altered")
        return cls(
            name=told["name"],
            text=module,
            entries=tuple(sorted(told["entries"].items())),
            arguments=tuple(told["arguments"]),
            has_lse=told["has_lse"],
            choices=tuple((Bucket.from_dict(b), Schedule.from_dict(s)) for b, s in told["choices"]),
            origin=told["origin"],
            origins=tuple(told["origins"]),
            notes=tuple(told["notes"]),
            hopper_digest=told["hopper_digest"],
        )


def fetch(name: str, key: str, build: Callable[[], Plan]) -> tuple[Plan, Path]:
    """The plan of `key` and the path of its module, from the cache or else built and kept."""
    folder = settings.cache_dir() / "kernels" / f"{name}-{key[:24]}"
    plan = _read(folder)
    if plan is None:
        plan = build()
        folder = _write(folder, plan)
    return plan, folder / "kernel.py"


def _read(folder: Path) -> Plan | None:
    try:
        return Plan.from_json(_text(folder / "plan.json"), _text(folder / "kernel.py"))
    except FileNotFoundError:
        if folder.is_dir() and any(folder.iterdir()):
            say_once(f"{folder}: the cached kernel is incomplete; it is rebuilt")
        return None
    except NotADirectoryError:
        return None
    except RecursionError:
        reason = "it is nested too deeply"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FlashgenError) as error:
        reason = str(error)
    say_once(f"{folder}: the cached kernel cannot be read ({reason}); it is rebuilt")
    return None


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no file")  # a pipe would keep its reader waiting
    return path.read_text("utf-8")


def _write(folder: Path, plan: Plan) -> Path:
    """Write both files under temporary names and rename them.

    A folder that refuses is replaced by a temporary one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "kernel.py", plan.text)
        replace_file(folder / "plan.json", plan.to_json())
    except OSError as error:
        say_once(
            f"{settings.cache_dir()}: the kernel cache cannot be written ({error.strerror}); "
            "kernels of this process are kept in a temporary folder\n"
            "  hint: set FLASHGEN_CACHE_DIR to a folder that can be written."
        )
        folder = _temporary_root() / folder.name
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "kernel.py", plan.text)
    return folder


def replace_file(path: Path, content: str | bytes, *, shared: bool = False) -> None:
    """Readers see the old file or the new one, never half of it; text is written as UTF-8.

    shared: for people, so that the umask says who may read it; else the owner alone may.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Made here and not by tempfile, whose files have no umask; reading that would mean setting it.
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = os.open(temporary, new, 0o666 if shared else 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as where the disk is full
            error.filename = str(path)  # else it reads like one of a standard stream
        raise


@cache
def _temporary_root() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashgen-"))
