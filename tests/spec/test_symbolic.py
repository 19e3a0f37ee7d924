"""SymPy forms: the stated formulas, and agreement with a plain evaluator over the tree."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import sympy as sp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import INPUTS, conditions, declared, integers, reals

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec
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
    parse_expression,
    unparse,
)
from flashgen.spec.model import Input
from flashgen.spec.symbolic import (
    KV_LEN,
    Q_LEN,
    ROW,
    SYMBOLS,
    B,
    H,
    K,
    Q,
    S,
    element,
    mask_predicate,
    score_expression,
    to_sympy,
)

TABLES = {name: Input(name, tuple(shape), dtype) for name, (shape, dtype) in INPUTS.items()}


def spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(head_dim=64, dtype="bf16", **fields)


def test_no_mask_is_true_and_no_score_is_s() -> None:
    assert mask_predicate(spec()) == sp.true
    assert score_expression(spec()) == S


def test_causal() -> None:
    assert mask_predicate(spec(mask="causal")) == (K <= Q)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({"left": 3}, K >= Q - 3),
        ({"right": 0}, K <= Q),
        ({"left": 3, "right": 2}, sp.And(K >= Q - 3, K <= Q + 2)),
    ],
)
def test_window(window: dict[str, int], expected: sp.Basic) -> None:
    assert mask_predicate(spec(mask={"window": window})) == expected


@pytest.mark.parametrize(
    ("shape", "lead"), [(["kv_len"], ()), (["batch", "kv_len"], (B,)), ([1, "kv_len"], (B,))]
)
def test_same(shape: list[Any], lead: tuple[sp.Symbol, ...]) -> None:
    built = mask_predicate(
        spec(mask={"same": "doc"}, inputs={"doc": {"shape": shape, "dtype": "int32"}})
    )
    doc = sp.IndexedBase("doc", integer=True)
    assert built == sp.Eq(doc[(*lead, Q)], doc[(*lead, K)])


def test_mask_is_the_conjunction_of_its_items() -> None:
    built = mask_predicate(spec(mask=["causal", {"expr": "k // 8 == q // 8"}]))
    assert built == sp.And(K <= Q, sp.Eq(sp.floor(K / 8), sp.floor(Q / 8)))


def test_dense_boolean_mask() -> None:
    inputs = {"m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}}
    m = sp.IndexedBase("m", integer=True)
    built = mask_predicate(spec(mask={"expr": "m[b, h, row, k]"}, inputs=inputs))
    assert built == sp.Ne(m[B, H, ROW, K], 0)
    hidden = mask_predicate(spec(mask={"expr": "not m[b, h, row, k]"}, inputs=inputs))
    assert hidden == sp.Eq(m[B, H, ROW, K], 0)


def test_prefix_and_run_time_scalar() -> None:
    inputs = {
        "prefix": {"shape": ["batch"], "dtype": "int32"},
        "reach": {"shape": [], "dtype": "int32"},
    }
    built = mask_predicate(
        spec(mask={"expr": "k < prefix[b] or q - reach <= k <= q"}, inputs=inputs)
    )
    prefix = sp.IndexedBase("prefix", integer=True)
    reach = sp.Symbol("reach", integer=True)
    assert built == sp.Or(sp.Lt(K, prefix[B]), sp.And(sp.Le(Q - reach, K), sp.Le(K, Q)))


def test_not_moves_onto_the_comparisons() -> None:
    inputs = {"doc": {"shape": ["kv_len"], "dtype": "int32"}}
    doc = sp.IndexedBase("doc", integer=True)
    built = mask_predicate(spec(mask={"expr": "not (doc[k] == 0 and k <= q)"}, inputs=inputs))
    assert built == sp.Or(sp.Ne(doc[K], 0), K > Q)
    chained = mask_predicate(spec(mask={"expr": "not 3 <= k < q"}))
    assert chained == sp.Or(sp.Gt(3, K), sp.Ge(K, Q))


def test_score_items() -> None:
    inputs = {
        "slopes": {"shape": ["q_heads"], "dtype": "fp32"},
        "rel": {"shape": [1, "q_len", "kv_len"], "dtype": "bf16"},
        "bump": {"shape": [], "dtype": "fp32"},
    }
    slopes = sp.IndexedBase("slopes", real=True)
    rel = sp.IndexedBase("rel", real=True)
    assert score_expression(spec(score={"softcap": 50})) == 50 * sp.tanh(S / 50)
    assert score_expression(spec(score={"alibi": "slopes"}, inputs=inputs)) == S - slopes[
        H
    ] * sp.Abs(Q - K)
    assert (
        score_expression(spec(score={"bias": {"tensor": "rel"}}, inputs=inputs))
        == S + rel[H, ROW, K]
    )
    assert score_expression(
        spec(score={"bias": {"tensor": "bump"}}, inputs=inputs)
    ) == S + sp.Symbol("bump", real=True)


def test_score_is_a_pipeline_in_order() -> None:
    built = score_expression(spec(score=[{"expr": "s + 1"}, {"softcap": 2.0}, {"expr": "s * s"}]))
    assert built == 4 * sp.tanh((S + 1) / 2) ** 2


def test_functions() -> None:
    built = score_expression(
        spec(score={"expr": "where(k < 2, sigmoid(s), min(s, abs(s), max(s, 1))) + k % 3 + q // 2"})
    )
    expected = (
        sp.Piecewise((1 / (1 + sp.exp(-S)), K < 2), (sp.Min(S, sp.Abs(S), sp.Max(S, 1)), True))
        + sp.Mod(K, 3)
        + sp.floor(Q / 2)
    )
    assert built == expected


def test_many_arguments_of_max_are_not_compared_with_each_other() -> None:
    terms = ", ".join(f"k % {n}" for n in range(2, 150))
    built = score_expression(spec(score={"expr": f"s + max({terms})"}))  # else a minute
    assert built.subs({K: 149, S: 0}) == 74


def test_symbols_carry_what_is_known_of_them() -> None:
    assert S.is_real
    assert all(symbol.is_integer for name, symbol in SYMBOLS.items() if name != "s")
    assert Q_LEN.is_nonnegative
    assert KV_LEN.is_nonnegative
    assert Q.is_nonnegative is None


# The second opinion: values by plain recursion over the tree.

_BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def stored(name: str, indices: tuple[int, ...]) -> float | int | bool:
    """What the made-up input `name` holds."""
    mixed = sum((place + 2) * index for place, index in enumerate(indices)) + len(name)
    kind = TABLES[name].dtype
    if kind == "bool":
        return mixed % 3 == 0
    return mixed % 5 - 1 if kind == "int32" else (mixed % 7) / 8 - 0.25


def value(node: Node, at: dict[str, Any]) -> Any:
    match node:
        case Number(value=number):
            return number
        case Name(name=name):
            return stored(name, ()) if name in TABLES else at[name]
        case Index(name=name, indices=indices):
            return stored(name, tuple(value(index, at) for index in indices))
        case Negate(operand=operand):
            return -value(operand, at)
        case Not(operand=operand):
            return not value(operand, at)
        case Binary(operator=name, left=left, right=right):
            divisor = value(right, at)
            if name in ("//", "%") and divisor == 0:
                return 0  # as docs/spec.md says
            return _BINARY[name](value(left, at), divisor)
        case Logic(operator=name, operands=operands):
            values = [value(operand, at) for operand in operands]
            return all(values) if name == "and" else any(values)
        case Compare(operators=names, operands=operands):
            values = [value(operand, at) for operand in operands]
            return all(
                _COMPARE[name](left, right)
                for name, left, right in zip(names, values, values[1:], strict=False)
            )
        case Call(function=name, arguments=arguments):
            values = [value(argument, at) for argument in arguments]
            return {
                "abs": abs,
                "min": min,
                "max": max,
                "exp": math.exp,
                "log": math.log,
                "tanh": math.tanh,
                "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
                "floor": math.floor,
                "where": lambda c, a, b: a if c else b,
            }[name](*values)
    raise AssertionError(node)


def symbolic_value(built: sp.Basic, at: dict[str, Any]) -> sp.Basic:
    """`built` with every symbol and every read replaced by its value."""
    points = {SYMBOLS[name]: sp.sympify(number) for name, number in at.items()}
    for declared_input in TABLES.values():
        if not declared_input.shape:
            number = stored(declared_input.name, ())
            points[element(declared_input)] = sp.sympify(
                int(number) if number is True or number is False else number
            )
    built = built.xreplace(points)
    while reads := [
        read
        for read in built.atoms(sp.Indexed)
        if all(index.is_Integer for index in (simplified.doit() for simplified in read.indices))
    ]:
        built = built.xreplace(
            {
                read: sp.sympify(
                    int(number)
                    if isinstance(
                        number := stored(
                            read.base.label.name, tuple(int(i.doit()) for i in read.indices)
                        ),
                        bool,
                    )
                    else number
                )
                for read in reads
            }
        )
    return built.doit()


PLACES = st.fixed_dictionaries(
    {
        "s": st.floats(-4, 4).map(lambda x: round(x, 3)),
        "q": st.integers(-20, 60),
        "row": st.integers(0, 60),
        "k": st.integers(0, 60),
        "b": st.integers(0, 3),
        "h": st.integers(0, 7),
        "hk": st.integers(0, 7),
        "q_len": st.integers(0, 64),
        "kv_len": st.integers(0, 64),
    }
)


@settings(max_examples=150)
@given(conditions(4), PLACES)
def test_conditions_agree_with_the_tree(node: Node, at: dict[str, Any]) -> None:
    wanted = value(node, at)
    built = mask_predicate(spec(mask={"expr": unparse(node)}, inputs=declared()))
    assert bool(symbolic_value(built, at)) is wanted


@settings(max_examples=150)
@given(st.one_of(integers(4), reals(4)), PLACES)
def test_numbers_agree_with_the_tree(node: Node, at: dict[str, Any]) -> None:
    try:
        wanted = value(node, at)
    except (ArithmeticError, ValueError):
        assume(False)
    assume(abs(wanted) < 1e12)
    try:
        made = spec(score={"expr": unparse(node)}, inputs=declared())
    except SpecError as error:
        assert "not a finite number" in str(error)  # a constant part beyond fp32
        return
    got = symbolic_value(score_expression(made), at)
    assert float(got) == pytest.approx(float(wanted), rel=1e-6, abs=1e-6)


def test_to_sympy_takes_the_score_so_far() -> None:
    assert to_sympy(parse_expression("s * 2"), {}, S + 1) == 2 * S + 2
