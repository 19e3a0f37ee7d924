"""An explanation as pictures: roofline, tile shapes, and the mask by elements and by tiles.

Needs matplotlib, which the extra `plot` brings; it is imported when something is drawn.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flashgen.compiler.explanation import Algorithm, Explanation, TileCell, shape_text
from flashgen.compiler.mask_sample import MaskSample, sample_mask
from flashgen.errors import FlashgenError, install_hint
from flashgen.passes.count import FULL, PARTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, PAPER, RULE = "#1b2733", "#6b7785", "#ffffff", "#d9dee4"
COLOURS: Mapping[str, str] = {"flash2": "#1f6feb", "flash1": "#d9730d", "naive": "#8a3ffc"}
MARKERS: Mapping[str, str] = {"flash2": "o", "flash1": "s", "naive": "^"}
EMPTY_COLOUR, PARTIAL_COLOUR, FULL_COLOUR = "#eef1f4", "#f2a33c", "#2f7d6d"
HATCH = "#9aa3ad"
# What a reason is called, and how cells are shaded that fail for it.
REASONS: Mapping[str, tuple[str, str, str]] = {
    "smem_bytes": ("too little shared memory", "#f6d5d0", "////"),
    "regs_per_thread": ("too few registers", "#d8dcef", "\\\\\\\\"),
    "tmem_columns": ("too little tensor memory", "#efe3c8", "xxxx"),
}
OTHER_REASON = ("#e3e3e3", "....")
SUFFIXES = (".png", ".svg", ".pdf")
DPI = 144


def draw(found: Explanation, path: Path) -> None:
    """All pictures on one page, in the format that `path` ends with; FlashgenError if it cannot."""
    check_path(path)
    figure = _figure(15, 12.5)
    panels = figure.subplots(2, 2, gridspec_kw={"hspace": 0.42, "wspace": 0.16})
    figure.subplots_adjust(left=0.06, right=0.975, top=0.855, bottom=0.06)
    figure.text(
        0.06, 0.968, found.spec.display_name, fontsize=20, weight="bold", color=INK, va="center"
    )
    figure.text(
        0.06,
        0.935,
        f"{found.target.name}  ·  {shape_text(found.shape)}  ·  {found.spec.dtype.q}  ·  "
        f"{schedule_line(found)}",
        fontsize=11,
        color=MUTED,
        va="center",
    )
    chosen = textwrap.fill(f"chosen: {found.choice}", 170) if found.choice else ""
    figure.text(0.06, 0.913, chosen, fontsize=9.5, color=MUTED, va="center")
    for axes, picture in zip(panels.flat, _pictures(found).values(), strict=True):
        picture(axes)
    _save(figure, path)


def schedule_line(found: Explanation) -> str:
    """The schedule, and the untuned one where that is another."""
    if found.schedule is None or found.choice is None:
        return "no schedule fits"
    other = found.choice.untuned
    untuned = f" (untuned: {other})" if other != found.schedule else ""
    return f"{found.schedule}{untuned}"


def check_path(path: Path) -> None:
    """FlashgenError for a file ending that is not a picture's, or without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise FlashgenError(
            f"{path}: a picture ends in {', '.join(SUFFIXES)} (got {path.suffix or 'no ending'!r})"
        )
    need_matplotlib()


def embedded(found: Explanation) -> dict[str, str]:
    """Each picture by name, as a data URL for an <img>."""
    need_matplotlib()
    urls = {}
    for name, picture in _pictures(found).items():
        figure = _figure(7.6, 5.6)
        axes = figure.subplots()
        figure.subplots_adjust(left=0.12, right=0.96, top=0.87, bottom=0.12)
        picture(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, facecolor=PAPER)
        urls[name] = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return urls


def _pictures(found: Explanation) -> dict[str, Callable[[Axes], None]]:
    schedule = found.schedule
    block = (schedule.block_m, schedule.block_n) if schedule else (64, 64)
    sample = sample_mask(found.spec, found.shape, *block, schedule.kernel if schedule else "loop")
    return {
        "roofline": lambda axes: _roofline(axes, found),
        "tile shapes": lambda axes: _tile_shapes(axes, found),
        "mask, elements": lambda axes: _elements(axes, sample),
        "mask, tiles": lambda axes: _tiles(axes, sample),
    }


