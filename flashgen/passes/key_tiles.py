"""The key tiles that query tiles visit, as numbers: ranges of them, or those of chunks.

Everything here is for many query tiles at once: an array with an entry for each, or `Lines`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashgen.passes.lines import Lines, elementwise

Array = NDArray[np.int64]
Values: TypeAlias = Any  # an Array or Lines


@dataclass(frozen=True)
class SpanKeys:
    """A span for each row or query tile: keys [start, stop), cut to those that exist.

    period: (start, width, period) of its chunks; exact: every key inside is visible to every row.
    """

    start: Values
    stop: Values
    period: tuple[Values, Values, int] | None
    exact: bool

    def num_keys(self) -> Values:
        if self.period is None:
            return np.maximum(self.stop - self.start, 0)
        return np.where(self.stop > self.start, self._below(self.stop) - self._below(self.start), 0)

    def _below(self, key: Values) -> Values:
        """Keys in chunks below `key`, up to a constant."""
        assert self.period is not None
        start, width, period = self.period
        return (key - start) // period * width + np.minimum((key - start) % period, width)

    def tile_hull(self, block_n: int) -> tuple[int, int]:
        """The first key tile that any of them meets, and the one after the last; (0, 0): none."""
        lo, hi = self.start // block_n, -(-self.stop // block_n)
        some = hi > lo  # as kernels ask: an empty range that begins inside a tile visits it
        first, stop = int(np.where(some, lo, 2**31).min()), int(np.where(some, hi, 0).max())
        return (first, stop) if first < stop else (0, 0)

    def shared_keys(self, other: SpanKeys) -> Values:
        lo, hi = np.maximum(self.start, other.start), np.minimum(self.stop, other.stop)
        return np.maximum(hi - lo, 0)

    def chunks(self) -> Iterator[tuple[Values, Values, NDArray[np.bool_]]]:
        """Keys [begin, end) of one chunk after another, and whether the walk gets that far."""
        assert self.period is not None
        start, width, period = self.period
        first, stop = (self.start - start) // period, (self.stop - 1 - start) // period + 1
        for step in range(int((stop - first).max(initial=0))):
            chunk = first + step
            begin = np.maximum(start + chunk * period, self.start)
            yield begin, np.minimum(start + chunk * period + width, self.stop), chunk < stop

    def chunk_tiles(self, block_n: int) -> Iterator[tuple[Values, Values]]:
        """Tiles [lo, hi) that meet a chunk, each tile once, as the kernel walks them."""
        next_tile = np.zeros_like(self.start)
        for begin, end, walked in self.chunks():
            lo = np.maximum(begin // block_n, next_tile)
            hi = np.where(walked, -(-np.maximum(end, 0) // block_n), 0)
            yield lo, hi
            next_tile = np.maximum(next_tile, hi)


def key_tile_ranges(spans: list[SpanKeys], block_n: int) -> Iterator[tuple[Values, Values]]:
    """Key tiles [lo, hi) that query tiles with these spans visit, in disjoint ranges."""
    if not spans or not len(spans[0].start):
        return
    if spans[0].period is not None:
        yield from spans[0].chunk_tiles(block_n)
        return
    ranges = [(span.start // block_n, -(-span.stop // block_n)) for span in spans]
    if len(ranges) == 1:
        yield ranges[0]
        return
    (lo_0, hi_0), (lo_1, hi_1) = ranges
    in_order = lo_0 <= lo_1
    hi = np.where(in_order, hi_0, hi_1)
    yield np.where(in_order, lo_0, lo_1), hi
    yield np.maximum(np.where(in_order, lo_1, lo_0), hi), np.where(in_order, hi_1, hi_0)


@dataclass(frozen=True)
class Walk:
    """The key tiles that each query tile visits: disjoint ranges [lo, hi), or those of chunks."""

    ranges: tuple[tuple[Values, Values], ...]
    chunks: ChunkTiles | None = None

    @classmethod
    def of(cls, spans: list[SpanKeys], block_n: int) -> Walk | None:
        """None where no query tile visits any."""
        if not spans or not len(spans[0].start):
            return None
        if spans[0].period is not None:
            return cls((), ChunkTiles(spans[0], block_n))
        return cls(tuple(key_tile_ranges(spans, block_n)))

    def tiles(self) -> Values:
        """How many a query tile visits."""
        if self.chunks is not None:
            return self.chunks.visited()
        return sum(np.maximum(hi - lo, 0) for lo, hi in self.ranges)

    def splits(self, number: int) -> Values:
        """How many of so many splits have a tile of these, each every `number`-th."""
        if number == 1 or (self.chunks is not None and self.chunks.without_gaps):
            return np.minimum(self.tiles(), number)
        if self.chunks is not None:
            return self.chunks.splits(number)
        sizes = [np.minimum(np.maximum(hi - lo, 0), number) for lo, hi in self.ranges]
        if len(sizes) == 1:
            return sizes[0]
        # Arcs of a circle of `number` splits: the second begins `apart` after the first.
        one, two = sizes
        apart = (self.ranges[1][0] - self.ranges[0][0]) % number
        shared = np.minimum(np.maximum(one - apart, 0), two)
        shared = shared + np.minimum(np.maximum(apart + two - number, 0), one)
        return one + two - np.minimum(shared, np.minimum(one, two))


@dataclass(frozen=True)
class ChunkTiles:
    """Key tiles of a periodic mask, counted by where they begin in its period."""

    keys: SpanKeys
    block_n: int

    @property
    def _period(self) -> tuple[Values, Values, int]:
        assert self.keys.period is not None
        return self.keys.period

    @property
    def without_gaps(self) -> bool:
        """No tile has room between two chunks of any query tile."""
        _, width, period = self._period
        return bool((width > period - self.block_n).all())

    def visited(self) -> Values:
        """Tiles that meet a chunk, as kernels walk them."""
        return self._whole(0, 1) + np.where(self._last, 1, 0)

    def splits(self, number: int) -> Values:
        """How many of so many splits have such a tile."""
        last: Values = np.where(self._last, self.keys.stop // self.block_n % number, -1)
        if isinstance(last, Lines) and not last.settled:
            return last  # of a round that does not count
        visited = ((self._whole(split, number) > 0) | (last == split) for split in range(number))
        return sum(np.where(found, 1, 0) for found in visited)

    def _whole(self, split: int, number: int) -> Values:
        """Of every number-th tile those before the end of the keys, but between two chunks."""
        _, width, period = self._period
        lo, hi = self.keys.start // self.block_n, self.keys.stop // self.block_n
        tiles = np.maximum((split - lo) // number - (split - hi) // number, 0)
        gap_stop = np.maximum(width, period - self.block_n + 1)
        return tiles - self._among(lo, hi, split, number, width, gap_stop)

    @property
    def _last(self) -> Values:
        """Whether the tile that the end of the keys cuts meets a chunk."""
        start, width, period = self._period
        tile = self.keys.stop // self.block_n
        first = np.maximum(tile * self.block_n, 0)
        into = (first - start) % period
        meets = (into < width) | (first - into + period < self.keys.stop)
        cut = self.keys.stop % self.block_n > 0
        return meets & cut & (tile >= self.keys.start // self.block_n)

    def full(self, begin: Values, end: Values) -> Values:
        """Tiles inside [begin, end) that lie in one chunk."""
        width = np.maximum(self._period[1] - self.block_n + 1, 0)
        return self._among(-(-begin // self.block_n), end // self.block_n, 0, 1, 0, width)

    def _among(
        self, lo: Values, hi: Values, split: int, number: int, least: Values, below: Values
    ) -> Values:
        """Of every number-th tile in [lo, hi) those that begin at least..below into a period."""
        start, _, period = self._period
        first, count = -((split - lo) // number), -((split - hi) // number)
        stride = number * self.block_n
        turn = period // math.gcd(period, stride)

        def counted(first: Array, last: Array, start: Array, least: Array, below: Array) -> Array:
            size = np.maximum(last - first, 0)
            at = first * stride + split * self.block_n - start
            inside = floor_sum(size, period, stride, at - least)
            return np.where(below > least, inside - floor_sum(size, period, stride, at - below), 0)

        args = (first, count, start, least, below)
        zero = first * 0
        return elementwise(counted, [zero + arg for arg in args], (turn, turn, period, 0, 0))


def floor_sum(count: Array, divisor: int, slope: int, offset: Array) -> Array:
    """The sum of (slope*i + offset) // divisor over 0 <= i < count, in steps of Euclid's algorithm.

    >>> floor_sum(np.array([5]), 7, 3, np.array([-4])).tolist()  # -1 - 1 + 0 + 0 + 1
    [-1]
    """
    total = np.zeros_like(count)
    while True:
        total = total + count * (count - 1) // 2 * (slope // divisor)
        total = total + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        reached = slope * count + offset
        if not slope or not (reached >= divisor).any():
            return total
        # Points below the line, counted along the other axis.
        count, offset = reached // divisor, reached % divisor
        slope, divisor = divisor, slope
