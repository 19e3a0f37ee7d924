"""How much a mask leaves to do: visible (query, key) pairs, and key tiles that a kernel walks.

Both follow the loop bounds of `visibility`, evaluated for all rows (or query tiles) at once:
nothing here has an entry per pair. What depends on data is counted from the inputs that are given,
and as all visible where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from flashgen.passes.inputs import NUM_BATCH, NUM_KV_HEADS, NUM_Q_HEADS
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
from flashgen.spec.parts import Shape

Array = NDArray[np.int64]
Inputs = Mapping[str, Any]  # numbers for scalars, what numpy.asarray takes for tensors; kv_lens too
BLOCK_PAIRS = 2**22  # pairs evaluated at a time where data decides about each


def visible_pairs(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Inputs | None = None,
    *,
    batch: int = 0,
    q_head: int = 0,
) -> int:
    """Pairs (query row, key) that the mask shows in one batch and query head.

    Exact for conjunctions and disjunctions (of two ranges) of affine terms. Terms that depend on an
    input not given count as visible, as do terms that a kernel decides element by element, unless
    `inputs` has all that the mask reads: then each pair is looked at, some millions at a time.

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
    place = _Place.of(spec, shape, inputs, batch, q_head)
    rows = np.arange(shape.q_len, dtype=np.int64)
    spans = [place.evaluated(span, rows, rows) for span in visibility(spec).spans]
    if not all(span.exact for span in spans) and place.knows(visibility(spec).predicate):
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
    per_place = spec.kv_lens != "none" or visibility(spec).predicate.has(sym.B, sym.H, sym.HK)
    if not per_place:
        return shape.batch * shape.q_heads * visible_pairs(spec, shape, inputs)
    return sum(
        visible_pairs(spec, shape, inputs, batch=batch, q_head=q_head)
        for batch in range(shape.batch)
        for q_head in range(shape.q_heads)
    )


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
    place = _Place.of(spec, shape, inputs, batch, q_head)
    first = np.arange(0, shape.q_len, block_m, dtype=np.int64)
    last = np.minimum(first + block_m, shape.q_len) - 1
    spans = [place.evaluated(span, first, last) for span in visibility(spec).spans]
    if not spans or not len(first):
        return 0
    if spans[0].period is not None:
        return int(spans[0].tiles_of_chunks(block_n).sum())
    ranges = [(span.start // block_n, -(-span.stop // block_n)) for span in spans]
    if len(ranges) == 1:
        lo, hi = ranges[0]
        return int(np.maximum(hi - lo, 0).sum())
    (lo_0, hi_0), (lo_1, hi_1) = ranges
    in_order = lo_0 <= lo_1
    lo, hi = np.where(in_order, lo_0, lo_1), np.where(in_order, hi_0, hi_1)
    next_lo, next_hi = np.where(in_order, lo_1, lo_0), np.where(in_order, hi_1, hi_0)
    both = np.maximum(hi - lo, 0) + np.maximum(next_hi - np.maximum(next_lo, hi), 0)
    return int(both.sum())


# ---- spans as numbers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keys:
    """A span for each row or query tile: keys [start, stop), cut to those that exist.

    period: (start, width, period) of its chunks; exact: every key inside is visible to every row.
    """

    start: Array
    stop: Array
    period: tuple[Array, Array, int] | None
    exact: bool

    def num_keys(self) -> Array:
        if self.period is None:
            return np.maximum(self.stop - self.start, 0)
        return np.where(self.stop > self.start, self._below(self.stop) - self._below(self.start), 0)

    def _below(self, key: Array) -> Array:
        """Keys in chunks below `key`, up to a constant."""
        assert self.period is not None
        start, width, period = self.period
        return (key - start) // period * width + np.minimum((key - start) % period, width)

    def shared_keys(self, other: _Keys) -> Array:
        lo, hi = np.maximum(self.start, other.start), np.minimum(self.stop, other.stop)
        return np.maximum(hi - lo, 0)

    def tiles_of_chunks(self, block_n: int) -> Array:
        """Tiles that meet a chunk, each once, as the kernel walks them."""
        assert self.period is not None
        start, width, period = self.period
        first, stop = (self.start - start) // period, (self.stop - 1 - start) // period + 1
        next_tile, visited = np.zeros_like(self.start), np.zeros_like(self.start)
        for step in range(int((stop - first).max(initial=0))):
            chunk = first + step
            begin = np.maximum(start + chunk * period, self.start)
            end = np.minimum(start + chunk * period + width, self.stop)
            lo = np.maximum(begin // block_n, next_tile)
            hi = -(-np.maximum(end, 0) // block_n)
            visited += np.where(chunk < stop, np.maximum(hi - lo, 0), 0)
            next_tile = np.maximum(next_tile, hi)
        return visited


@dataclass(frozen=True)
class _Place:
    """One batch and query head of a call: the value of everything but rows and keys."""

    spec: AttentionSpec
    symbols: Mapping[sp.Symbol, int | float]
    tensors: Mapping[str, NDArray[Any]]
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
            kv_len=kv_len,
            q_offset=kv_len - shape.q_len if spec.align == "bottom_right" else 0,
        )

    def knows(self, e: sp.Basic) -> bool:
        """Whether everything that `e` reads was given."""
        reads = {str(read.base) for read in e.atoms(sp.Indexed)}
        scalars = {sym.scalar(i) for i in self.spec.inputs if not i.shape}
        return reads <= self.tensors.keys() and e.free_symbols & scalars <= self.symbols.keys()

    def evaluated(self, span: Span, first: Array, last: Array) -> _Keys:
        """The span's hull for tiles of rows `first` to `last`."""
        values = dict(self.symbols)
        rows: dict[sp.Symbol, Any] = {
            ROW_FIRST: first,
            ROW_LAST: last,
            Q_FIRST: first + self.q_offset,
            Q_LAST: last + self.q_offset,
        }
        evaluate = _Evaluator({**values, **rows}, self.tensors, self.spec)

        def bounds(keys: Keys) -> tuple[Array, Array]:
            start = self._bound(evaluate, keys.start, 0, first)
            stop = self._bound(evaluate, keys.stop, self.kv_len, first)
            return np.maximum(start, 0), np.maximum(np.minimum(stop, self.kv_len), 0)

        start, stop = bounds(span.hull)
        full_start, full_stop = bounds(span.full)
        exact = not span.never_full and self._same(start, stop, full_start, full_stop)
        exact &= span.scan is None and span.possible == span.always
        if self.knows(span.possible):
            stop = np.where(evaluate(span.possible), stop, 0)
        else:
            exact = False
        period = None
        if span.period is not None and self.knows(span.period.start):
            period = (
                np.zeros_like(first) + evaluate(span.period.start),
                np.zeros_like(first) + evaluate(span.period.width),
                int(span.period.period),
            )
        if span.scan is not None and self.knows(span.scan.key_read):
            start, stop = self._scanned(span.scan, first, last, start, stop)
        return _Keys(start, stop, period, exact)

    def _bound(self, evaluate: _Evaluator, e: sp.Expr, otherwise: int, like: Array) -> Array:
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
        ids = _Evaluator({**self.symbols, sym.K: keys}, self.tensors, self.spec)(scan.key_read)
        lo, hi = start.copy(), stop.copy()
        for tile, (a, b) in enumerate(zip(first, last, strict=True)):
            rows = np.arange(a, b + 1) + self.q_offset
            known = ids[rows[(rows >= 0) & (rows < self.kv_len)]]
            inside = keys[start[tile] : stop[tile]]
            low, high = known.min(initial=2**62), known.max(initial=-(2**62))
            hits = inside[(ids[inside] >= low) & (ids[inside] <= high)]
            lo[tile], hi[tile] = (hits[0], hits[-1] + 1) if len(hits) else (start[tile], 0)
        return lo, hi


def _pairs_one_by_one(place: _Place, rows: Array) -> int:
    """Visible pairs by evaluating the predicate, BLOCK_PAIRS at a time."""
    predicate = visibility(place.spec).predicate
    keys = np.arange(place.kv_len, dtype=np.int64)[None, :]
    step = max(1, BLOCK_PAIRS // max(1, place.kv_len))
    total = 0
    for start in range(0, len(rows), step):
        block = rows[start : start + step, None]
        values: dict[sp.Symbol, Any] = {sym.ROW: block, sym.Q: block + place.q_offset, sym.K: keys}
        evaluate = _Evaluator({**place.symbols, **values}, place.tensors, place.spec)
        seen = np.broadcast_to(evaluate(predicate), (len(block), place.kv_len))
        total += int(seen.sum())
    return total


# ---- evaluation ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates SymPy expressions on whole arrays; integers stay integers."""

    values: Mapping[sp.Symbol, Any]
    tensors: Mapping[str, NDArray[Any]]
    spec: AttentionSpec

    def __call__(self, e: sp.Basic) -> Any:  # noqa: PLR0911 -- one return for each kind
        if e in self.values:
            return self.values[e]
        if isinstance(e, sp.Indexed):
            return self._read(e)
        if e.is_Number:
            return int(e) if e.is_Integer else float(e)
        if e in (sp.true, sp.false):
            return np.bool_(e == sp.true)
        if isinstance(e, sp.floor):
            above, below = (self(part) for part in sp.fraction(sp.together(e.args[0])))
            return np.floor_divide(above, below)
        if isinstance(e, sp.ceiling):
            return -self(sp.floor(-e.args[0]))
        if isinstance(e, sp.Piecewise):
            branches = [(self(value), self(condition)) for value, condition in e.args]
            rest: Any = 0
            for value, condition in reversed(branches):
                rest = np.where(condition, value, rest)
            return rest
        return (
            reduce(_OPERATIONS[e.func], map(self, e.args))
            if e.func in _OPERATIONS
            else self._one(e)
        )

    def _one(self, e: sp.Basic) -> Any:
        return _FUNCTIONS[e.func](*map(self, e.args))

    def _read(self, read: sp.Indexed) -> Any:
        """The elements read; 0 for those outside, which the predicate's own conditions hide."""
        tensor = self.tensors[str(read.base)]
        inside: Any = np.bool_(True)
        indices = []
        declared = self.spec.input(str(read.base)).shape
        for index, extent, named in zip(
            map(self, read.indices), tensor.shape, declared, strict=True
        ):
            place = np.asarray(0 if named == 1 else index)
            within = (place >= 0) & (place < extent)
            inside = inside & within
            indices.append(np.where(within, place, 0))
        if tensor.size == 0:
            return np.zeros(np.broadcast(*indices).shape, dtype=np.int64)
        value = tensor[tuple(indices)]
        return np.where(inside, value.astype(np.int64) if value.dtype == bool else value, 0)


_OPERATIONS: Mapping[type[sp.Basic], Callable[[Any, Any], Any]] = {
    sp.Add: np.add,
    sp.Mul: np.multiply,
    sp.Max: np.maximum,
    sp.Min: np.minimum,
    sp.And: np.logical_and,
    sp.Or: np.logical_or,
    sp.Mod: np.mod,
    sp.Eq: np.equal,
    sp.Ne: np.not_equal,
    sp.Le: np.less_equal,
    sp.Lt: np.less,
    sp.Ge: np.greater_equal,
    sp.Gt: np.greater,
}
_FUNCTIONS: Mapping[type[sp.Basic], Callable[..., Any]] = {
    sp.Not: np.logical_not,
    sp.Abs: np.abs,
    sp.Pow: lambda base, exponent: np.asarray(base, dtype=np.float64) ** exponent,
    sp.exp: np.exp,
    sp.log: np.log,
    sp.tanh: np.tanh,
}
