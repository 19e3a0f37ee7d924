"""The expression language of masks and scores: text -> a small frozen tree, and back.

Nothing is evaluated: an own tokenizer and a precedence parser build the tree, with limits on length
and depth, and `check_expression` proves that it means something (names, indices, kinds).

Grammar, loosest first, with Python's precedence and meaning::

    a or b    a and b    not a                 of conditions
    < <= > >= == !=                            of numbers; chains as in a <= b < c
    + -    * / // %    -a                      of numbers; // and % round towards minus infinity
    abs(x) exp(x) log(x) tanh(x) sigmoid(x) floor(x)  min(x, y, …) max(x, y, …)
    where(condition, x, y)                     x where the condition holds, else y
    doc[b, k]                                  an input, one integer index for each axis

Symbols are s (in scores), q, row, k, b, h, hk, q_len, kv_len; an input of shape [] is read by its
bare name. A read outside an input is never made: in a mask the comparison (or boolean read) that
contains it does not hold, after every `not` has been moved onto the comparisons (so such a read can
only hide a key); in a score the read gives 0.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from flashgen.dtypes import DTYPES
from flashgen.errors import SpecError, SpecProblem
from flashgen.spec.parts import FUNCTIONS, MAX_FP32, MAX_INT64, MIN_FP32, SYMBOLS, Input

MAX_LENGTH = 2000
MAX_DEPTH = 32
MAX_INTEGER = 2**31 - 1  # positions are int32 on the device, so integer literals are too

Place = Literal["mask", "score"]
Kind = Literal["condition", "integer", "real", "unknown"]


class ExpressionError(SpecError):
    """Text that is not an expression; `column` counts from 1 inside the text."""

    def __init__(self, column: int, message: str, hint: str | None = None) -> None:
        self.column, self.message, self.hint = column, message, hint
        super().__init__([SpecProblem("<expression>", 1, column, "", message, hint)])


@dataclass(frozen=True)
class ExpressionFault:
    """Something in a well-formed expression that has no meaning; `column` counts from 1."""

    column: int
    message: str
    hint: str | None = None


# -------------------------------------------------------------------------------------------------
# The tree


@dataclass(frozen=True)
class Node:
    """A part of an expression; `column` is where it stands in the text and is not compared."""

    column: int = field(default=0, compare=False, repr=False, kw_only=True)

    @property
    def children(self) -> tuple[Node, ...]:
        """The parts of this part, in the order of the text."""
        return ()

    @cached_property
    def depth(self) -> int:
        """Levels of this tree; a name or number has 1."""
        return 1 + max((child.depth for child in self.children), default=0)


@dataclass(frozen=True)
class Number(Node):
    """A literal: an int is an integer, a float a real number."""

    value: int | float


@dataclass(frozen=True)
class Name(Node):
    """A symbol, or an input of shape []."""

    name: str


@dataclass(frozen=True)
class Index(Node):
    """An element of an input."""

    name: str
    indices: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.indices


@dataclass(frozen=True)
class Call(Node):
    """One of `FUNCTIONS` of its arguments."""

    function: str
    arguments: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.arguments


@dataclass(frozen=True)
class Negate(Node):
    """-operand."""

    operand: Node

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class Binary(Node):
    """left operator right, with one of + - * / // %."""

    operator: str
    left: Node
    right: Node

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.left, self.right)


@dataclass(frozen=True)
class Compare(Node):
    """A chain: operands[0] operators[0] operands[1] operators[1] …, all of which must hold."""

    operators: tuple[str, ...]
    operands: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.operands


@dataclass(frozen=True)
class Not(Node):
    """The condition does not hold."""

    operand: Node

    @property
    def children(self) -> tuple[Node, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class Logic(Node):
    """All (`and`) or some (`or`) of the operands hold; two or more."""

    operator: Literal["and", "or"]
    operands: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        return self.operands


def walk(node: Node) -> Iterator[Node]:
    """`node` and every part of it, each before its own parts."""
    yield node
    for child in node.children:
        yield from walk(child)


# -------------------------------------------------------------------------------------------------
# Text -> tokens

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:"
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<operator>//|<=|>=|==|!=|\*\*|&&|\|\||<>|<<|>>|[-+*/%<>()\[\],=!&|~^?:;.@{}])"
    r"|(?P<end>\Z))"
)
_OPERATORS = frozenset(
    ("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", "(", ")", "[", "]", ",")
)
_KEYWORDS = frozenset(("and", "or", "not"))
_OPERATOR_HINTS = {
    "**": "write a product; exp(x * log(y)) is y to the power x",
    "&&": "write 'and'",
    "&": "write 'and'",
    "||": "write 'or'",
    "|": "write 'or'",
    "!": "write 'not'",
    "~": "write 'not'",
    "=": "write '==' to compare",
    "<>": "write '!='",
    "?": "write where(condition, a, b)",
    ".": "functions are called by their bare name, for example exp(x)",
}
_WORD_HINTS = {
    "if": "write where(condition, a, b)",
    "is": "write '=='",
    "in": "write 'low <= x and x <= high', or compare with each value",
}


