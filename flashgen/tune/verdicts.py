"""What is known of a Hopper kernel on this machine: proven, or never to be run again.

A warp-specialised kernel with a wrong barrier never ends, and the process that launched it cannot
be saved. What a process with a deadline found out is kept here, in a file for each kernel, schedule
and toolchain: whoever comes later reads one small file. Files are written whole or not at all. One
that cannot be read counts as not there: the kernel is tried again, in a process of its own.

Read by the warm path, so it imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from flashgen import settings
from flashgen.errors import FlashgenError
from flashgen.fingerprint import fingerprint
from flashgen.runtime.artifact import Plan, replace_file
from flashgen.runtime.said import say_once
from flashgen.schedule.model import Schedule
from flashgen.tune.table import Entry, read_data
from flashgen.tune.toolchain import BUNDLED, Device, assembler, kernel_digest, toolchain

VERSION = 1
# Kept: proven, hung, refused (for its machine code) and wrong (differs from the oracle). Of this
# process only, because the next one may be luckier: crashed, and untried, where no process could
# be had that tries it.
State = Literal["proven", "hung", "refused", "wrong", "crashed", "untried"]
KEPT: tuple[State, ...] = ("proven", "hung", "refused", "wrong")
HUNG = "hung before on this toolchain"


@dataclass(frozen=True)
class Machine:
    """What a verdict holds for: the GPU, its driver, and what made the machine code."""

    gpu: str
    driver: str
    torch: str
    triton: str
    ptxas: str

    @classmethod
    def of(cls, device: Device) -> Machine:
        tools = toolchain()
        return cls(device.name, device.driver, tools.torch, tools.triton, assembler())

    def __str__(self) -> str:
        return (
            f"{self.gpu}, driver {self.driver}, torch {self.torch}, triton {self.triton}, "
            f"ptxas {self.ptxas}"
        )


@dataclass(frozen=True)
class Subject:
    """A kernel's text (`toolchain.kernel_digest`) with a schedule, on a machine.

    spec: the name of a spec that has it, for people; no part of what is compared.
    """

    spec: str
    digest: str
    schedule: Schedule
    machine: Machine

    @property
    def key(self) -> str:
        return fingerprint([self.digest, self.schedule.to_dict(), asdict(self.machine)])[:24]


@dataclass(frozen=True)
class Verdict:
    """What was found out, with the reason where it is not proven, and when (UTC)."""

    subject: Subject
    state: State
    reason: str
    when: str

    @property
    def refusal(self) -> str:
        """Why the schedule is not used; empty for a proven one."""
        if self.state == "proven":
            return ""
        if self.state == "hung":
            return HUNG
        words = {"refused": "", "wrong": "differs from the oracle: "}
        return f"{words.get(self.state, '')}{self.reason}"

    def to_dict(self) -> dict[str, object]:
        """JSON types; the inverse of `parse`."""
        subject = self.subject
        return {
            "version": VERSION,
            "state": self.state,
            "reason": self.reason,
            "when": self.when,
            "spec": subject.spec,
            "kernel_digest": subject.digest,
            "schedule": subject.schedule.to_dict(),
            "machine": asdict(subject.machine),
        }


def subject_of(plan: Plan, name: str, schedule: Schedule, machine: Machine) -> Subject:
    """The subject of a schedule of the family in a plan's module; name: the spec's."""
    return Subject(name, plan.hopper_digest or digest_of(plan), schedule, machine)


def digest_of(plan: Plan) -> str:
    """That of the plan's kernel of the family; "" without one. It takes 40 ms: plans keep it."""
    kernel = dict(plan.entries).get("sm90")
    return _digest(plan.text, kernel) if kernel else ""


@cache
def _digest(text: str, kernel: str) -> str:
    return kernel_digest(text, kernel)


