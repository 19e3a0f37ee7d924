"""The grid and the variants of suite `fa-paper` as one picture, from the record alone.

`python -m flashgen.bench.fa_plot benchmarks/<gpu>/fa-paper.json` writes fa-paper.png beside it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.bench.cases import HEAD_DIMS
from flashgen.bench.fa_cases import CUDNN, FA3, FLASH, FLEX, FLEX_TUNED, GRID, VARIANT
from flashgen.bench.fa_figures import (
    FA3_SCALED,
    FA4_SCALED,
    best_of,
    best_rate,
    head_dim,
    is_baseline,
    lost,
    outside_names,
    peer_ratio,
    rate_of,
)
from flashgen.bench.fa_goals import GRID_LEAST, LOST_MOST
from flashgen.bench.fa_outside import PREFIX
from flashgen.bench.record import CaseRecord, Record, load, matmul_name
from flashgen.compiler.pictures import DPI, INK, MUTED, PAPER, RULE, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rate = Callable[[CaseRecord], float | None]

OURS, OUR_PLAIN = "flashgen", "our plain causal"
PEERS = (FLASH, FLEX, CUDNN, FA4_SCALED, FA3)  # drawn in this order, ours last
COLOURS: Mapping[str, str] = {
    OURS: "#1f6feb",
    FA3: "#d9730d",
    FA4_SCALED: "#8a3ffc",
    CUDNN: "#2f7d6d",
    FLASH: "#9aa3ad",
    FLEX: "#c2475d",
    OUR_PLAIN: "#c9dbf9",
}
OUTSIDE_COLOURS = ("#4d3b2f", "#7d6b1f")
MARKERS: Mapping[str, str] = {
    OURS: "o",
    FA3: "s",
    FA4_SCALED: "D",
    CUDNN: "^",
    FLASH: "v",
    FLEX: "X",
}
LABELS: Mapping[str, str] = {
    FA3: "FlashAttention-3",
    FA4_SCALED: "FlashAttention-4, scaled",
    CUDNN: "SDPA cuDNN",
    FLASH: "SDPA flash",
    FLEX: "FlexAttention",
}
GOAL = "#b42318"
SIZE = (13.5, 13.8)
LEFT, RIGHT = 0.055, 0.985
LEGEND_SIZES = (10.5, 9.5, 8.5, 7.5)
RATIOS = (0.85, 1.15)  # what the strips below the panels show at most


def draw(record: Record, path: Path) -> None:
    """Write the picture; FlashgenError without matplotlib."""
    figure_of(record).savefig(path, dpi=DPI, facecolor=PAPER)


def figure_of(record: Record) -> Figure:
    """A panel for each head dim and mask, with our speed over the fastest peer's below it, and the
    variants; FlashgenError without matplotlib."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, facecolor=PAPER)
    FigureCanvasAgg(figure)
    gpu = record.environment.get("gpu", record.target)
    title = f"Attention forward on {gpu}: bf16, 16,384 tokens, TFLOP/s"
    figure.text(LEFT, 0.972, title, fontsize=18, weight="bold", color=INK)
    known = record.environment
    versions = [f"{name} {known[name]}" for name in ("torch", "triton") if name in known]
    what = "over the number of keys; medians of bursts, higher is better"
    text = "  ·  ".join([record.started, *versions, what])
    figure.text(LEFT, 0.954, text, fontsize=10.5, color=MUTED)
    cases = [case for case in record.cases if case.group == GRID]
    rates = (record.ceiling(matmul_name("bf16")), *_rates(cases))
    top = 1.1 * max((rate for rate in rates if rate), default=1.0)
    handles: dict[str, Artist] = {}
    for row, causal in enumerate((False, True)):
        low = (0.66, 0.368)[row]
        places = figure.add_gridspec(
            2, 3, left=LEFT, right=RIGHT, bottom=low, top=low + 0.243, hspace=0.06, wspace=0.1,
            height_ratios=(3.4, 1),
        )  # fmt: skip
        for column, dim in enumerate(HEAD_DIMS):
            above = figure.add_subplot(places[0, column])
            below = figure.add_subplot(places[1, column], sharex=above)
            handles |= _panel(above, record, _line(cases, dim, causal=causal), top)
            above.set_title(
                f"head dim {dim}, {'causal' if causal else 'no mask'}",
                loc="left", color=INK, fontsize=11.5,
            )  # fmt: skip
            _strip(below, _line(cases, dim, causal=causal))
            if column == 0:
                above.set_ylabel("TFLOP/s", color=MUTED, fontsize=9.5)
                below.set_ylabel("of the\nfastest peer", color=MUTED, fontsize=8.5)
            else:
                above.tick_params(labelleft=False)
                below.tick_params(labelleft=False)
    _legend(figure, handles)
    places = figure.add_gridspec(1, 1, left=LEFT, right=RIGHT, bottom=0.045, top=0.292)
    _variants(figure.add_subplot(places[0, 0]), record)
    return figure


