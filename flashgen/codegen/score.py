"""The score as kernel text: from raw q·k through the pipeline to what the softmax takes."""

from __future__ import annotations

from dataclasses import dataclass

import sympy as sp
from sympy.printing.precedence import PRECEDENCE

from flashgen.codegen.expr import LOG2_E, TritonPrinter
from flashgen.passes.inputs import collapse_broadcasts
from flashgen.passes.simplify import under_mask
from flashgen.passes.visibility import visibility
from flashgen.problem import Problem
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

# Softcaps up to here (models have 15 to 50) leave the error of the fast tanh, times them, small.
LARGE_CAP = 1000

QK = sp.Symbol("scores", real=True)  # raw q·k, as the matmul leaves it


@dataclass(frozen=True)
class Score:
    """From raw q·k to scores, and from scores to the exponent of 2.

    folded: no score change and scale > 0, so that the scale is applied inside the exponent (one
    FFMA an element); otherwise `lines` leave scores in natural units. precise: fp32, where the
    maximum is subtracted first and the exponential is exact to about 1 ulp.
    """

    folded: bool
    precise: bool
    scale: str
    scale_log2: str
    lines: tuple[str, ...]
    may_be_minus_inf: bool

    @property
    def to_log2(self) -> str:
        """Name of the factor from scores, as `lines` leave them, to base 2."""
        return "QK_SCALE_LOG2" if self.folded else "LOG2_E"

    def exp(self, x: str) -> str:
        """e to the power of the text `x`."""
        return f"exp_fp32({x})" if self.precise else f"tl.exp2(({x}) * LOG2_E)"


def score_expression(problem: Problem) -> sp.Expr:
    """The score in natural units, as a function of raw q·k (of 0 * q·k where the scale is 0)."""
    spec = problem.spec
    natural = collapse_broadcasts(sym.score_expression(spec), spec)
    score = under_mask(natural, visibility(spec).predicate)
    scale = sp.Float(problem.softmax_scale or 1.0)
    return score.subs(sym.S, scale * QK)


def score_text(score: sp.Expr, problem: Problem, printer: TritonPrinter) -> Score:
    precise = problem.spec.dtype.q == "fp32"
    printer.shallow = abs(problem.softmax_scale) / LARGE_CAP
    folded = not (precise or problem.spec.score) and problem.softmax_scale > 0
    shared, final = _with_shared_named(score)
    lines = [] if problem.softmax_scale else ["scores = scores * 0.0"]
    for name, value in shared:
        lines.append(f"{name} = {printer.doprint(value)}")
        printer.name_part(name, value)
    if QK not in score.free_symbols:  # a score of its own: still one for each row and key
        lines.append(
            f"scores = tl.zeros_like(scores) + {printer.parenthesize(final, PRECEDENCE['Add'])}"
        )
    elif final != QK:
        lines.append(f"scores = {printer.doprint(final)}")
    return Score(
        folded=folded,
        precise=precise,
        scale=repr(problem.softmax_scale),
        scale_log2=repr(problem.softmax_scale * LOG2_E),
        lines=() if folded else tuple(lines),
        may_be_minus_inf=_may_be_minus_inf(problem.spec),
    )


def _with_shared_named(score: sp.Expr) -> tuple[list[tuple[sp.Symbol, sp.Expr]], sp.Expr]:
    """Subexpressions that occur more than once as (name, value), and the score in their terms.

    A name of an integer is one too: functions and divisions of integers are printed in another way.
    """
    found, (final,) = sp.cse([score], symbols=sp.numbered_symbols("t", real=True))
    shared: list[tuple[sp.Symbol, sp.Expr]] = []
    typed: dict[sp.Symbol, sp.Symbol] = {}
    for name, plain in found:
        value = plain.xreplace(typed)
        if getattr(value, "is_integer", False):
            typed[name] = sp.Symbol(name.name, integer=True)
        shared.append((typed.get(name, name), value))
    return shared, final.xreplace(typed)


def _may_be_minus_inf(spec: AttentionSpec) -> bool:
    """A bias or an expression may say -inf for a visible pair; softcap and ALiBi cannot."""
    return any(type(item).__name__ in {"Bias", "Expr"} for item in spec.score)
