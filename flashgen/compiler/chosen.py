"""The schedule of every shape bucket, and who chose it: the caller, a tuned config, or the default.

Runs where a plan is generated; the warm path reads the outcome from the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule, all_buckets
from flashgen.tune.lookup import Tables, resolve

GIVEN, DEFAULT = "given", "default"


@dataclass(frozen=True)
class Chosen:
    """A schedule for each bucket with its origin, in step; notes: what a caller must be told."""

    choices: tuple[tuple[Bucket, Schedule], ...]
    origins: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """All origins in a few words: "default", or "tuned for 3 of 48 shape buckets, ..."."""
        kinds = Counter(_kind(origin) for origin in self.origins)
        if len(kinds) == 1:
            return next(iter(kinds))
        parts = [f"{kind} for {n}" for kind, n in kinds.most_common() if kind != DEFAULT]
        return f"{', '.join(parts)} of {len(self.origins)} shape buckets, else {DEFAULT}"


def untuned(problem: Problem, schedule: Schedule | None) -> Chosen:
    """The given schedule for all buckets that it can serve, else the default of each."""
    from flashgen.compiler.choose import choose

    choices = tuple(choose(problem, schedule))
    return Chosen(choices, tuple(GIVEN if c == schedule else DEFAULT for _, c in choices))


def tuned(problem: Problem, tables: Tables) -> Chosen:
    """Tuned schedules where `tables` have some that fit, defaults elsewhere."""
    from flashgen.schedule.space import default_schedule

    found = resolve(tables, problem)
    choices, origins = [], []
    for bucket in all_buckets():
        each = found.choices.get(bucket)
        choices.append((bucket, each.schedule if each else default_schedule(problem, bucket)))
        origins.append(each.origin if each else DEFAULT)
    return Chosen(tuple(choices), tuple(origins), found.notes)


def _kind(origin: str) -> str:
    """Without the bucket that a near one was tuned for."""
    where, near, _ = origin.partition(" for ")
    return f"{where} (near)" if near else where