def ran_here(entry: Entry, subject: Subject) -> bool:
    """Whether a table's entry was measured with the subject's schedule on its GPU model by its
    Triton: what makes the machine code, and what runs it.

    The driver and torch, which only launch it, may be others.
    """
    machine = subject.machine
    return (
        entry.schedule == subject.schedule
        and (entry.device.name, entry.toolchain.triton) == (machine.gpu, machine.triton)
        and machine.ptxas == BUNDLED  # tables do not say, and are made with Triton's own
    )


def vouched(entry: Entry | None, subject: Subject) -> bool:
    """Whether a table's entry shows that `subject` runs to its end: `ran_here`, and the kernel's
    text is the same."""
    return entry is not None and ran_here(entry, subject) and entry.kernel_digest == subject.digest


# What this process found out: also where nothing can be written, and for what is not kept.
_HERE: dict[tuple[Path, str], Verdict] = {}


def folder() -> Path:
    """Where verdicts are kept, a file each."""
    return settings.cache_dir() / "verdicts"


def recall(subject: Subject) -> Verdict | None:
    """What is known; None: nothing."""
    here = _HERE.get((folder(), subject.key))
    return here or _read(folder() / f"{subject.key}.json")


def remember(subject: Subject, state: State, reason: str = "") -> Verdict:
    """Keep a verdict. One that is bad is not overruled by a later good one: a race of processes
    decided it."""
    known = recall(subject)
    if known is not None and known.state != "proven" and state == "proven":
        return known
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    verdict = Verdict(subject, state, reason, when)
    _HERE[folder(), subject.key] = verdict
    if state in KEPT:
        _write(verdict)
    return verdict


def known(*, bad: bool = False) -> tuple[Verdict, ...]:
    """All that is kept on this machine, by spec; bad: without what is proven."""
    verdicts = (verdict for path in _files() if (verdict := _read(path)) is not None)
    chosen = (each for each in verdicts if not bad or each.state != "proven")
    return tuple(sorted(chosen, key=lambda v: (v.subject.spec, v.subject.schedule, v.when)))


def forget_bad() -> int:
    """Forget what is not used any more, so that it is tried again; how many."""
    found = known(bad=True)
    for verdict in found:
        _HERE.pop((folder(), verdict.subject.key), None)
        with suppress(FileNotFoundError):
            (folder() / f"{verdict.subject.key}.json").unlink()
    return len(found)


def forget_here() -> None:
    """What is in memory only; for tests."""
    _HERE.clear()


def _files() -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(folder().glob("[0-9a-f]*.json"))


def _write(verdict: Verdict) -> None:
    path = folder() / f"{verdict.subject.key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(verdict.to_dict(), indent=1) + "\n")
    except OSError as error:
        say_once(
            f"{path.parent}: what was found out of a kernel cannot be kept ({error.strerror}); "
            "the next process tries it again\n"
            "  hint: set FLASHGEN_CACHE_DIR to a folder that can be written."
        )


def _read(path: Path) -> Verdict | None:
    if not path.exists():
        return None
    try:
        return parse(json.loads(read_data(path)))
    except (FlashgenError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        say_once(f"{path}: is no verdict of a kernel ({why}); the kernel is tried again")
        return None


def parse(data: object) -> Verdict:
    """The inverse of `Verdict.to_dict`; FlashgenError, ValueError, KeyError or TypeError."""
    if not isinstance(data, Mapping):
        raise TypeError("must be a mapping")
    if data["version"] != VERSION or data["state"] not in get_args(State):
        raise ValueError(f"version {data['version']!r}, state {data['state']!r}")
    texts = [data[name] for name in ("reason", "when", "spec", "kernel_digest")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("reason, when, spec and kernel_digest must be texts")
    subject = Subject(
        spec=data["spec"],
        digest=data["kernel_digest"],
        schedule=Schedule.from_dict(data["schedule"]),
        machine=Machine(**{name: str(value) for name, value in data["machine"].items()}),
    )
    return Verdict(subject, data["state"], data["reason"], data["when"])
