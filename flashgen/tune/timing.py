"""How contestants are timed: in short bursts, taking turns, with pauses in between.

A GPU that multiplies matrices at full power slows down by 10 to 15% within about 0.1 s, so a long
measurement flatters whoever runs first. Here each contestant gets a burst of at most `BURST_MS`
after an idle pause, all take turns, the first of a round changes from round to round, and what is
reported is the median over all rounds, with its spread. Ratios are only ever taken within one run.

Nothing here knows a GPU: a `Clock` does the timing, which tests replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BURST_MS = 20.0  # an H200 still runs at its full clock for some 100 ms (measured)
PAUSE_S = 0.06
ROUNDS = 6
REPLAY_MS = 3.0  # one sample: long enough that what an event costs (some us) does not count
MAX_CALLS = 64
MAX_REPLAYS = 12  # samples in one burst; more add nothing to a median over several rounds
LONG_MS = 200.0  # a call this long is timed in fewer rounds
LONG_ROUNDS = 3

Call = Callable[[], object]


class Clock(Protocol):
    """Runs work on a device and times it there."""

    def times_ms(self, call: Call, count: int) -> list[float]:
        """Device times of `count` consecutive calls, each in ms; returns when all are done."""

    def capture(self, calls: Sequence[Call]) -> Call | None:
        """One call that replays `calls` without launch gaps; None where they cannot be captured."""

    def idle(self, seconds: float) -> None:
        """Leave the device alone for a while."""


@dataclass(frozen=True)
class Burst:
    """A contestant ready to be timed: one sample is a `replay`, which makes `calls` calls."""

    replay: Call
    calls: int
    replays: int
    estimate_ms: float  # one call
    how: str


def plan_burst(calls: Sequence[Call], clock: Clock, *, graph: bool) -> Burst:
    """A burst over `calls`, the same work on different tensors so that no cache holds them all.

    graph: replay them from a captured graph where that works, for device time alone; otherwise
    samples are calls as a program makes them, one after the other, host time included where it is
    the longer one. A call longer than a burst is its own sample.
    """
    estimate = clock.times_ms(calls[0], 1)[0]
    if estimate < LONG_MS:
        estimate = min(clock.times_ms(calls[0], 3))
    if estimate >= BURST_MS:
        return Burst(calls[0], 1, 1, estimate, "1 call, eager")
    wanted = max(1, min(MAX_CALLS, int(REPLAY_MS / max(estimate, 1e-4))))
    number = -(-wanted // len(calls)) * len(calls)  # every tensor set as often as any other
    repeated = [calls[index % len(calls)] for index in range(number)]
    captured = clock.capture(repeated) if graph else None
    replay = captured or _one_after_the_other(repeated)
    if captured is not None:
        estimate = min(clock.times_ms(replay, 2)) / number
    replays = max(1, min(MAX_REPLAYS, int(BURST_MS / max(estimate * number, 1e-4))))
    text = "graph" if captured is not None else "eager, not capturable" if graph else "eager"
    return Burst(replay, number, replays, estimate, f"{number} calls, {text}")


def _one_after_the_other(calls: Sequence[Call]) -> Call:
    def replay() -> None:
        for call in calls:
            call()

    return replay


@dataclass(frozen=True)
class Failure:
    """A contestant that did not finish, and why."""

    reason: str


def alternate(
    bursts: Mapping[str, Burst],
    clock: Clock,
    *,
    rounds: int | None = None,
    pause_s: float = PAUSE_S,
) -> dict[str, tuple[float, ...] | Failure]:
    """ms per call, sample by sample, of every contestant; they take turns, `rounds` times."""
    if rounds is None:
        slow = any(burst.estimate_ms > LONG_MS for burst in bursts.values())
        rounds = LONG_ROUNDS if slow else ROUNDS
    samples: dict[str, list[float]] = {name: [] for name in bursts}
    failures: dict[str, Failure] = {}
    for turn in range(rounds):
        for name in rotated(list(bursts), turn):
            if name in failures:
                continue
            burst = bursts[name]
            clock.idle(pause_s)
            lead = 1 if burst.replays > 1 else 0  # the first after a pause pays for waking up
            try:
                times = clock.times_ms(burst.replay, burst.replays + lead)
            except Exception as error:  # one contestant's failure is a result
                failures[name] = Failure(describe(error))
                continue
            samples[name] += [ms / burst.calls for ms in times[lead:]]
    return {name: failures.get(name) or tuple(samples[name]) for name in bursts}


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """`names` beginning with another one each turn.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the beginning of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