@dataclass(frozen=True)
class _Token:
    kind: Literal["number", "name", "operator", "end"]
    text: str
    column: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else f"'{_clip(self.text)}'"


def _clip(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(text, position)
        if match is None:
            position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n"))
            found = text[position]
            shown = f"'{found}'" if found.isprintable() else f"the character U+{ord(found):04X}"
            raise ExpressionError(position + 1, f"{shown} has no meaning in an expression")
        kind = match.lastgroup
        token = _Token(kind, match[kind], match.start(kind) + 1)  # type: ignore[arg-type, index]
        if kind == "operator" and token.text not in _OPERATORS:
            raise ExpressionError(
                token.column,
                f"{token} has no meaning in an expression",
                _OPERATOR_HINTS.get(token.text),
            )
        position = match.end()
        if kind == "number":
            after = text[position : position + 1]
            leading_zero = re.match(r"0[0-9]", token.text) and token.text.isdigit()
            if after.isalnum() or after in {"_", "."} or leading_zero:
                raise ExpressionError(
                    token.column,
                    f"'{_clip(token.text + after)}' is not a number",
                    "write decimal numbers such as 4095, 0.1 or 1e-3",
                )
        tokens.append(token)
    return tokens


# -------------------------------------------------------------------------------------------------
# Tokens -> tree


class _Parser:
    """Recursive descent; every step that recurses counts towards `MAX_DEPTH`."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.position = 0
        self.nesting = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def at(self, *texts: str) -> bool:
        return self.token.kind in {"operator", "name"} and self.token.text in texts

    def take(self) -> _Token:
        token = self.token
        self.position += 1
        return token

    def expect(self, text: str, opened: _Token) -> None:
        if not self.at(text):
            raise ExpressionError(
                self.token.column,
                f"expected '{text}', got {self.token}",
                self.hint() or f"'{opened.text}' was opened at column {opened.column}",
            )
        self.take()

    def hint(self) -> str | None:
        return _WORD_HINTS.get(self.token.text)

    def enter(self, token: _Token) -> None:
        self.nesting += 1
        if self.nesting > MAX_DEPTH:
            raise _too_deep(token.column)

    def made(self, node: Node) -> Node:
        if node.depth > MAX_DEPTH:
            raise _too_deep(node.column)
        return node

    def parse(self) -> Node:
        if self.tokens[0].kind == "end":
            raise ExpressionError(1, "the expression is empty")
        node = self.disjunction()
        rest = self.token
        if rest.kind != "end":
            message = f"expected an operator or the end, got {rest}"
            raise ExpressionError(rest.column, message, self.hint())
        return node

    def disjunction(self) -> Node:
        return self.logic("or", self.conjunction)

    def conjunction(self) -> Node:
        return self.logic("and", self.negation)

    def logic(self, operator: Literal["and", "or"], parse: Callable[[], Node]) -> Node:
        first = parse()
        operands = [first]
        column = self.token.column
        while self.at(operator):
            self.take()
            operands.append(parse())
        if len(operands) == 1:
            return first
        return self.made(Logic(operator, tuple(operands), column=column))

    def negation(self) -> Node:
        if not self.at("not"):
            return self.comparison()
        token = self.take()
        self.enter(token)
        operand = self.negation()
        self.nesting -= 1
        return self.made(Not(operand, column=token.column))

    def comparison(self) -> Node:
        operands = [self.sum()]
        operators: list[str] = []
        column = self.token.column
        while self.at("<", "<=", ">", ">=", "==", "!="):
            operators.append(self.take().text)
            operands.append(self.sum())
        if not operators:
            return operands[0]
        return self.made(Compare(tuple(operators), tuple(operands), column=column))

    def sum(self) -> Node:
        node = self.product()
        while self.at("+", "-"):
            token = self.take()
            node = self.made(Binary(token.text, node, self.product(), column=token.column))
        return node

    def product(self) -> Node:
        node = self.unary()
        while self.at("*", "/", "//", "%"):
            token = self.take()
            node = self.made(Binary(token.text, node, self.unary(), column=token.column))
        return node

    def unary(self) -> Node:
        if not self.at("-"):
            return self.primary()
        token = self.take()
        self.enter(token)
        operand = self.unary()
        self.nesting -= 1
        return self.made(Negate(operand, column=token.column))

    def primary(self) -> Node:
        token = self.token
        if token.kind == "number":
            return self.number(self.take())
        if token.kind == "name" and token.text not in _KEYWORDS:
            self.take()
            if self.at("("):
                return self.made(Call(token.text, self.listed(")"), column=token.column))
            if self.at("["):
                return self.made(Index(token.text, self.listed("]"), column=token.column))
            return Name(token.text, column=token.column)
        if self.at("("):
            self.take()
            self.enter(token)
            node = self.disjunction()
            self.nesting -= 1
            self.expect(")", token)
            return node
        hint = "write (not …) in parentheses here" if self.at("not") else self.hint()
        raise ExpressionError(token.column, f"expected a number, a name or '(', got {token}", hint)

    def listed(self, closing: str) -> tuple[Node, ...]:
        opened = self.take()
        self.enter(opened)
        items: list[Node] = []
        if not self.at(closing):
            items.append(self.disjunction())
            while self.at(","):
                self.take()
                items.append(self.disjunction())
        self.nesting -= 1
        self.expect(closing, opened)
        return tuple(items)

    def number(self, token: _Token) -> Node:
        if token.text.isdigit():
            if len(token.text) > 10 or int(token.text) > MAX_INTEGER:
                raise ExpressionError(
                    token.column,
                    f"{_clip(token.text)} is too large for an integer (at most {MAX_INTEGER})",
                    "write it with a decimal point if it is a real number",
                )
            return Number(int(token.text), column=token.column)
        value = float(token.text)
        mantissa = re.split("[eE]", token.text)[0]
        if value < MIN_FP32 and mantissa.strip("0."):
            message = f"{_clip(token.text)} is too small for fp32 (0, or at least 1.2e-38)"
            raise ExpressionError(token.column, message)
        if value > MAX_FP32:
            raise ExpressionError(
                token.column, f"{_clip(token.text)} is too large for fp32 (at most 3.4e38)"
            )
        return Number(value, column=token.column)


def _too_deep(column: int) -> ExpressionError:
    return ExpressionError(
        column,
        f"nested more than {MAX_DEPTH} levels deep",
        "a sum or product of n terms is n levels deep; split it over several items",
    )


def parse_expression(text: str) -> Node:
    """The tree of `text`; ExpressionError (a SpecError, with `column`) when it is not one.

    >>> parse_expression("k <= q")
    Compare(operators=('<=',), operands=(Name(name='k'), Name(name='q')))
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            1,
            f"{len(text)} characters long, at most {MAX_LENGTH} are allowed",
            "split it over several items, or pass a table as an input",
        )
    node = _Parser(text).parse()
    if len(unparse(node)) > MAX_LENGTH:
        raise ExpressionError(
            1,
            f"{len(unparse(node))} characters long in canonical spelling, "
            f"at most {MAX_LENGTH} are allowed",
            "split it over several items, or pass a table as an input",
        )
    return node


