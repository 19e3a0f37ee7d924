"""The score as text of the Hopper kernel, where conversions and special functions are dear.

The unit that converts whole numbers and computes exp2 does 16 a cycle and SM, others 128 (CUDA
programming guide, arithmetic instructions). A distance to a key therefore is a number of the row
plus a constant for each column, in fp32 from the start; tanh is a polynomial where it can be.

What the hot loop does for each pair counts, so a distance that is added (`Tilt`) is left to the
softmax; the second walk has it as text.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import sympy as sp

from flashgen.codegen.expr import LOG2_E, TritonPrinter
from flashgen.codegen.integers import RANGES
from flashgen.codegen.score import QK, Score, score_text
from flashgen.problem import Problem
from flashgen.spec import symbolic as sym

N_START = sp.Symbol("n_start", integer=True, nonnegative=True)
LEAST_SCALE = 1e-15  # of q·k beside a tilt, which is divided by it and has to fit fp32
MAX_STEP = 2**10  # between keys: times the columns of a tile it is exact in fp32


@dataclass(frozen=True)
class Tanh:
    """tanh(x) / x as a polynomial in x * x, for |x| up to 0.75, or without terms an instruction;
    error: the largest, relative."""

    terms: tuple[float, ...]
    error: str


# Scores in fp16 have an error of 4.9e-4 of their own, which sets the bound of lse; in bf16 8 times
# as much. There the instruction will do: d128, 4k keys in 488 us; polynomials took 517 to 531 us.
# The terms are of least squares, reweighted until the error is level.
TANH: dict[str, Tanh] = {
    "bf16": Tanh((), "4.9e-4"),
    "fp16": Tanh((0.99998898, -0.3326967, 0.12742693, -0.03545274), "1.2e-5"),
}


@dataclass(frozen=True)
class Tilt:
    """base + slope * column added to the score: base and slope as text, of a row or of all rows.

    base goes to the exponent with the maximum; to_raw: from slope to what raw q·k grows by with
    each column. One FFMA a pair, where a score of its own takes two.
    """

    base: str
    slope: str
    to_raw: float


@dataclass(frozen=True)
class GluonScore(Score):
    """lines: what happens to scores before the softmax, which does the rest; again: that rest as
    text for the second walk, which takes scores in natural units."""

    again: tuple[str, ...] = ()
    tilt: Tilt | None = None


class Ramp(sp.Function):
    """Ramp(base, slope): base + slope * column for each column of a key tile."""

    is_real = True
    is_integer = False


class GluonPrinter(TritonPrinter):
    """Prints what only this family has: ramps, and tanh of a whole tile."""

    def _print_Ramp(self, expr: Ramp) -> str:
        base, slope = map(self.real, expr.args)
        return f"ramp({base}, {slope}, BLOCK_N)"

    def real(self, part: sp.Expr) -> str:
        """A number as one of fp32."""
        return repr(float(part)) if part.is_number else str(self._print(part))

    def _print_tanh(self, expr: sp.tanh) -> str:
        if not expr.has(QK):
            return super()._print_tanh(expr)
        factor, rest = expr.args[0].as_coeff_Mul()
        return f"fast_tanh({self._print(rest)}, {float(factor)!r}, BLOCK_N)"


def gluon_score(score: sp.Expr, problem: Problem, printer: TritonPrinter) -> GluonScore:
    """The score's text; a constant factor of the whole is left to the exponent."""
    own = GluonPrinter({**printer.names, N_START: "n_start"})
    own.ranges[N_START] = RANGES[sym.K]
    return _with_tilt(score, problem, own) or _with_factor(score, problem, own)


def _with_factor(score: sp.Expr, problem: Problem, own: GluonPrinter) -> GluonScore:
    factor, rest = score.as_coeff_Mul()
    if not (factor.is_positive and rest.has(QK)) or rest == QK:
        factor, rest = sp.Integer(1), score
    found = _extended(score_text(with_ramps(rest), problem, own))
    if factor == 1:
        return found
    scale = float(factor)
    return replace(found, folded=True, scale=repr(scale), scale_log2=repr(scale * LOG2_E))


def _with_tilt(score: sp.Expr, problem: Problem, own: GluonPrinter) -> GluonScore | None:
    """Of a multiple of raw q·k and something that grows evenly with the key."""
    grown = with_ramps(score)
    scale = grown.coeff(QK, 1)
    others = sp.Add.make_args(grown - scale * QK)
    ramps = [part for part in others if isinstance(part, Ramp)]
    rest = sp.Add(*(part for part in others if part not in ramps))
    if len(ramps) != 1 or not scale.is_number or rest.has(QK, sym.K) or scale < LEAST_SCALE:
        return None
    base, slope = ramps[0].args
    factor = float(scale)
    return replace(
        _extended(score_text(QK, problem, own)),
        scale_log2=repr(factor * LOG2_E),
        again=(f"scores = {own.doprint(grown)}",),
        tilt=Tilt(own.real(base + rest), own.real(slope), 1 / factor),
    )


def _extended(score: Score) -> GluonScore:
    return GluonScore(**{each.name: getattr(score, each.name) for each in fields(score)})


def with_ramps(e: sp.Expr) -> sp.Expr:
    """`e`, its whole numbers that grow evenly with the key as ramps.

    >>> slope = sp.Symbol("slope", real=True)
    >>> with_ramps(slope * (sym.Q - sym.K))
    Ramp(slope*(-n_start + q), -slope)
    """
    if not e.has(sym.K) or e.is_integer or not e.args or isinstance(e, sp.Indexed):
        return e
    if isinstance(e, (sp.logic.boolalg.Boolean, sp.core.relational.Relational)):
        return e  # decided in whole numbers
    even = [arg for arg in e.args if _evenness(arg) is not None]
    others = [with_ramps(arg) for arg in e.args if arg not in even]
    if isinstance(e, sp.Mul) and len(even) == 1 and not any(o.has(sym.K, QK) for o in others):
        base, step = _base_and_step(even[0])
        return Ramp(sp.Mul(*others, base), sp.Mul(*others, step))
    if isinstance(e, sp.Add) and even:
        return sp.Add(*others, Ramp(*_base_and_step(sp.Add(*even))))
    return e.func(*map(_in_reals, e.args))


def _in_reals(arg: sp.Basic) -> sp.Basic:
    """An argument of a real function, itself real where that costs nothing."""
    if _evenness(arg) is not None:
        return Ramp(*_base_and_step(arg))
    if isinstance(arg, sp.Abs) and _evenness(arg.args[0]) is not None:
        return sp.Abs(Ramp(*_base_and_step(arg.args[0])))
    return with_ramps(arg)


def _base_and_step(e: sp.Expr) -> tuple[sp.Expr, sp.Expr]:
    """At the tile's first key, and from key to key."""
    step = _evenness(e)
    assert step is not None
    return e.xreplace({sym.K: N_START}), step


def _evenness(e: sp.Basic) -> sp.Integer | None:
    """By how much a whole expression grows from key to key; None where that is not one number."""
    if not (isinstance(e, sp.Expr) and e.is_integer and e.has(sym.K)):
        return None
    if any(read.has(sym.K) for read in e.atoms(sp.Indexed, sp.Function, sp.Piecewise, sp.Mod)):
        return None
    expanded = sp.expand(e)
    step = expanded.coeff(sym.K, 1)
    if not step.is_Integer or abs(step) > MAX_STEP or (expanded - step * sym.K).has(sym.K):
        return None
    return step