def need_matplotlib() -> None:
    """FlashgenError that says what to install, where there is nothing to draw with."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise FlashgenError(
            f"pictures need matplotlib, which is not installed\n  hint: {install_hint('plot')}"
        ) from None


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=DPI, facecolor=PAPER)
    except OSError as error:
        raise FlashgenError(f"{path}: cannot be written ({error.strerror})") from None


def _frame(axes: Axes, title: str, subtitle: str) -> None:
    """The look that all pictures share."""
    axes.set_title(title, loc="left", fontsize=13, weight="bold", color=INK, pad=24)
    axes.text(0, 1.025, subtitle, transform=axes.transAxes, fontsize=9.5, color=MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=3)
    for side in axes.spines.values():
        side.set_color(RULE)


# **** roofline ****


def _roofline(axes: Axes, found: Explanation) -> None:
    """FLOP/s that memory and matmul units allow, and where each algorithm stands."""
    peak, bandwidth = found.peak_flops_per_s, found.target.dram_bytes_per_s
    shown = [each for each in found.algorithms if each.intensity > 0]
    knee = peak / bandwidth
    low = min([knee, *(each.intensity for each in shown)]) / 8
    high = max([knee, *(each.intensity for each in shown)]) * 5
    x = np.geomspace(low, high, 300)
    roof = np.minimum(peak, x * bandwidth)
    axes.plot(x, roof / 1e12, color=INK, lw=2.2, solid_capstyle="round", zorder=2)
    axes.fill_between(x, roof / 1e12, 1e-9, color="#f5f7f9", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low * bandwidth / 1e12 / 1.5, peak / 1e12 * 3)
    axes.axvline(knee, color=RULE, lw=1, ls="--", zorder=1)
    axes.annotate(
        f"{knee:.0f} FLOP/B",
        (knee, axes.get_ylim()[0]),
        xytext=(4, 5),
        textcoords="offset points",
        fontsize=8.5,
        color=MUTED,
    )
    axes.text(
        high / 1.15,
        peak / 1e12 * 1.12,
        f"{found.spec.dtype.q} matmuls {peak / 1e12:,.4g} TFLOP/s",
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=INK,
    )
    axes.text(
        0.02,
        0.97,
        f"slope: memory, {bandwidth / 1e12:.3g} TB/s",
        transform=axes.transAxes,
        va="top",
        fontsize=9.5,
        color=INK,
    )
    labels: list[tuple[float, bool]] = []
    for each in sorted(shown, key=lambda a: (a.intensity, a.name)):
        labels.append(_mark(axes, each, labels))
    axes.grid(True, which="major", color=RULE, lw=0.6, alpha=0.7, zorder=0)
    axes.set_xlabel("FLOP per byte of device memory", color=MUTED, fontsize=10)
    axes.set_ylabel("useful TFLOP/s at best", color=MUTED, fontsize=10)
    _frame(axes, "Roofline", "useful FLOPs (visible pairs); DRAM bytes by the model; not measured")


def _mark(axes: Axes, each: Algorithm, before: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    """A point at the rate that the bound allows; computing what is masked lowers it.

    before: places along the axis (0 to 1) of earlier labels, and whether they are left of their
    points; the result is this one's.
    """
    rate = each.flops / (each.bound_ms * 1e-3) / 1e12 if each.bound_ms else 0.0
    colour = COLOURS[each.name]
    axes.plot(
        each.intensity,
        rate,
        MARKERS[each.name],
        ms=10,
        color=colour,
        mec=PAPER,
        mew=1.5,
        zorder=4,
        clip_on=False,
    )
    left, right = axes.get_xlim()
    along = float(np.log(each.intensity / left) / np.log(right / left))
    # Neighbours' labels go to different sides of the slope; on the flat part, below it.
    flat = each.bound == "compute"
    to_left = along > 0.75 or (len(before) % 2 == 1 and not flat)
    crowd = sum(side == to_left and along - place < 0.25 for place, side in before)
    away = 15 * crowd
    shift = -14 - away if flat else 6 + away if to_left else -6 - away
    axes.annotate(
        f"{each.name}  {_time(each.bound_ms)}",
        (each.intensity, rate),
        xytext=(-10 if to_left else 10, shift),
        textcoords="offset points",
        ha="right" if to_left else "left",
        va="bottom" if to_left and not flat else "top",  # wholly above or below the slope
        fontsize=10.5,
        weight="bold",
        color=colour,
        bbox={"fc": PAPER, "ec": "none", "pad": 1.5, "alpha": 0.9},
        zorder=5,
    )
    return along, to_left


def _time(ms: float) -> str:
    return f"{ms:,.3g} ms" if ms >= 0.1 else f"{1000 * ms:.3g} µs"


# **** tile shapes ****


def _tile_shapes(axes: Axes, found: Explanation) -> None:
    """Tile traffic of each shape that fits; the others shaded by the reason."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch, Rectangle

    rows = sorted({cell.block_m for cell in found.grid})
    columns = sorted({cell.block_n for cell in found.grid})
    traffic = np.full((len(rows), len(columns)), np.nan)
    for cell in found.grid:
        if cell.schedule:
            place = rows.index(cell.block_m), columns.index(cell.block_n)
            traffic[place] = max(1, cell.tile_traffic_bytes)
    known = traffic[~np.isnan(traffic)]
    norm = LogNorm(known.min() * 0.7, known.max() * 1.6) if known.size else None
    if known.size:
        axes.imshow(traffic, origin="lower", aspect="auto", cmap="YlGnBu", norm=norm, zorder=1)
    looks = {reason: _look(reason) for reason in _reasons(found.grid)}
    for cell in found.grid:
        place = columns.index(cell.block_n), rows.index(cell.block_m)
        if cell.reason:
            _, fill, hatch = looks[cell.reason]
            axes.add_patch(
                Rectangle(
                    (place[0] - 0.5, place[1] - 0.5), 1, 1, fc=fill, ec=HATCH, hatch=hatch, lw=0
                )
            )
        _label(axes, cell, place, norm)
    chosen = found.schedule
    if chosen and chosen.block_m in rows and chosen.block_n in columns:
        corner = columns.index(chosen.block_n) - 0.5, rows.index(chosen.block_m) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=COLOURS["flash1"], lw=3, zorder=5))
    axes.set_xticks(range(len(columns)), [str(n) for n in columns])
    axes.set_yticks(range(len(rows)), [str(m) for m in rows])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(which="minor", color=PAPER, lw=2, zorder=3)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("block_n, keys", color=MUTED, fontsize=10, loc="left")
    axes.set_ylabel("block_m, query rows", color=MUTED, fontsize=10)
    patches = [
        Patch(fc=fill, ec=HATCH, hatch=hatch, lw=0, label=name)
        for name, fill, hatch in looks.values()
    ]
    patches.append(Patch(fill=False, ec=COLOURS["flash1"], lw=2.5, label="chosen"))
    axes.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(1.01, -0.055),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.8,
    )
    _frame(
        axes,
        f"Tile shapes, {found.loop_order}",
        "tile traffic; below it shared memory at the deepest pipeline that fits",
    )


