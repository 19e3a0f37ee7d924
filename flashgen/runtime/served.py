"""Which lengths each schedule of a plan serves, in words."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import KV_LEN_LIMITS, Q_LEN_LIMITS, Bucket, Schedule


def served(plan: Plan) -> dict[tuple[Schedule, str], list[str]]:
    """(schedule, who chose it) -> the lengths that it serves, as ranges that do not overlap."""
    areas: list[tuple[list[Bucket], tuple[Schedule, str]]] = []  # rectangles: first, last bucket
    for (bucket, schedule), origin in zip(plan.choices, plan.origins, strict=True):
        chosen = (schedule, origin)
        if areas and areas[-1][1] == chosen and areas[-1][0][1].q_len_max == bucket.q_len_max:
            areas[-1][0][1] = bucket
        else:
            areas.append(([bucket, bucket], chosen))
    found: dict[tuple[Schedule, str], list[str]] = {}
    merged: list[tuple[list[Bucket], tuple[Schedule, str]]] = []
    for (first, last), chosen in areas:
        below = _above(Q_LEN_LIMITS, first.q_len_max)
        for area, other in merged:
            same_keys = [b.kv_len_max for b in area] == [first.kv_len_max, last.kv_len_max]
            if other == chosen and same_keys and area[1].q_len_max == below:
                area[1] = last
                break
        else:
            merged.append(([first, last], chosen))
    for (first, last), chosen in merged:
        rows = _range("q_len", Q_LEN_LIMITS, first.q_len_max, last.q_len_max)
        keys = _range("kv_len", KV_LEN_LIMITS, first.kv_len_max, last.kv_len_max)
        found.setdefault(chosen, []).append(f"{rows}, {keys}")
    return found


def _above(limits: Sequence[int], limit: int | None) -> int | None:
    """The limit of the next smaller bucket; None: there is none."""
    smaller = [each for each in limits if limit is None or each < limit]
    return smaller[-1] if smaller else None


def _range(name: str, limits: Sequence[int], first: int | None, last: int | None) -> str:
    """Lengths from the bucket of `first` up to that of `last`."""
    above = _above(limits, first)
    if above is None:
        return f"{name} any" if last is None else f"{name} <= {last}"
    return f"{name} > {above}" if last is None else f"{name} {above + 1} to {last}"
