"""A mask predicate as limits of each row: its first and its last key, and what is left of it.

Inside a partial tile a pair is then decided by one comparison for each side that ends there,
against a number of its row; which tiles end on which side the loop bounds know already.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy as sp
from sympy.core.relational import (
    GreaterThan,
    LessThan,
    Relational,
    StrictGreaterThan,
    StrictLessThan,
)
from sympy.logic.boolalg import Boolean
from sympy.printing.precedence import PRECEDENCE

from flashgen.codegen.bounds import NARROWED
from flashgen.codegen.expr import TritonPrinter
from flashgen.codegen.integers import RANGES, size
from flashgen.passes.visibility import Scan
from flashgen.spec import symbolic as sym

MAX_LIMIT = 2**30  # less a position, which is under 2**29, it stays within 32 bits


# First and last key of the document that a row belongs to, where its keys lie side by side.
OWN_FIRST, OWN_LAST = sp.symbols("own_first own_last", integer=True, nonnegative=True)


@dataclass(frozen=True)
class RowLimits:
    """Keys from `first` to `last`, both included, of those for which `rest` holds.

    None: no limit. when: on what of a row alone it depends whether it sees anything.
    """

    first: sp.Expr | None
    last: sp.Expr | None
    when: Boolean
    rest: Boolean


@dataclass(frozen=True)
class MaskText:
    """Limits of a row's keys as kernel text: first ("": none), last; what is decided by pairs."""

    first: str
    last: str
    last_of_row: str  # where all keys of a tile exist; "": none
    rest: str


def mask_text(predicate: Boolean, printer: TritonPrinter) -> MaskText:
    """Limits as text; `last` also ends with the keys."""
    own: dict[sp.Basic, str] = {symbol: symbol.name for symbol in (OWN_FIRST, OWN_LAST)}
    printer = TritonPrinter({**printer.names, **own}, printer.helpers, precise=printer.precise)
    printer.ranges.update(dict.fromkeys(own, RANGES[sym.K]))
    found = row_limits(predicate)
    end = printer.doprint(sym.KV_LEN - 1)
    of_row = _narrow(found.last, printer) if found.last is not None else ""
    last = f"tl.minimum({of_row}, {end})" if of_row else end
    if found.when != sp.true:
        condition = printer.doprint(found.when)
        of_row = f"tl.where({condition}, {of_row or end}, -1)"
        last = f"tl.where({condition}, {last}, -1)"
    return MaskText(
        first="" if found.first is None else _narrow(found.first, printer),
        last=last if found.last is not None or found.when != sp.true else f"({last})",
        last_of_row=of_row,
        rest="" if found.rest == sp.true else printer.doprint(found.rest),
    )


def _narrow(limit: sp.Expr, printer: TritonPrinter) -> str:
    """A limit in 32 bits; beyond `MAX_LIMIT` one is as good as another."""
    if size(limit, printer.ranges) <= MAX_LIMIT:
        return str(printer.parenthesize(limit, PRECEDENCE["Add"]))
    return NARROWED.format(printer.doprint(limit))


def same_document(predicate: Boolean, scan: Scan) -> sp.Eq:
    """The part of the predicate that compares ids."""
    sides = {scan.row_read, scan.key_read}
    return next(part for part in predicate.atoms(sp.Eq) if set(part.args) == sides)


def by_own_keys(predicate: Boolean, scan: Scan) -> Boolean:
    """The predicate where each document's keys lie side by side, the row's own among them.

    before: doc[b, q] == doc[b, k] & k <= q       after: own_first <= k & k <= q
    """
    last = row_limits(predicate).last
    ends = () if last is None else sp.Min.make_args(last)
    own = sym.K >= OWN_FIRST
    if not any((sym.Q - end).is_nonnegative for end in ends):
        own = sp.And(own, sym.K <= OWN_LAST)
    return predicate.xreplace({same_document(predicate, scan): own})


def row_limits(predicate: Boolean) -> RowLimits:
    """The limits of a predicate over positions in whole numbers.

    >>> row_limits(sp.And(sym.K <= sym.Q, sym.K > sym.Q - 4))
    RowLimits(first=q - 3, last=q, when=True, rest=True)
    """
    firsts: list[sp.Expr] = []
    lasts: list[sp.Expr] = []
    when: list[Boolean] = []
    rest: list[Boolean] = []
    for part in sorted(sp.And.make_args(predicate), key=sp.default_sort_key):
        first, last = _side(part, GreaterThan), _side(part, LessThan)
        if first is not None:
            firsts.append(first)
        elif last is not None:
            lasts.append(last)
        elif not part.has(sym.K):
            when.append(part)
        else:
            rest.append(part)
    return RowLimits(
        first=sp.Max(*firsts) if firsts else None,
        last=sp.Min(*lasts) if lasts else None,
        when=sp.And(*when),
        rest=sp.And(*rest),
    )


def _side(part: Boolean, kind: type[Relational]) -> sp.Expr | None:
    """The last (LessThan) or first (GreaterThan) key that a part admits, if it is such a part; of
    several beside each other the widest."""
    if isinstance(part, sp.Or):
        limits = [_side(each, kind) for each in part.args]
        if any(limit is None for limit in limits):
            return None
        return sp.Max(*limits) if kind is LessThan else sp.Min(*limits)
    if not isinstance(part, Relational):
        return None
    return _limit(part, kind)


def _limit(part: Relational, kind: type[Relational]) -> sp.Expr | None:
    if not isinstance(part, (LessThan, StrictLessThan, GreaterThan, StrictGreaterThan)):
        return None
    least = sp.expand(part.gts - part.lts)  # at least 0; at least 1 where strict
    factor = least.coeff(sym.K, 1)
    others = sp.expand(least - factor * sym.K)
    if factor not in (1, -1) or others.has(sym.K) or not others.is_integer:
        return None
    if (factor == -1) != (kind is LessThan):
        return None
    room = others - (1 if isinstance(part, (StrictLessThan, StrictGreaterThan)) else 0)
    return room if factor == -1 else -room
