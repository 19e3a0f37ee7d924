"""The schedule of every shape bucket, and who chose it: the caller, a tuned config, or a model.

Runs where a plan is generated; the warm path reads the outcome from the plan. `chosen_for` asks
about a single bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.schedule.families import PORTABLE, missing_here
from flashgen.schedule.model import HOPPER, Bucket, Family, Schedule, all_buckets
from flashgen.schedule.sm90 import TMA_BYTES
from flashgen.tune.lookup import Tables, resolve, tables_of
from flashgen.tune.table import Entry
from flashgen.tune.verdicts import HUNG

GIVEN, UNTUNED, PREDICTED = "given", "untuned", "predicted"


@dataclass(frozen=True)
class Chosen:
    """A schedule for each bucket with its origin, in step; notes: what a caller must be told.

    entries: in step too, those of the tables that the schedules are from (None: from none).
    """

    choices: tuple[tuple[Bucket, Schedule], ...]
    origins: tuple[str, ...]
    notes: tuple[str, ...] = ()
    entries: tuple[Entry | None, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The origins without the bucket that a near one was tuned for."""
        return tuple(map(_kind, self.origins))

    @property
    def origin(self) -> str:
        """All origins in a few words: "untuned", or "tuned for 3 of 48 shape buckets, ..."."""
        kinds = Counter(self.kinds)
        if len(kinds) == 1:
            return next(iter(kinds))
        parts = [f"{kind} for {n}" for kind, n in kinds.most_common() if kind != UNTUNED]
        return f"{', '.join(parts)} of {len(self.origins)} shape buckets, else {UNTUNED}"


def untuned(problem: Problem, schedule: Schedule | None) -> Chosen:
    """The given schedule for all buckets that it can serve, else the default of each."""
    from flashgen.compiler.choose import choose

    missing = None if schedule is None else _missing(problem, schedule)
    if schedule is not None and missing:
        choices = tuple((bucket, portable(problem, bucket)) for bucket in all_buckets())
        origins = (UNTUNED,) * len(choices)
        return Chosen(choices, origins, (fallback(schedule, missing),), (None,) * len(choices))
    choices = tuple(choose(problem, schedule))
    origins = tuple(GIVEN if c == schedule else UNTUNED for _, c in choices)
    return Chosen(choices, origins, entries=(None,) * len(choices))


def tuned(problem: Problem, tables: Tables, buckets: Sequence[Bucket] | None = None) -> Chosen:
    """Tuned schedules where `tables` have some that fit, untuned ones elsewhere; buckets: all."""
    from flashgen.schedule.space import default_schedule

    wanted = all_buckets() if buckets is None else buckets
    found = resolve(tables, problem, wanted)
    choices, origins, entries = [], [], []
    for bucket in wanted:
        each = found.choices.get(bucket)
        choices.append((bucket, each.schedule if each else default_schedule(problem, bucket)))
        origins.append(each.origin if each else UNTUNED)
        entries.append(each.entry if each else None)
    return Chosen(tuple(choices), tuple(origins), found.notes, tuple(entries))


def of_family(
    problem: Problem, tables: Tables, family: Family, refused: Mapping[Schedule, str] | None = None
) -> Chosen:
    """Tuned schedules of one family where `tables` have some that fit, elsewhere its best guess;
    the untuned choice in buckets for which the family has none. refused: not to be used here, with
    the reason; the next best takes the place of a best guess.

    ScheduleError where it has none at all.
    """
    from flashgen.schedule.best import best_of, check_family
    from flashgen.schedule.space import default_schedule

    check_family(family, problem)
    found = tuned(problem, tables)
    gone = {s: why for s, why in (refused or {}).items() if s.family == family}
    choices, origins, entries = [], [], []
    for (bucket, schedule), origin, entry in zip(
        found.choices, found.origins, found.entries, strict=True
    ):
        kept = schedule.family == family
        best = None if kept else best_of(family, problem, bucket, frozenset(gone))
        chosen = schedule if kept else best or default_schedule(problem, bucket)
        guessed = PREDICTED if best is not None and family != PORTABLE else UNTUNED
        choices.append((bucket, chosen))
        origins.append(origin if kept else guessed)
        entries.append(entry if kept else None)
    used = {schedule for _, schedule in choices}
    said = (f"schedule {s} is not used: {why}" for s, why in gone.items() if s not in used)
    return Chosen(tuple(choices), tuple(origins), (*found.notes, *said), tuple(entries))


# **** schedules of the family gluon_sm90 that cannot be used here ****


def without_refused(chosen: Chosen, problem: Problem, refused: Mapping[Schedule, str]) -> Chosen:
    """The portable family in the place of Hopper schedules that are `refused`, or that the Triton
    here cannot compile; the notes say why."""
    reasons = {
        schedule: reason
        for schedule in dict.fromkeys(schedule for _, schedule in chosen.choices)
        if (reason := _missing(problem, schedule) or refused.get(schedule))
    }
    if not reasons:
        return chosen
    entries = chosen.entries or (None,) * len(chosen.choices)
    choices, origins, kept = [], [], []
    for (bucket, schedule), origin, entry in zip(
        chosen.choices, chosen.origins, entries, strict=True
    ):
        gone = schedule in reasons
        choices.append((bucket, portable(problem, bucket) if gone else schedule))
        origins.append(UNTUNED if gone else origin)
        kept.append(None if gone else entry)
    notes = (*chosen.notes, *(fallback(schedule, why) for schedule, why in reasons.items()))
    return replace(
        chosen,
        choices=tuple(choices),
        origins=tuple(origins),
        notes=notes,
        entries=tuple(kept),
    )