def _line(cases: Sequence[CaseRecord], dim: int, *, causal: bool) -> list[CaseRecord]:
    """The cases of a panel, by length."""
    end = "causal" if causal else "full"
    found = (each for each in cases if head_dim(each) == dim and each.id.endswith(f"/{end}"))
    return sorted(found, key=lambda case: case.shape["q_len"])


def _rates(cases: Sequence[CaseRecord]) -> list[float | None]:
    return [_rate(case, name) for case in cases for name in (*PEERS, OURS)]


def _legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """A row of its own between the title and the panels, as large as there is room for."""
    if not handles:
        return
    for size in LEGEND_SIZES:
        legend = figure.legend(
            list(handles.values()), list(handles), fontsize=size, frameon=False,
            ncols=len(handles), loc="upper left", bbox_to_anchor=(LEFT - 0.008, 0.95),
            borderaxespad=0, columnspacing=1.6, handlelength=2.2,
        )  # fmt: skip
        fits = legend.get_window_extent().x1 <= figure.bbox.x1
        if fits or size == LEGEND_SIZES[-1]:
            return
        legend.remove()


def _panel(
    axes: Axes, record: Record, cases: Sequence[CaseRecord], top: float
) -> dict[str, Artist]:
    """Lines of one head dim and mask; what they are called and drawn with, ours first."""
    handles: dict[str, Artist] = {}
    outside = dict(zip(outside_names(record.cases), cycle(OUTSIDE_COLOURS)))
    for name in (*PEERS, *outside, OURS):
        found = [(case.shape["q_len"], _rate(case, name)) for case in cases]
        points = [(length, rate) for length, rate in found if rate is not None]
        if points:
            label = LABELS.get(name, name.removeprefix(PREFIX))
            (handles[label],) = axes.plot(
                *zip(*points, strict=True),
                color=COLOURS.get(name) or outside[name],
                marker=MARKERS.get(name, "P"),
                markersize=6 if name == OURS else 4.5,
                markeredgecolor=PAPER,
                markeredgewidth=0.6,
                linewidth=2.6 if name == OURS else 1.4,
                linestyle="--" if name == FA4_SCALED else ":" if name in outside else "-",
                zorder=4 if name == OURS else 3,
            )
    ceiling = record.ceiling(matmul_name("bf16"))
    if ceiling:
        axes.axhline(ceiling, color=INK, linestyle=(0, (1, 2)), linewidth=1)
        axes.annotate(
            "8192³ matmul", (0.012, ceiling), xycoords=("axes fraction", "data"), ha="left",
            va="bottom", fontsize=8.5, color=INK,
        )  # fmt: skip
    axes.set_ylim(0, top)
    _lengths(axes, cases)
    axes.tick_params(labelbottom=False)
    _plain(axes)
    return dict(reversed(handles.items()))


