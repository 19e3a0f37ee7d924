"""Formulas as Python functions.

SymPy's lambdify does this for any expression and any library, and takes 10 ms for each; the
formulas of a tile graph are sums and products with few other operations, and exact in whole
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import sympy as sp
from sympy.core.function import AppliedUndef

from flashgen.schedule.scratch import FUNCTIONS


@cache
def function(arguments: tuple[sp.Symbol, ...], formula: sp.Expr) -> Callable[..., float]:
    """`formula` as a Python function of `arguments`; equal formulas share one."""
    return _evaluated(arguments, _text(formula))


def functions(
    arguments: Sequence[sp.Symbol], formulas: Sequence[sp.Expr]
) -> Callable[..., tuple[float, ...]]:
    """One function of `arguments` that returns the values of all `formulas`."""
    return _evaluated(arguments, f"({''.join(f'{_text(formula)}, ' for formula in formulas)})")


def _evaluated(arguments: Sequence[sp.Symbol], body: str) -> Callable[..., Any]:
    names = ", ".join(symbol.name for symbol in arguments)
    made: Callable[..., Any] = eval(f"lambda {names}: {body}", {"ceil": math.ceil, **FUNCTIONS})
    return made


def _text(e: sp.Basic) -> str:
    """`e` in Python, every part in parentheses. TypeError for what formulas do not contain."""
    for kind, write in _WRITERS.items():
        if isinstance(e, kind):
            return write(e)
    raise TypeError(f"a formula contains {type(e).__name__}: {e}")


def _all(e: sp.Basic) -> str:
    return ", ".join(map(_text, e.args))


def _joined(operator: str) -> Callable[[sp.Basic], str]:
    return lambda e: f"({operator.join(map(_text, e.args))})"


def _product(e: sp.Basic) -> str:
    above, below = _fraction(e)
    return f"({above} / {below})" if below else above


def _fraction(e: sp.Basic) -> tuple[str, str]:
    """What stands above and below the line; "" for nothing below."""
    above: list[str] = []
    below: list[str] = []
    for factor in sp.Mul.make_args(e):
        if factor.is_Rational:
            above += [str(factor.p)] * (factor.p != 1)
            below += [str(factor.q)] * (factor.q != 1)
        elif not factor.is_Pow:
            above.append(_text(factor))
        elif factor.exp.is_Integer:
            side = above if factor.exp > 0 else below
            side += [_text(factor.base)] * abs(int(factor.exp))
        else:
            raise TypeError(f"a formula contains a root or an exponential: {factor}")
    return f"({' * '.join(above or ['1'])})", f"({' * '.join(below)})" if below else ""


def _ceiling(e: sp.Basic) -> str:
    above, below = _fraction(e.args[0])
    return f"(-(-{above} // {below}))" if below else f"ceil({above})"


def _piecewise(e: sp.Basic) -> str:
    *others, (last, condition) = e.args
    if condition != sp.true:
        raise TypeError(f"a formula is not defined everywhere: {e}")
    chosen = "".join(f"{_text(value)} if {_text(when)} else " for value, when in others)
    return f"({chosen}{_text(last)})"


def _call(e: sp.Basic) -> str:
    name = e.func.__name__
    if name not in FUNCTIONS:
        raise TypeError(f"a formula contains a function that is not in scratch.py: {e}")
    return f"{name}({_all(e)})"


_WRITERS: Mapping[type[sp.Basic], Callable[[Any], str]] = {
    sp.Symbol: lambda e: e.name,
    sp.Add: _joined(" + "),
    sp.Mul: _product,
    sp.Pow: _product,
    sp.Rational: _product,
    sp.ceiling: _ceiling,
    sp.Max: lambda e: f"max({_all(e)})",
    sp.Min: lambda e: f"min({_all(e)})",
    sp.Piecewise: _piecewise,
    sp.Le: _joined(" <= "),
    sp.Lt: _joined(" < "),
    sp.Ge: _joined(" >= "),
    sp.Gt: _joined(" > "),
    sp.Or: _joined(" or "),
    AppliedUndef: _call,
}
