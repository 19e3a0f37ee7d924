"""What the search knows of a measured schedule, and what it asks of those who measure.

Imports nothing heavy: results travel between processes and are written to tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from flashgen.errors import FlashgenError
from flashgen.schedule.model import Schedule

State = Literal["measured", "does_not_fit", "wrong", "failed", "hung", "crashed"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Measurement:
    """One schedule, timed, or the reason why it was not.

    time_us: the median of a launch in microseconds; low_us, high_us: the 20th and 80th percentile;
    samples_us: what they were taken from, where it was kept; reason: why there is no time, empty
    where there is one. States: `does_not_fit` was refused by the compiler or the launch for its
    resources, `wrong` differs from the oracle, `failed` raised another error, `hung` passed its
    deadline, `crashed` took its process along.
    """

    schedule: Schedule
    state: State
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    samples_us: tuple[float, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise FlashgenError(
                f"measurement.state: must be one of {', '.join(STATES)} (got {self.state!r})"
            )
        times = (self.time_us, self.low_us, self.high_us)
        if self.measured and not all(_is_time(time) for time in times):
            raise FlashgenError(
                f"measurement of {self.schedule}: times must be positive and finite (got {times})"
            )
        if not self.measured and (times != (None, None, None) or not self.reason):
            raise FlashgenError(
                f"measurement of {self.schedule}: {self.state} needs a reason and has no time"
            )

    @property
    def measured(self) -> bool:
        """Whether there is a time; what has none may not win."""
        return self.state == "measured"

    def to_dict(self) -> dict[str, object]:
        """JSON types; the inverse of `from_dict`."""
        return {
            "schedule": self.schedule.to_dict(),
            "state": self.state,
            "time_us": self.time_us,
            "low_us": self.low_us,
            "high_us": self.high_us,
            "samples_us": list(self.samples_us),
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Measurement:
        """FlashgenError, KeyError, TypeError or ValueError for what `to_dict` never returns."""
        schedule = data["schedule"]
        if not isinstance(schedule, Mapping):
            raise TypeError("measurement.schedule: must be a mapping")
        samples = data["samples_us"]
        if not isinstance(samples, Sequence) or isinstance(samples, str):
            raise TypeError("measurement.samples_us: must be a list")
        return cls(
            schedule=Schedule.from_dict(schedule),
            state=data["state"],  # type: ignore[arg-type]
            time_us=_number(data["time_us"]),
            low_us=_number(data["low_us"]),
            high_us=_number(data["high_us"]),
            samples_us=tuple(float(each) for each in samples),
            reason=str(data["reason"]),
        )


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"measurement: a time must be a number (got {value!r})")
    return float(value)


class Measurer(Protocol):
    """Who compiles, checks and times schedules of a case: a GPU's workers, or a test's formula.

    `prepare` may be called from another thread while `measure` runs, each from one at a time.
    """

    def prepare(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, str]:
        """Compile ahead, in parallel; those that cannot be used, with the reason.

        What is returned here is discarded and no trial: it costs the search no evaluation.
        """
        ...

    def measure(self, schedule: Schedule) -> Measurement:
        """Compile if needed, compare with the oracle, time. Never raises for a bad schedule."""
        ...

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        """Time close candidates again, interleaved, so that drift of the clock hits all of them."""
        ...

    def close(self) -> None:
        """End workers and free what they hold; may be called twice."""
        ...
