"""How much a mask leaves to do: visible (query, key) pairs, and key tiles that a kernel walks.

Both follow the loop bounds of `visibility`, evaluated for many rows (or query tiles) at once:
nothing that counts has an entry per pair. (`visible_matrix` and `tile_classes`, which have one, are
for pictures of small shapes.) What depends on data is counted from the inputs that are given, and
as all visible where they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from flashgen.passes.evaluate import Evaluator
from flashgen.passes.inputs import NUM_BATCH, NUM_KV_HEADS, NUM_Q_HEADS
from flashgen.passes.key_tiles import ChunkTiles, SpanKeys, Walk, key_tile_ranges
from flashgen.passes.lines import Lines, NotLinearError, over
from flashgen.passes.lowering import Kernel
from flashgen.passes.periodic import PeriodicKeys, periodic_keys
from flashgen.passes.visibility import (
    Q_FIRST,
    Q_LAST,
    ROW_FIRST,
    ROW_LAST,
    Keys,
    Scan,
    Span,
    visibility,
)
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input, MaskItem, Shape

T = TypeVar("T")
Array = NDArray[np.int64]
Inputs = Mapping[str, Any]  # numbers for scalars, what numpy.asarray takes for tensors; kv_lens too
BLOCK_PAIRS = 2**22  # pairs evaluated at a time where data decides about each
BLOCK_ROWS = 2**20  # rows whose bounds are evaluated at a time
MOST_PAIRS = 2**30  # that are looked at one by one: for some ten seconds
MANY = 2**12  # tiles, or rows, whose bounds are evaluated as lines

EMPTY, PARTIAL, FULL = 0, 1, 2  # what a kernel does with a tile: skip, mask, compute plainly


def visible_pairs(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Inputs | None = None,
    *,
    batch: int = 0,
    q_head: int = 0,
) -> int:
    """Pairs (query row, key) that the mask shows in one batch and query head.

    Exact for conjunctions and disjunctions (of two ranges) of affine terms, and of these with
    periodic ones (`passes.periodic`). Terms that depend on an input not given count as visible, as
    do others that a kernel decides element by element, unless `inputs` has all that the mask reads:
    then each pair is looked at, some millions at a time, of up to MOST_PAIRS.

    >>> spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])
    >>> visible_pairs(spec, Shape(1, 1, 1, 4, 6))
    18
    >>> prefix = spec.replace(
    ...     mask=[{"expr": "k < prefix[b] or k <= q"}],
    ...     inputs={"prefix": {"shape": ["batch"], "dtype": "int32"}},
    ... )
    >>> visible_pairs(prefix, Shape(1, 1, 1, 4, 4), {"prefix": [3]})
    13
    >>> visible_pairs(prefix, Shape(1, 1, 1, 4, 4))
    16
    """
    if inputs:
        return _pairs(_Place.of(spec, shape, inputs, batch, q_head))
    return _pairs_unknown(_Mask.of(spec), shape, batch, q_head)


@dataclass(frozen=True)
class _Mask:
    """What decides about pairs, besides a shape: specs that differ elsewhere are counted once."""

    items: tuple[MaskItem, ...]
    inputs: tuple[Input, ...]
    align: str
    kv_lens: str
    spec: AttentionSpec = field(compare=False)

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Mask:
        return cls(spec.mask, spec.inputs, spec.align, spec.kv_lens, spec)


@lru_cache(maxsize=4096)
def _pairs_unknown(mask: _Mask, shape: Shape, batch: int, q_head: int) -> int:
    return _pairs(_Place.of(mask.spec, shape, None, batch, q_head))


def _pairs(place: _Place) -> int:
    return sum(_of_tiles(place, 1, lambda rows: _pairs_of(place, rows)))


def _of_tiles(place: _Place, block_m: int, part: Callable[[Any], T]) -> list[T]:
    """`part` of the first rows of all tiles: of many at once, or of some as an array at a time."""
    count = -(-place.q_len // block_m)
    if count > MANY and not place.reads_rows:
        with contextlib.suppress(NotLinearError):
            return [over(count, lambda tile: part(tile * block_m))]
    starts = range(0, place.q_len, BLOCK_ROWS * block_m)
    stops = (min(start + BLOCK_ROWS * block_m, place.q_len) for start in starts)
    return [
        part(np.arange(start, stop, block_m, dtype=np.int64))
        for start, stop in zip(starts, stops, strict=True)
    ]


def _pairs_of(place: _Place, rows: Any) -> int:
    """Visible pairs of these rows."""
    found = visibility(place.spec)
    spans = [place.evaluated(span, rows, rows) for span in found.spans]
    if place.knows(found.predicate) and not all(span.exact for span in spans):
        periodic = place.periodic
        if periodic is not None:
            q = rows + place.q_offset
            return int(periodic.num_keys(place.evaluator({sym.Q: q}), q, place.kv_len).sum())
        if place.q_len * place.kv_len <= MOST_PAIRS:
            if isinstance(rows, Lines):
                raise NotLinearError
            return _pairs_one_by_one(place, rows)
    total = sum((span.num_keys() for span in spans), np.zeros_like(rows))
    if len(spans) == 2:
        total = total - spans[0].shared_keys(spans[1])
    return int(total.sum())


def all_visible_pairs(spec: AttentionSpec, shape: Shape, inputs: Inputs | None = None) -> int:
    """`visible_pairs` summed over batches and query heads: what `matmul_flops` is proportional to.

    >>> spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])
    >>> all_visible_pairs(spec, Shape(2, 8, 2, 100, 100))
    80800
    """
    predicate = visibility(spec).predicate
    by_batch = spec.kv_lens != "none" or predicate.has(sym.B)
    batches = range(shape.batch if by_batch else 1)
    heads = range(shape.q_heads if predicate.has(sym.H, sym.HK) else 1)
    pairs = sum(
        visible_pairs(spec, shape, inputs, batch=batch, q_head=q_head)
        for batch in batches
        for q_head in heads
    )
    return pairs * shape.batch * shape.q_heads // max(1, len(batches) * len(heads))


def visited_tiles(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    inputs: Inputs | None = None,
    *,
    batch: int = 0,
    q_head: int = 0,
) -> int:
    """(query tile, key tile) pairs that a kernel walks in one batch and query head.

    Bounds that depend on an input not given are taken to hide nothing.

    >>> shape = Shape(batch=1, q_heads=1, kv_heads=1, q_len=8192, kv_len=8192)
    >>> spec = AttentionSpec(head_dim=128, dtype="bf16", mask=["causal"])
    >>> visited_tiles(spec, shape, 64, 64)
    8256
    >>> spec = spec.replace(mask=["causal", {"window": {"left": 511}}])
    >>> visited_tiles(spec, shape, 64, 64)
    1116
    """
    return visits(spec, shape, block_m, block_n, inputs, batch=batch, q_head=q_head).tiles


@dataclass(frozen=True)
class Visits:
    """What is walked of the (query tile, key tile) grid, per batch and query head.

    `tiles` pairs are visited. `first_visits` counts the pairs of a query tile and a split of the
    keys that have a visited tile: the query tiles themselves, where the keys are not split and
    every one sees a key. `keys` lie in key tiles that are visited by some query tile; `key_tiles`
    are what flash1's outer loop walks, from the first to the last of those in each span.
    """

    tiles: int
    first_visits: int
    keys: int
    key_tiles: int


def visits(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    inputs: Inputs | None = None,
    *,
    num_kv_splits: int = 1,
    kernel: Kernel = "loop",
    batch: int = 0,
    q_head: int = 0,
) -> Visits:
    """Tile pairs that a kernel walks; of `num_kv_splits` splits each has every such key tile.

    A single-tile kernel has no bounds: each query tile computes its one key tile.

    >>> spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])
    >>> visits(spec, Shape(1, 1, 1, 256, 256), 64, 64, num_kv_splits=2)
    Visits(tiles=10, first_visits=7, keys=256, key_tiles=4)
    >>> windowed = spec.replace(mask=["causal", {"window": {"left": 63}}])
    >>> visits(windowed, Shape(1, 1, 1, 1, 4096), 16, 64)
    Visits(tiles=1, first_visits=1, keys=64, key_tiles=1)
    >>> visits(spec, Shape(1, 1, 1, 256, 32), 64, 64)
    Visits(tiles=1, first_visits=1, keys=32, key_tiles=1)
    >>> visits(spec, Shape(1, 1, 1, 256, 32), 64, 64, kernel="single_tile")
    Visits(tiles=4, first_visits=4, keys=32, key_tiles=1)
    """
    place = _Place.of(spec, shape, inputs, batch, q_head)
    if kernel == "single_tile":
        tiles = _tiles_of_one_key_tile(shape, block_m)
        return Visits(tiles, tiles, place.kv_len if tiles else 0, min(1, tiles))

    def part(first: Any) -> tuple[int, int, list[tuple[int, int]]]:
        spans = _spans_of_tiles(place, first, block_m)
        walk = Walk.of(spans, block_n)
        if walk is None:
            return 0, 0, []
        hulls = [span.tile_hull(block_n) for span in spans]
        return walk.tiles().sum(), walk.splits(num_kv_splits).sum(), hulls

    parts = _of_tiles(place, block_m, part)
    hulls = [hull for _, _, found in parts for hull in found]
    walked = list(_disjoint(hulls))
    tiles = int(sum(found for found, _, _ in parts))
    # Chunks of few queries leave gaps.
    keys = sum(min(hi * block_n, place.kv_len) - lo * block_n for lo, hi in walked)
    return Visits(
        tiles=tiles,
        first_visits=int(sum(found for _, found, _ in parts)),
        keys=min(keys, tiles * block_n),
        key_tiles=sum(hi - lo for lo, hi in walked),
    )


def _tiles_of_one_key_tile(shape: Shape, block_m: int) -> int:
    """What a kernel without a key loop computes: a tile for each query tile, if there are keys."""
    return -(-shape.q_len // block_m) if shape.kv_len else 0


def _disjoint(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same numbers, each in one range, in order; empty ranges left out."""
    reached = 0
    for lo, hi in sorted(ranges):
        if hi > max(lo, reached):
            yield max(lo, reached), hi
            reached = hi


