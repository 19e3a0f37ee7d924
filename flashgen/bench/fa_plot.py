"""The grid and the variants of suite `fa-paper` as one picture, from the record alone.

`python -m flashgen.bench.fa_plot benchmarks/<gpu>/fa-paper.json` writes fa-paper.png beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.bench.cases import HEAD_DIMS
from flashgen.bench.fa_cases import CUDNN, FA3, FLASH, FLEX, FLEX_TUNED, GRID, VARIANT
from flashgen.bench.fa_figures import (
    FA3_SCALED,
    FA4_SCALED,
    best_of,
    best_rate,
    is_baseline,
    rate_of,
)
from flashgen.bench.record import CaseRecord, Record, load, matmul_name
from flashgen.compiler.pictures import DPI, INK, MUTED, PAPER, RULE, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rate = Callable[[CaseRecord], float | None]

OURS, OUR_PLAIN = "flashgen", "our plain causal"
COLOURS: Mapping[str, str] = {
    OURS: "#1f6feb",
    FA3: "#d9730d",
    FA4_SCALED: "#8a3ffc",
    CUDNN: "#2f7d6d",
    FLASH: "#9aa3ad",
    FLEX: "#c2475d",
    OUR_PLAIN: "#a9c8f7",
}
LABELS: Mapping[str, str] = {
    FA3: "FlashAttention-3",
    FA4_SCALED: "FlashAttention-4, scaled",
    CUDNN: "SDPA cuDNN",
    FLASH: "SDPA flash",
    FLEX: "FlexAttention",
}


def draw(record: Record, path: Path) -> None:
    """A panel for each head dim and mask, and the variants below; FlashgenError without
    matplotlib."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 13), facecolor=PAPER)
    FigureCanvasAgg(figure)
    places = figure.add_gridspec(
        3, 3, left=0.05, right=0.985, top=0.9, bottom=0.07, hspace=0.34, wspace=0.16
    )
    figure.text(
        0.05, 0.965, "Attention forward, bf16, 16,384 tokens", fontsize=20, weight="bold", color=INK
    )
    gpu = record.environment.get("gpu", record.target)
    text = f"{gpu}  ·  {record.started}  ·  TFLOP/s, bursts"
    figure.text(0.05, 0.94, text, fontsize=11, color=MUTED)
    labelled = False
    for row, causal in enumerate((False, True)):
        for column, head_dim in enumerate(HEAD_DIMS):
            axes = figure.add_subplot(places[row, column])
            _panel(axes, record, head_dim, causal=causal)
            if not labelled and axes.get_legend_handles_labels()[0]:
                labelled = True
                handles = axes.get_legend_handles_labels()
                figure.legend(
                    *handles, fontsize=10, frameon=False, ncols=6, loc="upper right",
                    bbox_to_anchor=(0.985, 0.958),
                )  # fmt: skip
    _variants(figure.add_subplot(places[2, :]), record)
    figure.savefig(path, dpi=DPI, facecolor=PAPER)


def _panel(axes: Axes, record: Record, head_dim: int, *, causal: bool) -> None:
    end = "causal" if causal else "full"
    cases = sorted(
        (
            case
            for case in record.cases
            if case.group == GRID and f"/d{head_dim}/" in case.id and case.id.endswith(end)
        ),
        key=lambda case: case.shape["q_len"],
    )
    for name in (FLASH, FLEX, CUDNN, FA4_SCALED, FA3, OURS):
        found = [(case.shape["q_len"], _rate(case, name)) for case in cases]
        points = [(length, rate) for length, rate in found if rate is not None]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[name],
                label=LABELS.get(name, name),
                marker="o",
                markersize=4,
                linewidth=2.4 if name == OURS else 1.4,
                linestyle="--" if name == FA4_SCALED else "-",
            )
    ceiling = record.ceiling(matmul_name("bf16"))
    if ceiling:
        axes.axhline(ceiling, color=MUTED, linestyle=":", linewidth=1)
        axes.annotate(
            "8192³ matmul", (0.99, ceiling), xycoords=("axes fraction", "data"), ha="right",
            va="bottom", fontsize=8, color=MUTED,
        )  # fmt: skip
    lengths = [case.shape["q_len"] for case in cases]
    axes.set_xscale("log", base=2)
    names = [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    axes.set_xticks(lengths, names)
    axes.set_ylim(0, 1.12 * ceiling if ceiling else None)
    axes.set_title(f"d = {head_dim}, {'causal' if causal else 'no mask'}", loc="left", color=INK)
    _plain(axes)


def _rate(case: CaseRecord, name: str) -> float | None:
    return best_rate(case) if name == OURS else rate_of(case, name)


def _variants(axes: Axes, record: Record) -> None:
    """A group of bars for each variant."""
    cases = [case for case in record.cases if case.group == VARIANT]
    bars: Sequence[tuple[str, str, Rate]] = (
        (OUR_PLAIN, OUR_PLAIN, lambda case: rate_of(case, best_of(case, is_baseline))),
        (OURS, OURS, best_rate),
        (FA3, "FlashAttention-3", lambda case: rate_of(case, FA3) or rate_of(case, FA3_SCALED)),
        (FLEX, "FlexAttention, the faster of default and max-autotune", _flex),
    )
    width = 0.8 / len(bars)
    for place, (name, label, rate) in enumerate(bars):
        heights = [rate(case) or 0.0 for case in cases]
        positions = [index + (place - (len(bars) - 1) / 2) * width for index in range(len(cases))]
        axes.bar(positions, heights, width, color=COLOURS[name], label=label)
    names = ["\n".join(case.id.split("/")[1:4]) for case in cases]
    axes.set_xticks(range(len(cases)), names, fontsize=8)
    axes.set_title("Variants, TFLOP/s of visible pairs", loc="left", color=INK)
    if cases:
        axes.legend(fontsize=8, frameon=False, ncols=len(bars), loc="upper right")
        axes.set_ylim(0, 1.18 * axes.get_ylim()[1])
    _plain(axes)


def _flex(case: CaseRecord) -> float | None:
    return max((r for r in (rate_of(case, FLEX), rate_of(case, FLEX_TUNED)) if r), default=None)


def _plain(axes: Axes) -> None:
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="flashgen.bench.fa_plot", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    given = parser.parse_args(arguments)
    draw(load(given.record), given.picture or given.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
