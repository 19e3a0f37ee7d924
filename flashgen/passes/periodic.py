"""How many keys each query sees of a mask that is periodic between limits: exact at any length.

A part of a mask such as (q - k) % 16 == 1 or min(q % 5, k % 3) == 0 says the same of q + P and of
k + P as of q and k. Parts such as k <= q and q // 64 == k // 64 bound the keys of a row, and parts
that do not read k hold for a whole row. Between two bounds only the periodic parts decide, and a
table with a row and a column for each place in a period counts their keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import sympy as sp
from numpy.typing import NDArray
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from flashgen.passes.evaluate import evaluate_on
from flashgen.passes.lines import elementwise
from flashgen.spec import symbolic as sym

Array = NDArray[np.int64]
MAX_PERIOD = 2**11
MAX_ENTRIES = 2**23  # of a table
MAX_LIMITS = 4  # of the keys of a row; they are sorted for each row
MAX_ROUNDS = 64  # in search of a period


class NotPeriodicError(Exception):
    """A part of the mask is neither periodic, nor a bound of keys, nor a matter of rows alone."""


class _TooShortError(Exception):
    """A period that must be longer, by `factor`."""

    def __init__(self, factor: int) -> None:
        self.factor = factor


@dataclass(frozen=True, eq=False)
class PeriodicKeys:
    """A mask in parts.

    limits: key numbers by row; bit i of a case says that a key is below limit i. conditions: of
    rows, the bits after these. seen[case, q % period, n]: how many of the first n <= period keys a
    row sees in a case.
    """

    period: int
    limits: tuple[sp.Expr, ...]
    conditions: tuple[Boolean, ...]
    seen: Array

    def num_keys(self, evaluate: Callable[[sp.Basic], Any], q: Any, kv_len: int) -> Any:
        """Keys below `kv_len` that each of the queries `q`, an array or lines, sees."""
        ends = [np.minimum(np.maximum(evaluate(e) + 0 * q, 0), kv_len) for e in self.limits]
        rows = sum(
            (np.where(evaluate(c), 1 << bit, 0) for bit, c in self._numbered_conditions()),
            np.zeros_like(q),
        )
        total = np.zeros_like(q)
        for lo, hi in pairwise([0, *_sorted(ends), kv_len]):
            below = (np.where(end >= hi, 1 << bit, 0) for bit, end in enumerate(ends))
            case = sum(below, rows)
            moduli = (self.period, self.period, self.period, 0)
            total = total + elementwise(self._between, (lo, hi, q, case), moduli)
        return total

    def _numbered_conditions(self) -> enumerate[Boolean]:
        return enumerate(self.conditions, len(self.limits))

    def _between(self, lo: Array, hi: Array, q: Array, case: Array) -> Array:
        return self._below(hi, q, case) - self._below(lo, q, case)

    def _below(self, stop: Array, q: Array, case: Array) -> Array:
        place = q % self.period
        whole = self.seen[case, place, self.period] * (stop // self.period)
        found: Array = whole + self.seen[case, place, stop % self.period]
        return found


def _sorted(values: list[Any]) -> list[Any]:
    """Arrays or lines in order, element by element."""
    found = list(values)
    for last in range(len(found) - 1, 0, -1):
        for i in range(last):
            lower, upper = np.minimum(found[i], found[i + 1]), np.maximum(found[i], found[i + 1])
            found[i], found[i + 1] = lower, upper
    return found


@lru_cache(maxsize=256)
def periodic_keys(predicate: Boolean) -> PeriodicKeys | None:
    """A predicate of `q` and `k` in parts; None where a part is of no such kind.

    >>> even = sp.Eq(sp.Mod(sym.Q - sym.K, 4), 0) & sp.Le(sym.K, sym.Q)
    >>> periodic_keys(even).limits
    (q + 1,)
    >>> periodic_keys(sp.Le(sym.K * sym.K, sym.Q)) is None
    True
    """
    parts = _Parts()
    try:
        rest = parts.of(predicate)
    except NotPeriodicError:
        return None
    bits = (*parts.limits.values(), *parts.conditions.values())
    if len(parts.limits) > MAX_LIMITS or 2 ** len(bits) * parts.period**2 > MAX_ENTRIES:
        return None
    return PeriodicKeys(
        period=parts.period,
        limits=tuple(parts.limits),
        conditions=tuple(parts.conditions),
        seen=_table(rest, bits, parts.period),
    )


def _table(rest: Boolean, bits: tuple[sp.Symbol, ...], period: int) -> Array:
    place = np.arange(period, dtype=np.int64)
    found = np.zeros((2 ** len(bits), period, period + 1), dtype=np.int64)
    for values in product((False, True), repeat=len(bits)):
        case = sum(value << bit for bit, value in enumerate(values))
        known = dict(zip(bits, map(np.bool_, values), strict=True))
        shown = evaluate_on(rest, {**known, sym.Q: place[:, None], sym.K: place[None, :]})
        found[case, :, 1:] = np.broadcast_to(shown, (period, period)).cumsum(axis=1)
    return found


@dataclass
class _Parts:
    """What has been found in a predicate so far: limits and conditions, each with the symbol that
    stands for it."""

    period: int = 1
    limits: dict[sp.Expr, sp.Symbol] = field(default_factory=dict)
    conditions: dict[Boolean, sp.Symbol] = field(default_factory=dict)

    def of(self, e: Boolean) -> Boolean:
        """The predicate with symbols in place of what is not periodic."""
        if isinstance(e, sp.And | sp.Or | sp.Not):
            return e.func(*map(self.of, e.args))
        period = _period(e)
        if period is not None:
            self.period = math.lcm(self.period, period)
            if self.period > MAX_PERIOD:
                raise NotPeriodicError
            return e
        if sym.K not in e.free_symbols:
            return self.conditions.setdefault(e, sp.Symbol(f"row_{len(self.conditions)}"))
        if not isinstance(e, Relational):
            raise NotPeriodicError
        return self._bound(e)

    def _bound(self, e: Relational) -> Boolean:
        """slope * x + rest <= 0 in limits of x, where x is k, or k // width."""
        difference = sp.expand(e.lhs - e.rhs)
        x, width = _key_term(difference)
        slope = difference.coeff(x)
        rest = sp.expand(difference - slope * x)
        if not slope.is_Integer or slope == 0 or sym.K in rest.free_symbols or rest.has(sp.Float):
            raise NotPeriodicError
        if slope < 0 and isinstance(e, sp.Le | sp.Lt | sp.Ge | sp.Gt):
            # x >= rest / -slope is what is not below it
            slope, rest, e = -slope, -rest, e.reversedsign
        if rest.is_integer is not True and not _rational(rest):
            raise NotPeriodicError
        least, beyond = sp.ceiling(-rest / slope), sp.floor(-rest / slope) + 1
        below, up_to = (lambda: self._below(width * least)), (lambda: self._below(width * beyond))
        made: Mapping[type[Relational], Callable[[], Boolean]] = {
            sp.Lt: below,
            sp.Le: up_to,
            sp.Ge: lambda: sp.Not(below()),
            sp.Gt: lambda: sp.Not(up_to()),
            sp.Eq: lambda: sp.And(up_to(), sp.Not(below())),
            sp.Ne: lambda: sp.Or(sp.Not(up_to()), below()),
        }
        return made[type(e)]()

    def _below(self, limit: sp.Expr) -> sp.Symbol:
        return self.limits.setdefault(limit, sp.Symbol(f"below_{len(self.limits)}"))


