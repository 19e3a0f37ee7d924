"""How well one order agrees with another: the model's of schedules against the measured one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_CORRELATION = 0.6
TOP_SHARE = 1 / 3


@dataclass(frozen=True)
class Ranking:
    """Of `count` schedules, what the model says against what was measured.

    place: where in the model's order the fastest one stands, from 1; loss: how much longer than the
    fastest the model's first choice takes (0: it is the fastest).
    """

    count: int
    place: int
    correlation: float
    fastest: str
    first: str
    loss: float

    @property
    def top_third(self) -> bool:
        """Whether the fastest one is in the first third of the model's order."""
        return self.place <= math.floor(TOP_SHARE * self.count)

    @property
    def good(self) -> bool:
        """Whether the model ranks well enough to say where to look first."""
        return self.top_third and self.correlation >= MIN_CORRELATION


def rank(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Ranking:
    """The ranking of what both have; ValueError for fewer than two.

    >>> rank({"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 20.0, "b": 10.0, "c": 30.0})
    Ranking(count=3, place=2, correlation=0.5, fastest='a', first='b', loss=1.0)
    """
    names = [name for name in measured if name in predicted]
    if len(names) < 2:
        raise ValueError("nothing to rank")
    order = sorted(names, key=lambda name: (predicted[name], name))
    fastest = min(names, key=lambda name: (measured[name], name))
    return Ranking(
        count=len(names),
        place=order.index(fastest) + 1,
        correlation=spearman([measured[n] for n in names], [predicted[n] for n in names]),
        fastest=fastest,
        first=order[0],
        loss=measured[order[0]] / measured[fastest] - 1,
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's, of ranks; equal values share their mean rank.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 40.0, 30.0])
    0.8
    >>> spearman([1.0, 1.0], [1.0, 2.0])
    0.0
    """
    mine, theirs = _ranks(one), _ranks(other)
    middle = (len(mine) + 1) / 2
    shared = sum((a - middle) * (b - middle) for a, b in zip(mine, theirs, strict=True))
    spreads = [sum((place - middle) ** 2 for place in places) for places in (mine, theirs)]
    return round(shared / math.sqrt(math.prod(spreads)), 6) if all(spreads) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2 + 1
        first = last + 1
    return ranks
