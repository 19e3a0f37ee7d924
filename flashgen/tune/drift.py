"""Are committed entries still true? Each is checked, timed again against the untuned choice, and
compared with what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.problem import Problem
from flashgen.schedule.space import check, default_schedule
from flashgen.tune.measurement import Measurement, Measurer
from flashgen.tune.search import close_quietly
from flashgen.tune.session import MakeMeasurer, case_of, digest_of
from flashgen.tune.table import Entry, Table
from flashgen.tune.toolchain import Device, toolchain

TOLERANCE = 0.05  # clocks and temperatures of one GPU model differ by less


@dataclass(frozen=True)
class Drift:
    """One entry, seen again.

    state: "ok"; "slower", "faster" by more than the tolerance; "beaten" by the untuned choice;
    "stale": not feasible any more; "failed": could not be timed. changed: what differs from when it
    was measured. time_us, default_us: now.
    """

    entry: Entry
    state: str
    reason: str
    time_us: float | None = None
    default_us: float | None = None
    changed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the entry may stay."""
        return self.state in {"ok", "faster"}

    @property
    def ratio(self) -> float | None:
        """Time now over time then."""
        return self.time_us and self.time_us / self.entry.time_us

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        return {
            "pass": self.entry.direction,
            "bucket": self.entry.bucket.to_dict(),
            "schedule": self.entry.schedule.to_dict(),
            "state": self.state,
            "reason": self.reason,
            "time_us": self.time_us,
            "was_us": self.entry.time_us,
            "default_us": self.default_us,
            "changed": list(self.changed),
        }


def check_table(
    table: Table,
    problem: Problem,
    device: Device,
    make_measurer: MakeMeasurer,
    *,
    devices: tuple[int, ...] = (0,),
    tolerance: float = TOLERANCE,
) -> Iterator[Drift]:
    """Every entry of the table, one after the other."""
    for entry in table.entries:
        rejection = check(entry.schedule, problem, entry.bucket)
        if rejection is not None:
            yield Drift(entry, "stale", str(rejection), changed=_changed(entry, problem, device))
            continue
        case = case_of(problem, device, entry.bucket, entry.shape)
        measurer = make_measurer(case, devices[:1])
        try:
            yield _again(entry, problem, device, measurer, tolerance)
        finally:
            close_quietly(measurer)


def _again(
    entry: Entry, problem: Problem, device: Device, measurer: Measurer, tolerance: float
) -> Drift:
    default = default_schedule(problem, entry.bucket)
    both = tuple(dict.fromkeys((entry.schedule, default)))
    changed = _changed(entry, problem, device)
    refused = dict(measurer.prepare(both))
    if entry.schedule in refused:
        return Drift(entry, "failed", refused[entry.schedule], changed=changed)
    checked = measurer.measure(entry.schedule)  # against the oracle too; a race only times
    if not checked.measured:
        return Drift(entry, "failed", f"{checked.state}: {checked.reason}", changed=changed)
    raced = measurer.race(tuple(each for each in both if each not in refused))
    now, other = raced[entry.schedule], raced.get(default)
    return _judged(entry, now, other, tolerance, changed)


def _judged(
    entry: Entry,
    now: Measurement,
    default: Measurement | None,
    tolerance: float,
    changed: tuple[str, ...],
) -> Drift:
    if now.time_us is None:
        return Drift(entry, "failed", f"{now.state}: {now.reason}", changed=changed)
    default_us = default.time_us if default else None
    ratio = now.time_us / entry.time_us
    state, reason = "ok", f"{100 * (ratio - 1):+.1f}%"
    if ratio > 1 + tolerance:
        state = "slower"
    elif ratio < 1 - tolerance:
        state = "faster"
    if default_us is not None and default_us < now.time_us * (1 - tolerance):
        state, reason = "beaten", f"the untuned choice takes {default_us:.4g} us"
    return Drift(entry, state, reason, now.time_us, default_us, changed)


def _changed(entry: Entry, problem: Problem, device: Device) -> tuple[str, ...]:
    """What is not as it was when the entry was measured."""
    tools = toolchain()
    pairs = {
        "kernel": (entry.kernel_digest, digest_of(problem, entry.schedule)),
        "GPU": (entry.device.name, device.name),
        "driver": (entry.device.driver, device.driver),
        "torch": (entry.toolchain.torch, tools.torch),
        "triton": (entry.toolchain.triton, tools.triton),
    }
    return tuple(f"{name}: was {was}, is {now}" for name, (was, now) in pairs.items() if was != now)
