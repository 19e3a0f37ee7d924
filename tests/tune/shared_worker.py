"""A worker on a shared study, with a formula for a clock: `shared_worker.py STORAGE LOG SECONDS`.

It writes a line to LOG before and after each measurement: a test sees what a killed one did.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fakes import FakeMeasurer, smooth, timed
from tuning_cases import SPACE, trials

from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement
from flashgen.tune.search import Limits, search
from flashgen.tune.strategies import RandomOrder


class Logged(FakeMeasurer):
    """Says what it does, in whole lines."""

    def __init__(self, log: str, seconds: float) -> None:
        super().__init__(seconds=seconds)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, word: str, schedule: Schedule) -> None:
        os.write(self.log, f"{os.getpid()} {word} {schedule}\n".encode())

    def measure(self, schedule: Schedule) -> Measurement:
        self.say("begin", schedule)
        super().measure(schedule)
        self.say("end", schedule)
        return timed(schedule, smooth(schedule))


def main() -> None:
    storage, log, seconds = sys.argv[1:]
    found = search(
        trials(storage),
        SPACE,
        Logged(log, float(seconds)),
        RandomOrder(os.getpid()),
        Limits(seconds=240, trials=10**6, patience=10**6),
        race=False,
    )
    if found.error is not None:
        sys.exit(str(found.error))


if __name__ == "__main__":
    main()
