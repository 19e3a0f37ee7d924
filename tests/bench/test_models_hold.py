"""The models of bytes and of time against what was measured: the committed records of the H200.

Nothing is timed here. A change of a model that fits the record less well fails.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from flashgen.bench.counters_report import agreements
from flashgen.bench.gluon_variants import VARIANTS
from flashgen.bench.record import load
from flashgen.bench.schedules_report import MOST_LOST, hopper_parts, hopper_rankings, rankings
from flashgen.problem import Problem
from flashgen.schedule.predict import predicted_time_us
from flashgen.spec.parts import Shape
from flashgen.target import get_target

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
    found = hopper_rankings(load(MEASURED / "fa-paper.json"))
    assert len(found) >= 37  # all but the bias: its tiles now leave no room for that run's stages
    assert {name: each for name, each in found.items() if each.loss > MOST_LOST} == {}
    assert statistics.mean(each.place == 1 for each in found.values()) >= 0.85
    assert max(each.place for each in found.values()) <= 3
    many = [each for each in found.values() if each.count >= 5]
    assert len(many) >= 15
    assert min(each.correlation for each in many) >= 0.5
    assert statistics.median(each.correlation for each in many) >= 0.85


def test_the_report_of_hopper_kernels_has_the_models_order() -> None:
    (part,) = hopper_parts(load(MEASURED / "fa-paper.json"))
    assert part in (MEASURED / "fa-paper.md").read_text("utf-8")


FIRST_RUN = re.compile(r"\| d(\d+)( causal)? N=(\d+) \|.*?\*\*(\d+) .*?\*\* \| (.+?) \|")


def test_the_first_runs_of_hopper_kernels() -> None:
    """Of each case the page has the fastest of those that took part."""
    text = (MEASURED / "gluon-first.md").read_text("utf-8")
    cases = FIRST_RUN.findall(text)
    assert len(cases) == 18
    variants = {variant.name: variant for variant in VARIANTS}
    losses = []
    for head_dim, causal, length, tflops, fastest in cases:
        variant = variants[f"plain-d{head_dim}{'-causal' if causal else ''}"]
        heads, n = 2048 // int(head_dim), int(length)
        problem = Problem(variant.spec, get_target("nvidia-h200"))
        shape = Shape(16384 // n, heads, heads, n, n)
        times = {
            str(each).removeprefix("gluon_sm90 "): predicted_time_us(problem, each, shape)
            for each in variant.schedules
        }
        losses.append(times[fastest] / min(times.values()))
        pairs = n * (n + 1) // 2 if causal else n * n
        took_us = 4 * int(head_dim) * pairs * shape.batch * heads / int(tflops) / 1e6
        assert 0.9 < times[fastest] / took_us < 1.1
    assert max(losses) <= 1 + MOST_LOST
    assert sum(loss == 1 for loss in losses) >= 9


@pytest.mark.parametrize("name", ["counters", "schedules"])
def test_tables_are_made_from_their_records(name: str) -> None:
    from flashgen.bench.report import render

    text = (MEASURED / f"{name}.md").read_text("utf-8")
    assert text == render(load(MEASURED / f"{name}.json"))
