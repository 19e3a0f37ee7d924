"""Expressions of a spec as SymPy: the mask as one predicate, the score pipeline as one formula.

Symbols carry the assumptions that simplification may use: positions are integers (a query's aligned
position may be negative), lengths are nonnegative integers, the score is real. Inputs are
`IndexedBase(name)[…]`; run-time scalars are `Symbol(name)`.

`not` is moved onto the comparisons here (not (a and b) becomes not a or not b), because a
comparison that would read outside an input does not hold, whichever way round it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import sympy as sp
from sympy.logic.boolalg import Boolean

from flashgen.dtypes import DTYPES
from flashgen.errors import SpecError, SpecProblem
from flashgen.spec.expr import (
    Binary,
    Call,
    Compare,
    Index,
    Logic,
    Name,
    Negate,
    Node,
    Not,
    Number,
    fits_fp32,
    parse_expression,
)
from flashgen.spec.model import (
    Alibi,
    AttentionSpec,
    Bias,
    Causal,
    Expr,
    Input,
    MaskItem,
    Same,
    ScoreItem,
    Softcap,
)
from flashgen.spec.parts import MAX_INT64

S = sp.Symbol("s", real=True)
Q, ROW, K, B, H, HK = sp.symbols("q row k b h hk", integer=True)
Q_LEN, KV_LEN = sp.symbols("q_len kv_len", integer=True, nonnegative=True)

SYMBOLS: dict[str, sp.Symbol] = {
    symbol.name: symbol for symbol in (S, Q, ROW, K, B, H, HK, Q_LEN, KV_LEN)
}
# The indices of a bias, which a tensor of lower rank uses from the right.
BIAS_INDICES: tuple[sp.Symbol, ...] = (B, H, ROW, K)

# A window side of this many keys or more hides nothing (and q + side would leave int32).
NO_LIMIT = 2**30
_EXACT = 2**31  # whole numbers below it become integers, exact in every later step


class FloorDiv(sp.Function):
    """a // b where b may be 0: 0 then, else a / b rounded down. Not taken apart by SymPy."""

    is_integer = True

    @classmethod
    def eval(cls, a: sp.Expr, b: sp.Expr) -> sp.Expr | None:
        if b.is_zero:
            return sp.Integer(0)
        return sp.floor(a / b) if _is_never_zero(b) else None


class FloorMod(sp.Function):
    """a % b where b may be 0: 0 then, else a - b * (a // b). Not taken apart by SymPy."""

    is_real = True

    @classmethod
    def eval(cls, a: sp.Expr, b: sp.Expr) -> sp.Expr | None:
        if b.is_zero:
            return sp.Integer(0)
        return sp.Mod(a, b) if _is_never_zero(b) else None

    def _eval_is_integer(self) -> bool | None:
        return True if all(arg.is_integer for arg in self.args) else None


def _is_never_zero(b: sp.Expr) -> bool:
    return bool(b.is_number or b.is_nonzero)


def _divided(kind: type[FloorDiv | FloorMod], a: sp.Expr, b: sp.Expr) -> sp.Expr:
    if b.is_zero:  # q - q: whoever wrote it did not mean it
        raise ZeroDivisionError
    return kind(a, b)


def real(value: float) -> sp.Expr:
    """A number of the spec: exact where it is whole, else the float it is.

    >>> real(50.0), real(0.5) == 0.5
    (50, True)
    """
    if float(value).is_integer() and abs(value) < _EXACT:
        return sp.Integer(int(value))
    return sp.Float(value)


def scalar(declared: Input) -> sp.Symbol:
    """The symbol of a run-time scalar: real for floats, integer for integers and booleans."""
    if DTYPES[declared.dtype].kind == "float":
        return sp.Symbol(declared.name, real=True)
    return sp.Symbol(declared.name, integer=True)


def element(declared: Input, *indices: sp.Expr) -> sp.Expr:
    """The element of an input at `indices` (none: the scalar itself)."""
    if not declared.shape:
        return scalar(declared)
    if DTYPES[declared.dtype].kind == "float":
        return sp.IndexedBase(declared.name, real=True)[indices]
    return sp.IndexedBase(declared.name, integer=True)[indices]


