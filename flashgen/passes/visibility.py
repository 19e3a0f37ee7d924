"""Mask predicate -> loop bounds: which key tiles a query tile skips, computes plainly, or masks.

The predicate is read as inequalities over the key position `k`. For a tile of query rows each
inequality gives two intervals of keys: the *hull*, outside which no row of the tile sees a key, and
the *full* interval, in which every row sees every key. And intersects them, Or keeps them side by
side (two at most, else one hull). Terms that are not understood stay element-wise: their hull is
everything and their full interval is empty, which is always right and only ever slower.

Nothing here has an entry per query-key pair or per pair of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import sympy as sp
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from flashgen.passes.inputs import collapse_broadcasts, guard_reads
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

ROW_FIRST, ROW_LAST = sp.symbols("row_first row_last", integer=True, nonnegative=True)
Q_FIRST, Q_LAST = sp.symbols("q_first q_last", integer=True)
MAX_SPANS = 2
MAX_COEFFICIENT = 2**31  # of a bound: times a position it stays within 64 bits
MAX_PERIOD = 2**28  # keys: a chunk's end and the next one's stay within 32 bits

Range = tuple[sp.Expr, sp.Expr]


@dataclass(frozen=True)
class Keys:
    """Keys [start, stop), in terms of q_first, q_last, row_first, row_last and run-time scalars."""

    start: sp.Expr
    stop: sp.Expr

    def __and__(self, other: Keys) -> Keys:
        return Keys(sp.Max(self.start, other.start), sp.Min(self.stop, other.stop))


EVERYTHING = Keys(-sp.oo, sp.oo)
NOTHING = Keys(sp.oo, -sp.oo)


@dataclass(frozen=True)
class Period:
    """Chunks of keys [start + t*period, start + t*period + width), t any integer.

    Outside the chunks no row of the tile sees a key; where `uniform` holds, every row sees every
    key of every chunk.
    """

    start: sp.Expr
    width: sp.Expr
    period: sp.Expr
    uniform: Boolean


@dataclass(frozen=True)
class Scan:
    """`same: name`: the ids of the tile's rows are looked up among the keys' at run time.

    The kernel reads the ids once, keeps first and last hit, and calls the interval full when all
    rows carry one id and every key between first and last hit carries it too. Unsorted ids stay
    right.
    """

    name: str
    row_read: sp.Indexed
    key_read: sp.Indexed


@dataclass(frozen=True)
class Span:
    """One conjunction: hull and full interval, with the conditions under which each counts.

    possible: some row of the tile may see keys in the hull; always: the full interval counts.
    """

    hull: Keys = EVERYTHING
    full: Keys = EVERYTHING
    possible: Boolean = sp.true
    always: Boolean = sp.true
    period: Period | None = None
    scan: Scan | None = None

    def __and__(self, other: Span) -> Span:
        full, always = self.full & other.full, sp.And(self.always, other.always)
        if (self.period and other.period) or (self.scan and other.scan):
            full = NOTHING  # the second one stays element-wise
        return Span(
            hull=self.hull & other.hull,
            full=full,
            possible=sp.And(self.possible, other.possible),
            always=always,
            period=self.period or other.period,
            scan=self.scan or other.scan,
        )

    @property
    def heavy_last(self) -> bool:
        """Whether a query tile further down may see more keys."""
        return bool(self.hull.stop.has(Q_LAST, ROW_LAST))

    @property
    def never_full(self) -> bool:
        """No key tile is ever full."""
        return self.full.start == sp.oo or self.full.stop == -sp.oo or self.always == sp.false


SEE_ALL = (Span(),)
SEE_NONE: tuple[Span, ...] = ()
UNKNOWN = (Span(full=NOTHING),)


@dataclass(frozen=True)
class Visibility:
    """Spans of keys for one query tile, and the predicate that decides inside partial tiles."""

    spans: tuple[Span, ...]
    predicate: Boolean

    @property
    def hides_nothing(self) -> bool:
        return self.predicate == sp.true


@cache
def visibility(spec: AttentionSpec) -> Visibility:
    """Loop bounds of the spec's mask.

    >>> from flashgen.spec.model import AttentionSpec
    >>> spec = AttentionSpec(head_dim=64, dtype="fp16", mask=["causal"])
    >>> visibility(spec).spans[0].hull
    Keys(start=-oo, stop=q_last + 1)
    >>> visibility(spec).spans[0].full
    Keys(start=-oo, stop=q_first + 1)
    """
    predicate = guard_reads(collapse_broadcasts(sym.mask_predicate(spec), spec), spec)
    return Visibility(spans=_spans(predicate), predicate=predicate)


# ---- boolean structure -------------------------------------------------------------------------


def _spans(predicate: Boolean) -> tuple[Span, ...]:  # noqa: PLR0911 -- one return for each kind
    """Spans of a predicate, by its structure."""
    if isinstance(predicate, BooleanTrue):
        return SEE_ALL
    if isinstance(predicate, BooleanFalse):
        return SEE_NONE
    if isinstance(predicate, sp.And):
        return _intersect(_spans(arg) for arg in _ordered(predicate.args))
    if isinstance(predicate, sp.Or):
        return _unite(_spans(arg) for arg in _ordered(predicate.args))
    if isinstance(predicate, sp.Not):
        return _negated(predicate.args[0])
    if isinstance(predicate, sp.core.relational.Relational):
        return _relational(predicate)
    return UNKNOWN


def _ordered(args: Iterable[Boolean]) -> list[Boolean]:
    """A fixed order, so that the same spec always gives the same text."""
    return sorted(args, key=sp.default_sort_key)


def _negated(inner: Boolean) -> tuple[Span, ...]:
    """Not pushed one level down; SymPy has already turned Not(a <= b) into a > b."""
    if isinstance(inner, sp.And):
        return _spans(sp.Or(*[sp.Not(arg) for arg in inner.args]))
    if isinstance(inner, sp.Or):
        return _spans(sp.And(*[sp.Not(arg) for arg in inner.args]))
    return UNKNOWN


def _intersect(parts: Iterable[tuple[Span, ...]]) -> tuple[Span, ...]:
    spans: tuple[Span, ...] = SEE_ALL
    for part in parts:
        spans = tuple(a & b for a in spans for b in part)
    return _merge(spans)


def _unite(parts: Iterable[tuple[Span, ...]]) -> tuple[Span, ...]:
    return _merge(tuple(span for part in parts for span in part))


def _merge(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Join spans open on the same side; more than MAX_SPANS become one hull.

    before: [-oo, prefix) or [-oo, q_last + 1)     after: [-oo, Max(prefix, q_last + 1))
    """
    merged: list[Span] = []
    for span in dict.fromkeys(spans):
        joined = next(((i, j) for i, old in enumerate(merged) if (j := _joined(old, span))), None)
        if joined:
            merged[joined[0]] = joined[1]
        else:
            merged.append(span)
    if len(merged) > MAX_SPANS:
        return (_hull_of(merged),)
    if len(merged) > 1 and any(span.period or span.scan for span in merged):
        return (_hull_of(merged),)
    return tuple(merged)


