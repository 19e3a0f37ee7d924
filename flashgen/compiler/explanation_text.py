"""An explanation, and a comparison of targets, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from flashgen.compiler.explanation import (
    Algorithm,
    Comparison,
    Explanation,
    RejectionGroup,
    shape_text,
)

WIDTH = 100


def explanation_text(found: Explanation) -> str:
    """The whole explanation, section after section."""
    lines = [*_head(found)]
    sections = (
        ("What limits the kernel", _limits(found)),
        ("Loop orders side by side", _algorithms(found)),
        ("Mask", _mask(found)),
        ("Formulas", _formulas(found)),
        ("On chip", _tiles(found)),
        ("Families of kernels", _families(found)),
        ("Rejected tile shapes", _rejections(found)),
        ("Largest tiles that fit", _frontier(found)),
    )
    for title, body in sections:
        lines += ["", title, *body]
    return "\n".join(lines) + "\n"


def comparison_text(found: Comparison) -> str:
    """A table with a line for each target."""
    rows: list[Sequence[str]] = [
        ("target", "arch", "schedule", "shared memory", "fit", "flash2", "flash1", "naive", "")
    ]
    for row in found.rows:
        shared = "-" if row.smem_bytes is None else f"{of_limit(row.smem_bytes, row.smem_limit)}"
        rows.append(
            (
                row.target,
                row.arch,
                row.schedule or "-",
                shared,
                "-" if row.feasible is None else f"{row.feasible} of {row.tried}",
                _ms(row.flash2_ms),
                _ms(row.flash1_ms),
                _ms(row.naive_ms),
                "; ".join(
                    filter(None, (row.bound and f"{row.bound}-bound", row.chosen_by, row.note))
                ),
            )
        )
    assumed = " (assumed: the spec names none)" if found.shape_assumed else ""
    head = (
        f"{found.spec.display_name}: {shape_text(found.shape)}{assumed}",
        *_served(found),
        "times: by the roofline, in ms, of both orders and of naive attention; nothing is measured",
        "",
    )
    return "\n".join([*head, *_table(rows)]) + "\n"


# **** sections ****


def _head(found: Explanation) -> Iterator[str]:
    spec, target = found.spec, found.target
    dims = spec.head_dim
    width = f"{dims.qk}" if dims.qk == dims.v else f"{dims.qk}/{dims.v}"
    assumed = " (assumed: the spec names none)" if found.shape_assumed else ""
    yield f"{spec.display_name} on {target.name} ({target.id}, {target.arch})"
    yield from _served(found)
    yield f"  shape     {shape_text(found.shape)}{assumed}; head_dim {width}, {spec.dtype.q}"
    yield f"  order     {found.loop_order}, {found.order_reason}"
    if found.schedule is None:
        yield f"  schedule  none of {found.tried} fits"
        return
    limit = target.smem_per_block_bytes
    family = found.schedule.family
    yield f"  schedule  {str(found.schedule).removeprefix(f'{family} ')}, family {family}"
    if found.choice is not None:
        yield from _wrapped(str(found.choice), "  chosen    ", "            ")
        if found.choice.untuned != found.schedule:
            yield f"  untuned   {found.choice.untuned}"
        for note in found.choice.notes:
            first, *others = note.splitlines()
            yield from _wrapped(first, "  note      ", "            ")
            for line in others:
                yield from _wrapped(line.strip(), "            ", "            ")
    yield (
        f"  on chip   {of_limit(found.smem_bytes, limit)} of shared memory, "
        f"{found.regs_per_thread} registers a thread for tiles"
    )


def _served(found: Explanation | Comparison) -> Iterator[str]:
    for sentence in found.not_served:
        yield from _wrapped(f"not served: {sentence}", "  ", "            ")


def _limits(found: Explanation) -> Iterator[str]:
    for limit in found.limits:
        yield from _wrapped(limit, "  - ", "    ")


def _algorithms(found: Explanation) -> Iterator[str]:
    rows: list[Sequence[str]] = [("", *(each.name for each in found.algorithms))]
    rows += [(label, *(of(each) for each in found.algorithms)) for label, of in ALGORITHM_ROWS]
    yield from _indented(_table(rows))
    for each in found.algorithms:
        yield f"  {each.name}: {each.schedule or _NAIVE}"


_NAIVE = "three kernels, S and P through device memory, all pairs computed"


def _mask(found: Explanation) -> Iterator[str]:
    mask = found.mask
    yield from _wrapped(mask.predicate, "  shows     ", "            ")
    yield (
        f"  pairs     {mask.visible_pairs:,} of {mask.pairs:,} visible"
        f" ({_share(mask.visible_pairs, mask.pairs)}), for each batch and query head"
    )
    yield (
        f"  tiles     {mask.visited_tiles:,} of {mask.tiles:,} visited"
        f" ({_share(mask.visited_tiles, mask.tiles)})"
    )
    if found.spec.inputs or found.spec.kv_lens != "none":
        yield "            what inputs hide is not known here and counts as visible"
    for sentence in mask.bounds:
        yield from _wrapped(sentence, "  - ", "    ")


def _formulas(found: Explanation) -> Iterator[str]:
    for formula in found.formulas:
        unit = f" {formula.unit}" if formula.unit else ""
        yield f"  {formula.name} = {formula.value:,}{unit}"
        yield from _wrapped(formula.text, "      = ", "        ")
        if formula.with_numbers not in (formula.text, str(formula.value)):
            yield from _wrapped(formula.with_numbers, "      = ", "        ")


def _tiles(found: Explanation) -> Iterator[str]:
    if not found.tiles:
        yield "  nothing fits"
        return
    rows: list[Sequence[str]] = [("tile", "where", "made for each", "shape", "", "bytes")]
    for tile in found.tiles:
        copies = f" x {tile.copies}" if tile.copies > 1 else ""
        rows.append(
            (
                tile.name,
                {"smem": "shared", "reg": "registers"}[tile.space],
                tile.loop,
                f"{tile.dtype} [{', '.join(tile.shape)}]",
                "x".join(map(str, tile.extents)),
                f"{tile.bytes:,}{copies}",
            )
        )
    yield from _indented(_table(rows))
    limit = found.target.smem_per_block_bytes
    yield f"  shared memory, as the compiler allocates it: {of_limit(found.smem_bytes, limit)}"
    yield f"  shared memory, by the textbook: {of_limit(found.textbook_smem_bytes, limit)}"


def _families(found: Explanation) -> Iterator[str]:
    width = max(len(each.family) for each in found.families)
    for each in found.families:
        yield from _wrapped(str(each), f"  {each.family:{width}}  ", " " * (width + 4))


def _rejections(found: Explanation) -> Iterator[str]:
    yield f"  {found.feasible} of {found.tried} schedules of the grid fit"
    for group in found.rejections:
        count = sum(tile.schedules for tile in group.tiles)
        yield f"  {group.reason}: {count} schedules"
        yield from _indented(_table(rejection_rows(group)), "    ")


def rejection_rows(group: RejectionGroup) -> list[Sequence[str]]:
    """A table of a reason's tile shapes, with its head."""
    head = ("tile", "closest schedule", "schedules rejected")
    return [
        head,
        *(
            (
                f"{tile.block_m}x{tile.block_n}",
                tile.text.partition(": ")[2],
                f"{tile.schedules} of {tile.tried}" + ("" if tile.any_fits else ", none fits"),
            )
            for tile in group.tiles
        ),
    ]


