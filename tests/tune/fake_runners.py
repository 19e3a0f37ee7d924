"""Runners for measuring processes without a GPU: each schedule's tile says what happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement


def tile(block_n: int, block_m: int = 64) -> Schedule:
    return Schedule(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)


GOOD, ABORTS, HANGS, RAISES, WRONG, SPOILS, ENDS = (tile(2**i) for i in range(4, 11))


def timed(schedule: Schedule, time_us: float) -> Measurement:
    return Measurement(schedule, "measured", time_us, time_us, time_us)


class FakeRunner:
    """Times are process ids, so that a test sees who answered."""

    def __init__(self, case: object, device: int) -> None:
        self.case, self.device = case, device
        self._intact = True

    def measure(self, schedule: Schedule) -> Measurement:
        if schedule == ABORTS:
            print("illegal memory access", file=sys.stderr, flush=True)
            os.abort()
        if schedule == HANGS:
            _hang()
        if schedule == RAISES:
            raise RuntimeError("the runner itself failed")
        if schedule == ENDS:
            sys.exit(7)
        if schedule == WRONG:
            return Measurement(schedule, "wrong", reason="max error 3 (bound 0.1)")
        if schedule == SPOILS:
            self._intact = False
        return timed(schedule, float(os.getpid()))

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        return {schedule: self.measure(schedule) for schedule in schedules}

    def intact(self) -> bool:
        return self._intact


def _hang() -> None:
    """As a driver does: in a call that no signal handler interrupts, with a child of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    subprocess.run(["sleep", "1000"], check=False)


class CrashesInRaces(FakeRunner):
    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        os.abort()


def refuses(case: object, device: int) -> FakeRunner:
    raise ValueError(f"no GPU {device} for {case}")


def says_case(case: object, device: int) -> FakeRunner:
    """`case` is a file, to which it writes how often a runner was made."""
    with Path(str(case)).open("a") as stream:
        stream.write(f"{os.getpid()} {device}\n")
    return FakeRunner(case, device)


def slow_start(case: object, device: int) -> FakeRunner:
    time.sleep(1000)
    return FakeRunner(case, device)


class HopperRunner(FakeRunner):
    """Of the family gluon_sm90 what has tiles of 128 keys hangs."""

    def measure(self, schedule: Schedule) -> Measurement:
        if schedule.family == "gluon_sm90" and schedule.block_n == 128:
            _hang()
        return timed(schedule, 7.0)
