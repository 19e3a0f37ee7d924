"""The best schedule of one family for a bucket, by predicted time; nothing is measured."""

from __future__ import annotations

from functools import cache

from flashgen.errors import ScheduleError
from flashgen.problem import Problem
from flashgen.schedule.families import FAMILIES, PORTABLE
from flashgen.schedule.model import HOPPER, Bucket, Family, Schedule, all_buckets
from flashgen.schedule.orders import judged_by
from flashgen.schedule.predict import predicted_time_us
from flashgen.schedule.predict_sm90 import likely_spills
from flashgen.schedule.space import default_schedule, enumerate_space, unserved

MOST_REFUSED = 8  # of a spec's, in all buckets, before another family serves it


@cache
def best_of(
    family: Family,
    problem: Problem,
    bucket: Bucket,
    refused: frozenset[Schedule] = frozenset(),
) -> Schedule | None:
    """The best guess at the fastest schedule of a family; None where it has none.

    refused: known not to be usable here; too many of them leave none.

    Of triton it is the untuned choice, which knows measured tiles. Of gluon_sm90 it is the shortest
    predicted time, for the shape that stands for the bucket (`schedule.orders`), among schedules
    whose machine code is not likely to spill; of equals, one in which the most heads share a tile.
    """
    if family == PORTABLE:
        return default_schedule(problem, bucket)
    feasible = enumerate_space(problem, bucket, (family,)).feasible
    usable = [each for each in feasible if not _spills(each, problem)] or feasible
    if len(refused.intersection(usable)) >= MOST_REFUSED:
        return None
    shape, _ = judged_by(problem, bucket)
    times = {s: predicted_time_us(problem, s, shape) for s in usable if s not in refused}
    return min(times, key=lambda each: (times[each], -each.packed_heads, each), default=None)


def _spills(schedule: Schedule, problem: Problem) -> bool:
    return schedule.family == HOPPER and likely_spills(schedule, problem)


def why_none(family: Family, problem: Problem, bucket: Bucket) -> str:
    """Why a family has no feasible schedule for a bucket."""
    found = enumerate_space(problem, bucket, (family,)).grouped()
    groups = ", ".join(f"{len(each)} for {reason}" for reason, each in found.items())
    return unserved(family, problem, bucket) or f"all are rejected, {groups}"


def check_family(family: Family, problem: Problem) -> None:
    """ScheduleError where a family has no schedule in any bucket, with the reason."""
    if any(enumerate_space(problem, b, (family,)).feasible for b in all_buckets()):
        return
    raise ScheduleError(none_at_all(family, problem, why_none(family, problem, Bucket(None, None))))


def none_at_all(family: Family, problem: Problem, why: str) -> str:
    """The message that a family cannot be had, with what can."""
    others = ", ".join(each for each in FAMILIES if each != family)
    return (
        f"{problem.name}: family {family} cannot be had for this spec on {problem.target.id}\n"
        f"  {why}\n"
        f"  hint: family {others} serves it; without a family the choice is flashgen's."
    )