def _rational(e: sp.Expr) -> bool:
    return bool(e.is_rational)


def _key_term(difference: sp.Expr) -> tuple[sp.Expr, sp.Integer]:
    """(k, 1), or (k // width, width): what of the key a difference reads."""
    floors = [f for f in difference.atoms(sp.floor) if sym.K in f.free_symbols]
    if not floors:
        return sym.K, sp.Integer(1)
    width = sym.K / floors[0].args[0]
    if len(floors) > 1 or not width.is_Integer or width <= 0:
        raise NotPeriodicError
    return floors[0], width


def _period(e: sp.Basic) -> int | None:
    """A P with which `e` is the same for q + P, and for k + P; None: none is found."""
    period = 1
    for _ in range(MAX_ROUNDS):
        try:
            steps = [_step(e, moved, period) for moved in (sym.Q, sym.K)]
        except _TooShortError as short:
            period *= short.factor
            if period > MAX_PERIOD:
                return None
            continue
        except NotPeriodicError:
            return None
        return period if not any(steps) else None
    return None


def _step(e: sp.Basic, moved: sp.Symbol, by: int) -> sp.Rational:  # noqa: PLR0911 -- one a kind
    """What `e` changes by, always, where `moved` grows by `by`."""
    if moved not in e.free_symbols:
        return sp.Integer(0)
    if e == moved:
        return sp.Integer(by)
    if e.is_Add:
        return sum((_step(part, moved, by) for part in e.args), sp.Integer(0))
    if e.is_Mul and e.args[0].is_Rational:
        factor, rest = e.as_coeff_Mul()
        return factor * _step(rest, moved, by)
    if isinstance(e, sp.floor | sp.ceiling):
        step = _step(e.args[0], moved, by)
        return _whole(step)
    if isinstance(e, sp.Mod) and e.args[1].is_Integer:
        powers = _has_whole_coefficients(e.args[0], moved)  # then it grows by multiples of `by`
        step = sp.Integer(by) if powers else _whole(_step(e.args[0], moved, by))
        if step % e.args[1]:
            raise _TooShortError(int(abs(e.args[1]) // math.gcd(int(step), int(e.args[1]))))
        return sp.Integer(0)
    if any(_step(part, moved, by) for part in e.args):
        raise NotPeriodicError
    return sp.Integer(0)


def _has_whole_coefficients(e: sp.Expr, moved: sp.Symbol) -> bool:
    """Whether `e` is a sum of products of whole powers of `moved` and what else is whole."""
    if not e.is_polynomial(moved):
        return False
    return all(c.is_integer for c in sp.Poly(e, moved).all_coeffs())


def _whole(step: sp.Rational) -> sp.Integer:
    if not step.is_Integer:
        raise _TooShortError(int(step.q))
    return step
