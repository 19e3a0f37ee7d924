"""Search one case: ask a strategy, claim, measure, tell, until a limit says it is enough.

Only feasible schedules are asked for. Compiling goes ahead in a thread of its own, a few schedules
at a time; what does not compile or fit is discarded there and is no trial. At the end the close
ones race each other and the untuned choice, interleaved, and the race decides.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from flashgen.errors import TuningError
from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement, Measurer
from flashgen.tune.processes import cores
from flashgen.tune.strategies import Strategy
from flashgen.tune.study import Trials, measured_only

SECONDS = 60.0
SHARE_OF_SPACE, FEWEST_TRIALS = 0.2, 12
IMPROVEMENT = 0.005  # less than this is noise, and no progress
NEAR_BOUND = 0.95
CLOSE = 1.03  # times the best: what may be faster in a race
RACERS = 4
# Schedules that are compiled before their turn: as many as the cores take at once. More would be
# chosen by what is known too early.
AHEAD = max(4, min(14, cores() - 2))


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first.

    seconds: of this run; trials: known schedules of the case, earlier runs' included (None: a fifth
    of the space, at least 12); patience: trials without progress (None: a twelfth of the space, at
    least 8); near_bound: the roofline's time over the best's at which nothing is left to win.
    """

    seconds: float = SECONDS
    trials: int | None = None
    patience: int | None = None
    near_bound: float = NEAR_BOUND

    def trials_of(self, feasible: int) -> int:
        if self.trials is not None:
            return self.trials
        return max(FEWEST_TRIALS, math.ceil(SHARE_OF_SPACE * feasible))

    def patience_of(self, feasible: int) -> int:
        return self.patience if self.patience is not None else max(8, math.ceil(feasible / 12))


@dataclass(frozen=True)
class Space:
    """What there is to choose from: feasible schedules, the untuned one, and good guesses."""

    feasible: tuple[Schedule, ...]
    default: Schedule
    seeds: tuple[Schedule, ...] = ()
    bound_us: float = 0.0

    @property
    def first(self) -> tuple[Schedule, ...]:
        """What is tried before the strategy is asked: the default, to know what tuning is worth,
        then the seeds that are feasible."""
        inside = set(self.feasible)
        return tuple(s for s in dict.fromkeys((self.default, *self.seeds)) if s in inside)


