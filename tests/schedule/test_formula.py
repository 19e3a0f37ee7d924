"""Formulas as Python functions: what SymPy says, exactly, and what no formula contains."""

from __future__ import annotations

import pytest
import sympy as sp

from flashgen.ir.symbols import BLOCK_M, BLOCK_N, HEAD_DIM_QK, KV_LEN, NUM_STAGES, Q_LEN
from flashgen.schedule import scratch
from flashgen.schedule.formula import function, functions

SYMBOLS = (BLOCK_M, BLOCK_N, HEAD_DIM_QK, KV_LEN, NUM_STAGES, Q_LEN)
NUMBERS = {BLOCK_M: 64, BLOCK_N: 48, HEAD_DIM_QK: 72, KV_LEN: 1000, NUM_STAGES: 2, Q_LEN: 999}
FORMULAS = [
    sp.Integer(0),
    3 * BLOCK_M - 7 * BLOCK_N * HEAD_DIM_QK,
    BLOCK_M**2 * HEAD_DIM_QK / (4 * NUM_STAGES),
    sp.Rational(3, 8) * Q_LEN / BLOCK_M**2,
    1 / BLOCK_N,
    BLOCK_M * sp.ceiling(Q_LEN / BLOCK_M) * sp.ceiling(KV_LEN / BLOCK_N),
    16 * sp.ceiling(HEAD_DIM_QK / 16),
    sp.ceiling(KV_LEN / BLOCK_N - sp.Rational(5, 2)),
    sp.Max(BLOCK_M, BLOCK_N, NUM_STAGES - 9, evaluate=False),
    sp.Min(BLOCK_M * BLOCK_N, HEAD_DIM_QK, evaluate=False),
    sp.Piecewise((BLOCK_M, sp.Le(NUM_STAGES, 1)), (BLOCK_N, True)),
    sp.Piecewise((BLOCK_M, sp.Ge(NUM_STAGES, 2)), (BLOCK_N, True)),
    sp.Piecewise(
        (BLOCK_M, sp.Or(sp.Lt(BLOCK_M, BLOCK_N), sp.Lt(KV_LEN, BLOCK_M))),
        (sp.Integer(0), True),
    ),
]


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_a_function_says_what_sympy_says(formula: sp.Expr) -> None:
    expected = float(formula.subs(NUMBERS))
    assert function(SYMBOLS, formula)(*NUMBERS.values()) == expected


def test_functions_of_scratch_are_called() -> None:
    call = scratch.call(scratch.wgmma_conversion, BLOCK_M, BLOCK_N, NUM_STAGES, 2, 16)
    expected = 5 + scratch.wgmma_conversion(64, 48, 2, 2, 16)
    assert function(SYMBOLS, call + 5)(*NUMBERS.values()) == expected


def test_tiles_of_a_length_beyond_the_precision_of_floats_are_counted_exactly() -> None:
    tiles = function((Q_LEN, BLOCK_M), sp.ceiling(Q_LEN / BLOCK_M))
    assert tiles(2**60 + 1, 64) == 2**54 + 1


def test_several_formulas_are_one_function() -> None:
    both = functions((BLOCK_M, BLOCK_N), [BLOCK_M + BLOCK_N, BLOCK_M * BLOCK_N])
    assert both(3, 5) == (8, 15)
    assert functions((BLOCK_M,), [BLOCK_M])(3) == (3,)


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (sp.sin(BLOCK_M), "a formula contains sin: sin(block_m)"),
        (sp.sqrt(BLOCK_M), "a formula contains a root or an exponential: sqrt(block_m)"),
        (sp.Function("system")(BLOCK_M), "a function that is not in scratch.py: system(block_m)"),
        (sp.Piecewise((BLOCK_M, BLOCK_M < 3)), "a formula is not defined everywhere"),
    ],
)
def test_what_no_formula_contains_is_refused(formula: sp.Expr, said: str) -> None:
    with pytest.raises(TypeError) as error:
        function(SYMBOLS, formula)
    assert said in str(error.value)
