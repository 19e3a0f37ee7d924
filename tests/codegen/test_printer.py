"""Printed expressions against SymPy: the text, run on arrays, gives what the expression means.

`tl` is emulated with C's rounding of integer division, which is the device's, and Triton's: what
the printer does about negative positions is tested here, not what numpy would do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy as sp
from hypothesis import assume, given, settings
from spec.strategies import conditions, declared, integers

from flashgen.codegen.expr import TritonPrinter, clear_denominators, is_nonnegative
from flashgen.codegen.integers import steps
from flashgen.spec import symbolic as sym
from flashgen.spec.expr import Index, Node, parse_expression, walk
from flashgen.spec.model import AttentionSpec
from flashgen.spec.symbolic import to_sympy

SPEC = AttentionSpec(head_dim=16, dtype="fp32", inputs=declared())
INPUTS = {i.name: i for i in SPEC.inputs}


class Device(np.ndarray):
    """An array whose // and % truncate, as on the device, and that has `.to`."""

    def __floordiv__(self, other: Any) -> Any:
        return divided(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return divided(other, self)

    def __mod__(self, other: Any) -> Any:
        return self - divided(self, other) * other

    def __rmod__(self, other: Any) -> Any:
        return other - divided(other, self) * self

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)


def divided(a: Any, b: Any) -> Any:
    """a / b towards zero; a number that a device may give differently where b is 0."""
    b = np.where(np.asarray(b) == 0, -77, b)
    return (np.sign(a) * np.sign(b) * (np.abs(a).view(np.ndarray) // np.abs(b))).view(Device)


def device(value: Any) -> Any:
    return np.asarray(value).view(Device)


def floor_mod(a: Any, b: Any) -> Any:
    """The text of the module's helper, in this emulation."""
    r = device(a) % b
    return np.where((r != 0) & ((r < 0) != (np.asarray(b) < 0)), r + b, r).view(Device)


def floor_div(a: Any, b: Any) -> Any:
    return (device(a) - floor_mod(a, b)) // b


TL = SimpleNamespace(
    abs=np.abs,
    exp=np.exp,
    exp2=np.exp2,
    log=np.log,
    log2=np.log2,
    sqrt=np.sqrt,
    floor=np.floor,
    maximum=np.maximum,
    minimum=np.minimum,
    where=lambda c, a, b: np.where(c, a, b).view(Device),
    float32=np.float64,
    int32=np.int64,
    int64=np.int64,
)
FUNCTIONS = {"tl": TL, "floor_div": floor_div, "floor_mod": floor_mod, "tanh": np.tanh}


def run(e: sp.Basic, values: Mapping[sp.Symbol, Any], *, precise: bool = False) -> Any:
    """The printed text of `e`, evaluated with each symbol as an array."""
    names = {symbol: symbol.name for symbol in values}
    text = TritonPrinter(names, precise=precise).doprint(e)
    places = {symbol.name: device(value) for symbol, value in values.items()}
    with np.errstate(all="ignore"):
        return eval(text, {**FUNCTIONS, **places})  # the printer's own text


POSITIONS = {
    sym.Q: np.array([-7, -3, -1, 0, 2, 5, 40]),
    sym.ROW: np.array([0, 1, 2, 3, 4, 5, 6]),
    sym.K: np.array([0, 4, 1, 7, 30, 2, 12]),
    sym.B: np.array([0, 0, 1, 1, 2, 2, 3]),
    sym.H: np.array([0, 5, 1, 3, 2, 4, 6]),
    sym.HK: np.array([0, 2, 0, 1, 1, 2, 3]),
    sym.Q_LEN: np.array([7] * 7),
    sym.KV_LEN: np.array([31] * 7),
}
SCALARS = {sym.scalar(i): i.dtype for i in SPEC.inputs if not i.shape}
VALUES = POSITIONS | {
    s: np.array([3] * 7) if d != "bool" else np.array([1] * 7) for s, d in SCALARS.items()
}


def exactly(e: sp.Basic, values: Mapping[sp.Symbol, Any], place: int) -> Any:
    """SymPy's own value at one place."""
    return e.subs({symbol: sp.sympify(array[place].item()) for symbol, array in values.items()})


def reads_nothing(node: Node) -> bool:
    return not any(isinstance(part, Index) for part in walk(node))


@settings(max_examples=150)
@given(integers(4).filter(reads_nothing))
def test_integers(node: Node) -> None:
    e = to_sympy(node, INPUTS)
    found = np.broadcast_to(run(e, VALUES), 7)
    assert [int(x) for x in found] == [int(exactly(e, VALUES, n)) for n in range(7)]


# The ends of what 32 bits are relied on for: positions up to 2**29, scalars up to 2**31 - 1.
FAR, MOST = 2**29, 2**31 - 1
EXTREMES = {
    **{s: np.array([0, 3, FAR - 1, FAR], np.int32) for s in (sym.ROW, sym.K, sym.Q_LEN)},
    sym.KV_LEN: np.array([1, 2, 3, FAR], np.int32),
    sym.Q: np.array([-FAR, -7, FAR - 1, FAR], np.int32),
    **{s: np.array([0, 5, 70_000, MOST]) for s in (sym.B, sym.H, sym.HK)},
    **{
        s: np.array([-MOST, 0, 5, MOST], np.int32) if d != "bool" else np.array([1, 0, 1, 1])
        for s, d in SCALARS.items()
    },
}


@settings(max_examples=150)
@given(integers(3).filter(reads_nothing))
def test_integers_do_not_wrap(node: Node) -> None:
    e = to_sympy(node, INPUTS)
    assume(all(steps(part) < 2**62 for part in sp.preorder_traversal(e)))
    found = np.broadcast_to(run(e, EXTREMES), 4)
    assert [int(x) for x in found] == [int(exactly(e, EXTREMES, n)) for n in range(4)]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("k - q + 128 < 0", "kv_idx + 128 - q_idx < 0"),
        ("2 * k < q", "2 * kv_idx < q_idx"),
        ("abs(q - k) <= 4095", "tl.abs(kv_idx - q_idx) <= 4095"),
        ("100000 * q < k", "100000 * q_idx.to(tl.int64) < kv_idx"),
        ("q * k < 5", "q_idx.to(tl.int64) * kv_idx < 5"),
        ("h * 70000 + k < 5", "70000 * h + kv_idx < 5"),
        ("k < reach", "kv_idx < reach_value"),
        ("k < reach + 1", "kv_idx < reach_value.to(tl.int64) + 1"),
        ("k // 8192 == q // 8192", "(kv_idx // 8192) == floor_div(q_idx, 8192)"),
    ],
)
def test_only_what_could_leave_32_bits_has_64(text: str, printed: str) -> None:
    names = {
        sym.K: "kv_idx",
        sym.Q: "q_idx",
        sym.H: "h",
        sp.Symbol("reach", integer=True): "reach_value",
    }
    assert TritonPrinter(names).doprint(to_sympy(parse_expression(text), INPUTS)) == printed


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("s + 0.25 * (k - q)", "scores + 0.25 * (kv_idx - q_idx)"),
        ("s - (q - k) / 100", "scores - 0.01 * (q_idx - kv_idx)"),
        ("s + k - q - 3", "scores + (kv_idx - q_idx - 3)"),
        ("s - 0.1 * (2 * q - k + 7)", "scores + 0.1 * (kv_idx - 2 * q_idx - 7)"),
    ],
)
def test_positions_cancel_before_they_are_real(text: str, printed: str) -> None:
    names = {sym.K: "kv_idx", sym.Q: "q_idx", sym.S: "scores"}
    assert TritonPrinter(names).doprint(to_sympy(parse_expression(text), INPUTS)) == printed