@dataclass(frozen=True)
class Progress:
    """How far a search is; what a terminal shows."""

    doing: str
    trials: int
    most_trials: int
    feasible: int
    best: Measurement | None
    default_us: float | None
    bound_us: float
    seconds_left: float
    failures: Mapping[str, int]
    discarded: int


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    best: the winner with the time that decided (None: nothing could be timed, or there was nothing
    to choose); default: the untuned schedule in the same comparison; known: all trials of the case;
    new: how many of them this run added; stopped: why it ended.
    """

    space: Space
    best: Measurement | None
    default: Measurement | None
    known: Mapping[Schedule, Measurement]
    new: int
    discarded: Mapping[Schedule, str]
    stopped: str
    seconds: float
    interrupted: bool = False
    error: TuningError | None = None

    @property
    def failures(self) -> dict[str, int]:
        return failures(self.known.values())

    @property
    def only_one(self) -> bool:
        """One feasible schedule: nothing to choose, nothing timed."""
        return len(self.space.feasible) == 1


def failures(found: Iterable[Measurement]) -> dict[str, int]:
    """How many of each state but `measured`."""
    return dict(Counter(each.state for each in found if not each.measured))


Report = Callable[[Progress], None]


def search(
    trials: Trials,
    space: Space,
    measurer: Measurer | None,
    strategy: Strategy,
    limits: Limits,
    *,
    report: Report = lambda progress: None,
    stop: threading.Event | None = None,
    race: bool = True,
    before_race: Callable[[], None] = lambda: None,
) -> Outcome:
    """Measure until a limit is reached, then race. Never raises for what a schedule does.

    before_race: waits for others that measure for the same case, so that their trials count.

    Ctrl-C and a storage that fails end the search with the best so far (`interrupted`, `error`).
    TuningError before the first trial if nothing is feasible. measurer: None where one schedule is
    feasible, which is not timed.
    """
    if not space.feasible:
        raise TuningError(
            f"{trials.case.spec}: no schedule is feasible for {trials.case.bucket} on "
            f"{trials.case.gpu}\n  hint: `flashgen explain` shows why."
        )
    if len(space.feasible) == 1:
        return Outcome(space, None, None, {}, 0, {}, "one feasible schedule", 0.0)
    if measurer is None:
        raise TypeError("search: a measurer is needed where there is something to choose")
    stop = stop or threading.Event()
    run = _Search(
        trials, space, measurer, strategy, limits, report, stop, before_race if race else None
    )
    return run.run()


@dataclass
class _Search:
    trials: Trials
    space: Space
    measurer: Measurer
    strategy: Strategy
    limits: Limits
    report: Report
    stop: threading.Event
    before_race: Callable[[], None] | None
    known: dict[Schedule, Measurement] = field(default_factory=dict)
    discarded: dict[Schedule, str] = field(default_factory=dict)
    new: int = 0
    begun: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        interrupted, error, raced = False, None, {}
        try:
            with _Ahead(self.measurer) as ahead:
                stopped = self._loop(ahead)
            if self.before_race is not None:
                self.before_race()
                self._learn()
                raced = self._race()
        except KeyboardInterrupt:
            stopped, interrupted = "interrupted", True
        except TuningError as failed:
            stopped, error = "ended by an error", failed
        best, default = self._decide(raced)
        return Outcome(
            space=self.space,
            best=best,
            default=default,
            known=dict(self.known),
            new=self.new,
            discarded=dict(self.discarded),
            stopped=stopped,
            seconds=time.monotonic() - self.begun,
            interrupted=interrupted,
            error=error,
        )

    def _loop(self, ahead: _Ahead) -> str:
        """Why it ended."""
        self._learn()
        self.discarded.update(self.trials.discarded())
        while True:
            why = self._enough()
            if why:
                return why
            order = self._order()
            if not order:
                return "nothing is left to measure"
            chosen = ahead.next(order)
            self._discard(ahead.take_discarded())
            if chosen is not None:
                self._measure(chosen)
            self._learn()

    def _learn(self) -> None:
        """What this and other processes have found out; only schedules of this space count.

        Trials of processes that are gone are finished or freed on the way.
        """
        self.trials.recover()
        inside = set(self.space.feasible)
        found = {s: m for s, m in self.trials.known().items() if s in inside}
        self.known.update(found)

    def _order(self) -> list[Schedule]:
        """Free schedules: the first ones, then as the strategy says."""
        taken = self.trials.taken()
        free = [
            schedule
            for schedule in self.space.feasible
            if schedule not in self.known and schedule not in self.discarded
            if schedule not in taken
        ]
        first = [schedule for schedule in self.space.first if schedule in free]
        rest = [schedule for schedule in free if schedule not in first]
        return [*first, *(self.strategy.order(self.known, rest) if rest else [])]

    def _measure(self, schedule: Schedule) -> None:
        self._report(f"measuring {schedule}")
        claim = self.trials.claim(schedule)
        if claim is None:  # another process was faster
            return
        with claim.alive():
            found = self.measurer.measure(schedule)
            self.known[schedule] = found
            if claim.finish(found):
                self.new += 1

    def _discard(self, reasons: Mapping[Schedule, str]) -> None:
        fresh = {s: why for s, why in reasons.items() if s not in self.discarded}
        self.discarded.update(fresh)
        if fresh:
            self.trials.discard(fresh)

    # **** when it is enough ****

    def _enough(self) -> str:
        """Why to stop, or nothing."""
        if self.stop.is_set():
            return "told to stop"
        if time.monotonic() - self.begun >= self.limits.seconds:
            return f"{self.limits.seconds:g} s are over"
        if not self._first_are_known():
            return ""
        if len(self.known) >= self.limits.trials_of(len(self.space.feasible)):
            return f"{len(self.known)} trials"
        return self._nothing_to_win()

    def _nothing_to_win(self) -> str:
        best = self._best()
        if best is None or best.time_us is None:
            return ""
        if self.space.bound_us >= self.limits.near_bound * best.time_us:
            return f"within {100 * (1 - self.limits.near_bound):.0f}% of the roofline's bound"
        patience = self.limits.patience_of(len(self.space.feasible))
        if self._without_progress() >= patience:
            return f"converged: no progress in {patience} trials"
        return ""

    def _first_are_known(self) -> bool:
        return all(s in self.known or s in self.discarded for s in self.space.first)

    def _without_progress(self) -> int:
        """Trials since the last one that was better by more than noise."""
        best, since = math.inf, 0
        for found in self.known.values():
            if found.time_us is not None and found.time_us < best * (1 - IMPROVEMENT):
                best, since = found.time_us, 0
            else:
                since += 1
        return since

    def _best(self) -> Measurement | None:
        return next(iter(measured_only(self.known.values())), None)

    def _report(self, doing: str) -> None:
        default = self.known.get(self.space.default)
        feasible = len(self.space.feasible)
        self.report(
            Progress(
                doing=doing,
                trials=len(self.known),
                most_trials=self.limits.trials_of(feasible),
                feasible=feasible,
                best=self._best(),
                default_us=default.time_us if default else None,
                bound_us=self.space.bound_us,
                seconds_left=max(0.0, self.limits.seconds - (time.monotonic() - self.begun)),
                failures=failures(self.known.values()),
                discarded=len(self.discarded),
            )
        )

    # **** the race ****

    def _race(self) -> dict[Schedule, Measurement]:
        """Close candidates and the default, timed against each other; what earlier races said of
        the same field is used again."""
        field_ = self._racers()
        if len(field_) <= 1:
            return {}
        earlier = self.trials.races()
        if set(field_) <= set(earlier):
            return {schedule: earlier[schedule] for schedule in field_}
        self._report(f"racing {len(field_)} schedules")
        found = dict(self.measurer.race(field_))
        self.trials.keep_race(found)
        return found

    def _racers(self) -> tuple[Schedule, ...]:
        ranked = measured_only(self.known.values())
        if not ranked:
            return ()
        best = ranked[0].time_us or 0.0
        close = [each.schedule for each in ranked if (each.time_us or 0.0) <= CLOSE * best]
        default = self.known.get(self.space.default)
        field_ = close[:RACERS]
        if default is not None and default.measured:
            field_.append(self.space.default)
        return tuple(dict.fromkeys(field_))

    def _decide(
        self, raced: Mapping[Schedule, Measurement]
    ) -> tuple[Measurement | None, Measurement | None]:
        """(winner, default): from the race where there was one, else from the trials."""
        times = measured_only(raced.values()) or measured_only(self.known.values())
        best = times[0] if times else None
        default = raced.get(self.space.default) or self.known.get(self.space.default)
        return best, default


class _Ahead:
    """Compiles the next schedules while one is being measured."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flashgen-ahead")
        self._running: Future[Mapping[Schedule, str]] | None = None
        self._asked: set[Schedule] = set()
        self._ready: set[Schedule] = set()
        self._discarded: dict[Schedule, str] = {}
        self._batch: tuple[Schedule, ...] = ()

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def next(self, order: Sequence[Schedule]) -> Schedule | None:
        """The first of `order` that is compiled; None: look again, those that were are no good."""
        self._collect(wait=False)
        self._submit(order)
        if not any(schedule in self._ready for schedule in order[:AHEAD]):
            self._collect(wait=True)
            self._submit(order)
        return next((schedule for schedule in order if schedule in self._ready), None)

    def take_discarded(self) -> dict[Schedule, str]:
        found, self._discarded = self._discarded, {}
        return found

    def _submit(self, order: Sequence[Schedule]) -> None:
        batch = tuple(s for s in order[:AHEAD] if s not in self._asked)
        if self._running is None and batch:
            self._asked.update(batch)
            self._batch = batch
            self._running = self._thread.submit(self._measurer.prepare, batch)

    def _collect(self, *, wait: bool) -> None:
        if self._running is None or not (wait or self._running.done()):
            return
        bad = dict(self._running.result())
        self._running = None
        self._discarded.update(bad)
        self._ready.update(schedule for schedule in self._batch if schedule not in bad)


def close_quietly(measurer: Measurer) -> None:
    """End a measurer whatever state it is in; its errors are no reason to lose a result."""
    with suppress(Exception):
        measurer.close()