# -------------------------------------------------------------------------------------------------
# Tree -> text

_ATOM, _UNARY, _PRODUCT, _SUM, _COMPARE, _NOT, _AND, _OR = range(8, 0, -1)


def _level(node: Node) -> int:
    if isinstance(node, Logic):
        return _AND if node.operator == "and" else _OR
    if isinstance(node, Binary):
        return _SUM if node.operator in {"+", "-"} else _PRODUCT
    levels: dict[type[Node], int] = {Not: _NOT, Compare: _COMPARE, Negate: _UNARY}
    return levels.get(type(node), _ATOM)


def unparse(node: Node) -> str:  # noqa: PLR0911 - one return for each kind
    """The canonical spelling: one space around operators, only the parentheses that are needed.

    >>> unparse(parse_expression("((k))<=q  and not(b==0)"))
    'k <= q and not b == 0'
    """
    if isinstance(node, Number):
        return repr(node.value)
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Index):
        return f"{node.name}[{', '.join(map(unparse, node.indices))}]"
    if isinstance(node, Call):
        return f"{node.function}({', '.join(map(unparse, node.arguments))})"
    level = _level(node)
    if isinstance(node, Negate):
        return "-" + _wrapped(node.operand, level)
    if isinstance(node, Not):
        return "not " + _wrapped(node.operand, level)
    if isinstance(node, Binary):
        return f"{_wrapped(node.left, level)} {node.operator} {_wrapped(node.right, level + 1)}"
    if isinstance(node, Compare):
        parts = [_wrapped(node.operands[0], level + 1)]
        for operator, operand in zip(node.operators, node.operands[1:], strict=True):
            parts += [operator, _wrapped(operand, level + 1)]
        return " ".join(parts)
    if isinstance(node, Logic):
        return f" {node.operator} ".join(_wrapped(part, level + 1) for part in node.operands)
    raise TypeError(f"not a node of an expression: {node!r}")