def _reasons(grid: Sequence[TileCell]) -> list[str]:
    return list(dict.fromkeys(cell.reason for cell in grid if cell.reason))


def _look(reason: str) -> tuple[str, str, str]:
    return REASONS.get(reason, (reason, *OTHER_REASON))


def _label(axes: Axes, cell: TileCell, place: tuple[int, int], norm: Any) -> None:
    if cell.reason is not None:
        axes.text(
            *place,
            _shortfall(cell),
            ha="center",
            va="center",
            fontsize=8.5,
            color="#6b3a33",
            zorder=4,
            bbox={"fc": PAPER, "ec": "none", "pad": 1.5, "alpha": 0.85},
        )
        return
    dark = bool(norm and norm(max(1, cell.tile_traffic_bytes)) > 0.55)
    depth = f"{cell.num_stages} stage{'s' if cell.num_stages > 1 else ''}"
    texts: tuple[tuple[str, dict[str, Any]], ...] = (
        (_size(cell.tile_traffic_bytes), {"va": "bottom", "fontsize": 10, "weight": "bold"}),
        (f"{cell.smem_bytes / 1024:,.0f} KiB, {depth}", {"va": "top", "fontsize": 8}),
    )
    for text, look in texts:
        y = place[1] + (0.02 if look["va"] == "bottom" else -0.06)
        axes.text(place[0], y, text, ha="center", color=PAPER if dark else INK, zorder=4, **look)


