"""Loop bounds the other way round: which query tiles see a key tile (flash1).

before: keys [max(a, ...), min(c, ...)) that the rows row_first to row_last see
after:  query tiles whose row_last reaches some row, and whose row_first lies before another
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy as sp

from flashgen.codegen.expr import TritonPrinter
from flashgen.passes.visibility import Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST, Span
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import MAX_POSITION

N_START, BLOCK_N = sp.symbols("n_start BLOCK_N", integer=True)
_NAMES: dict[sp.Basic, str] = {N_START: "n_start", BLOCK_N: "BLOCK_N"}
MAX_BLOCK = 2**16  # no tile has as many keys
_OF_TILE = (Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST)


@dataclass(frozen=True)
class QueryRange:
    """The query tiles that see the keys from `n_start` on, as kernel text.

    They are those whose last row is at or after `first_row` and whose first row is before
    `stop_row`; none where `condition` does not hold. An empty text is no limit.
    """

    first_row: str
    stop_row: str
    condition: str


def query_range(
    spans: Sequence[Span], spec: AttentionSpec, printer: TritonPrinter
) -> QueryRange | None:
    """The range, where one describes exactly the tiles that are visited; else None.

    That is so for one span whose ends each are a position of the tile and something that is the
    same for all tiles: causal masks and windows, not k <= 2*q and not documents.
    """
    if len(spans) != 1 or spans[0].scan or spans[0].period or spans[0].possible.has(*_OF_TILE):
        return None
    offset = sym.KV_LEN - sym.Q_LEN if spec.align == "bottom_right" else sp.Integer(0)
    first_rows: list[sp.Expr] = []
    stop_rows: list[sp.Expr] = []
    conditions: list[sp.Basic] = [] if spans[0].possible == sp.true else [spans[0].possible]
    for start in _ends(sp.Max, spans[0].hull.start):
        # start < n_start + BLOCK_N
        if not start.has(*_OF_TILE):
            conditions.append(sp.Lt(start, N_START + BLOCK_N, evaluate=False))
            continue
        beyond = _beyond(start, {Q_FIRST: offset, ROW_FIRST: sp.Integer(0)})
        if beyond is None:
            return None
        stop_rows.append(N_START + BLOCK_N - beyond)
    for stop in _ends(sp.Min, spans[0].hull.stop):
        # stop > n_start
        if not stop.has(*_OF_TILE):
            conditions.append(sp.Gt(stop, N_START, evaluate=False))
            continue
        beyond = _beyond(stop, {Q_LAST: offset, ROW_LAST: sp.Integer(0)})
        if beyond is None:
            return None
        first_rows.append(N_START - beyond + 1)
    text = TritonPrinter({**printer.names, **_NAMES}, printer.helpers, precise=printer.precise)
    text.constants |= {BLOCK_N}  # a constexpr, which has no dtype
    text.ranges |= {N_START: (0, MAX_POSITION), BLOCK_N: (0, MAX_BLOCK)}
    return QueryRange(
        first_row=text.doprint(sp.Max(*first_rows)) if first_rows else "",
        stop_row=text.doprint(sp.Min(*stop_rows)) if stop_rows else "",
        condition=text.doprint(sp.And(*conditions, evaluate=False)) if conditions else "",
    )


def _ends(of: type[sp.Max] | type[sp.Min], end: sp.Expr) -> tuple[sp.Expr, ...]:
    """The terms whose maximum or minimum `end` is; none where it is open."""
    return () if end.is_infinite else tuple(of.make_args(end))


def _beyond(end: sp.Expr, offsets: dict[sp.Symbol, sp.Expr]) -> sp.Expr | None:
    """What is added to a tile's row to give `end`; None where that depends on the tile."""
    for position, offset in offsets.items():
        rest = sp.expand(end - position)
        if not rest.has(*_OF_TILE):
            return rest + offset
    return None