def _wrapped(node: Node, least: int) -> str:
    text = unparse(node)
    return text if _level(node) >= least else f"({text})"


# -------------------------------------------------------------------------------------------------
# What a tree means


@dataclass(frozen=True)
class Meaning:
    """What `check_expression` found: all faults, the inputs read, and the value if constant."""

    faults: tuple[ExpressionFault, ...]
    reads: tuple[Index | Name, ...]
    constant: bool | float | None


@dataclass(frozen=True)
class _Value:
    kind: Kind
    constant: bool | int | float | None = None


_UNKNOWN = _Value("unknown")
_TO_NUMBER = "where(condition, 1, 0) turns a condition into a number"
_TO_CONDITION = "compare it, for example x != 0"
_NAME_HINTS = {
    "true": "a condition that always holds is left out",
    "false": "a condition that never holds would hide every key",
    "pi": "write the number",
    "i": "the query's position is called q, its row is row",
    "j": "the key's position is called k",
    "q_idx": "the query's position is called q, its row is row",
    "kv_idx": "the key's position is called k",
    "k_idx": "the key's position is called k",
    "col": "the key's position is called k",
    "score": "the score is called s",
    "head": "the query head is called h",
    "batch": "the batch index is called b",
    "softcap": "write a score item: {softcap: 50.0}",
    "sqrt": "write exp(0.5 * log(x))",
    "pow": "write a product, or exp(y * log(x))",
    "log2": "write 1.4426950408889634 * log(x)",
    "exp2": "write exp(0.6931471805599453 * x)",
    "int": "write floor(x)",
    "float": "numbers mix freely; leave the conversion out",
    "clamp": "write min(max(x, low), high)",
    "sigmoid_": "write sigmoid(x)",
}


