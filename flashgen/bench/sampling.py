"""Which schedules of a space are measured: chosen by a fixed rule that knows no model of time.

So the measurements can judge a model. The default is among them, and schedules that differ in one
field from it; the rest are spread evenly over the tile shapes of the space.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields

from flashgen.schedule.model import Schedule

SEED = 20261129
NEIGHBOURS = 10


def sample(feasible: Sequence[Schedule], default: Schedule, count: int) -> tuple[Schedule, ...]:
    """`count` of the feasible schedules (all, if there are fewer), the default first.

    >>> tiles = [
    ...     Schedule(block_m=m, block_n=n, num_warps=4, num_stages=2)
    ...     for m in (16, 32, 64)
    ...     for n in (16, 32, 64)
    ... ]
    >>> [f"{s.block_m}x{s.block_n}" for s in sample(tiles, tiles[4], 4)]
    ['32x32', '32x16', '32x64', '64x32']
    """
    near = [each for each in feasible if _differences(each, default) == 1]
    near = _shuffled(near)[: min(NEIGHBOURS, count - 1)]
    chosen = [default, *sorted(near)]
    rest = [each for each in feasible if each not in set(chosen)]
    return tuple([*chosen, *_in_turn(rest)][:count])


def _in_turn(schedules: Iterable[Schedule]) -> list[Schedule]:
    """One of each tile shape, then another one of each, and so on; shapes in no order."""
    by_tile: dict[tuple[int, int], list[Schedule]] = {}
    for schedule in _shuffled(schedules):
        by_tile.setdefault((schedule.block_m, schedule.block_n), []).append(schedule)
    piles = list(by_tile.values())
    longest = max(map(len, piles), default=0)
    return [pile[turn] for turn in range(longest) for pile in piles if turn < len(pile)]


def _shuffled(schedules: Iterable[Schedule]) -> list[Schedule]:
    ordered = sorted(schedules)
    random.Random(SEED).shuffle(ordered)
    return ordered


def _differences(one: Schedule, other: Schedule) -> int:
    return sum(getattr(one, f.name) != getattr(other, f.name) for f in fields(Schedule))