def mask_predicate(spec: AttentionSpec) -> Boolean:
    """When query `q` (row `row`) of batch `b`, head `h` may see key `k`: the And of the items.

    Raises SpecError for an expression without a real value (such as one that divides by q - q).
    """
    items = (
        _sound(partial(_mask_item, spec, item), spec, f"mask[{place}].expr")
        for place, item in enumerate(spec.mask)
    )
    return sp.And(*items)


def score_expression(spec: AttentionSpec) -> sp.Expr:
    """The score after the pipeline as a formula in `S`, the scaled q·k, in natural units.

    Raises SpecError for an expression without a real value (such as one that divides by q - q).
    """
    score: sp.Expr = S
    for place, item in enumerate(spec.score):
        step = partial(_score_item, spec, item, score)
        score = _sound(step, spec, f"score[{place}].expr")
    return score


def to_sympy(node: Node, inputs: Mapping[str, Input], score: sp.Expr = S) -> sp.Expr | Boolean:
    """The SymPy form of a checked expression; `score` stands for `s`."""
    return _Converter(inputs, score).expression(node)


def _mask_item(spec: AttentionSpec, item: MaskItem) -> Boolean:
    if isinstance(item, Causal):
        return sp.Le(K, Q)
    if isinstance(item, Same):
        declared = spec.input(item.input)
        lead = (B,) * (len(declared.shape) - 1)
        return sp.Eq(element(declared, *lead, Q), element(declared, *lead, K))
    if isinstance(item, Expr):
        return to_sympy(parse_expression(item.expr), _inputs(spec))
    sides: list[Boolean] = []
    if item.left is not None and item.left < NO_LIMIT:
        sides.append(sp.Ge(K, Q - item.left))
    if item.right is not None and item.right < NO_LIMIT:
        sides.append(sp.Le(K, Q + item.right))
    return sp.And(*sides)


def _score_item(spec: AttentionSpec, item: ScoreItem, score: sp.Expr) -> sp.Expr:
    if isinstance(item, Softcap):
        cap = real(item.cap)
        return cap * sp.tanh(score / cap)
    if isinstance(item, Alibi):
        return score - element(spec.input(item.input), H) * sp.Abs(Q - K)
    if isinstance(item, Bias):
        declared = spec.input(item.tensor)
        rank = len(declared.shape)
        return score + element(declared, *BIAS_INDICES[len(BIAS_INDICES) - rank :])
    return to_sympy(parse_expression(item.expr), _inputs(spec), score)


def _inputs(spec: AttentionSpec) -> dict[str, Input]:
    return {declared.name: declared for declared in spec.inputs}


def _sound(build: Callable[[], sp.Basic], spec: AttentionSpec, field: str) -> sp.Basic:
    """What `build` returns, if it is real everywhere as far as SymPy can tell."""
    problem = SpecProblem(
        spec.name or "<AttentionSpec>",
        0,
        0,
        field,
        "the expression has no real value",
        "look for a division by zero, or the logarithm of a negative number, after cancelling",
    )
    try:
        result = build()
    except (TypeError, ZeroDivisionError, ValueError) as error:
        raise SpecError([problem]) from error
    if result.has(sp.zoo, sp.nan, sp.oo, -sp.oo, sp.I):
        raise SpecError([problem])
    if not all(map(_fits_fp32, result.atoms(sp.Number) - result.atoms(sp.Integer))):
        message = "a number in the expression, once it is simplified, does not fit in fp32"
        raise SpecError([replace(problem, message=message, hint=None)])
    if _leaves_64_bits(result):
        message = "a whole number in the expression, once it is simplified, does not fit in 64 bits"
        hint = "write real numbers, with a decimal point"
        raise SpecError([replace(problem, message=message, hint=hint)])
    return result


def _fits_fp32(number: sp.Number) -> bool:
    try:
        return fits_fp32(float(number))
    except OverflowError:
        return False


def _leaves_64_bits(e: sp.Basic) -> bool:
    """Whether a number beyond 64 bits is added to, compared with or multiplies whole numbers."""
    if isinstance(e, sp.core.relational.Relational):
        whole = e.lhs.is_integer and e.rhs.is_integer
    else:
        whole = isinstance(e, (sp.floor, sp.ceiling)) or getattr(e, "is_integer", False)
    numbers = e.atoms(sp.Rational) if isinstance(e, (sp.floor, sp.ceiling)) else e.args
    if whole and any(
        n.is_Rational and max(abs(n.p), n.q) > MAX_INT64 for n in numbers if isinstance(n, sp.Expr)
    ):
        return True
    return any(map(_leaves_64_bits, e.args))


