"""The disk cache of generated modules: one folder a plan, written whole or not at all.

A folder is named `<spec>-<key>`, where the key covers everything the text depends on. It holds
`kernel.py`, the module, and `plan.json`, which says how to call it and carries the module's digest.
Anything unreadable, truncated or altered is a miss: rebuilt, and said once.
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
from flashgen.fingerprint import fingerprint_text
from flashgen.runtime.said import say_once
from flashgen.schedule.model import Bucket, Schedule, all_buckets

PLAN_VERSION = 3
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
        return json.dumps(
            {
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
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, data: dict[str, object], text: str) -> Plan:
        """The inverse of `to_json`; ValueError, KeyError or TypeError for what is not one."""
        plan = cls(
            name=str(data["name"]),
            text=text,
            entries=tuple(sorted(data["entries"].items())),  # type: ignore[attr-defined]
            arguments=tuple(data["arguments"]),  # type: ignore[arg-type]
            has_lse=bool(data["has_lse"]),
            choices=tuple(
                (Bucket.from_dict(b), Schedule.from_dict(s))
                for b, s in data["choices"]  # type: ignore[attr-defined]
            ),
            origin=str(data["origin"]),
            origins=tuple(map(str, data["origins"])),  # type: ignore[call-overload]
            notes=tuple(map(str, data["notes"])),  # type: ignore[call-overload]
            hopper_digest=str(data["hopper_digest"]),
        )
        if data["version"] != PLAN_VERSION or data["module_digest"] != plan.digest:
            raise ValueError("version or digest differs")
        return plan


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
        data = json.loads((folder / "plan.json").read_text("utf-8"))
        return Plan.from_json(data, (folder / "kernel.py").read_text("utf-8"))
    except FileNotFoundError:
        if folder.is_dir() and any(folder.iterdir()):
            say_once(f"{folder}: the cached kernel is incomplete; it is rebuilt")
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FlashgenError) as error:
        say_once(f"{folder}: the cached kernel cannot be read ({error}); it is rebuilt")
        return None


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
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _temporary_root() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashgen-"))
