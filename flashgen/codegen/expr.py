"""SymPy -> Triton expressions over index tensors.

Positions are integers of either sign (`q` is negative above a bottom-right aligned triangle), while
Triton's `//` and `%` truncate as C's do. Floor division and modulus therefore print as such only
where the operand cannot be negative, and as the module's `floor_div` / `floor_mod` elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import takewhile

import sympy as sp
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.str import StrPrinter

from flashgen.codegen.integers import (
    MAX_INT32,
    RANGES,
    WIDE_SYMBOLS,
    Interval,
    gathered,
    interval,
    is_ratio,
    is_rounded_real,
    size,
    steps,
)
from flashgen.spec import symbolic as sym
from flashgen.spec.parts import MAX_FP32, MAX_INT64, MIN_FP32

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
        self.shallow = 0.0  # slopes below which tanh needs care where its argument is small
        self.ranges: dict[sp.Basic, Interval] = dict(RANGES)
        self.constants: set[sp.Basic] = set()  # names that are constexprs in the kernel

    def name_part(self, symbol: sp.Symbol, value: sp.Expr) -> None:
        """From here on `symbol`, the variable of this name, stands for `value`."""
        if symbol.is_integer:
            self.ranges[symbol] = interval(value, self.ranges)

    def is_wide(self, e: sp.Basic) -> bool:
        """Whether the text of a whole expression has 64 bits, or is a number that needs them."""
        if isinstance(e, (sp.Indexed, sp.core.relational.Relational)) or not e.args:
            return e in WIDE_SYMBOLS or (e.is_Integer and size(e) > MAX_INT32)
        return self._needs_64_bits(e) or any(self.is_wide(arg) for arg in e.args)

    def _needs_64_bits(self, e: sp.Basic) -> bool:
        """Whether a whole expression could leave 32 bits, in a step on the way to it too."""
        whole = getattr(e, "is_integer", False) and not is_rounded_real(e)
        return bool(whole) and steps(e, self.ranges) > MAX_INT32

    def _operands(
        self, operands: Sequence[sp.Expr], bind: int = 0, *, wide: bool = False
    ) -> list[str]:
        """Texts of operands; with `wide`, or for numbers that need it, whole ones in 64 bits.

        The first that is no number or constant is widened: the rest follows it.
        """
        texts = [self.parenthesize(operand, bind) for operand in operands]
        widened = self._widened(operands, wide=wide)
        if widened is not None:
            texts[widened] = self._in_64_bits(operands[widened])
        return texts

    def _widened(self, operands: Sequence[sp.Expr], *, wide: bool) -> int | None:
        """Which operand to widen so that all that is computed has 64 bits; None: that is so."""
        whole = all(o.is_integer and not is_rounded_real(o) for o in operands)
        large = any(o.is_Integer and size(o) > MAX_INT32 for o in operands)
        first = next(
            (n for n, o in enumerate(operands) if not o.is_number and o not in self.constants), None
        )
        needed = whole and (wide or large) and first is not None
        return None if not needed or self.is_wide(operands[first or 0]) else first

    def _in_64_bits(self, e: sp.Expr) -> str:
        return self.parenthesize(e, PRECEDENCE["Atom"], strict=True) + ".to(tl.int64)"

    def _print(self, expr: object, **kwargs: object) -> str:
        name = self.names.get(expr) if isinstance(expr, sp.Basic) else None
        return name if name is not None else str(super()._print(expr, **kwargs))

    def _print_Float(self, expr: sp.Float) -> str:
        """A number that fp32 can hold: from others Triton makes fp64."""
        value = float(expr)
        if abs(value) > MAX_FP32:
            return f'float("{math.copysign(math.inf, value)}")'
        return repr(value if abs(value) >= MIN_FP32 else 0.0)

    def _print_Integer(self, expr: sp.Integer) -> str:
        """Beyond 64 bits a factor of real numbers: whole expressions have none (spec/symbolic)."""
        return str(expr.p) if abs(expr.p) <= MAX_INT64 else repr(float(expr))

    def _print_Rational(self, expr: sp.Rational) -> str:
        return str(expr.p) if expr.q == 1 else repr(expr.p / expr.q)

    def _print_NumberSymbol(self, expr: sp.NumberSymbol) -> str:
        return repr(float(expr))

    _print_Exp1 = _print_NumberSymbol
    _print_Pi = _print_NumberSymbol

    def _print_Add(self, expr: sp.Add, order: object = None) -> str:
        """Positive terms first, so that no sum starts with a minus that it can avoid."""
        terms = sorted(
            gathered(expr.args),
            key=lambda t: (_is_negative(t), t.is_number, sp.default_sort_key(t)),
        )
        whole = list(takewhile(lambda term: term.is_integer, terms))
        shown = [terms[0], *(_negated(t) if _is_negative(t) else t for t in terms[1:])]
        wide = self._needs_64_bits(sp.Add(*whole, evaluate=False))
        widened = self._widened(shown[: len(whole)], wide=wide)
        text = self._term(shown[0], PRECEDENCE["Add"], wide=widened == 0)
        for place, term in list(enumerate(terms))[1:]:
            sign = "-" if _is_negative(term) else "+"
            bind = PRECEDENCE["Mul"] if isinstance(shown[place], sp.Add) else PRECEDENCE["Add"]
            text += f" {sign} {self._term(shown[place], bind, wide=widened == place)}"
        return text

    def _term(self, e: sp.Expr, bind: int, *, wide: bool) -> str:
        return self._in_64_bits(e) if wide else self.parenthesize(e, bind)

    def _print_Mul(self, expr: sp.Mul) -> str:
        """Numerators times the reciprocal of denominators: one division at the most."""
        above = [a for a in expr.args if not _is_reciprocal(a)]
        below = [1 / a for a in expr.args if _is_reciprocal(a)]
        negative = bool(above) and above[0] == -1 and len(above) > 1
        factors = sorted(above[1:] if negative else above, key=_how_often)
        shown = self._factors(expr, factors)
        if factors and factors[0].is_number:
            shown[0] = self._print(factors[0])
        text = " * ".join(shown) or "1.0"
        if below:
            bottom = " * ".join(self._factors(sp.Mul(*below), below, PRECEDENCE["Pow"]))
            text = f"{text} / ({bottom})" if len(below) > 1 else f"{text} / {bottom}"
        return f"-{text}" if negative else text

    def _factors(
        self, product: sp.Expr, factors: Sequence[sp.Expr], bind: int = PRECEDENCE["Mul"]
    ) -> list[str]:
        """Texts of factors; whole ones that come first in a real product do not overflow there."""
        if product.is_integer:
            return self._operands(factors, bind, wide=self._needs_64_bits(product))
        texts = [self.parenthesize(factor, bind) for factor in factors]
        whole = list(takewhile(lambda factor: factor.is_integer, factors))
        if len(whole) > 1 and self._needs_64_bits(sp.Mul(*whole, evaluate=False)):
            first = next((n for n, factor in enumerate(whole) if not factor.is_number), None)
            if first is not None:
                texts[first] = self._real(factors[first])
        return texts

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
            power = sp.Pow(base, exponent, evaluate=False)
            wide = self._needs_64_bits(power)
            return " * ".join(self._operands([base] * exponent, PRECEDENCE["Mul"], wide=wide))
        if exponent % 2:
            factor = self.parenthesize(base, PRECEDENCE["Mul"])
            return f"{self._whole_power(base, exponent - 1)} * {factor}"
        return f"tl.exp2({float(exponent)} * tl.log2({self._real(sp.Abs(base))}))"

    def _print_Abs(self, expr: sp.Abs) -> str:
        return f"tl.abs({self._operands(expr.args, wide=self._needs_64_bits(expr))[0]})"

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

        Its error is absolute: where x is small, too large for fp32 and for large factors around it.
        There the module's `tanh`.
        """
        if self.precise or abs(expr.args[0].as_coeff_Mul()[0]) < self.shallow:
            self.helpers.add("tanh")
            return f"tanh({self._real(expr.args[0])})"
        doubled = sp.Float(2 * LOG2_E) * expr.args[0]
        return f"(1.0 - 2.0 / (tl.exp2({self._print(doubled)}) + 1.0))"

    def _print_Max(self, expr: sp.Max) -> str:
        return self._nested("tl.maximum", expr)

    def _print_Min(self, expr: sp.Min) -> str:
        return self._nested("tl.minimum", expr)

    def _nested(self, function: str, expr: sp.Expr) -> str:
        texts = self._operands(sorted(expr.args, key=sp.default_sort_key))
        return reduce(lambda left, right: f"{function}({left}, {right})", texts)

    def _print_floor(self, expr: sp.floor) -> str:
        if not is_ratio(expr.args[0]):
            return f"tl.floor({self._print(expr.args[0])})"
        return self._divide("//", "floor_div", *sp.fraction(sp.together(expr.args[0])))

    def _print_ceiling(self, expr: sp.ceiling) -> str:
        return f"-({self._print(sp.floor(-expr.args[0]))})"

    def _print_Mod(self, expr: sp.Mod) -> str:
        left, right = expr.args
        if not (left.is_integer and right.is_integer):
            ratio = self._print(sp.floor(left / right))
            return f"({self._print(left)} - ({self._print(right)}) * {ratio})"
        return self._divide("%", "floor_mod", left, right)

    def _print_FloorDiv(self, expr: sym.FloorDiv) -> str:
        left, right = expr.args
        if left.is_integer and right.is_integer:
            return self._unless_zero(
                right, lambda safe: self._divide("//", "floor_div", left, safe)
            )
        ratio = partial(self._ratio, left, right)
        return self._unless_zero(right, lambda safe: f"tl.floor({ratio(safe)})")

    def _print_FloorMod(self, expr: sym.FloorMod) -> str:
        left, right = expr.args
        if left.is_integer and right.is_integer:
            return self._unless_zero(right, lambda safe: self._divide("%", "floor_mod", left, safe))
        shown, ratio = self.parenthesize(left, PRECEDENCE["Add"]), partial(self._ratio, left, right)
        return self._unless_zero(
            right, lambda safe: f"{shown} - {self._print(safe)} * tl.floor({ratio(safe)})"
        )

    def _ratio(self, left: sp.Expr, right: sp.Expr, safe: sp.Symbol) -> str:
        return f"{self.parenthesize(left, PRECEDENCE['Mul'])} / {self._print(safe)}"

    def _unless_zero(self, divisor: sp.Expr, text_of: Callable[[sp.Symbol], str]) -> str:
        """What `text_of` says of a divisor that is never 0; 0 where `divisor` is."""
        shown = self.parenthesize(divisor, PRECEDENCE["Relational"])
        safe = sp.Dummy(
            integer=divisor.is_integer, real=True, nonnegative=is_nonnegative(divisor) or None
        )
        self.names = {**self.names, safe: f"tl.where({shown} == 0, 1, {shown})"}
        if divisor.is_integer:
            self.ranges[safe] = interval(divisor, self.ranges)
        return f"tl.where({shown} == 0, 0, {text_of(safe)})"

    def _divide(self, operator: str, helper: str, left: sp.Expr, right: sp.Expr) -> str:
        if is_nonnegative(left) and is_nonnegative(right):
            shown = self._operands((left, right), PRECEDENCE["Pow"])
            return f"({f' {operator} '.join(shown)})"
        self.helpers.add(helper)
        # floor_div subtracts a remainder, which is smaller than the divisor, from the left side.
        reach = size(left, self.ranges) + size(right, self.ranges)
        wide = operator == "//" and reach > MAX_INT32
        return f"{helper}({', '.join(self._operands((left, right), wide=wide))})"

    def _print_Piecewise(self, expr: sp.Piecewise) -> str:
        *branches, text = self._operands([value for value, _ in expr.args])
        for branch, (_, condition) in reversed(list(zip(branches, expr.args, strict=False))):
            text = f"tl.where({self._print(condition)}, {branch}, {text})"
        return text

    def _print_ITE(self, expr: sp.ITE) -> str:
        """What SymPy makes of a comparison with a Piecewise that is a condition of another."""
        return f"tl.where({', '.join(map(self._print, expr.args))})"

    def _print_Relational(self, expr: sp.core.relational.Relational) -> str:
        left, right = self._operands((expr.lhs, expr.rhs), precedence(expr))
        return f"{left} {expr.rel_op} {right}"

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


def _negated(term: sp.Expr) -> sp.Expr:
    """-term, with a factor in front of a sum left there."""
    factor, rest = term.as_coeff_Mul()
    if not rest.is_Add:
        return -term
    return rest if factor == -1 else sp.Mul(-factor, rest, evaluate=False)


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
    sides = [sp.expand(side * factor) for side in (predicate.lhs, predicate.rhs)]
    if factor == 1 or any(MAX_INT64 < steps(side) < math.inf for side in sides):
        return predicate
    return predicate.func(*sides, evaluate=False)