def _joined(a: Span, b: Span) -> Span | None:
    """The union of two spans that are unbounded on one side, or None."""
    plain = all(
        s.period is None and s.scan is None and s.possible == s.always == sp.true for s in (a, b)
    )
    if not plain or a.never_full or b.never_full:
        return None
    if all(s.hull.start == s.full.start == -sp.oo for s in (a, b)):
        hull = Keys(-sp.oo, sp.Max(a.hull.stop, b.hull.stop))
        return Span(hull=hull, full=Keys(-sp.oo, sp.Max(a.full.stop, b.full.stop)))
    if all(s.hull.stop == s.full.stop == sp.oo for s in (a, b)):
        hull = Keys(sp.Min(a.hull.start, b.hull.start), sp.oo)
        return Span(hull=hull, full=Keys(sp.Min(a.full.start, b.full.start), sp.oo))
    return None


def _hull_of(spans: list[Span]) -> Span:
    """One span around all; full where the first that is ever full is."""
    source = next((s for s in spans if not (s.never_full or s.period or s.scan)), None)
    return Span(
        hull=Keys(sp.Min(*[s.hull.start for s in spans]), sp.Max(*[s.hull.stop for s in spans])),
        full=source.full if source else NOTHING,
        possible=sp.Or(*[s.possible for s in spans]),
        always=source.always if source else sp.false,
    )


# ---- inequalities ------------------------------------------------------------------------------


def _relational(relation: sp.core.relational.Relational) -> tuple[Span, ...]:
    """Spans of `left rel right`, brought to `f <= 0` over the integers."""
    scan = _scan(relation)
    if scan:
        return (Span(scan=scan),)
    periodic = _periodic(relation)
    if periodic:
        return (Span(period=periodic),)
    f = _integral(relation.lhs - relation.rhs)
    if isinstance(relation, sp.Eq):
        return _intersect([_at_most_zero(f), _at_most_zero(-f)])
    if isinstance(relation, sp.Ne):
        return _unite([_at_most_zero(f + 1), _at_most_zero(1 - f)]) if f.is_integer else UNKNOWN
    if isinstance(relation, (sp.Ge, sp.Gt)):
        f = -f
    if isinstance(relation, (sp.Lt, sp.Gt)):
        if not f.is_integer:
            return UNKNOWN
        f = f + 1
    return _at_most_zero(f)


