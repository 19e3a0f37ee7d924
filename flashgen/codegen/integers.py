"""How large the integers of an expression can become: what 32 bits hold, and what needs 64.

Positions and lengths are at most 2**29 (`MAX_POSITION`, to which every call is held), run-time
scalars and elements of inputs anything that 32 bits hold. From that follow bounds of every part of
an expression. A sum or product that could leave 32 bits on the way is computed in 64, all others in
32. Whole numbers of an expression mean 64 bits, as in the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import sympy as sp

from flashgen.passes.visibility import Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST
from flashgen.spec import symbolic as sym
from flashgen.spec.parts import MAX_POSITION

MAX_INT32 = 2**31 - 1

Interval = tuple[float, float]  # of whole numbers, kept as Python's; infinite: not known

UNKNOWN: Interval = (-math.inf, math.inf)
INT32: Interval = (-(2**31), MAX_INT32)
_INDEX: Interval = (0, MAX_POSITION)
_POSITION: Interval = (-MAX_POSITION, MAX_POSITION)
RANGES: Mapping[sp.Basic, Interval] = {
    **dict.fromkeys((sym.K, sym.ROW, sym.Q_LEN, sym.KV_LEN, ROW_FIRST, ROW_LAST), _INDEX),
    **dict.fromkeys((sym.Q, Q_FIRST, Q_LAST), _POSITION),
    **dict.fromkeys((sym.B, sym.H, sym.HK), (0, MAX_INT32)),
}
# Variables of a kernel that have 64 bits anyway.
WIDE_SYMBOLS = frozenset((sym.B, sym.H, sym.HK))


def interval(e: sp.Basic, known: Mapping[sp.Basic, Interval] = RANGES) -> Interval:
    """(lowest, highest) value of a whole expression; `known` are those of named parts.

    >>> interval(sym.K // 3 - sym.ROW)
    (-536870912, 178956971)
    """
    if e in known:
        return known[e]
    if isinstance(e, sp.Integer):
        return int(e), int(e)
    if isinstance(e, (sp.floor, sp.ceiling)):
        return _rounded(e.args[0], known)
    if not getattr(e, "is_integer", False):
        return UNKNOWN
    if isinstance(e, (sp.Symbol, sp.Indexed)):
        return INT32
    values = [value for value, _ in e.args] if isinstance(e, sp.Piecewise) else e.args
    rule = _RULES.get(e.func)
    return rule(*(interval(value, known) for value in values)) if rule else UNKNOWN


def size(e: sp.Basic, known: Mapping[sp.Basic, Interval] = RANGES) -> float:
    """The largest magnitude of a whole expression."""
    return _size(interval(e, known))


def steps(e: sp.Basic, known: Mapping[sp.Basic, Interval] = RANGES) -> float:
    """The largest magnitude on the way to a sum, product, power or magnitude, in any order."""
    sizes = [size(arg, known) for arg in e.args]
    if isinstance(e, sp.Add):
        return sum(sizes)
    if isinstance(e, sp.Mul):
        return math.prod(sizes)
    if isinstance(e, sp.Pow) and e.exp.is_Integer and e.exp > 0:
        return float(sizes[0] ** int(e.exp))
    return sizes[0] if isinstance(e, sp.Abs) else 0


def is_rounded_real(e: sp.Basic) -> bool:
    """Whether a whole expression is computed in real numbers: it has the floor of one in it."""
    if isinstance(e, (sp.Indexed, sp.Symbol)):
        return False
    if isinstance(e, (sp.floor, sp.ceiling)) and not is_ratio(e.args[0]):
        return True
    if isinstance(e, sym.FloorDiv) and not all(arg.is_integer for arg in e.args):
        return True
    return any(is_rounded_real(arg) for arg in e.args)


def is_ratio(e: sp.Expr) -> bool:
    """Whether e is a whole expression divided by another."""
    above, below = sp.fraction(sp.together(e))
    return bool(above.is_integer and below.is_integer)


def gathered(terms: Sequence[sp.Expr]) -> list[sp.Expr]:
    """Terms of a sum; of a real one those that are whole, or fractions of whole numbers, together.

    SymPy multiplies out and sorts, and the roundings of large terms then remain where they cancel.

    before: k + s - q       after: s + (k - q)
    before: k/100 - q/100   after: (k - q)/100
    """
    whole = [term for term in terms if term.is_integer and not is_rounded_real(term)]
    if len(whole) == len(terms):
        return list(terms)
    if len(whole) > 1:
        terms = [*(t for t in terms if t not in whole), sp.Add(*whole, evaluate=False)]
    return _with_factor_in_front(terms)


def _with_factor_in_front(terms: Sequence[sp.Expr]) -> list[sp.Expr]:
    split = [(term, *term.as_coeff_Mul()) for term in terms]
    found = [
        (term, factor, whole)
        for term, factor, whole in split
        if not factor.is_Integer and whole.is_integer and not is_rounded_real(whole)
    ]
    moving = [factor for _, factor, whole in found if not whole.is_number]
    if len(found) < 2 or not moving:
        return list(terms)
    least = min(moving, key=abs)
    unit = next((least / n for n in range(1, 9) if _are_multiples(found, least / n)), None)
    if unit is None:
        return list(terms)
    inside = sp.Add(*(round(float(factor / unit)) * whole for _, factor, whole in found))
    return [*(t for t in terms if t not in {f[0] for f in found}), _times(unit, inside)]


def _are_multiples(found: Sequence[tuple[sp.Expr, sp.Expr, sp.Expr]], unit: sp.Expr) -> bool:
    ratios = [float(factor / unit) for _, factor, _ in found]
    return all(abs(r) < MAX_INT32 * 2 and math.isclose(r, round(r), rel_tol=1e-13) for r in ratios)


def _times(factor: sp.Expr, total: sp.Expr) -> sp.Expr:
    """A product that SymPy does not multiply out."""
    return sp.Mul(factor, total, evaluate=not total.is_Add)


def _size(bounds: Interval) -> float:
    return max(abs(bounds[0]), abs(bounds[1]))


def _added(*parts: Interval) -> Interval:
    return sum(low for low, _ in parts), sum(high for _, high in parts)


def _multiplied(*parts: Interval) -> Interval:
    if any(math.isinf(_size(part)) for part in parts):
        return UNKNOWN
    low, high = parts[0]
    for part in parts[1:]:
        corners = [a * b for a, b in product((low, high), part)]
        low, high = min(corners), max(corners)
    return low, high


def _raised(base: Interval, exponent: Interval) -> Interval:
    if math.isinf(_size(base)) or exponent[0] < 0:
        return UNKNOWN
    largest = _size(base) ** exponent[1]
    return -largest, largest


_RULES: Mapping[type[sp.Basic], Callable[..., Interval]] = {
    sp.Add: _added,
    sp.Mul: _multiplied,
    sp.Pow: _raised,
    sp.Max: lambda *parts: (max(low for low, _ in parts), max(high for _, high in parts)),
    sp.Min: lambda *parts: (min(low for low, _ in parts), min(high for _, high in parts)),
    sp.Piecewise: lambda *parts: (min(low for low, _ in parts), max(high for _, high in parts)),
    sp.Abs: lambda part: (0, _size(part)),
    sp.Mod: lambda _, divisor: (-_size(divisor), _size(divisor)),
    sym.FloorMod: lambda _, divisor: (-_size(divisor), _size(divisor)),
    sym.FloorDiv: lambda part, _: (-_size(part), _size(part)),
}


def _rounded(ratio: sp.Expr, known: Mapping[sp.Basic, Interval]) -> Interval:
    """Of a floor or ceiling: the numerator's, divided by a constant."""
    above, below = sp.fraction(sp.together(ratio))
    if not (above.is_integer and below.is_integer):
        return UNKNOWN
    low, high = interval(above, known)
    if math.isinf(_size((low, high))):
        return UNKNOWN
    if not below.is_Integer:
        return -_size((low, high)), _size((low, high))
    ends = [low // int(below), high // int(below)]
    return min(ends), max(ends) + 1
