"""SymPy -> Triton expressions over index tensors.

Positions are integers of either sign (`q` is negative above a bottom-right aligned triangle), while
Triton's `//` and `%` truncate as C's do. Floor division and modulus therefore print as such only
where the operand cannot be negative, and as the module's `floor_div` / `floor_mod` elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import sympy as sp
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.str import StrPrinter

from flashgen.spec import symbolic as sym

LOG2_E = 1.4426950408889634  # log2(e): exp(x) = exp2(x * LOG2_E), and the hardware has exp2

LONGEST_PRODUCT = 8  # of equal factors

_NONNEGATIVE = {
    s: sp.Symbol(f"{s.name}_", integer=True, nonnegative=True)
    for s in (sym.K, sym.ROW, sym.B, sym.H, sym.HK, sym.Q_LEN, sym.KV_LEN)
}


def is_nonnegative(e: sp.Expr) -> bool:
    """Whether e is >= 0 for every key, row, batch and head."""
    return bool(e.xreplace(_NONNEGATIVE).is_nonnegative)


class TritonPrinter(StrPrinter):
    """Prints one expression; `names` gives the kernel's variable for each symbol and input read.

    `precise`: the result counts in fp32, not in 16 bits. `helpers` collects the functions of the
    module that the text calls.
    """

    def __init__(
        self,
        names: Mapping[sp.Basic, str],
        helpers: set[str] | None = None,
        *,
        precise: bool = False,
    ) -> None:
        super().__init__({"order": None, "full_prec": False})
        self.names = names
        self.helpers: set[str] = set() if helpers is None else helpers
        self.precise = precise

    def _print(self, expr: object, **kwargs: object) -> str:
        name = self.names.get(expr) if isinstance(expr, sp.Basic) else None
        return name if name is not None else str(super()._print(expr, **kwargs))

    def _print_Float(self, expr: sp.Float) -> str:
        return repr(float(expr))

    def _print_Rational(self, expr: sp.Rational) -> str:
        return str(expr.p) if expr.q == 1 else repr(expr.p / expr.q)

    def _print_NumberSymbol(self, expr: sp.NumberSymbol) -> str:
        return repr(float(expr))

    _print_Exp1 = _print_NumberSymbol
    _print_Pi = _print_NumberSymbol

    def _print_Add(self, expr: sp.Add, order: object = None) -> str:
        """Positive terms first, so that no sum starts with a minus that it can avoid."""
        terms = sorted(
            expr.args, key=lambda t: (_is_negative(t), t.is_number, sp.default_sort_key(t))
        )
        text = self.parenthesize(terms[0], PRECEDENCE["Add"])
        for term in terms[1:]:
            sign, shown = ("-", -term) if _is_negative(term) else ("+", term)
            bind = PRECEDENCE["Mul"] if isinstance(shown, sp.Add) else PRECEDENCE["Add"]
            text += f" {sign} {self.parenthesize(shown, bind)}"
        return text

    def _print_Mul(self, expr: sp.Mul) -> str:
        """Numerators times the reciprocal of denominators: one division at the most."""
        above = [a for a in expr.args if not _is_reciprocal(a)]
        below = [1 / a for a in expr.args if _is_reciprocal(a)]
        negative = bool(above) and above[0] == -1 and len(above) > 1
        factors = sorted(above[1:] if negative else above, key=_how_often)
        shown = [self.parenthesize(a, PRECEDENCE["Mul"]) for a in factors]
        if factors and factors[0].is_number:
            shown[0] = self._print(factors[0])
        text = " * ".join(shown) or "1.0"
        if below:
            bottom = " * ".join(self.parenthesize(a, PRECEDENCE["Pow"]) for a in below)
            text = f"{text} / ({bottom})" if len(below) > 1 else f"{text} / {bottom}"
        return f"-{text}" if negative else text

    def _print_Pow(self, expr: sp.Pow, rational: bool = False) -> str:
        base, exponent = expr.args
        if exponent == -1:
            return f"1.0 / {self.parenthesize(base, PRECEDENCE['Pow'])}"
        if exponent.is_Integer:
            return self._whole_power(base, int(exponent))
        if exponent == sp.Rational(1, 2):
            return f"tl.sqrt({self._real(base)})"
        return f"tl.exp2({self._print(exponent)} * tl.log2({self._real(base)}))"

    def _whole_power(self, base: sp.Expr, exponent: int) -> str:
        """A product; the logarithm of |base| for what would be a long one."""
        if exponent < 0:
            return f"1.0 / ({self._whole_power(base, -exponent)})"
        if exponent <= LONGEST_PRODUCT:
            return " * ".join([self.parenthesize(base, PRECEDENCE["Mul"])] * exponent)
        if exponent % 2:
            factor = self.parenthesize(base, PRECEDENCE["Mul"])
            return f"{self._whole_power(base, exponent - 1)} * {factor}"
        return f"tl.exp2({float(exponent)} * tl.log2({self._real(sp.Abs(base))}))"

    def _print_Abs(self, expr: sp.Abs) -> str:
        return f"tl.abs({self._print(expr.args[0])})"

    def _print_exp(self, expr: sp.exp) -> str:
        return f"tl.exp({self._real(expr.args[0])})"

    def _print_log(self, expr: sp.log) -> str:
        return f"tl.log({self._real(expr.args[0])})"

    def _real(self, e: sp.Expr) -> str:
        """e as an argument of a function that takes no integers."""
        if e.is_number:
            return repr(float(e))
        if e.is_integer:
            return f"{self.parenthesize(e, PRECEDENCE['Atom'])}.to(tl.float32)"
        return self._print(e)

    def _print_tanh(self, expr: sp.tanh) -> str:
        """1 - 2/(exp(2x) + 1): exact limits at both ends, two special-function instructions.

        Its error is absolute, too large for fp32 where x is small: there the module's `tanh`.
        """
        if self.precise:
            self.helpers.add("tanh")
            return f"tanh({self._real(expr.args[0])})"
        doubled = sp.Float(2 * LOG2_E) * expr.args[0]
        return f"(1.0 - 2.0 / (tl.exp2({self._print(doubled)}) + 1.0))"

    def _print_Max(self, expr: sp.Max) -> str:
        return self._nested("tl.maximum", expr.args)

    def _print_Min(self, expr: sp.Min) -> str:
        return self._nested("tl.minimum", expr.args)

    def _nested(self, function: str, args: tuple[sp.Expr, ...]) -> str:
        texts = [self._print(a) for a in sorted(args, key=sp.default_sort_key)]
        return reduce(lambda left, right: f"{function}({left}, {right})", texts)

    def _print_floor(self, expr: sp.floor) -> str:
        numerator, denominator = sp.fraction(sp.together(expr.args[0]))
        if not (numerator.is_integer and denominator.is_integer):
            return f"tl.floor({self._print(expr.args[0])})"
        return self._divide("//", "floor_div", numerator, denominator)

    def _print_ceiling(self, expr: sp.ceiling) -> str:
        return f"-({self._print(sp.floor(-expr.args[0]))})"

    def _print_Mod(self, expr: sp.Mod) -> str:
        left, right = expr.args
        if not (left.is_integer and right.is_integer):
            ratio = self._print(sp.floor(left / right))
            return f"({self._print(left)} - ({self._print(right)}) * {ratio})"
        return self._divide("%", "floor_mod", left, right)

    def _divide(self, operator: str, helper: str, left: sp.Expr, right: sp.Expr) -> str:
        if is_nonnegative(left) and is_nonnegative(right):
            bind = PRECEDENCE["Pow"]
            return f"({self.parenthesize(left, bind)} {operator} {self.parenthesize(right, bind)})"
        self.helpers.add(helper)
        return f"{helper}({self._print(left)}, {self._print(right)})"

    def _print_Piecewise(self, expr: sp.Piecewise) -> str:
        *branches, last = expr.args
        text = self._print(last.expr)
        for branch in reversed(branches):
            text = f"tl.where({self._print(branch.cond)}, {self._print(branch.expr)}, {text})"
        return text

    def _print_Relational(self, expr: sp.core.relational.Relational) -> str:
        bind = precedence(expr)
        return (
            f"{self.parenthesize(expr.lhs, bind)} {expr.rel_op} {self.parenthesize(expr.rhs, bind)}"
        )

    def _print_And(self, expr: sp.And) -> str:
        return self._joined(" & ", expr.args)

    def _print_Or(self, expr: sp.Or) -> str:
        return self._joined(" | ", expr.args)

    def _print_Not(self, expr: sp.Not) -> str:
        return f"~({self._print(expr.args[0])})"

    def _joined(self, operator: str, args: tuple[sp.Basic, ...]) -> str:
        ordered = sorted(args, key=sp.default_sort_key)
        return operator.join(f"({self._print(a)})" for a in ordered)


def _is_negative(term: sp.Expr) -> bool:
    return bool(term.as_coeff_Mul()[0].is_negative)


def _how_often(factor: sp.Expr) -> int:
    """Order of a product's factors: what a program multiplies only once comes first."""
    if factor.is_number:
        return 0
    return 1 + 2 * factor.has(sym.K) + factor.has(sym.Q, sym.ROW) + 4 * bool(factor.has(sym.S))


def _is_reciprocal(e: sp.Expr) -> bool:
    return isinstance(e, sp.Pow) and e.exp == -1


def clear_denominators(predicate: sp.Basic) -> sp.Basic:
    """Relations over positions in integers only, so that no position is rounded to fp32.

    before: q/2 < k       after: q < 2*k
    """
    if isinstance(predicate, (sp.And, sp.Or, sp.Not)):
        return predicate.func(*[clear_denominators(a) for a in predicate.args])
    if not isinstance(predicate, sp.core.relational.Relational):
        return predicate
    terms = sp.Add.make_args(sp.expand(predicate.lhs)) + sp.Add.make_args(sp.expand(predicate.rhs))
    coefficients = [t.as_coeff_Mul()[0] for t in terms]
    if not all(c.is_Rational for c in coefficients):
        return predicate
    factor = sp.ilcm(1, 1, *[c.q for c in coefficients])
    if factor == 1:
        return predicate
    return predicate.func(
        sp.expand(predicate.lhs * factor), sp.expand(predicate.rhs * factor), evaluate=False
    )
