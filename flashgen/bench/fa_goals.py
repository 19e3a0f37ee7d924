"""What suite `fa-paper` must reach, as data, and the tables that hold a record against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashgen.bench.fa_cases import FA3, FLEX_TUNED, GRID, VARIANT
from flashgen.bench.fa_figures import (
    FA3_SCALED,
    Figure,
    best_of,
    best_rate,
    head_dim,
    is_ours,
    lost,
    outside_names,
    over,
    peer_ratio,
    percent,
    rate_of,
    ratio_text,
    ratio_to,
    text,
)
from flashgen.bench.markdown import number, table
from flashgen.bench.record import CaseRecord, Record, matmul_name
from flashgen.tune.summary import geometric_mean

GRID_MEAN, GRID_LEAST = 1.03, 0.95  # of the fastest peer's speed
OUTSIDE_LEAST = 1.0  # of an outside contestant's
MATMUL_LEAST = 0.85  # of the rate of a large matmul, for
WIDE_HEADS, LONG = (128, 256), 8192  # these head dims, from this length on
FLEX_MEAN = 1.6  # of FlexAttention's speed, tuned, over the variants

# Kind -> the share of the plain causal kernel's TFLOP/s that it may cost.
LOST_MOST: Mapping[str, float] = {
    "softcap50": 0.12,
    "alibi": 0.05,
    "bias": 0.35,
    "documents": 0.10,
    "window4096": 0.05,
    "window512": 0.35,
}
# Kind -> FlashAttention-3's TFLOP/s in bursts on an H200, in another run.
FA3_LEVELS: Mapping[str, float] = {
    "window512": 426,
    "window4096": 697,
    "softcap50": 562,
    "documents": 592,
}


def goals(record: Record) -> str:
    """Each goal of the whole: what was measured, what is asked, and whether it is met."""
    grid = [case for case in record.cases if case.group == GRID]
    variants = [case for case in record.cases if case.group == VARIANT]
    ceiling = record.ceiling(matmul_name("bf16"))
    against = _found(grid, peer_ratio)
    rows = [
        _row("grid: best / fastest peer, geometric mean", _mean(against), GRID_MEAN, against),
        _row("grid: best / fastest peer, lowest", _least(against), GRID_LEAST, against),
    ]
    long = [c for c in grid if head_dim(c) in WIDE_HEADS and c.shape["q_len"] >= LONG]
    shares = _found(long, lambda case: over(best_rate(case), ceiling))
    title = f"grid: of an 8192³ matmul at d=128 and 256 from {LONG} keys on, lowest"
    rows.append(_row(title, _least(shares), MATMUL_LEAST, shares))
    for name in outside_names(record.cases):
        for_all = _found(grid, lambda case, name=name: ratio_to(case, name))  # type: ignore[misc]
        rows.append(_row(f"grid: best / {name}, lowest", _least(for_all), OUTSIDE_LEAST, for_all))
    flex = _found(variants, lambda case: ratio_to(case, FLEX_TUNED))
    title = "variants: best / FlexAttention (max-autotune), geometric mean"
    rows.append(_row(title, _mean(flex), FLEX_MEAN, flex))
    return table(["goal", "measured", "asked", "", "lowest at", "cases"], rows)


def _found(cases: Sequence[CaseRecord], figure: Figure) -> dict[str, float]:
    return {case.id: value for case in cases for value in [figure(case)] if value is not None}


def _mean(found: Mapping[str, float]) -> float | None:
    return geometric_mean(found.values())


def _least(found: Mapping[str, float]) -> float | None:
    return min(found.values(), default=None)


def _row(title: str, measured: float | None, asked: float, found: Mapping[str, float]) -> list[str]:
    verdict = _verdict(None if measured is None else measured >= asked)
    at = min(found, key=lambda name: found[name]) if found else ""
    return [title, ratio_text(measured), f"≥ {asked:.2f}", verdict, at, str(len(found))]


def variant_goals(cases: Sequence[CaseRecord]) -> str:
    """For each variant: what it costs, FlashAttention-3's levels, and which family served."""
    rows = []
    for case in cases:
        kind = case.id.split("/")[1]
        most, level = LOST_MOST.get(kind), FA3_LEVELS.get(kind)
        share, best = lost(case), best_rate(case)
        here = rate_of(case, FA3)
        scaled = rate_of(case, FA3_SCALED)
        theirs = here or scaled
        rows.append(
            [
                case.id,
                family_of(case),
                percent(share),
                "" if most is None else f"≤ {most:.0%}",
                _verdict(None if most is None or share is None else share <= most),
                text(best),
                "" if level is None else number(level),
                _verdict(None if level is None or best is None else best >= level),
                text(here) or ("" if scaled is None else f"~{number(scaled)}"),
                _verdict(None if theirs is None or best is None else best >= theirs),
            ]
        )
    header = [
        "case", "family", "lost", "asked", "", "TFLOP/s", "fa3 in another run", "", "fa3 here", "",
    ]  # fmt: skip
    note = (
        "Lost: against our plain causal kernel of the same shape, per visible pair. Family: of the "
        "best schedule; gluon_sm90 are the Hopper kernels, triton the portable ones. ~: scaled."
    )
    return f"{note}\n\n{table(header, rows)}"


def family_of(case: CaseRecord) -> str:
    """Of the fastest schedule of ours."""
    fields = case.facts.get("schedules", {}).get(best_of(case, is_ours), {})
    return str(fields.get("family", ""))


def _verdict(met: bool | None) -> str:
    return "" if met is None else "met" if met else "**missed**"
