"""The models of bytes and of time against what was measured: the committed records of the H200.

Nothing is timed here. A change of a model that fits the record less well fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.bench.counters_report import agreements
from flashgen.bench.record import load
from flashgen.bench.schedules_report import rankings

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


@pytest.mark.parametrize("name", ["counters", "schedules"])
def test_tables_are_made_from_their_records(name: str) -> None:
    from flashgen.bench.report import render

    text = (MEASURED / f"{name}.md").read_text("utf-8")
    assert text == render(load(MEASURED / f"{name}.json"))
