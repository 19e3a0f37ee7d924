"""The picture of suite `fa-paper`: nothing lies over anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from flashgen.bench.fa_cases import FA3, GRID
from flashgen.bench.fa_plot import LABELS, draw, figure_of
from flashgen.bench.record import CaseRecord, Record, Result, load

MEASURED = Path(__file__).parents[2] / "benchmarks" / "nvidia-h200" / "fa-paper.json"


def with_outside(record: Record) -> Record:
    """As if outside contestants with long names had taken part."""

    def more(case: CaseRecord) -> CaseRecord:
        fa3 = case.result(FA3)
        if case.group != GRID or fa3 is None:
            return case
        others = (Result(f"outside {name}", ms=fa3.ms) for name in ("prototype", "prototype-4mb"))
        return replace(case, results=(*case.results, *others))

    return replace(record, cases=tuple(map(more, record.cases)))


@pytest.mark.parametrize(
    "change", [lambda r: r, with_outside, lambda r: replace(r, cases=r.cases[:3])]
)
def test_no_text_lies_over_another(change: Callable[[Record], Record]) -> None:
    figure = figure_of(change(load(MEASURED)))
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    things = {text.get_text(): text for text in figure.texts} | {"legend": legend}
    things |= {
        f"title {i} {axes.get_title(loc='left')}": axes._left_title
        for i, axes in enumerate(figure.axes)
        if axes.get_title(loc="left")
    }
    things |= {
        f"legend {i}": axes.get_legend()
        for i, axes in enumerate(figure.axes)
        if axes.get_legend() is not None
    }
    boxes = {name: thing.get_window_extent(renderer) for name, thing in things.items()}
    assert len(boxes) >= 2 + 1 + 6 + 1
    over = [(a, b) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]
    assert over == []
    inside = figure.bbox
    assert all(
        inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
        for box in boxes.values()
    )


def test_the_legend_names_everybody_once_ours_first() -> None:
    figure = figure_of(with_outside(load(MEASURED)))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:3] == ["flashgen", "prototype-4mb", "prototype"]
    assert sorted(names[3:]) == sorted(LABELS.values())


def test_a_record_without_cases_has_a_picture(tmp_path: Path) -> None:
    draw(replace(load(MEASURED), cases=()), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 10_000