def _frontier(found: Explanation) -> Iterator[str]:
    cells = {(cell.block_m, cell.block_n): cell for cell in found.grid}
    limit = found.target.smem_per_block_bytes
    for schedule in found.frontier:
        cell = cells[schedule.block_m, schedule.block_n]
        yield f"  {schedule}: {of_limit(cell.smem_bytes, limit)}"
    if not found.frontier:
        yield "  none"


# **** numbers ****


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _indented(lines: Iterable[str], by: str = "  ") -> Iterator[str]:
    return (f"{by}{line}" for line in lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _si(value: float) -> str:
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E"), "FLOP")


def _bytes(value: float) -> str:
    return _scaled(value, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), "B")


def _scaled(value: float, step: int, prefixes: Sequence[str], unit: str) -> str:
    place = 0
    while value >= step and place < len(prefixes) - 1:
        value, place = value / step, place + 1
    return f"{value:.4g} {prefixes[place]}{unit}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def of_limit(used: int, limit: int) -> str:
    """`196,608 of 232,448 B (85%)`."""
    return f"{used:,} of {limit:,} B ({used / limit:.0%})"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


# What the table of algorithms says of each, row by row.
ALGORITHM_ROWS: Sequence[tuple[str, Callable[[Algorithm], str]]] = (
    ("FLOPs, visible pairs", lambda a: _si(a.flops)),
    ("FLOPs, executed", lambda a: _si(a.executed_flops)),
    ("tile traffic", lambda a: _bytes(a.tile_traffic_bytes)),
    ("DRAM, floor", lambda a: _bytes(a.dram_floor_bytes)),
    ("DRAM, model", lambda a: _bytes(a.dram_bytes)),
    ("workspace", lambda a: _bytes(a.workspace_bytes)),
    ("FLOP per DRAM byte", lambda a: f"{a.intensity:.4g}"),
    ("roofline, compute, ms", lambda a: _ms(a.compute_ms)),
    ("roofline, memory, ms", lambda a: _ms(a.memory_ms)),
    ("roofline bound, ms", lambda a: f"{_ms(a.bound_ms)} ({a.bound})"),
    ("programs", lambda a: str(a.programs or "-")),
)
