"""A measurer with a formula for a clock, and failures on demand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement, State

Clock = Callable[[Schedule], float]


def smooth(schedule: Schedule) -> float:
    """A valley with its floor at 128 x 32, 8 warps, 2 stages, and a little noise that is fixed."""
    distance = (
        abs(schedule.block_m.bit_length() - 8)
        + 1.3 * abs(schedule.block_n.bit_length() - 6)
        + 0.2 * abs(schedule.num_warps - 8)
        + 0.5 * abs(schedule.num_stages - 2)
        + (0.2 if schedule.maxnreg is not None else 0.0)
    )
    digest = hashlib.sha256(str(schedule).encode()).digest()
    return 100.0 + 20.0 * distance + digest[0] / 255


@dataclass
class FakeMeasurer:
    """Deterministic times; `fails` names the state of those that have none."""

    clock: Clock = smooth
    fails: Mapping[Schedule, State] = field(default_factory=dict)
    refuses: Mapping[Schedule, str] = field(default_factory=dict)
    race_clock: Clock | None = None
    seconds: float = 0.0
    on_measure: Callable[[Schedule], None] = lambda schedule: None
    prepared: list[Schedule] = field(default_factory=list)
    measured: list[Schedule] = field(default_factory=list)
    raced: list[tuple[Schedule, ...]] = field(default_factory=list)
    closed: int = 0

    def prepare(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, str]:
        self.prepared += schedules
        return {each: self.refuses[each] for each in schedules if each in self.refuses}

    def measure(self, schedule: Schedule) -> Measurement:
        self.measured.append(schedule)
        self.on_measure(schedule)
        if self.seconds:
            time.sleep(self.seconds)
        if schedule in self.fails:
            return Measurement(schedule, self.fails[schedule], reason="as the test asked")
        return timed(schedule, self.clock(schedule))

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        self.raced.append(tuple(schedules))
        clock = self.race_clock or self.clock
        return {each: timed(each, clock(each)) for each in schedules}

    def close(self) -> None:
        self.closed += 1


def timed(schedule: Schedule, time_us: float) -> Measurement:
    return Measurement(schedule, "measured", time_us, 0.99 * time_us, 1.01 * time_us)