class _Checker:
    def __init__(self, inputs: Mapping[str, Input | None], place: Place) -> None:
        self.inputs = inputs
        self.place = place
        self.faults: list[ExpressionFault] = []
        self.reads: list[Index | Name] = []
        self.indexing = 0

    def fault(self, node: Node, message: str, hint: str | None = None) -> _Value:
        self.faults.append(ExpressionFault(node.column, message, hint))
        return _UNKNOWN

    def value(self, node: Node) -> _Value:  # noqa: PLR0911 - one return for each kind
        """Kind and, where no name occurs, value of `node`; faults are collected on the way."""
        if isinstance(node, Number):
            return _Value("integer" if isinstance(node.value, int) else "real", node.value)
        if isinstance(node, Name):
            return self.name(node)
        if isinstance(node, Index):
            return self.index(node)
        if isinstance(node, Call):
            return self.call(node)
        if isinstance(node, Negate):
            operand = self.numeric(node.operand, "'-'")
            return self.folded(node, operand.kind, (operand,))
        if isinstance(node, Binary):
            return self.binary(node)
        if isinstance(node, Compare):
            values = tuple(
                self.numeric(operand, f"'{node.operators[max(place - 1, 0)]}'")
                for place, operand in enumerate(node.operands)
            )
            return self.folded(node, "condition", values)
        if isinstance(node, Not):
            return self.folded(node, "condition", (self.condition(node.operand, "'not'"),))
        assert isinstance(node, Logic)
        values = tuple(self.condition(part, f"'{node.operator}'") for part in node.operands)
        return self.folded(node, "condition", values)

    def numeric(self, node: Node, user: str) -> _Value:
        value = self.value(node)
        if value.kind == "condition":
            text = _clip(unparse(node))
            return self.fault(node, f"{user} needs numbers, '{text}' is a condition", _TO_NUMBER)
        return value

    def condition(self, node: Node, user: str) -> _Value:
        value = self.value(node)
        if value.kind in {"integer", "real"}:
            text = _clip(unparse(node))
            return self.fault(node, f"{user} needs conditions, '{text}' is a number", _TO_CONDITION)
        return value

    def name(self, node: Name) -> _Value:  # noqa: PLR0911 - one return for each kind
        name = node.name
        if name in self.inputs:
            declared = self.inputs[name]
            self.reads.append(node)
            if declared is None:
                return _UNKNOWN
            if declared.shape:
                axes = ", ".join(map(str, declared.shape))
                return self.fault(
                    node,
                    f"'{name}' has shape [{axes}] and needs {_count(len(declared.shape), 'index')}",
                    f"write {name}[…], with one index for each axis",
                )
            return _Value(_input_kind(declared))
        if name == "s":
            if self.place == "mask":
                return self.fault(
                    node,
                    "'s' is the score, which a mask cannot see",
                    "a mask may use q, row, k, b, h, hk, q_len, kv_len and inputs",
                )
            if self.indexing:
                return self.fault(node, "'s' is the score, which cannot be part of an index")
            return _Value("real")
        if name in SYMBOLS:
            return _Value("integer")
        if name in FUNCTIONS:
            return self.fault(node, f"'{name}' is a function", f"write {name}(…)")
        return self.unknown(node, name, "is not a symbol or a declared input")

    def unknown(self, node: Node, name: str, what: str) -> _Value:
        known = [name for name in SYMBOLS if name != "s" or self.place == "score"]
        known += list(self.inputs)
        if isinstance(node, Call):
            known = list(FUNCTIONS)
        if isinstance(node, Index):
            known = list(self.inputs)
        hint = _NAME_HINTS.get(name) or _NAME_HINTS.get(name.lower())
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if hint is None and close:
            hint = f"did you mean '{close[0]}'?"
        if hint is None and isinstance(node, Call):
            hint = f"allowed: {', '.join(FUNCTIONS)}"
        if hint is None:
            declared = f"; inputs: {', '.join(self.inputs)}" if self.inputs else ""
            symbols = ", ".join(symbol for symbol in known if symbol in SYMBOLS)
            hint = (
                "declare it under inputs"
                if isinstance(node, Index)
                else f"symbols: {symbols}{declared}"
            )
        return self.fault(node, f"'{_clip(name)}' {what}", hint)

    def index(self, node: Index) -> _Value:
        self.indexing += 1
        values = [self.value(part) for part in node.indices]
        self.indexing -= 1
        for part, value in zip(node.indices, values, strict=True):
            if value.kind in {"real", "condition"}:
                kind = "a condition" if value.kind == "condition" else "a real number"
                self.fault(
                    part,
                    f"'{_clip(unparse(part))}' is {kind}, an index must be an integer",
                    "floor(x) and // give integers",
                )
        if node.name not in self.inputs:
            if node.name in SYMBOLS or node.name in FUNCTIONS:
                return self.fault(
                    node,
                    f"'{node.name}' is not an input, so it cannot be indexed",
                    f"write {node.name}(…)" if node.name in FUNCTIONS else None,
                )
            return self.unknown(node, node.name, "is not a declared input")
        self.reads.append(node)
        declared = self.inputs[node.name]
        if declared is None:
            return _UNKNOWN
        if len(node.indices) != len(declared.shape):
            axes = ", ".join(map(str, declared.shape))
            return self.fault(
                node,
                f"'{node.name}' has shape [{axes}] and needs "
                f"{_count(len(declared.shape), 'index')}, got {len(node.indices)}",
                None if declared.shape else f"a run-time scalar is read as {node.name}",
            )
        return _Value(_input_kind(declared))

    def call(self, node: Call) -> _Value:
        function = node.function
        if function not in FUNCTIONS:
            for part in node.arguments:
                self.value(part)
            if function in self.inputs:
                self.reads.append(Name(function, column=node.column))
                return self.fault(
                    node, f"'{function}' is an input", f"write {function}[…] to read it"
                )
            if function in SYMBOLS:
                return self.fault(node, f"'{function}' is a symbol, not a function")
            return self.unknown(node, function, "is not a function")
        if function == "where" and node.arguments:
            values = (
                self.condition(node.arguments[0], "where"),
                *(self.numeric(part, "where") for part in node.arguments[1:]),
            )
        else:
            values = tuple(self.numeric(part, function) for part in node.arguments)
        least, most = FUNCTIONS[function]
        if len(values) < least or (most is not None and len(values) > most):
            wanted = _count(least, "argument") if least == most else f"at least {least} arguments"
            return self.fault(node, f"{function} needs {wanted}, got {len(values)}")
        numbers = values[1:] if function == "where" else values
        kind: Kind = "real"
        if function == "floor":
            kind = "integer"
        elif function in {"abs", "min", "max", "where"}:
            kind = _common(numbers)
        return self.folded(node, kind, values)

    def binary(self, node: Binary) -> _Value:
        values = (
            self.numeric(node.left, f"'{node.operator}'"),
            self.numeric(node.right, f"'{node.operator}'"),
        )
        kind = _common(values)
        if node.operator == "/" and kind != "unknown":
            kind = "real"
        if node.operator == "//":
            kind = "integer"
        if node.operator in {"/", "//", "%"} and values[1].constant == 0:
            return self.fault(node, f"'{node.operator}' divides by zero")
        return self.folded(node, kind, values)

    def folded(self, node: Node, kind: Kind, values: tuple[_Value, ...]) -> _Value:
        """The value of `node` if those of its parts are known; not finite in fp32 is a fault."""
        constants = [value.constant for value in values]
        known = [constant for constant in constants if constant is not None]
        if not known or len(known) != len(constants):
            return _Value(kind)
        try:
            result = _fold(node, known)
        except (ArithmeticError, ValueError):
            result = math.nan
        if not isinstance(result, bool) and not fits_fp32(result):
            return self.fault(node, f"'{_clip(unparse(node))}' is not a number that fp32 can hold")
        if kind == "integer" and abs(result) > MAX_INT64:
            message = f"'{_clip(unparse(node))}' does not fit in 64 bits"
            return self.fault(node, message, "write real numbers, with a decimal point")
        return _Value(kind, result)


