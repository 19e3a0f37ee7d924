"""The largest of several formulas, written without having SymPy compare them."""

from __future__ import annotations

from collections.abc import Iterable

import sympy as sp


def largest(needs: Iterable[sp.Expr]) -> sp.Expr:
    """Max of the needs, without those that another one exceeds term by term."""
    distinct = list(dict.fromkeys(sp.expand(need) for need in needs))
    kept = [
        need
        for need in distinct
        if not any(other != need and _exceeds(other, need) for other in distinct)
    ]
    return maximum(*kept) if kept else sp.Integer(0)


def maximum(*needs: sp.Expr) -> sp.Expr:
    """Max as written: SymPy's comparison of every pair would take most of the time spent here."""
    return needs[0] if len(needs) == 1 else sp.Max(*needs, evaluate=False)


def minimum(*needs: sp.Expr) -> sp.Expr:
    """Min as written."""
    return needs[0] if len(needs) == 1 else sp.Min(*needs, evaluate=False)


def _exceeds(one: sp.Expr, other: sp.Expr) -> bool:
    """Whether one - other has no negative term; symbols are positive."""
    return all(term.is_nonnegative for term in sp.Add.make_args(sp.expand(one - other)))
