"""Scores of the Hopper kernel: distances without conversions, tanh without the exponential."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy as sp
from property.masks import SCORES

from flashgen.codegen.expr import TritonPrinter
from flashgen.codegen.gluon_score import N_START, TANH, Ramp, Tilt, gluon_score, with_ramps
from flashgen.codegen.score import QK, score_expression
from flashgen.problem import Problem
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

H200 = get_target("nvidia-h200")


def problem(**fields: Any) -> Problem:
    return Problem(AttentionSpec(head_dim=64, dtype="bf16", **fields), H200)


def without_ramps(e: sp.Expr) -> sp.Expr:
    return e.replace(Ramp, lambda base, slope: base + slope * (sym.K - N_START))


@pytest.mark.parametrize("name", SCORES)
def test_ramps_mean_what_they_replace(name: str) -> None:
    score = score_expression(problem(**SCORES[name]))
    assert sp.simplify(without_ramps(with_ramps(score)) - score) == 0


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("s - 0.5 * abs(q - k)", "tl.abs(ramp("),
        ("s * exp(-0.25 * (q - k))", "ramp("),
        ("tanh(s + k)", "ramp(n_start, 1.0, BLOCK_N)"),
        ("s + (q - k) % 5", "floor_mod("),
        ("s + where(k < 5, 1.0, 0.0)", "tl.where(kv_idx < 5, 1, 0)"),
    ],
)
def test_texts(expression: str, text: str) -> None:
    """What does not grow evenly from key to key, or is compared, stays in whole numbers."""
    asked = problem(score=[{"expr": expression}])
    names = {QK: "scores", sym.K: "kv_idx", sym.Q: "q_idx"}
    found = gluon_score(score_expression(asked), asked, TritonPrinter(names))
    assert text in "\n".join(found.lines)


def test_a_factor_of_all_is_left_to_the_exponent() -> None:
    asked = problem(score=[{"softcap": 50.0}])
    found = gluon_score(score_expression(asked), asked, TritonPrinter({QK: "scores"}))
    assert found.lines == ("scores = fast_tanh(scores, 0.0025, BLOCK_N)",)
    assert (found.folded, found.scale) == (True, "50.0")


@pytest.mark.parametrize(
    ("expression", "base", "slope", "to_raw"),
    [
        ("s + k", "n_start", "1.0", 8.0),
        ("s - 0.5 * (q - k)", "0.5 * (n_start - q_idx)", "0.5", 8.0),
        ("4 * s + 3 * k", "3 * n_start", "3.0", 2.0),
    ],
)
def test_a_distance_that_is_added_is_left_to_the_softmax(
    expression: str, base: str, slope: str, to_raw: float
) -> None:
    asked = problem(score=[{"expr": expression}])
    names = {QK: "scores", sym.K: "kv_idx", sym.Q: "q_idx"}
    found = gluon_score(score_expression(asked), asked, TritonPrinter(names))
    assert found.lines == ()
    assert found.tilt is not None
    assert found.tilt == Tilt(base, slope, to_raw)
    assert f", {slope}, BLOCK_N)" in found.again[0]


@pytest.mark.parametrize(
    "expression",
    [
        "k - s", "s * k", "0 * s + k", "abs(s + k)", "s + k + bias[q, k]",
        "exp(h) * s + k", "1e-30 * s + k",
    ],
)  # fmt: skip
def test_no_tilt_where_raw_scores_are_not_a_positive_part_beside_it(expression: str) -> None:
    bias = {"shape": ["q_len", "kv_len"], "dtype": "fp32"}
    given = {"bias": bias} if "bias" in expression else {}
    asked = problem(score=[{"expr": expression}], inputs=given)
    names: dict[sp.Basic, str] = {QK: "scores", sym.K: "kv_idx", sym.Q: "q_idx", sym.H: "h"}
    score = score_expression(asked)
    names |= dict.fromkeys(score.atoms(sp.Indexed), "read")
    assert gluon_score(score, asked, TritonPrinter(names)).tilt is None


@pytest.mark.parametrize("dtype", [each for each in TANH if TANH[each].terms])
def test_polynomials_of_tanh(dtype: str) -> None:
    x = np.linspace(1e-3, 0.75, 10_001)
    found = x * np.polyval(TANH[dtype].terms[::-1], x * x)
    error = np.abs(found / np.tanh(x) - 1).max()
    assert error <= float(TANH[dtype].error)
    assert error >= 0.9 * float(TANH[dtype].error)
