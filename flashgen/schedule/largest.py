"""The largest of several formulas, written without having SymPy compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy as sp

Terms = Mapping[sp.Expr, sp.Rational]  # a sum: products without their numbers, and the numbers


def largest(needs: Iterable[sp.Expr]) -> sp.Expr:
    """Max of the needs, without those that another one exceeds term by term."""
    distinct = list(dict.fromkeys(sp.expand(need) for need in needs))
    terms = {need: need.as_coefficients_dict() for need in distinct}
    kept = [
        need
        for need in distinct
        if not any(other is not need and _exceeds(terms[other], terms[need]) for other in distinct)
    ]
    return maximum(*kept) if kept else sp.Integer(0)


def maximum(*needs: sp.Expr) -> sp.Expr:
    """Max as written: SymPy's comparison of every pair would take most of the time spent here."""
    return needs[0] if len(needs) == 1 else sp.Max(*needs, evaluate=False)


def minimum(*needs: sp.Expr) -> sp.Expr:
    """Min as written."""
    return needs[0] if len(needs) == 1 else sp.Min(*needs, evaluate=False)


def _exceeds(one: Terms, other: Terms) -> bool:
    """Whether one - other has no negative term; symbols are positive."""
    rest = {term: one.get(term, 0) - other.get(term, 0) for term in (*one, *other)}
    return all(n == 0 or (n > 0 and term.is_nonnegative) for term, n in rest.items())
