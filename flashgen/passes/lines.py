"""Sums over long arithmetic progressions, exact and without an entry per element.

Loop bounds are built from sums, maxima, minima, quotients and remainders of the first row of a
tile. For the query tiles t = r, r + P, r + 2P, … such an expression is a straight line as long as P
is a multiple of every divisor's share and no maximum or comparison changes sides. `over` evaluates
a function of t on lines that are known by both ends: numpy's functions on `Lines` note where a line
would bend, and the next round is on shorter lines, or a longer period P, until none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

T = TypeVar("T")
MAX_LINES = 2**18  # a sum over more of them would be no faster than over the elements
MAX_ROUNDS = 64


class NotLinearError(Exception):
    """No lines: a product of two positions, a read that moves with them, or too many pieces."""


@dataclass
class _Axis:
    """The numbers below `count` in lines: from `first` on, `period` apart, `lengths` of them.

    What a round finds: `bent` lines, where to cut them (`after` so many elements), and the factor
    by which the period is too short.
    """

    count: int
    period: int
    first: NDArray[np.int64]
    lengths: NDArray[np.int64]
    bent: NDArray[np.bool_] = field(init=False)
    after: NDArray[np.int64] = field(init=False)
    factor: int = 1

    def __post_init__(self) -> None:
        if len(self.first) > MAX_LINES:
            raise NotLinearError
        self.bent = np.zeros(len(self.first), dtype=bool)
        self.after = np.zeros(len(self.first), dtype=np.int64)

    @classmethod
    def of(cls, count: int, period: int) -> _Axis:
        first = np.arange(min(count, period), dtype=np.int64)
        return cls(count, period, first, (count - 1 - first) // period + 1)

    @property
    def numbers(self) -> Lines:
        return Lines(self, np.stack([self.first, self.first + (self.lengths - 1) * self.period]))

    def refined(self) -> _Axis:
        """The axis of the next round."""
        if self.factor > 1:
            return _Axis.of(self.count, self.period * self.factor)
        cut = self.bent
        rest = self.first[cut] + self.after[cut] * self.period
        lengths = np.where(cut, self.after, self.lengths)
        return _Axis(
            self.count,
            self.period,
            np.concatenate([self.first, rest]),
            np.concatenate([lengths, self.lengths[cut] - self.after[cut]]),
        )

    @property
    def judged(self) -> NDArray[np.bool_]:
        """Lines that are still straight, and have an element between their ends."""
        return (self.lengths > 2) & ~self.bent

    def steps(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """What a value changes by from one element of a line to the next."""
        found: NDArray[np.int64] = (ends[1] - ends[0]) // np.maximum(self.lengths - 1, 1)
        return found

    def cut_at_changes(self, difference: NDArray[np.int64]) -> None:
        """Ask for lines along which the difference keeps its sign."""
        cut = self.judged & (np.sign(difference[0]) != np.sign(difference[1]))
        if cut.any():
            step = np.where(cut, np.abs(self.steps(difference)), 1)
            same = (np.abs(difference[0]) - 1) // step + 1  # elements with the first one's sign
            self.after[cut] = np.maximum(same, 1)[cut]
            self.bent |= cut

    def ask_for_multiples(self, ends: NDArray[np.int64], divisor: NDArray[np.int64]) -> None:
        """Ask for a period after which the value has changed by a multiple of the divisor."""
        step = self.steps(ends)
        divisor = np.broadcast_to(np.maximum(np.abs(divisor), 1), step.shape)
        short = self.judged & (step % divisor != 0)
        if short.any():
            missing = divisor[short] // np.gcd(step[short], divisor[short])
            for factor in np.unique(missing).tolist():
                self.factor = math.lcm(self.factor, factor)
            if self.factor * self.period > MAX_LINES:
                raise NotLinearError
            self.bent |= short

    def ask_for_constants(self, ends: NDArray[np.int64]) -> None:
        if (self.judged & (ends[0] != ends[1])).any():
            raise NotLinearError


class Lines(NDArrayOperatorsMixin):
    """Integers or conditions for each number of an axis, by those at both ends of its lines.

    Stands in for a numpy array in sums, maxima, minima, comparisons, np.where, // and %.
    """

    def __init__(self, axis: _Axis, ends: NDArray[Any]) -> None:
        self.axis, self.ends = axis, ends

    def __len__(self) -> int:
        return self.axis.count

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise NotLinearError

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Lines:
        if method != "__call__" or options:
            raise NotLinearError
        ends = [x.ends if isinstance(x, Lines) else np.asarray(x) for x in inputs]
        if any(x.dtype.kind not in "bi" or x.ndim not in (0, 2) for x in ends):
            raise NotLinearError
        if ufunc in _COMPARISONS:
            left, right = (x.astype(np.int64) for x in ends)
            self.axis.cut_at_changes(self._wide(left - right))
        elif ufunc is np.absolute:
            self.axis.cut_at_changes(ends[0])
        elif ufunc in (np.floor_divide, np.remainder):
            self.axis.ask_for_constants(self._wide(ends[1]))
            self.axis.ask_for_multiples(self._wide(ends[0]), self._wide(ends[1])[0])
        elif ufunc is np.multiply:
            left, right = map(self._wide, ends)
            moving = (left[0] != left[1]) & (right[0] != right[1])
            if (self.axis.judged & moving).any():
                raise NotLinearError
        elif ufunc not in _PIECEWISE:
            raise NotLinearError
        return Lines(self.axis, ufunc(*ends))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Lines:
        if function is np.zeros_like and not options:
            return Lines(self.axis, np.zeros(self.ends.shape, dtype=np.int64))
        if function is np.where and not options and len(args) == 3:
            picked = np.where(*(x.ends if isinstance(x, Lines) else x for x in args))
            return Lines(self.axis, self._wide(picked))
        raise NotLinearError

    @property
    def settled(self) -> bool:
        """Whether all lines of this round are straight so far."""
        return not self.axis.bent.any()

    def _wide(self, ends: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(ends, (2, len(self.axis.first)))

    def sum(self) -> int:
        wide = self._wide(self.ends).astype(np.int64)
        return int((self.axis.lengths * (wide[0] + wide[1])).sum()) // 2

    def min(self, initial: int = 2**62) -> int:
        return int(self.ends.min(initial=initial))

    def max(self, initial: int = -(2**62)) -> int:
        return int(self.ends.max(initial=initial))

    def all(self) -> bool:
        return bool(self.ends.all())

    def any(self) -> bool:
        return bool(self.ends.any())


_COMPARISONS = frozenset(
    {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
) | {np.maximum, np.minimum}
_PIECEWISE = frozenset(
    {np.add, np.subtract, np.negative, np.logical_and, np.logical_or, np.logical_not}
) | {np.bitwise_and, np.bitwise_or, np.invert}


def over(count: int, function: Callable[[Any], T]) -> T:
    """`function` of the numbers below `count` > 0, which may sum up and compare what it makes.

    NotLinearError where that takes more lines than it is worth.
    """
    axis = _Axis.of(count, 1)
    for _ in range(MAX_ROUNDS):
        found = function(axis.numbers)
        if not axis.bent.any():
            return found
        axis = axis.refined()
    raise NotLinearError


def elementwise(
    function: Callable[..., NDArray[np.int64]], args: Sequence[Any], moduli: Sequence[int]
) -> Any:
    """`function` of arrays or lines, for a function that is straight between ends.

    That is so where each argument moves by multiples of its modulus (0: not at all).
    """
    lines = next((x for x in args if isinstance(x, Lines)), None)
    if lines is None:
        return function(*args)
    ends = [lines._wide(x.ends if isinstance(x, Lines) else np.asarray(x)) for x in args]
    for values, modulus in zip(ends, moduli, strict=True):
        if modulus:
            lines.axis.ask_for_multiples(values, np.asarray(modulus))
        else:
            lines.axis.ask_for_constants(values)
    return Lines(lines.axis, function(*ends))