def _integral(f: sp.Expr) -> sp.Expr:
    """f times the least common denominator of its rational coefficients.

    before: q/2 - k       after: q - 2*k
    """
    terms = sp.Add.make_args(sp.expand(f))
    denominators = [t.as_coeff_Mul()[0].q for t in terms if t.as_coeff_Mul()[0].is_Rational]
    return sp.expand(f * sp.ilcm(1, 1, *denominators))


def _at_most_zero(f: sp.Expr) -> tuple[Span, ...]:  # noqa: PLR0911 -- one return for each kind
    """Spans of `f <= 0`."""
    f = sp.expand(f)
    if any(max(abs(n.p), n.q) > MAX_COEFFICIENT for n in f.atoms(sp.Rational)):
        return UNKNOWN
    opened = _open_nonlinear(f)
    if opened is not None:
        return opened
    if not f.has(sym.K):
        return _gate(f)
    if not f.is_integer:
        return UNKNOWN
    position = _key_term(f)
    if position is None:
        return UNKNOWN
    a, chunk, shift, g = position
    bounds = _range_over_rows(-g)
    if bounds is None:
        return UNKNOWN
    low, high = bounds
    if a > 0:  # floor((k + shift)/chunk) <= u  <=>  k + shift < chunk*(u + 1)
        stop = [chunk * (sp.floor(u / a) + 1) - shift for u in (low, high)]
        return (Span(hull=Keys(-sp.oo, stop[1]), full=Keys(-sp.oo, stop[0])),)
    # a < 0: floor((k + shift)/chunk) >= u  <=>  k + shift >= chunk*u
    start = [chunk * sp.ceiling(-u / -a) - shift for u in (low, high)]
    return (Span(hull=Keys(start[1], sp.oo), full=Keys(start[0], sp.oo)),)


def _key_term(f: sp.Expr) -> tuple[sp.Integer, sp.Integer, sp.Expr, sp.Expr] | None:
    """f as a*floor((k + shift)/chunk) + g with g free of k: (a, chunk, shift, g)."""
    with_key = [t for t in sp.Add.make_args(f) if t.has(sym.K)]
    if len(with_key) != 1:
        return None
    a, body = with_key[0].as_coeff_Mul()
    chunked = _chunk_of(body)
    if chunked is None or not a.is_Integer:
        return None
    return a, chunked[0], chunked[1], f - with_key[0]


def _chunk_of(body: sp.Expr) -> tuple[sp.Integer, sp.Expr] | None:
    """(chunk, shift) of k or floor((k + shift)/chunk)."""
    if body == sym.K:
        return sp.Integer(1), sp.Integer(0)
    if not isinstance(body, sp.floor):
        return None
    inner = sp.expand(body.args[0])
    slope = inner.coeff(sym.K)
    if not (slope.is_Rational and slope.p == 1 and slope > 0):
        return None
    shift = sp.expand((inner - slope * sym.K) * slope.q)
    return (sp.Integer(slope.q), shift) if shift.is_Integer else None


def _open_nonlinear(f: sp.Expr) -> tuple[Span, ...] | None:
    """`f <= 0` with one |e|, Max or Min over k, as And/Or of inequalities without it.

    before: |q - k| - 64 <= 0     after: q - k - 64 <= 0 and k - q - 64 <= 0
    """
    for term in sp.Add.make_args(f):
        a, body = term.as_coeff_Mul()
        if not (isinstance(body, (sp.Abs, sp.Max, sp.Min)) and body.has(sym.K)):
            continue
        branches = (
            (body.args[0], -body.args[0]) if isinstance(body, sp.Abs) else _ordered(body.args)
        )
        parts = [_at_most_zero(f - term + a * branch) for branch in branches]
        all_of = (a > 0) != isinstance(body, sp.Min)
        return _intersect(parts) if all_of else _unite(parts)
    return None


def _gate(f: sp.Expr) -> tuple[Span, ...]:
    """`f <= 0` without k: a condition on the rows of the tile (or on the whole program)."""
    bounds = _range_over_rows(f)
    if bounds is None:
        return UNKNOWN
    low, high = bounds
    return (Span(possible=sp.Le(low, 0).canonical, always=sp.Le(high, 0).canonical),)


# ---- periodic and data-dependent terms ---------------------------------------------------------


def _periodic(relation: sp.core.relational.Relational) -> Period | None:
    """floor(k/C) ≡ r (mod n), from Eq(Mod(e, n), c) or Eq(Mod(x, n), Mod(y, n))."""
    congruence = _congruence(relation)
    if congruence is None:
        return None
    e, modulus = congruence
    position = _key_term(sp.expand(e))
    if position is None or abs(position[0]) != 1:
        return None
    sign, chunk, shift, g = position
    if chunk * modulus > MAX_PERIOD:
        return None
    bounds = _range_over_rows(-g * sign)
    if bounds is None:
        return None
    low, high = bounds
    return Period(
        start=chunk * low - shift,
        width=sp.Min(chunk * (high - low + 1), chunk * modulus),
        period=chunk * modulus,
        uniform=sp.Eq(low, high),
    )