@settings(max_examples=150)
@given(conditions(4).filter(reads_nothing))
def test_conditions(node: Node) -> None:
    e = to_sympy(node, INPUTS)
    cleared = clear_denominators(e)
    expected = [bool(exactly(e, VALUES, n)) for n in range(7)]
    for shown in (e, cleared):
        if shown in (sp.true, sp.false):
            assert expected == [bool(shown)] * 7
        else:
            assert [bool(x) for x in np.broadcast_to(run(shown, VALUES), 7)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "where(k <= where(3 > row, 13, q), 5, 7) == 5",
        "where(where(row < 3, k, q) > where(h < 2, 1, b), 5, k) < 6",
        "where(abs(where(q < 0, 2, k)) < 4 or not where(k < 5, q, 1) >= 1, 1, k) < 4",
        "where(where(where(row > 1, q, k) > 3, k, 9) > 6, row, 0) > 1",
    ],
)
def test_conditions_that_compare_conditional_values(text: str) -> None:
    """SymPy has an operation of its own for them, which no other test meets."""
    node = parse_expression(text)
    e = to_sympy(node, INPUTS)
    assert e.atoms(sp.ITE)
    expected = [bool(exactly(e, VALUES, n)) for n in range(7)]
    assert [bool(x) for x in run(e, VALUES)] == expected
    assert expected == [_in_python(text, n) for n in range(7)]


