"""Tune a spec: a search for each of its shape buckets, and what they found written to its table."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path

from flashgen import pipeline, settings
from flashgen.errors import TableError, TuningError
from flashgen.problem import Problem
from flashgen.runtime.frozen import refuse_if_frozen
from flashgen.runtime.said import say_once
from flashgen.schedule.best import none_at_all, why_none
from flashgen.schedule.families import FAMILIES
from flashgen.schedule.model import HOPPER, Bucket, Family, Schedule, bucket_of
from flashgen.schedule.predict_sm90 import likely_spills
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.parts import Shape
from flashgen.tune import lookup, verdicts
from flashgen.tune.measurement import Measurer
from flashgen.tune.search import Limits, Outcome, Progress, Space, close_quietly, search
from flashgen.tune.storage import place_of
from flashgen.tune.strategies import Strategy, strategy
from flashgen.tune.study import Case, Trials
from flashgen.tune.table import Entry, Table, read_table, table_path, write_table
from flashgen.tune.toolchain import Device, kernel_digest, toolchain
from flashgen.tune.work import predictions, work_of

BEST_PREDICTED = 2  # seeds that the model gives, of each family
POLL_S = 0.1

MakeMeasurer = Callable[[Case, tuple[int, ...]], Measurer]
Report = Callable[[Case, Progress], None]


@dataclass(frozen=True)
class Request:
    """How to tune. devices: numbers of the GPUs, each with a measuring worker of its own; storage:
    as `storage.place_of`; out: the folder of tables (None: the user's); exclusive: of processes
    that want the same, one tunes and the others wait for its table; families: whose schedules are
    searched, beside the untuned choice."""

    limits: Limits = field(default_factory=Limits)
    devices: tuple[int, ...] = (0,)
    storage: str | None = None
    sampler: str = "model"
    out: Path | None = None
    retry_failed: bool = False
    exclusive: bool = False
    write: bool = True
    families: tuple[Family, ...] = FAMILIES


@dataclass(frozen=True)
class Result:
    """One case, tuned: entry is None where there was nothing to choose or nothing to time."""

    case: Case
    outcome: Outcome | None
    entry: Entry | None
    predicted_us: Mapping[Schedule, float] = field(hash=False, default_factory=dict)
    trials: Trials | None = None

    def to_dict(self) -> dict[str, object]:
        """JSON types, for `--json`."""
        found = self.outcome
        return {
            "bucket": self.case.bucket.to_dict(),
            "shape": asdict(self.case.shape),
            "study": self.case.study,
            "entry": self.entry and self.entry.to_dict(),
            "stopped": found.stopped if found else "another process tuned it",
            "trials": len(found.known) if found else 0,
            "new_trials": found.new if found else 0,
            "feasible": len(found.space.feasible) if found else 0,
            "discarded": len(found.discarded) if found else 0,
            "failures": found.failures if found else {},
            "seconds": round(found.seconds, 2) if found else 0.0,
        }


def cases_of(
    problem: Problem, device: Device, shapes: Sequence[Shape] | None = None
) -> tuple[Case, ...]:
    """A case for each shape bucket that the shapes fall into: the first shape of a bucket stands
    for it. TuningError where there is no shape."""
    wanted = tuple(shapes or problem.spec.shapes)
    if not wanted:
        raise TuningError(
            f"{problem.name}: the spec has no shapes to tune for\n"
            "  hint: add shapes: to the spec, or give one with --shape B,H,HK,Q,K."
        )
    found: dict[Bucket, Shape] = {}
    for shape in wanted:
        found.setdefault(bucket_of(shape.q_len, shape.kv_len), shape)
    return tuple(case_of(problem, device, bucket, shape) for bucket, shape in found.items())


def case_of(problem: Problem, device: Device, bucket: Bucket, shape: Shape) -> Case:
    """ScheduleError where nothing is feasible for the bucket."""
    hopper = enumerate_space(problem, bucket, (HOPPER,)).feasible
    return Case(
        spec=problem.name,
        fingerprint=problem.spec.fingerprint,
        gpu=problem.target.id,
        device=device,
        toolchain=toolchain(),
        kernel_digest=digest_of(problem, default_schedule(problem, bucket)),
        direction="forward",
        bucket=bucket,
        shape=shape,
        hopper_digest=digest_of(problem, hopper[0]) if hopper else "",
    )


@cache
def digest_of(problem: Problem, schedule: Schedule) -> str:
    """Of the kernel that `schedule` is one of, as it is generated now."""
    plan = pipeline.generate(
        problem, [(Bucket(None, None), schedule)], has_lse=False, origin="digest"
    )
    if schedule.family == HOPPER:
        return verdicts.digest_of(plan)
    return kernel_digest(plan.text, plan.entries[0][1])


def cases_with(problem: Problem, cases: Sequence[Case], family: Family) -> tuple[Case, ...]:
    """The cases in which a family has schedules; of others is said that they are left out.

    TuningError where there is none, with the reasons.
    """
    reasons = {
        case: why_none(family, problem, case.bucket)
        for case in cases
        if not enumerate_space(problem, case.bucket, (family,)).feasible
    }
    if len(reasons) == len(cases):
        listed = "\n  ".join(f"{case.bucket}: {reason}" for case, reason in reasons.items())
        raise TuningError(none_at_all(family, problem, listed))
    for case, reason in reasons.items():
        say_once(f"{problem.name}: {case.bucket} is not tuned with family {family}: {reason}")
    return tuple(case for case in cases if case not in reasons)


def tune_case(
    problem: Problem,
    case: Case,
    request: Request,
    make_measurer: MakeMeasurer,
    report: Report = lambda case, progress: None,
) -> Result:
    """Search, and add what was found to the table. FrozenError after `freeze()`."""
    refuse_if_frozen(f"tune {case.spec} for {case.gpu}, {case.bucket}")
    path = table_path(request.out or settings.user_tables_dir(), case.gpu, case.spec)
    with _turn(path, case, exclusive=request.exclusive) as waited:
        if waited and (entry := _entry_in(path, case)) is not None:
            lookup.forget()
            return Result(case, None, entry)
        result = _searched(problem, case, request, make_measurer, report)
        if result.entry is not None and request.write:
            add_entries(path, problem, case.gpu, [result.entry])
        return result


def space_of(
    problem: Problem,
    case: Case,
    predicted: Mapping[Schedule, float],
    families: tuple[Family, ...] = FAMILIES,
) -> Space:
    """What is feasible, the untuned choice, and the guesses that come first."""
    feasible = enumerate_space(problem, case.bucket, families).feasible
    default = default_schedule(problem, case.bucket)
    best = [_best_predicted(problem, predicted, family) for family in families]
    of_each = [each for pair in zip_longest(*best) for each in pair if each is not None]
    committed = lookup.seeds(lookup.tables_of(problem.spec, problem.target), problem, case.bucket)
    return Space(
        # A default of a coarser bucket need not be a point of this bucket's grid.
        # Nor need it be of a searched family: it takes part as what others must beat.
        feasible=tuple(sorted({*feasible, default}))
        if len(feasible) > 1 or default.family not in families
        else feasible,
        default=default,
        seeds=(*of_each, *committed),
        bound_us=work_of(problem, default, case.shape).bound_us,
    )


def _best_predicted(
    problem: Problem, predicted: Mapping[Schedule, float], family: Family
) -> list[Schedule]:
    """The best of a family by the model, of those with the same time the first one, and none that
    is likely not to come through the compiler."""
    found: dict[float, Schedule] = {}
    for schedule in sorted(predicted, key=lambda schedule: (predicted[schedule], schedule)):
        if schedule.family == family and not (
            family == HOPPER and likely_spills(schedule, problem)
        ):
            found.setdefault(predicted[schedule], schedule)
    return list(found.values())[:BEST_PREDICTED]


def _searched(
    problem: Problem, case: Case, request: Request, make_measurer: MakeMeasurer, report: Report
) -> Result:
    feasible = enumerate_space(problem, case.bucket, request.families).feasible
    predicted = predictions(problem, feasible, case.shape)
    space = space_of(problem, case, predicted, request.families)
    predicted = predictions(problem, space.feasible, case.shape)
    chosen = strategy(request.sampler, lambda: predicted)
    trials = open_trials(case, request)
    measurers: list[Measurer] = []
    try:
        if len(space.feasible) > 1:
            measurers = [make_measurer(case, (device,)) for device in request.devices]
        outcome = _search_on_all(
            trials, space, measurers, chosen, request.limits, lambda p: report(case, p)
        )
    finally:
        for measurer in measurers:
            close_quietly(measurer)
    entry = entry_of(problem, case, outcome)
    return Result(case, outcome, entry, predicted, trials)


def _search_on_all(
    trials: Trials,
    space: Space,
    measurers: Sequence[Measurer],
    chosen: Strategy,
    limits: Limits,
    report: Callable[[Progress], None],
) -> Outcome:
    """One search a GPU, all on the same trials; the first one reports and races at the end."""
    stop = threading.Event()
    helpers = [
        threading.Thread(
            target=_help,
            args=(trials, space, measurer, chosen, limits, stop),
            name=f"flashgen-gpu-{number}",
            daemon=True,
        )
        for number, measurer in enumerate(measurers[1:], 1)
    ]
    for helper in helpers:
        helper.start()

    def finish_helpers() -> None:
        stop.set()
        for helper in helpers:
            helper.join()

    try:
        return search(
            trials,
            space,
            measurers[0] if measurers else None,
            chosen,
            limits,
            report=report,
            before_race=finish_helpers,
        )
    finally:
        finish_helpers()


def _help(
    trials: Trials,
    space: Space,
    measurer: Measurer,
    chosen: Strategy,
    limits: Limits,
    stop: threading.Event,
) -> None:
    """A further GPU's search. Its end, whatever it is, is no end of the others'."""
    try:
        search(trials, space, measurer, chosen, limits, stop=stop, race=False)
    except Exception as error:
        say_once(f"a measuring worker ended early ({type(error).__name__}: {error})")


def open_trials(case: Case, request: Request) -> Trials:
    """The kept trials; where the default place cannot be written, trials of this run alone."""
    named = request.storage or settings.storage()
    try:
        return Trials(case, place_of(named), retry_failed=request.retry_failed)
    except TuningError as error:
        if named is not None:
            raise
        say_once(f"{error}\n  trials of this run are kept in memory only.")
        return Trials(case, place_of("memory"))


def entry_of(problem: Problem, case: Case, outcome: Outcome) -> Entry | None:
    """The table's entry; None where nothing was timed.

    The winner is never slower than the untuned schedule in the comparison that decided: where that
    one is the fastest, it is the entry.
    """
    best, default = outcome.best, outcome.default
    if best is None or best.time_us is None:
        return None
    work = work_of(problem, best.schedule, case.shape)
    rate, unit = work.rate(best.time_us)
    return Entry(
        direction=case.direction,
        bucket=case.bucket,
        shape=case.shape,
        schedule=best.schedule,
        time_us=best.time_us,
        low_us=best.low_us or best.time_us,
        high_us=best.high_us or best.time_us,
        rate=rate,
        unit=unit,
        bound_us=work.bound_us,
        default=outcome.space.default,
        default_us=default.time_us if default else None,
        trials=len(outcome.known),
        feasible=len(outcome.space.feasible),
        kernel_digest=case.digest_of(best.schedule),
        device=case.device,
        toolchain=case.toolchain,
    )


# **** tables ****


def add_entries(path: Path, problem: Problem, gpu: str, entries: Sequence[Entry]) -> Table:
    """Put entries into the table at `path`, in the place of those for the same buckets.

    A table of another state of the spec is replaced. One that cannot be read is kept beside it.
    """
    with _turn(path, None, exclusive=True):
        table = Table(problem.name, problem.spec.fingerprint, gpu, ())
        if path.exists():
            try:
                found = read_table(path)
                if (found.fingerprint, found.gpu) == (table.fingerprint, table.gpu):
                    table = found
            except TableError as error:
                aside = path.with_suffix(f".damaged-{int(time.time())}")
                with suppress(OSError):
                    path.replace(aside)
                say_once(f"{error.place}: {error.problem}; it is kept as {aside.name}")
        table = table.with_entries(entries)
        write_table(path, table)
    lookup.forget()
    return table


def _entry_in(path: Path, case: Case) -> Entry | None:
    try:
        table = read_table(path)
    except TableError:
        return None
    if table.fingerprint != case.fingerprint:
        return None
    return table.entry(case.bucket, case.direction)


@contextmanager
def _turn(path: Path, case: Case | None, *, exclusive: bool) -> Iterator[bool]:
    """Wait for the turn to tune (a case) or to write (None) a table; True: somebody had it before.

    The lock is the kernel's and ends with its process. Where no lock file can be made everybody
    goes on alone.
    """
    name = f".{path.stem}.{case.study[-12:] if case else 'write'}.lock"
    lock = path.with_name(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("a") if exclusive else None
    except OSError:
        stream = None
    if stream is None:
        yield False
        return
    with stream:
        yield _wait_for(stream.fileno(), case)


def _wait_for(descriptor: int, case: Case | None) -> bool:
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if case is not None and not waited:
                say_once(f"{case.spec}: another process tunes {case.bucket}; waiting for its table")
            waited = True
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return waited
        else:
            return waited