def _missing(problem: Problem, schedule: Schedule) -> str | None:
    """Why no schedule of the family can be used for this problem, or with this Triton."""
    row_bytes = problem.head_dim_v * problem.out_elem_bytes
    if schedule.family == HOPPER and problem.target.arch == "sm_90" and row_bytes % TMA_BYTES:
        return (
            f"head_dim.v {problem.head_dim_v} makes output rows of {row_bytes} B, and TMA steps by "
            f"multiples of {TMA_BYTES} B"
        )
    return missing_here(schedule.family, problem.target)


def fallback(schedule: Schedule, reason: str) -> str:
    """What is said where the portable family takes the place of a Hopper schedule."""
    hint = ""
    if reason == HUNG:
        hint = (
            "\n  hint: `flashgen list --hung` shows it, and with --forget it is tried again, in a "
            "process of its own."
        )
    return f"schedule {schedule} is not used: {reason}; family triton serves{hint}"


def portable(problem: Problem, bucket: Bucket) -> Schedule:
    """The untuned choice, which is one of the portable family's."""
    from flashgen.schedule.space import default_schedule

    return default_schedule(problem, bucket)


@dataclass(frozen=True)
class Choice:
    """The schedule that calls of one bucket get, and who chose it.

    untuned: what they would get without a table; entry: the table's, None for an untuned choice.
    """

    schedule: Schedule
    origin: str
    untuned: Schedule
    entry: Entry | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Who chose, with the figures and versions of the measurement that decided."""
        if self.entry is None:
            return UNTUNED
        return f"{_in_full(self.origin)}: {measured_text(self.entry)}"


def chosen_for(problem: Problem, bucket: Bucket) -> Choice:
    """What calls of `bucket` get where no schedule is given.

    ScheduleError where nothing fits, for then there is nothing to tune either.
    """
    from flashgen.schedule.space import default_schedule

    without = default_schedule(problem, bucket)
    found = tuned(problem, tables_of(problem.spec, problem.target), [bucket])
    found = without_refused(found, problem, {})
    ((_, schedule),) = found.choices
    return Choice(schedule, found.origins[0], without, found.entries[0], found.notes)


def entries_of(problem: Problem, plan: Plan) -> tuple[Entry | None, ...]:
    """The tables' entries behind a plan's choices, in step; None where none is."""
    found = resolve(tables_of(problem.spec, problem.target), problem).choices
    steps = zip(plan.choices, plan.origins, strict=True)
    return tuple(
        found[bucket].entry
        if bucket in found and (found[bucket].schedule, found[bucket].origin) == (schedule, origin)
        else None
        for (bucket, schedule), origin in steps
    )


def measured(entry: Entry | None) -> dict[str, object] | None:
    """The measurement behind an entry, as JSON types; `docs/tuning.md` defines the fields."""
    if entry is None:
        return None
    return {
        "bucket": entry.bucket.to_dict(),
        "shape": asdict(entry.shape),
        "time_us": entry.time_us,
        "low_us": entry.low_us,
        "high_us": entry.high_us,
        "rate": entry.rate,
        "unit": entry.unit,
        "bound_us": entry.bound_us,
        "untuned": {"schedule": entry.default.to_dict(), "time_us": entry.default_us},
        "speedup": entry.speedup,
        "search": {"trials": entry.trials, "feasible": entry.feasible},
        "measured_with": {
            "gpu": entry.device.name,
            "driver": entry.device.driver,
            **entry.toolchain.to_dict(),
        },
    }


def measured_text(entry: Entry) -> str:
    """The same in a sentence."""
    shape, tools = entry.shape, entry.toolchain
    gain = f", {entry.speedup:.3f} x the speed of the untuned" if entry.speedup else ""
    return (
        f"{entry.time_us:.4g} us measured for b{shape.batch} h{shape.q_heads}:{shape.kv_heads} "
        f"q{shape.q_len} k{shape.kv_len}{gain}; roofline bound {entry.bound_us:.4g} us; "
        f"{entry.trials} of {entry.feasible} schedules tried; torch {tools.torch}, "
        f"triton {tools.triton}"
    )


def _in_full(origin: str) -> str:
    """`tuned`, `tuned on GPU`, each with or without a near bucket, in words for people."""
    where, near, lengths = origin.partition(" for ")
    where = f"{where} on this GPU" if where == "tuned" else where
    return f"{where} for near lengths ({lengths})" if near else where


def _kind(origin: str) -> str:
    """Without the bucket that a near one was tuned for."""
    where, near, _ = origin.partition(" for ")
    return f"{where} (near)" if near else where
