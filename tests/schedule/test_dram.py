"""The DRAM model: the floor where everything fits in L2, more where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.passes.count import visits
from flashgen.problem import Problem
from flashgen.schedule.budget import budget_for
from flashgen.schedule.dram import DramTraffic, dram_bytes_model, for_shape, grid_programs
from flashgen.schedule.model import Schedule
from flashgen.schedule.orders import estimate
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import get_target


def traffic(
    shape: Shape, order: str = "flash2", target: str = "nvidia-h200", **fields: Any
) -> DramTraffic:
    spec = AttentionSpec(**{"head_dim": 128, "dtype": "bf16", "loop_order": order, **fields})
    problem = Problem(spec, get_target(target))
    schedule = Schedule(
        loop_order=order,  # type: ignore[arg-type]
        block_m=64,
        block_n=64,
        num_warps=4,
        num_stages=2,
    )
    found = visits(spec, shape, 64, 64)
    figures = budget_for(problem, schedule).figures(
        schedule,
        shape,
        visited_tiles=found.tiles,
        visible_pairs=1,
        first_visits=found.first_visits,
        visited_keys=found.keys,
        key_tiles=found.key_tiles,
    )
    return dram_bytes_model(problem, schedule, shape, figures, found)


def heads(length: int, count: int = 16) -> Shape:
    return Shape(batch=1, q_heads=count, kv_heads=count, q_len=length, kv_len=length)


def test_what_fits_in_l2_costs_the_floor() -> None:
    found = traffic(heads(4096))
    assert found.fits_l2
    assert found.total_bytes == found.floor_bytes == 4 * 16 * 4096 * 128 * 2


def test_keys_that_outgrow_l2_are_read_again() -> None:
    """262,144 keys of 512 B are 128 MiB a head, in each half of L2; a wave reads them all."""
    found = traffic(heads(262_144, 1))
    assert found.working_set_bytes == 2 * 262_144 * 512
    assert found.total_bytes > 2 * found.floor_bytes
    assert found.missed_bytes == found.reused_bytes
    assert traffic(heads(262_144, 1), target="nvidia-l4").working_set_bytes == 262_144 * 512


def test_a_window_keeps_the_working_set_small() -> None:
    wide = traffic(heads(262_144, 1))
    narrow = traffic(heads(262_144, 1), mask=["causal", {"window": {"left": 1023}}])
    assert narrow.working_set_bytes < wide.working_set_bytes / 10
    assert narrow.total_bytes == narrow.floor_bytes


def test_less_l2_never_costs_less() -> None:
    totals = [
        traffic(heads(32_768), target=target).total_bytes
        for target in ("nvidia-b200", "nvidia-h200", "nvidia-a10")
    ]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_flash1_carries_its_state_through_l2() -> None:
    small, large = traffic(heads(512, 4), "flash1"), traffic(heads(16_384, 64), "flash1")
    assert small.fits_l2
    assert small.missed_bytes == 0
    assert small.written_back_bytes == 4 * 512 * (4 * 128 + 8)  # once: nobody drops what is dirty
    assert not large.fits_l2
    assert large.missed_bytes == pytest.approx(large.reused_bytes)
    assert large.written_back_bytes == 255 * 64 * 16_384 * (4 * 128 + 8)  # by each key tile but one
    assert large.total_bytes > traffic(heads(16_384, 64)).total_bytes


@pytest.mark.parametrize("order", ["flash2", "flash1"])
def test_no_work_moves_nothing(order: str) -> None:
    assert traffic(Shape(0, 4, 4, 128, 128), order).total_bytes == 0
    assert traffic(Shape(1, 4, 4, 0, 0), order).total_bytes == 0


def test_no_more_splits_than_key_tiles_are_priced() -> None:
    """8 splits of one key tile: the kernel of splits runs once, and a merge reads what it left."""
    spec = AttentionSpec(head_dim=64, dtype="bf16", loop_order="flash1")
    problem, shape = Problem(spec, get_target("nvidia-h200")), Shape(1, 4, 4, 128, 64)
    asked = Schedule(
        loop_order="flash1", block_m=64, block_n=64, num_warps=4, num_stages=1, num_kv_splits=8
    )
    runs = for_shape(problem, asked, shape)
    assert runs.splits_for(shape.kv_len) == 1
    assert grid_programs(runs, shape) == 4
    split, whole = (
        estimate(problem, schedule, shape) for schedule in (asked, replace(asked, num_kv_splits=1))
    )
    state = 4 * 128 * (4 * 64 + 8)  # of one split, written and read
    assert split.tile_traffic_bytes == whole.tile_traffic_bytes + 2 * state
    assert split.dram_bytes == whole.dram_bytes + state
    assert split.programs == whole.programs == 4
    assert split.time_us > whole.time_us  # two launches
    (left_open, fixed) = (
        for_shape(problem, replace(asked, num_kv_splits=n), shape) for n in (None, 1)
    )
    assert left_open == fixed


def test_programs_of_a_grid() -> None:
    flash2 = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=2)
    flash1 = Schedule(
        loop_order="flash1", block_m=64, block_n=64, num_warps=4, num_stages=2, num_kv_splits=8
    )
    shape = Shape(batch=2, q_heads=16, kv_heads=4, q_len=1000, kv_len=4096)
    assert grid_programs(flash2, shape) == 2 * 16 * 16
    assert grid_programs(flash1, shape) == 2 * 16 * 8


def test_keys_that_no_query_sees_are_not_read() -> None:
    """One query with a window of 64 of 131,072 keys: one key tile of K and V for each head."""
    shape = Shape(batch=1, q_heads=4, kv_heads=4, q_len=1, kv_len=131_072)
    found = traffic(shape, mask=["causal", {"window": {"left": 63, "right": 0}}])
    assert found.total_bytes == found.floor_bytes == 4 * 128 * 2 * (2 * 64 + 2)
    whole = traffic(shape, mask=["causal"])
    assert whole.floor_bytes == 4 * 128 * 2 * (2 * 131_072 + 2)
