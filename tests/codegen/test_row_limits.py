"""A predicate parted into limits of a row and a rest says of every pair what it said before."""

from __future__ import annotations

import itertools

import pytest
import sympy as sp
from property.masks import MASKS

from flashgen.codegen.row_limits import row_limits
from flashgen.passes.visibility import visibility
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

K, Q = sym.K, sym.Q
PREDICATES = {
    name: visibility(AttentionSpec(head_dim=64, dtype="bf16", **fields)).predicate
    for name, fields in MASKS.items()
    if not fields.get("inputs")
}
FIXED = {sym.B: 0, sym.H: 0, sym.HK: 0, sym.Q_LEN: 48, sym.KV_LEN: 48}


@pytest.mark.parametrize("name", PREDICATES)
def test_nothing_is_lost(name: str) -> None:
    predicate = PREDICATES[name]
    found = row_limits(predicate)
    parts = [found.when, found.rest]
    parts += [] if found.first is None else [found.first <= K]
    parts += [] if found.last is None else [found.last >= K]
    whole = sp.And(*parts)
    says, said = (
        sp.lambdify([Q, sym.ROW, K], each.subs(FIXED), modules="math")
        for each in (whole, predicate)
    )
    for q, k in itertools.product(range(0, 48, 3), range(48)):
        assert bool(says(q, q, k)) == bool(said(q, q, k)), (q, k)


@pytest.mark.parametrize(
    ("predicate", "first", "last", "rest"),
    [
        (sp.And(K <= Q, Q - 511 <= K), Q - 511, Q, sp.true),
        (sp.Or(K <= Q, K < 40), None, sp.Max(39, Q), sp.true),
        (sp.Or(K > Q, K >= 7), sp.Min(7, Q + 1), None, sp.true),
        (sp.Or(K > Q, K < 7), None, None, sp.Or(K > Q, K < 7)),
        (2 * K <= Q, None, None, 2 * K <= Q),
        (Q - 2**40 <= K, Q - 2**40, None, sp.true),
    ],
)
def test_what_becomes_a_limit(
    predicate: sp.Basic, first: sp.Expr | None, last: sp.Expr | None, rest: sp.Basic
) -> None:
    """Steps of one key, on one side, far from the ends of 32 bits; else pairs are compared."""
    found = row_limits(predicate)
    assert (found.first, found.last) == (first, last)
    assert sp.simplify(sp.Equivalent(found.rest, rest)) == sp.true


def test_what_a_row_alone_says() -> None:
    found = row_limits(sp.And(K <= Q, Q >= 0))
    assert (found.when, found.last, found.rest) == (Q >= 0, Q, sp.true)