def _strip(axes: Axes, cases: Sequence[CaseRecord]) -> None:
    """Our speed over the fastest peer's."""
    found = [(case.shape["q_len"], peer_ratio(case)) for case in cases]
    points = [(length, min(max(r, RATIOS[0]), RATIOS[1])) for length, r in found if r is not None]
    axes.axhline(1.0, color=INK, linewidth=0.9)
    axes.axhline(GRID_LEAST, color=GOAL, linewidth=0.9, linestyle=(0, (3, 2)))
    if points:
        axes.plot(
            *zip(*points, strict=True), color=COLOURS[OURS], marker="o", markersize=5,
            markeredgecolor=PAPER, markeredgewidth=0.6, linewidth=1.6,
        )  # fmt: skip
    axes.set_ylim(*RATIOS)
    axes.set_yticks((0.9, 1.0, 1.1), ("0.9", "1.0", "1.1"))
    _lengths(axes, cases)
    _plain(axes)
    axes.tick_params(labelsize=8.5)


def _lengths(axes: Axes, cases: Sequence[CaseRecord]) -> None:
    lengths = [case.shape["q_len"] for case in cases]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_length(length) for length in lengths])
    axes.minorticks_off()


def _length(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _rate(case: CaseRecord, name: str) -> float | None:
    return best_rate(case) if name == OURS else rate_of(case, name)


def _variants(axes: Axes, record: Record) -> None:
    """A group of bars for each variant; above ours what the variant costs, and the most it may."""
    cases = [case for case in record.cases if case.group == VARIANT]
    bars: Sequence[tuple[str, str, Rate]] = (
        (OUR_PLAIN, "flashgen, plain causal of the same shape", _plain_rate),
        (OURS, "flashgen", best_rate),
        (FA3, "FlashAttention-3 (hatched: scaled)", _fa3),
        (FLEX, "FlexAttention, the faster of default and max-autotune", _flex),
    )
    width = 0.82 / len(bars)
    for place, (name, label, rate) in enumerate(bars):
        heights = [rate(case) or 0.0 for case in cases]
        positions = [index + (place - (len(bars) - 1) / 2) * width for index in range(len(cases))]
        drawn = axes.bar(positions, heights, 0.94 * width, color=COLOURS[name], label=label)
        for case, bar in zip(cases, drawn, strict=True):
            if name == FA3 and rate_of(case, FA3) is None:
                bar.set(hatch="////", edgecolor=PAPER, linewidth=0)
        if name == OURS:
            _costs(axes, cases, positions, width)
    axes.set_xticks(range(len(cases)), [_variant_name(case) for case in cases], fontsize=9)
    axes.set_title(
        "Variants, TFLOP/s of visible pairs; in per cent what they cost against plain causal "
        "attention, in red the most they may",
        loc="left", color=INK, fontsize=11.5,
    )  # fmt: skip
    axes.set_ylabel("TFLOP/s", color=MUTED, fontsize=9.5)
    _plain(axes)
    if cases:
        axes.legend(
            fontsize=9.5, frameon=False, ncols=len(bars), loc="upper left", borderaxespad=0.1,
            columnspacing=1.6,
        )  # fmt: skip
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.tick_params(axis="x", length=0, labelcolor=INK)


def _costs(
    axes: Axes, cases: Sequence[CaseRecord], positions: Sequence[float], width: float
) -> None:
    for case, position in zip(cases, positions, strict=True):
        mine, plain, share = best_rate(case), _plain_rate(case), lost(case)
        if mine is None or plain is None or share is None:
            continue
        axes.annotate(
            f"{share:.0%}", (position, mine), xytext=(0, -7), textcoords="offset points",
            ha="center", va="top", fontsize=8, color=PAPER,
        )  # fmt: skip
        most = LOST_MOST.get(case.id.split("/")[1])
        if most is not None:
            level = (1 - most) * plain
            ends = [position - 0.5 * width, position + 0.5 * width]
            axes.plot(ends, [level, level], color=GOAL, linewidth=2, zorder=4)


def _variant_name(case: CaseRecord) -> str:
    kind = case.id.split("/")[1]
    kind = re.sub(r"(?<=[a-z])(?=\d)", " ", kind).replace("-", ", ")
    return f"{kind}\nd{head_dim(case)}, {_length(case.shape['q_len'])}"


def _plain_rate(case: CaseRecord) -> float | None:
    return rate_of(case, best_of(case, is_baseline))


def _fa3(case: CaseRecord) -> float | None:
    return rate_of(case, FA3) or rate_of(case, FA3_SCALED)


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