def _congruence(relation: sp.core.relational.Relational) -> tuple[sp.Expr, sp.Expr] | None:
    """(e, n) of a relation that says e ≡ 0 (mod n), n a positive constant."""
    if not isinstance(relation, sp.Eq):
        return None
    left, right = relation.args
    if not isinstance(left, sp.Mod):
        left, right = right, left
    if not (isinstance(left, sp.Mod) and left.args[1].is_Integer and left.args[1] > 1):
        return None
    if isinstance(right, sp.Mod) and right.args[1] == left.args[1]:
        right = right.args[0]
    elif not (right.is_Integer and 0 <= right < left.args[1]):
        return None
    e = left.args[0] - right
    return (e, left.args[1]) if e.is_integer and e.has(sym.K) else None


def _scan(relation: sp.core.relational.Relational) -> Scan | None:
    """`x[.., q] == x[.., k]`: the same input read at the query's and at the key's position."""
    if not isinstance(relation, sp.Eq):
        return None
    left, right = relation.args
    if not (isinstance(left, sp.Indexed) and isinstance(right, sp.Indexed)):
        return None
    if left.has(sym.K):
        left, right = right, left
    same_base = left.base == right.base and left.indices[:-1] == right.indices[:-1]
    moving = (sym.Q, sym.ROW, sym.K)
    leading_fixed = not any(index.has(*moving) for index in left.indices[:-1])
    if same_base and leading_fixed and left.indices[-1] == sym.Q and right.indices[-1] == sym.K:
        return Scan(name=str(left.base), row_read=left, key_read=right)
    return None


# ---- range of an expression over the rows of a tile ----------------------------------------------


def _range_over_rows(e: sp.Expr) -> Range | None:
    """(lowest, highest) value of e over the tile's rows, by interval arithmetic; None: unknown."""
    if not e.has(sym.Q, sym.ROW, sym.K):
        return e, e
    leaf = {sym.Q: (Q_FIRST, Q_LAST), sym.ROW: (ROW_FIRST, ROW_LAST)}.get(e)
    if leaf:
        return leaf
    rule = _RANGE_RULES.get(e.func)
    return rule(e) if rule else None


def _ranges(args: Iterable[sp.Expr]) -> list[Range] | None:
    found = [_range_over_rows(arg) for arg in args]
    return None if any(r is None for r in found) else [r for r in found if r is not None]


def _range_add(e: sp.Expr) -> Range | None:
    parts = _ranges(e.args)
    return (
        None if parts is None else (sp.Add(*[p[0] for p in parts]), sp.Add(*[p[1] for p in parts]))
    )


def _range_mul(e: sp.Expr) -> Range | None:
    coefficient, body = e.as_coeff_Mul()
    inner = _range_over_rows(body) if coefficient != 1 else None
    if inner is None:
        return None
    low, high = (coefficient * inner[0], coefficient * inner[1])
    return (low, high) if coefficient > 0 else (high, low)


def _range_monotone(e: sp.Expr) -> Range | None:
    parts = _ranges(e.args)
    return (
        None if parts is None else (e.func(*[p[0] for p in parts]), e.func(*[p[1] for p in parts]))
    )


def _range_mod(e: sp.Expr) -> Range | None:
    modulus = e.args[1]
    return (sp.Integer(0), modulus - 1) if modulus.is_Integer and modulus > 0 else None


def _range_abs(e: sp.Expr) -> Range | None:
    inner = _range_over_rows(e.args[0])
    return inner and (sp.Max(0, inner[0], -inner[1]), sp.Max(-inner[0], inner[1]))


_RANGE_RULES: Mapping[type[sp.Basic], Callable[[sp.Expr], Range | None]] = {
    sp.Add: _range_add,
    sp.Mul: _range_mul,
    sp.floor: _range_monotone,
    sp.ceiling: _range_monotone,
    sp.Max: _range_monotone,
    sp.Min: _range_monotone,
    sp.Mod: _range_mod,
    sp.Abs: _range_abs,
}


def with_rows(span: Span, substitutions: Mapping[sp.Symbol, sp.Expr]) -> Span:
    """The span with its row symbols replaced, for printing and for counting."""
    period = span.period
    if period:
        period = Period(
            *(
                getattr(period, f).subs(substitutions)
                for f in ("start", "width", "period", "uniform")
            )
        )
    return replace(
        span,
        hull=Keys(span.hull.start.subs(substitutions), span.hull.stop.subs(substitutions)),
        full=Keys(span.full.start.subs(substitutions), span.full.stop.subs(substitutions)),
        possible=span.possible.subs(substitutions),
        always=span.always.subs(substitutions),
        period=period,
    )
