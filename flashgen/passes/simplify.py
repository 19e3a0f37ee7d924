"""Rewrites of the score that hold for the pairs that the mask shows, and only for those.

A masked pair's score is replaced by -inf and a full tile has none, so that what the mask says may
be used to simplify the score.
"""

from __future__ import annotations

import sympy as sp
from sympy.logic.boolalg import Boolean

from flashgen.spec import symbolic as sym


def under_mask(score: sp.Expr, predicate: Boolean) -> sp.Expr:
    """Distances without `abs` where the mask hides one side.

    before: s - slopes[h]*Abs(k - q), mask k <= q      after: s - slopes[h]*(q - k)
    """
    shown = sp.And.make_args(predicate)
    if any(sp.Le(sym.K, sym.Q + n) in shown for n in (0, -1)):
        return _replace_distance(score, sym.Q - sym.K)
    if sp.Ge(sym.K, sym.Q) in shown:
        return _replace_distance(score, sym.K - sym.Q)
    return score


def _replace_distance(score: sp.Expr, distance: sp.Expr) -> sp.Expr:
    return score.xreplace({sp.Abs(sym.Q - sym.K): distance, sp.Abs(sym.K - sym.Q): distance})
