"""Reads of declared inputs that might leave the tensor, and the conditions that keep them inside.

An index outside an input matches nothing: the comparison that contains it does not hold, and it is
never read. In a score such a read is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy as sp
from sympy.logic.boolalg import Boolean

from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

NUM_BATCH, NUM_Q_HEADS, NUM_KV_HEADS = sp.symbols(
    "num_batch num_q_heads num_kv_heads", integer=True, nonnegative=True
)
# Along each axis: how long it is, and the position that runs along it and so cannot leave it.
EXTENTS: Mapping[str, sp.Symbol] = {
    "batch": NUM_BATCH,
    "q_heads": NUM_Q_HEADS,
    "kv_heads": NUM_KV_HEADS,
    "q_len": sym.Q_LEN,
    "kv_len": sym.KV_LEN,
}
RUNS_ALONG: Mapping[str, sp.Symbol] = {
    "batch": sym.B,
    "q_heads": sym.H,
    "kv_heads": sym.HK,
    "q_len": sym.ROW,
    "kv_len": sym.K,
}
_NEVER_NEGATIVE = (sym.ROW, sym.K, sym.B, sym.H, sym.HK)


def range_conditions(read: sp.Indexed, spec: AttentionSpec) -> tuple[Boolean, ...]:
    """What must hold for `read` to lie inside its tensor, beyond what always holds.

    doc[b, q] of shape [batch, kv_len], bottom_right: (q >= 0,)
    """
    shape = spec.input(str(read.base)).shape
    found = [
        condition
        for index, extent in zip(read.indices, shape, strict=True)
        if extent != 1
        for condition in _axis_conditions(index, extent, spec)
    ]
    return tuple(dict.fromkeys(found))


def _axis_conditions(index: sp.Expr, extent: int | str, spec: AttentionSpec) -> list[Boolean]:
    if isinstance(extent, str) and index == RUNS_ALONG[extent]:
        return []
    starts_at_zero = index in _NEVER_NEGATIVE or (index == sym.Q and spec.align == "top_left")
    ends_with_keys = index == sym.Q and extent == "kv_len" and spec.align == "bottom_right"
    length = EXTENTS[extent] if isinstance(extent, str) else sp.Integer(extent)
    lowest, highest = _bounds(index)
    starts_at_zero = starts_at_zero or lowest >= 0
    ends_inside = ends_with_keys or (length.is_Integer and highest < length)
    conditions = [] if starts_at_zero else [sp.Ge(index, 0)]
    conditions += [] if ends_inside else [sp.Lt(index, length)]
    return [c for c in conditions if c != sp.true]


def _bounds(e: sp.Expr) -> tuple[sp.Expr, sp.Expr]:
    """(lowest, highest) value that an index can have whatever the positions; ±oo: unknown.

    max(min(k - q, 128), -128) + 128: (0, 256)
    """
    if e.is_number:
        return e, e
    if e in _NEVER_NEGATIVE:
        return sp.Integer(0), sp.oo
    if isinstance(e, (sp.Add, sp.Max, sp.Min, sp.floor)):
        parts = [_bounds(arg) for arg in e.args]
        return e.func(*[low for low, _ in parts]), e.func(*[high for _, high in parts])
    if isinstance(e, sp.Mod) and e.args[1].is_Integer and e.args[1] > 0:
        return sp.Integer(0), e.args[1] - 1
    factor, body = e.as_coeff_Mul()
    if isinstance(e, sp.Mul) and factor != 1:
        low, high = _bounds(body)
        return (factor * low, factor * high) if factor > 0 else (factor * high, factor * low)
    return -sp.oo, sp.oo


def collapse_broadcasts(e: sp.Basic, spec: AttentionSpec) -> sp.Basic:
    """Index 0 along every axis of extent 1: what is broadcast does not move with rows or keys.

    before: rel[b, h, row, k] of shape [batch, 1, 1, kv_len]      after: rel[b, 0, 0, k]
    """
    if isinstance(e, sp.Indexed):
        shape = spec.input(str(e.base)).shape
        return e.base[
            tuple(
                sp.Integer(0) if extent == 1 else collapse_broadcasts(index, spec)
                for index, extent in zip(e.indices, shape, strict=True)
            )
        ]
    if not e.has(sp.Indexed):
        return e
    return e.func(*[collapse_broadcasts(arg, spec) for arg in e.args])


def guard_reads(e: sp.Basic, spec: AttentionSpec) -> sp.Basic:
    """Every comparison with a read that might leave its tensor, And'ed with what keeps it inside.

    before: doc[b, q] == doc[b, k]      after: (q >= 0) & (doc[b, q] == doc[b, k])
    """
    if isinstance(e, sp.core.relational.Relational):
        reads = sorted(e.atoms(sp.Indexed), key=sp.default_sort_key)
        conditions = [c for read in reads for c in range_conditions(read, spec)]
        return sp.And(*conditions, e) if conditions else e
    if not e.args or isinstance(e, sp.Indexed) or not e.has(sp.core.relational.Relational):
        return e
    return e.func(*[guard_reads(arg, spec) for arg in e.args])