@dataclass(frozen=True)
class Walks:
    """The walks of the query tiles, per batch and query head, in key tiles.

    total: visited by all query tiles; longest: by one; full: of the total, those without a mask.
    """

    query_tiles: int
    total: int
    longest: int
    full: int

    @property
    def mean(self) -> float:
        return self.total / self.query_tiles if self.query_tiles else 0.0

    @property
    def partial_share(self) -> float:
        """Of the visited key tiles, those that need mask code: 0 to 1."""
        return 1 - self.full / self.total if self.total else 0.0


def walks(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    inputs: Inputs | None = None,
    *,
    kernel: Kernel = "loop",
    batch: int = 0,
    q_head: int = 0,
) -> Walks:
    """How many key tiles the query tiles visit in one batch and query head.

    A single-tile kernel computes its one key tile, and the mask in it, for each query tile.

    >>> spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])
    >>> walks(spec, Shape(1, 1, 1, 256, 256), 64, 64)
    Walks(query_tiles=4, total=10, longest=4, full=6)
    >>> walks(spec, Shape(1, 1, 1, 256, 32), 64, 64, kernel="single_tile")
    Walks(query_tiles=4, total=4, longest=1, full=0)
    """
    query_tiles = -(-shape.q_len // block_m)
    if kernel == "single_tile":
        tiles = _tiles_of_one_key_tile(shape, block_m)
        return Walks(query_tiles, tiles, min(1, tiles), full=0)
    place = _Place.of(spec, shape, inputs, batch, q_head)

    def part(first: Any) -> tuple[int, int, int]:
        walk = Walk.of(_spans_of_tiles(place, first, block_m), block_n)
        if walk is None:
            return 0, 0, 0
        tiles, full = walk.tiles(), np.zeros_like(first)
        last = np.minimum(first + block_m, place.q_len) - 1
        for span in visibility(spec).spans:
            full = full + place.full_tiles(span, first, last, block_n)
        return int(tiles.sum()), int(tiles.max(initial=0)), int(np.minimum(full, tiles).sum())

    parts = _of_tiles(place, block_m, part)
    return Walks(
        query_tiles=query_tiles,
        total=sum(total for total, _, _ in parts),
        longest=max((longest for _, longest, _ in parts), default=0),
        full=sum(full for _, _, full in parts),
    )


def _spans_of_tiles(place: _Place, first: Array, block_m: int) -> list[SpanKeys]:
    """The spans of the query tiles at `first`."""
    last = np.minimum(first + block_m, place.q_len) - 1
    return [place.evaluated(span, first, last) for span in visibility(place.spec).spans]


def visible_matrix(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Inputs,
    *,
    rows: Array | None = None,
    keys: Array | None = None,
    batch: int = 0,
) -> NDArray[np.bool_]:
    """[rows, keys]: which pairs of these (None: of all) the mask shows in a batch's first head.

    For small numbers of them; `inputs` has all that the mask reads.
    """
    place = _Place.of(spec, shape, inputs, batch, 0)
    rows = np.arange(shape.q_len, dtype=np.int64) if rows is None else rows
    keys = np.arange(shape.kv_len, dtype=np.int64) if keys is None else keys
    return place.seen(rows, keys) & (keys < place.kv_len)


def tile_classes(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    inputs: Inputs,
    kernel: Kernel = "loop",
) -> NDArray[np.int8]:
    """[query tiles, key tiles] of EMPTY, PARTIAL, FULL: what the kernel does in the first head.

    For small shapes. A visited tile is full where the loop bounds prove it, not where it happens to
    be: the tile that the end of the keys cuts is partial, and every tile of a single-tile kernel.
    """
    place = _Place.of(spec, shape, inputs, 0, 0)
    first = np.arange(0, shape.q_len, block_m, dtype=np.int64)
    key_tile = np.arange(-(-shape.kv_len // block_n), dtype=np.int64)
    classes = np.full((len(first), len(key_tile)), EMPTY, dtype=np.int8)
    if kernel == "single_tile":
        return np.full_like(classes, PARTIAL)
    for lo, hi in key_tile_ranges(_spans_of_tiles(place, first, block_m), block_n):
        classes[(key_tile >= lo[:, None]) & (key_tile < hi[:, None])] = PARTIAL
    last = np.minimum(first + block_m, shape.q_len) - 1
    for span in visibility(spec).spans:
        for begin, end in place.full_ranges(span, first, last):
            starts, stops = key_tile * block_n, (key_tile + 1) * block_n
            inside = (starts >= begin[:, None]) & (stops <= end[:, None])
            classes[inside & (classes == PARTIAL)] = FULL
    return classes


# ---- spans as numbers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """One batch and query head of a call: the value of everything but rows and keys."""

    spec: AttentionSpec
    symbols: Mapping[sp.Symbol, int | float]
    tensors: Mapping[str, NDArray[Any]]
    q_len: int
    kv_len: int
    q_offset: int

    @classmethod
    def of(
        cls, spec: AttentionSpec, shape: Shape, inputs: Inputs | None, batch: int, q_head: int
    ) -> _Place:
        given = dict(inputs or {})
        kv_lens = given.pop("kv_lens", None)
        kv_len = shape.kv_len if kv_lens is None else min(shape.kv_len, int(kv_lens[batch]))
        symbols: dict[sp.Symbol, int | float] = {
            sym.B: batch,
            sym.H: q_head,
            sym.HK: q_head // max(1, shape.q_heads // max(1, shape.kv_heads)),
            sym.Q_LEN: shape.q_len,
            sym.KV_LEN: kv_len,
            NUM_BATCH: shape.batch,
            NUM_Q_HEADS: shape.q_heads,
            NUM_KV_HEADS: shape.kv_heads,
        }
        symbols |= {
            sym.scalar(spec.input(n)): v for n, v in given.items() if not spec.input(n).shape
        }
        return cls(
            spec=spec,
            symbols=symbols,
            tensors={n: np.asarray(v) for n, v in given.items() if spec.input(n).shape},
            q_len=shape.q_len,
            kv_len=kv_len,
            q_offset=kv_len - shape.q_len if spec.align == "bottom_right" else 0,
        )

    def knows(self, e: sp.Basic) -> bool:
        """Whether everything that `e` reads was given."""
        reads = {str(read.base) for read in e.atoms(sp.Indexed)}
        scalars = {sym.scalar(i) for i in self.spec.inputs if not i.shape}
        return reads <= self.tensors.keys() and e.free_symbols & scalars <= self.symbols.keys()

    def evaluated(self, span: Span, first: Array, last: Array) -> SpanKeys:
        """The span's hull for tiles of rows `first` to `last`."""
        evaluate = self._evaluator(first, last)

        def bounds(keys: Keys) -> tuple[Array, Array]:
            return self._bounds(evaluate, keys, first)

        start, stop = bounds(span.hull)
        full_start, full_stop = bounds(span.full)
        exact = not span.never_full and self._same(start, stop, full_start, full_stop)
        exact &= span.scan is None and self.knows(span.possible) and self.knows(span.always)
        if self.knows(span.possible):
            possible = evaluate(span.possible)
            stop = np.where(possible, stop, 0)
            exact = exact and bool(np.equal(possible, evaluate(span.always)).all())
        period = None
        if span.period is not None and self.knows(span.period.start):
            period = (
                np.zeros_like(first) + evaluate(span.period.start),
                np.zeros_like(first) + evaluate(span.period.width),
                int(span.period.period),
            )
        if span.scan is not None and self.knows(span.scan.key_read):
            start, stop = self._scanned(span.scan, first, last, start, stop)
        return SpanKeys(start, stop, period, exact)

    def full_ranges(self, span: Span, first: Array, last: Array) -> Iterator[tuple[Array, Array]]:
        """Keys [begin, end) that all rows of a tile see, by the span's bounds, range by range."""
        if span.never_full:
            return
        evaluate = self._evaluator(first, last)
        start, stop = self._bounds(evaluate, span.full, first)
        stop = np.where(self.knows(span.always) and evaluate(span.always), stop, 0)
        if span.scan is not None:
            hull = self.evaluated(span, first, last)
            start, stop = np.maximum(start, hull.start), np.minimum(stop, hull.stop)
            stop = np.where(self._one_id(span.scan, first, last, hull), stop, 0)
        if span.period is None:
            yield start, stop
            return
        uniform = evaluate(span.period.uniform)
        for begin, end, walked in self.evaluated(span, first, last).chunks():
            yield np.maximum(begin, start), np.where(uniform & walked, np.minimum(end, stop), 0)

    def full_tiles(self, span: Span, first: Any, last: Any, block_n: int) -> Any:
        """How many key tiles all rows of each query tile see, by the span's bounds."""
        if span.period is None:
            found = self.full_ranges(span, first, last)
            counts = (np.maximum(end // block_n - -(-begin // block_n), 0) for begin, end in found)
            return sum(counts, np.zeros_like(first))
        if span.never_full:
            return np.zeros_like(first)
        evaluate = self._evaluator(first, last)
        start, stop = self._bounds(evaluate, span.full, first)
        sure = self.knows(span.always) and evaluate(span.always & span.period.uniform)
        hull = self.evaluated(span, first, last)
        begin, end = np.maximum(start, hull.start), np.minimum(stop, hull.stop)
        return np.where(sure, ChunkTiles(hull, block_n).full(begin, end), 0)

    @property
    def reads_rows(self) -> bool:
        """Whether bounds follow an input that is given, row by row."""
        spans = visibility(self.spec).spans
        return any(span.scan is not None and self.knows(span.scan.key_read) for span in spans)

    def seen(self, rows: Array, keys: Array) -> NDArray[np.bool_]:
        """[rows, keys]: the predicate, pair by pair."""
        block, key = rows[:, None], keys[None, :]
        evaluate = self.evaluator({sym.ROW: block, sym.Q: block + self.q_offset, sym.K: key})
        predicate = evaluate(visibility(self.spec).predicate)
        return np.broadcast_to(predicate, (len(rows), len(keys)))

    def _evaluator(self, first: Array, last: Array) -> Evaluator:
        """Evaluates bounds for tiles of rows `first` to `last`."""
        rows: dict[sp.Symbol, Any] = {
            ROW_FIRST: first,
            ROW_LAST: last,
            Q_FIRST: first + self.q_offset,
            Q_LAST: last + self.q_offset,
        }
        return self.evaluator(rows)

    def evaluator(self, values: Mapping[sp.Symbol, Any]) -> Evaluator:
        """Evaluates what also reads these symbols."""
        return Evaluator({**self.symbols, **values}, self.tensors, self.spec)

    @property
    def periodic(self) -> PeriodicKeys | None:
        """The predicate in periodic parts and limits; None where it has others."""
        predicate = visibility(self.spec).predicate
        read = {symbol: self.symbols[symbol] for symbol in predicate.free_symbols & {*self.symbols}}
        if predicate.atoms(sp.Indexed) or any(int(value) != value for value in read.values()):
            return None
        known = {symbol: sp.Integer(int(value)) for symbol, value in read.items()}
        return periodic_keys(predicate.subs({**known, sym.ROW: sym.Q - self.q_offset}))

    def _bounds(self, evaluate: Evaluator, keys: Keys, like: Array) -> tuple[Array, Array]:
        """Both ends of a range of keys, cut to those that exist."""
        start = self._bound(evaluate, keys.start, 0, like)
        stop = self._bound(evaluate, keys.stop, self.kv_len, like)
        return np.maximum(start, 0), np.maximum(np.minimum(stop, self.kv_len), 0)

    def _bound(self, evaluate: Evaluator, e: sp.Expr, otherwise: int, like: Array) -> Array:
        known = not e.is_infinite and self.knows(e)
        value = evaluate(e) if known else self.kv_len if e == sp.oo else otherwise
        return np.zeros_like(like) + value

    @staticmethod
    def _same(start: Array, stop: Array, full_start: Array, full_stop: Array) -> bool:
        nothing = stop <= start
        return bool((nothing | ((start == full_start) & (stop == full_stop))).all())

    def _scanned(
        self, scan: Scan, first: Array, last: Array, start: Array, stop: Array
    ) -> tuple[Array, Array]:
        """First and last key whose id lies between the least and the greatest id of the rows."""
        keys = np.arange(self.kv_len, dtype=np.int64)
        ids = self._ids(scan)
        lo, hi = start.copy(), stop.copy()
        for tile, (a, b) in enumerate(zip(first, last, strict=True)):
            rows = np.arange(a, b + 1) + self.q_offset
            known = ids[rows[(rows >= 0) & (rows < self.kv_len)]]
            inside = keys[start[tile] : stop[tile]]
            low, high = known.min(initial=2**62), known.max(initial=-(2**62))
            hits = inside[(ids[inside] >= low) & (ids[inside] <= high)]
            lo[tile], hi[tile] = (hits[0], hits[-1] + 1) if len(hits) else (start[tile], 0)
        return lo, hi

    def _ids(self, scan: Scan) -> Array:
        keys = np.arange(self.kv_len, dtype=np.int64)
        ids = Evaluator({**self.symbols, sym.K: keys}, self.tensors, self.spec)(scan.key_read)
        return np.asarray(ids, dtype=np.int64)

    def _one_id(
        self, scan: Scan, first: Array, last: Array, hull: SpanKeys
    ) -> NDArray[np.bool_] | Literal[False]:
        """Whether all rows of a tile, and all keys between first and last hit, carry one id."""
        if not self.knows(scan.key_read):
            return False
        ids, one = self._ids(scan), np.zeros(len(first), dtype=bool)
        for tile, (a, b) in enumerate(zip(first, last, strict=True)):
            rows = np.arange(a, b + 1) + self.q_offset
            known = ids[rows[(rows >= 0) & (rows < self.kv_len)]]
            between = ids[hull.start[tile] : hull.stop[tile]]
            one[tile] = len(known) and len(np.unique(np.concatenate([known, between]))) == 1
        return one


def _pairs_one_by_one(place: _Place, rows: Array) -> int:
    """Visible pairs by evaluating the predicate, BLOCK_PAIRS at a time."""
    keys_step = min(BLOCK_PAIRS, max(1, place.kv_len))
    step = BLOCK_PAIRS // keys_step
    return sum(
        int(place.seen(rows[row : row + step], np.arange(key, end, dtype=np.int64)).sum())
        for row in range(0, len(rows), step)
        for key in range(0, place.kv_len, keys_step)
        for end in [min(key + keys_step, place.kv_len)]
    )