def _shortfall(cell: TileCell) -> str:
    """How much the closest schedule of a shape would need."""
    if cell.reason == "smem_bytes":
        return f"{cell.required / 1024:,.0f} KiB\nof {cell.limit / 1024:,.0f}"
    unit = {"regs_per_thread": " regs", "tmem_columns": " columns"}.get(str(cell.reason), "")
    return f"{cell.required}{unit}\nof {cell.limit}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError("not reached: TiB takes all")


# **** the mask ****


def _elements(axes: Axes, sample: MaskSample) -> None:
    """Which pairs are visible; a pixel of a large sample shows a share of its pairs."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("visible", [EMPTY_COLOUR, FULL_COLOUR])
    axes.imshow(
        sample.density,
        cmap=colours,
        norm=PowerNorm(0.5, 0, 1),
        interpolation="nearest",
        aspect=_aspect(sample),
        extent=(0, sample.kv_len, sample.q_len, 0),
    )
    _mask_frame(axes, sample, "Mask, elements", "visible")


def _tiles(axes: Axes, sample: MaskSample) -> None:
    """What the kernel does with each tile: skip it, compute it plainly, or compute the mask."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    classes = sample.classes
    axes.imshow(
        classes,
        cmap=ListedColormap([EMPTY_COLOUR, PARTIAL_COLOUR, FULL_COLOUR]),
        vmin=-0.5,
        vmax=2.5,
        interpolation="nearest",
        aspect=_aspect(sample),
        extent=(
            0,
            classes.shape[1] * sample.block_n,
            classes.shape[0] * sample.block_m,
            0,
        ),
    )
    if max(classes.shape) <= 64:
        for key in range(classes.shape[1] + 1):
            axes.axvline(key * sample.block_n, color=PAPER, lw=0.8)
        for row in range(classes.shape[0] + 1):
            axes.axhline(row * sample.block_m, color=PAPER, lw=0.8)
    full, partial = int((classes == FULL).sum()), int((classes == PARTIAL).sum())
    counts = (
        (FULL_COLOUR, f"full {full:,}"),
        (PARTIAL_COLOUR, f"partial {partial:,}"),
        (EMPTY_COLOUR, f"skipped {classes.size - full - partial:,}"),
    )
    axes.legend(
        handles=[Patch(fc=colour, ec=RULE, label=label) for colour, label in counts],
        loc="upper right",
        bbox_to_anchor=(1.02, -0.055),
        ncols=3,
        columnspacing=1.2,
        frameon=False,
        fontsize=9.5,
        handlelength=1.2,
    )
    _mask_frame(axes, sample, f"Mask, tiles of {sample.block_m}x{sample.block_n}", "")


def _aspect(sample: MaskSample) -> Literal["equal", "auto"]:
    """Square elements, unless one side would vanish."""
    ratio = sample.q_len / max(1, sample.kv_len)
    return "equal" if 0.25 <= ratio <= 4 else "auto"


def _mask_frame(axes: Axes, sample: MaskSample, title: str, what: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_anchor("W")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("key", color=MUTED, fontsize=10, loc="left")
    axes.set_ylabel("query row", color=MUTED, fontsize=10)
    parts = [part for part in _caption(sample, what) if part]
    _frame(axes, title, "; ".join(parts))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _caption(sample: MaskSample, what: str) -> Iterator[str]:
    share = sample.density.mean() if sample.density.size else 0.0
    yield f"{share:.1%} {what}" if what else ""
    yield (
        ""
        if sample.whole
        else f"{_many(sample.q_len, 'row')}, {_many(sample.kv_len, 'key')} of the shape"
    )
    yield f"{', '.join(sample.drawn)} drawn at random" if sample.drawn else ""