def _in_python(text: str, place: int) -> bool:
    names = {symbol.name: int(array[place]) for symbol, array in VALUES.items()}
    return bool(eval(text, {"where": lambda c, a, b: a if c else b, **names}))


@pytest.mark.parametrize(
    ("text", "divisor"),
    [("floor", 3), ("floor", -3), ("floor", 7), ("mod", 3), ("mod", -3), ("mod", 7)],
)
def test_division_of_negative_numbers_rounds_down(text: str, divisor: int) -> None:
    e = sp.floor(sym.Q / divisor) if text == "floor" else sp.Mod(sym.Q, divisor)
    python = [int(q) // divisor if text == "floor" else int(q) % divisor for q in POSITIONS[sym.Q]]
    assert [int(x) for x in run(e, POSITIONS)] == python


def test_what_cannot_be_negative_is_divided_plainly() -> None:
    printer = TritonPrinter({sym.K: "kv_idx", sym.Q: "q_idx"})
    assert printer.doprint(sp.floor(sym.K / 4)) == "(kv_idx // 4)"
    assert printer.doprint(sp.Mod(sym.K, 4)) == "(kv_idx % 4)"
    assert not printer.helpers
    assert printer.doprint(sp.floor(sym.Q / 4)) == "floor_div(q_idx, 4)"
    assert printer.helpers == {"floor_div"}
    assert not is_nonnegative(sym.Q)
    assert is_nonnegative(sym.K + sym.ROW)


s = sym.S
REAL_VALUES = {
    s: np.array([-30.0, -1.5, -1e-3, 0.0, 0.25, 2.0, 90.0]),
    sym.Q: POSITIONS[sym.Q],
    sym.K: POSITIONS[sym.K],
}
REALS = (
    50 * sp.tanh(s / 50),
    sp.tanh(s),
    s - sp.Float(0.3) * sp.Abs(sym.Q - sym.K),
    s + sp.Float(0.1) * sp.log(1 + sp.Abs(sym.Q - sym.K)),
    s / (1 + sp.exp(-s)),
    sp.Max(s, -2) - sp.Min(s, sp.Float(1.5)),
    sp.Piecewise((s, sym.K < 5), (s * s - 1, True)),
    sp.exp(-sp.Abs(s)) / (2 + sp.exp(s / 4)),
    (s + 1) ** 2 * (sym.Q - sym.K),
    (s + 1) ** 3 - (s - 2) ** 4,
    sp.sqrt(s * s + 1),
    sp.Rational(1, 3) * s - sp.Rational(5, 7),
    s - 2 * (sym.Q - sym.K) / 3,
    -(s - 1) * (sym.K + 2),
    s / (sym.K + 1) / 2,
    sp.pi * s + sp.E,
    sp.exp(sp.Rational(1, 2)) * s + sp.log(3),
    s * (1 - 2 * sp.Mod(sp.floor(sym.K / 3), 2)),
    s ** sp.Integer(-2),
    (s / 40) ** 5 + (sym.Q - sym.K) / s**3,
    (s / 40) ** 13 - (s / 30) ** 20,
    sp.log(sym.K + 1) + sp.exp(-sym.K),
)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("e", REALS, ids=str)
def test_reals(e: sp.Expr, precise: bool) -> None:
    found = np.broadcast_to(run(e, REAL_VALUES, precise=precise), 7)
    for place in range(7):
        expected = complex(sp.N(exactly(e, REAL_VALUES, place)))
        assert expected.imag == 0 or math.isnan(expected.real)
        if math.isfinite(expected.real):
            assert math.isclose(float(found[place]), expected.real, rel_tol=1e-12, abs_tol=1e-12)


def test_small_numbers_are_not_lost_to_denominators() -> None:
    """Positions are compared in integers: 16,777,217 and its neighbour are one number in fp32."""
    assert clear_denominators(sym.Q / 2 < sym.K) == sp.Lt(sym.Q, 2 * sym.K)
    assert clear_denominators(sp.Lt(sym.Q * sp.Rational(2, 3), sym.K / 4 + 1)) == sp.Lt(
        8 * sym.Q, 3 * sym.K + 12
    )
