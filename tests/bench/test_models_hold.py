"""The models of bytes and of time against what was measured: the committed records of the H200.

Nothing is timed here. A change of a model that fits the record less well fails.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from flashgen.bench.counters_report import agreements
from flashgen.bench.record import load
from flashgen.bench.schedules_report import MOST_LOST, hopper_parts, hopper_rankings, rankings

MEASURED = Path(__file__).parents[2] / "benchmarks" / "nvidia-h200"


def test_counted_bytes_are_those_of_the_models() -> None:
    found = agreements(load(MEASURED / "counters.json"))
    orders = [each.id.partition("/")[0] for each in found]
    assert orders.count("flash2") >= 27 and orders.count("flash1") >= 27
    assert [
        (each.id, each.tile_traffic_error, each.dram_error) for each in found if not each.good
    ] == []


def test_the_fastest_schedule_is_in_the_models_first_third() -> None:
    record = load(MEASURED / "schedules.json")
    found = rankings(record)
    assert len(found) >= 5
    assert min(each.count for each in found.values()) >= 30
    assert {name: each for name, each in found.items() if not each.good} == {}


def test_the_models_first_hopper_schedule_is_near_the_fastest() -> None:
    """Many of the schedules that are timed are within 2% of each other."""
    found = hopper_rankings(load(MEASURED / "fa-paper.json"))
    assert len(found) >= 45
    assert {name: each for name, each in found.items() if each.loss > MOST_LOST} == {}
    assert statistics.mean(each.loss for each in found.values()) <= 0.01
    assert statistics.mean(each.loss <= 0.02 for each in found.values()) >= 0.8
    many = [each for each in found.values() if each.count >= 5]
    assert len(many) >= 9
    assert statistics.median(each.correlation for each in many) >= 0.65


def test_the_report_of_hopper_kernels_has_the_models_order() -> None:
    (part,) = hopper_parts(load(MEASURED / "fa-paper.json"))
    assert part in (MEASURED / "fa-paper.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["counters", "schedules"])
def test_tables_are_made_from_their_records(name: str) -> None:
    from flashgen.bench.report import render

    text = (MEASURED / f"{name}.md").read_text("utf-8")
    assert text == render(load(MEASURED / f"{name}.json"))