def fits_fp32(value: float) -> bool:
    """Whether fp32 can hold a number with all its digits."""
    return value == 0 or MIN_FP32 <= abs(value) <= MAX_FP32


def _count(number: int, noun: str) -> str:
    plural = {"index": "indices"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"


def _input_kind(declared: Input) -> Kind:
    kinds: dict[str, Kind] = {"float": "real", "integer": "integer", "boolean": "condition"}
    return kinds[DTYPES[declared.dtype].kind]


def _common(values: tuple[_Value, ...]) -> Kind:
    kinds = {value.kind for value in values}
    if "real" in kinds:
        return "real"
    return "unknown" if "unknown" in kinds else "integer"


def _fold(node: Node, values: list[bool | int | float]) -> bool | int | float:
    if isinstance(node, Negate):
        return -values[0]
    if isinstance(node, Not):
        return not values[0]
    if isinstance(node, Logic):
        return all(values) if node.operator == "and" else any(values)
    if isinstance(node, Compare):
        pairs = zip(node.operators, values, values[1:], strict=False)
        return all(_COMPARISONS[operator](left, right) for operator, left, right in pairs)
    if isinstance(node, Binary):
        return _ARITHMETIC[node.operator](values[0], values[1])
    assert isinstance(node, Call)
    return _CALLS[node.function](*values)


_COMPARISONS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_ARITHMETIC = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: math.floor(a // b),
    "%": lambda a, b: a % b,
}
_CALLS: dict[str, Callable[..., bool | int | float]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)),
    "floor": math.floor,
    "where": lambda condition, a, b: a if condition else b,
}


def check_expression(node: Node, inputs: Mapping[str, Input | None], place: Place) -> Meaning:
    """Everything in `node` that has no meaning in `place`, and what it reads.

    `inputs` are the declared ones; None stands for one whose declaration is itself at fault, about
    which nothing is said twice.
    """
    checker = _Checker(inputs, place)
    value = checker.value(node)
    if place == "mask" and value.kind in {"integer", "real"}:
        checker.fault(
            node, "a mask needs a condition (true: visible), this is a number", _TO_CONDITION
        )
    if place == "score" and value.kind == "condition":
        checker.fault(
            node, "a score needs a number, this is a condition", "hide keys with mask, not score"
        )
    return Meaning(tuple(checker.faults), tuple(checker.reads), value.constant)
