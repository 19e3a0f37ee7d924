"""The expression language: structure, spelling, limits; Python's parser as second opinion."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import INPUTS, conditions, integers, reals

from flashgen.errors import SpecError
from flashgen.spec.expr import (
    MAX_DEPTH,
    MAX_LENGTH,
    Binary,
    Call,
    Compare,
    ExpressionError,
    Index,
    Logic,
    Name,
    Negate,
    Node,
    Not,
    Number,
    check_expression,
    parse_expression,
    unparse,
    walk,
)
from flashgen.spec.parts import Input

DECLARED = {name: Input(name, tuple(shape), dtype) for name, (shape, dtype) in INPUTS.items()}
WORDS = st.sampled_from(
    ("k", "q", "1", "2.5", "-", "+", "*", "/", "//", "%", "<", "==", "not", "and", "or", "(", ")")
)
NODES = st.one_of(integers(4), conditions(4), reals(4))

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "and",
    ast.Or: "or",
}


def as_python_reads(text: str) -> Node:
    """The tree that Python's parser gives for `text`."""
    return _converted(ast.parse(text, mode="eval").body)


def _converted(node: ast.expr) -> Node:
    match node:
        case ast.Constant(value=value):
            return Number(value)
        case ast.Name(id=name):
            return Name(name)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=indices)):
            return Index(name, tuple(map(_converted, indices)))
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            return Index(name, (_converted(index),))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return Call(name, tuple(map(_converted, arguments)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Negate(_converted(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Not(_converted(operand))
        case ast.BinOp(left=left, op=operator, right=right):
            return Binary(_OPERATORS[type(operator)], _converted(left), _converted(right))
        case ast.BoolOp(op=operator, values=values):
            name = "and" if isinstance(operator, ast.And) else "or"
            return Logic(name, tuple(map(_converted, values)))
        case ast.Compare(left=left, ops=operators, comparators=others):
            return Compare(
                tuple(_OPERATORS[type(operator)] for operator in operators),
                (_converted(left), *map(_converted, others)),
            )
    raise AssertionError(f"not in the language: {ast.dump(node)}")


@given(NODES)
def test_text_and_tree_round_trip(node: Node) -> None:
    text = unparse(node)
    if len(text) > MAX_LENGTH:
        return
    assert parse_expression(text) == node
    assert unparse(parse_expression(text)) == text


@given(NODES)
def test_precedence_is_pythons(node: Node) -> None:
    text = unparse(node)
    assert as_python_reads(text) == node


@given(st.lists(WORDS, max_size=9))
def test_reads_what_python_reads_the_same_way(words: list[str]) -> None:
    text = " ".join(words)
    try:
        tree = parse_expression(text)
    except ExpressionError:
        return
    assert as_python_reads(text) == tree


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("k<=q", "k <= q"),
        ("((k)) <= (q)", "k <= q"),
        ("q-(k-1)", "q - (k - 1)"),
        ("(q-k)-1", "q - k - 1"),
        ("-(k+1)", "-(k + 1)"),
        ("-k*2", "-k * 2"),
        ("k - -1", "k - -1"),
        ("not (k < q)", "not k < q"),
        ("(not a) == b", "(not a) == b"),
        ("a and (b or c) or not d", "a and (b or c) or not d"),
        ("(a and b) and c", "(a and b) and c"),
        ("0 <= k < q_len", "0 <= k < q_len"),
        ("(a < b) < c", "(a < b) < c"),
        ("k//64==q//64", "k // 64 == q // 64"),
        ("m[ b,h ,row,k ]", "m[b, h, row, k]"),
        ("where(k<q,1,2.50)", "where(k < q, 1, 2.5)"),
        (".5 + 1. + 1e3 + 2E-3", "0.5 + 1.0 + 1000.0 + 0.002"),
        ("k\n  <=\tq", "k <= q"),
    ],
)
def test_canonical_spelling(text: str, canonical: str) -> None:
    assert unparse(parse_expression(text)) == canonical


def test_columns_point_into_the_text() -> None:
    tree = parse_expression("a and doc[b, k] == 1")
    columns = {unparse(node): node.column for node in walk(tree)}
    assert columns["a"] == 1
    assert columns["doc[b, k]"] == 7
    assert columns["b"] == 11
    assert columns["k"] == 14
    assert columns["1"] == 20


@pytest.mark.parametrize(
    ("text", "column"),
    [("k < ", 5), ("k $ q", 3), ("k < q)", 6), ("doc[b", 6), ("k < 9999999999", 5), ("", 1)],
)
def test_errors_carry_the_column(text: str, column: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text)
    assert caught.value.column == column
    assert caught.value.problems[0].column == column


def test_depth_is_limited_exactly() -> None:
    deepest = "-" * (MAX_DEPTH - 1) + "k"
    assert parse_expression(deepest).depth == MAX_DEPTH
    with pytest.raises(ExpressionError, match="nested more than 32"):
        parse_expression("-" + deepest)


def test_parentheses_alone_are_limited_too() -> None:
    with pytest.raises(ExpressionError, match="nested more than 32"):
        parse_expression("(" * 900 + "k" + ")" * 900)


def test_length_is_limited_exactly() -> None:
    text = "k < 1" + " " * (MAX_LENGTH - 5)
    assert parse_expression(text) == parse_expression("k < 1")
    with pytest.raises(ExpressionError, match="2001 characters long"):
        parse_expression(text + " ")


def test_a_long_disjunction_is_not_deep() -> None:
    text = " or ".join(f"k == {n}" for n in range(170))
    assert parse_expression(text).depth == 3


@given(st.text(max_size=80))
def test_any_text_is_an_expression_or_a_spec_error(text: str) -> None:
    try:
        tree = parse_expression(text)
    except SpecError:
        return
    check_expression(tree, DECLARED, "score")


@given(st.text("kq sbdoc[](),.+-*/%<>=!0123456789e_notandorwherefloormaxabs\n", max_size=60))
def test_any_likely_text_is_an_expression_or_a_spec_error(text: str) -> None:
    try:
        tree = parse_expression(text)
    except SpecError:
        return
    for place in ("mask", "score"):
        for fault in check_expression(tree, DECLARED, place).faults:
            assert 1 <= fault.column <= len(text)


@given(st.one_of(integers(4), reals(4)))
def test_numbers_pass_the_check_of_a_score(node: Node) -> None:
    faults = check_expression(node, DECLARED, "score").faults
    allowed = ("divides by zero", "is not a number that fp32 can hold")
    assert [fault for fault in faults if not fault.message.endswith(allowed)] == []


@given(conditions(4))
def test_conditions_pass_the_check_of_a_mask(node: Node) -> None:
    assert check_expression(node, DECLARED, "mask").faults == ()


def test_all_faults_of_an_expression_are_found() -> None:
    meaning = check_expression(
        parse_expression("kk < qq and doc[k] + (b < 1) == 0"), DECLARED, "mask"
    )
    assert [fault.column for fault in meaning.faults] == [1, 6, 13, 25]


def test_reads_lists_every_read_of_an_input() -> None:
    meaning = check_expression(
        parse_expression("doc[b, k] == doc[b, q] and k < reach"), DECLARED, "mask"
    )
    assert [unparse(read) for read in meaning.reads] == ["doc[b, k]", "doc[b, q]", "reach"]


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("1 < 2", True),
        ("1 < 2 < 1", False),
        ("not 7 // 2 == 3", False),
        ("-7 // 2 == -4 and -7 % 3 == 2", True),
        ("max(1, 2, 3) == abs(-3) and floor(2.5) == 2", True),
        ("where(1 < 2, 3, 4) == 3 and sigmoid(0) == 0.5 and exp(0) == 1", True),
        ("log(1) == 0 or tanh(0) == 1", True),
        ("k < 1", None),
    ],
)
def test_constants_are_folded(text: str, constant: bool | None) -> None:
    assert check_expression(parse_expression(text), {}, "mask").constant is constant


def test_a_faulty_declaration_is_not_reported_twice() -> None:
    meaning = check_expression(parse_expression("doc[b, k] == x"), {"doc": None, "x": None}, "mask")
    assert meaning.faults == ()
