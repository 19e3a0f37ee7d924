"""Medians, spreads and geometric means: what a table shows of many samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The middle of a set of samples and its spread: the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float


def summarise(samples: Sequence[float]) -> Summary:
    """Median and spread; ValueError for no samples.

    >>> summarise([3.0, 1.0, 2.0, 5.0, 4.0])
    Summary(median=3.0, p20=1.8, p80=4.2)
    """
    if not samples:
        raise ValueError("no samples")
    return Summary(*(_percentile(samples, share) for share in (0.5, 0.2, 0.8)))


def _percentile(samples: Sequence[float], share: float) -> float:
    """Between the two nearest samples, in proportion (as numpy does)."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return rounded(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(ratio) for ratio in ratios]
    return rounded(math.exp(math.fsum(logs) / len(logs))) if logs else None


def rounded(value: float, digits: int = 6) -> float:
    """`value` to some significant digits: a measured time has no more, and JSON stays readable.

    >>> rounded(0.123456789), rounded(1234567.8)
    (0.123457, 1234570.0)
    """
    return float(f"{value:.{digits}g}")