# SymPy compares each argument of Min and Max with each other: 120 of them took it a minute.
_MAX_COMPARED = 8


def _extremum(kind: type[sp.Expr], *values: sp.Expr) -> sp.Expr:
    count = sum(len(value.args) if isinstance(value, kind) else 1 for value in values)
    return kind(*values, evaluate=count <= _MAX_COMPARED)


_COMPARISONS: dict[str, Callable[[sp.Expr, sp.Expr], Boolean]] = {
    "<": sp.Lt,
    "<=": sp.Le,
    ">": sp.Gt,
    ">=": sp.Ge,
    "==": sp.Eq,
    "!=": sp.Ne,
}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_ARITHMETIC: dict[str, Callable[[sp.Expr, sp.Expr], sp.Expr]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": partial(_divided, FloorDiv),
    "%": partial(_divided, FloorMod),
}
_CALLS: dict[str, Callable[..., sp.Expr]] = {
    "abs": sp.Abs,
    "min": partial(_extremum, sp.Min),
    "max": partial(_extremum, sp.Max),
    "exp": sp.exp,
    "log": sp.log,
    "tanh": sp.tanh,
    "sigmoid": lambda x: 1 / (1 + sp.exp(-x)),
    "floor": sp.floor,
}


class _Converter:
    def __init__(self, inputs: Mapping[str, Input], score: sp.Expr) -> None:
        self.inputs = inputs
        self.score = score

    def expression(self, node: Node) -> sp.Expr | Boolean:
        if isinstance(node, (Compare, Not, Logic)) or self.is_boolean_read(node):
            return self.condition(node, holds=True)
        return self.number(node)

    def is_boolean_read(self, node: Node) -> bool:
        if not isinstance(node, (Name, Index)):
            return False
        declared = self.inputs.get(node.name)
        return declared is not None and DTYPES[declared.dtype].kind == "boolean"

    def number(self, node: Node) -> sp.Expr:  # noqa: PLR0911 - one return for each kind
        if isinstance(node, Number):
            return sp.Integer(node.value) if isinstance(node.value, int) else real(node.value)
        if isinstance(node, Name):
            if node.name in self.inputs:
                return element(self.inputs[node.name])
            return self.score if node.name == "s" else SYMBOLS[node.name]
        if isinstance(node, Index):
            return element(self.inputs[node.name], *map(self.number, node.indices))
        if isinstance(node, Negate):
            return -self.number(node.operand)
        if isinstance(node, Binary):
            return _ARITHMETIC[node.operator](self.number(node.left), self.number(node.right))
        if isinstance(node, Call) and node.function == "where":
            condition = self.condition(node.arguments[0], holds=True)
            return sp.Piecewise(
                (self.number(node.arguments[1]), condition), (self.number(node.arguments[2]), True)
            )
        if isinstance(node, Call):
            return _CALLS[node.function](*map(self.number, node.arguments))
        raise TypeError(f"not a number: {node!r}")

    def condition(self, node: Node, *, holds: bool) -> Boolean:
        """The condition that `node` holds, or that it does not."""
        if isinstance(node, Not):
            return self.condition(node.operand, holds=not holds)
        if isinstance(node, Logic):
            join = sp.And if (node.operator == "and") == holds else sp.Or
            return join(*(self.condition(part, holds=holds) for part in node.operands))
        if isinstance(node, Compare):
            values = [self.number(operand) for operand in node.operands]
            operators = node.operators if holds else [_OPPOSITE[name] for name in node.operators]
            links = (
                _COMPARISONS[operator](left, right)
                for operator, left, right in zip(operators, values, values[1:], strict=False)
            )
            return sp.And(*links) if holds else sp.Or(*links)
        compare = sp.Ne if holds else sp.Eq
        return compare(self.boolean_read(node), 0)

    def boolean_read(self, node: Node) -> sp.Expr:
        if isinstance(node, Name):
            return element(self.inputs[node.name])
        if isinstance(node, Index):
            return element(self.inputs[node.name], *map(self.number, node.indices))
        raise TypeError(f"not a condition: {node!r}")
