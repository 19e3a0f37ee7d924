"""The model of time for Hopper schedules: what it must know whatever its constants are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from flashgen.problem import Problem
from flashgen.schedule import sm90
from flashgen.schedule.best import best_of
from flashgen.schedule.model import Bucket, Schedule, Scheduler, Sm90, bucket_of
from flashgen.schedule.predict import predict, predicted_time_us
from flashgen.schedule.predict_sm90 import heads_abreast, likely_spills
from flashgen.schedule.roofline import roofline
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target

ANY = Bucket(None, None)


def problem(**fields: Any) -> Problem:
    spec = AttentionSpec(**{"head_dim": 128, "dtype": "bf16", "mask": ["causal"], **fields})
    return Problem(spec, get_target("nvidia-h200"))


def square(length: int, heads: int = 16, batch: int = 1) -> Shape:
    return Shape(batch, heads, heads, length, length)


def hopper(
    consumers: int = 2,
    block_n: int = 128,
    stages: int = 2,
    scheduler: Scheduler = "dynamic",
    **own: Any,
) -> Schedule:
    return Schedule(
        family="gluon_sm90",
        block_m=64 * consumers,
        block_n=block_n,
        num_warps=4 * (consumers + 1),
        num_stages=stages,
        sm90=Sm90(**{"scheduler": scheduler, "separate_out": True, **own}),
    )


def us(schedule: Schedule, shape: Shape, **fields: Any) -> float:
    return predicted_time_us(problem(**fields), schedule, shape)


def test_no_time_is_below_the_roofline() -> None:
    shape = square(4096)
    flops = 4 * 128 * 16 * 4096 * 4097 // 2
    floor = roofline(flops, 4 * 16 * 4096 * 128 * 2, get_target("nvidia-h200"), "bf16")
    for schedule in sm90.grid(problem(), ANY):
        found = predict(problem(), schedule, shape)
        assert floor.time_us < found.time_us < math.inf
        assert found.per_sm == 1


def test_no_work_takes_a_launch() -> None:
    assert us(hopper(), Shape(0, 4, 4, 64, 64)) < 5


def test_longer_takes_longer_and_a_mask_less() -> None:
    times = [us(hopper(), square(n)) for n in (512, 1024, 4096, 16384)]
    assert times == sorted(times)
    masks = [["causal", {"window": {"left": 511}}], ["causal"], []]
    times = [us(hopper(), square(8192), mask=mask) for mask in masks]
    assert times == sorted(times)


def test_tiles_dealt_out_in_turn_wait_for_whoever_got_the_heavy_ones() -> None:
    """One head after the other, its 128 tiles fall nearly in step with 132 SMs."""
    static, dynamic = (hopper(scheduler=each, group_mb=4) for each in ("static", "dynamic"))
    long, short = square(16384), square(512, batch=32)
    assert us(static, long) > 1.25 * us(dynamic, long)
    assert us(static, long, mask=[]) < 1.1 * us(dynamic, long, mask=[])
    assert us(static, short) < us(dynamic, short)
    assert us(replace(static, sm90=replace(static.sm90, group_mb=1024)), long) < us(static, long)


def test_a_program_for_each_tile_begins_anew_each_time() -> None:
    grid = hopper(scheduler="grid", separate_out=False)
    assert us(grid, square(512, batch=32)) > 1.2 * us(hopper(), square(512, batch=32))
    assert us(grid, square(16384)) < 1.05 * us(hopper(), square(16384))


def test_output_through_qs_buffer_delays_the_next_tile() -> None:
    shared = hopper(separate_out=False)
    assert us(shared, square(1024, batch=16)) > us(hopper(), square(1024, batch=16))


@pytest.mark.parametrize("group", [6, 8])
def test_heads_that_share_tiles_pay_where_rows_are_few(group: int) -> None:
    apart, packed = hopper(), hopper(packed_heads=8)
    few, many = (Shape(4, 8 * group, 8, q_len, 16384) for q_len in (8, 4096))
    assert us(packed, few, mask=[]) < 0.6 * us(apart, few, mask=[])
    assert us(packed, many, mask=[]) > 0.99 * us(apart, many, mask=[])
    found = [predict(problem(mask=[]), each, few) for each in (apart, packed)]
    assert [each.programs for each in found] == [4 * 8 * group, 4 * 8]
    best = best_of("gluon_sm90", problem(heads={"group": group}), bucket_of(8, 16384))
    assert best is not None
    assert best.packed_heads > 1


def test_more_warpgroups_hide_more_of_a_softmax() -> None:
    two, three = (hopper(n, stages=4, scheduler="grid") for n in (2, 3))
    assert us(three, square(16384), head_dim=64) < us(two, square(16384), head_dim=64)


def test_one_stage_waits_for_each_tile() -> None:
    assert us(hopper(stages=1), square(4096)) > 1.2 * us(hopper(), square(4096))


def test_wider_heads_come_closer_to_the_peak() -> None:
    rates = [
        d * predict(problem(head_dim=d, mask=[]), hopper(2, 64, 2), square(8192)).time_us ** -1
        for d in (64, 128, 256)
    ]
    assert rates == sorted(rates)


def test_score_work_and_inputs_for_each_score_are_counted() -> None:
    dense = {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}}
    plain = us(hopper(2, 64), square(4096))
    capped = us(hopper(2, 64), square(4096), score=[{"softcap": 50.0}])
    assert capped > 1.1 * plain  # a second instruction of the unit of exp2
    bias = us(hopper(2, 64), square(4096), score=[{"bias": {"tensor": "rel"}}], inputs=dense)
    assert bias > 1.3 * plain


# As ptxas of Triton 3.7 had it for plain attention: head dim, mask, schedule, whether it spilled.
SPILLED: tuple[tuple[int, str, Schedule, bool], ...] = (
    (64, "full", hopper(3, 128, scheduler="grid", separate_out=False), False),
    (64, "full", hopper(3, 128, scheduler="static"), False),
    (64, "full", hopper(3, 128, scheduler="static", q_buffers=2), True),
    (64, "full", hopper(3, 128, scheduler="dynamic", separate_out=False), True),
    (64, "full", hopper(3, 64, scheduler="dynamic", q_buffers=2), False),
    (64, "causal", hopper(3, 64, scheduler="dynamic", q_buffers=2), True),
    (64, "causal", hopper(3, 128, scheduler="grid", separate_out=False), True),
    (64, "causal", hopper(3, 128, scheduler="grid"), False),
    (64, "causal", hopper(3, 128, scheduler="static"), True),
    (64, "causal", hopper(2, 128, scheduler="dynamic", q_buffers=2), False),
    (128, "causal", hopper(2, 128, scheduler="static", q_buffers=2), False),
    (128, "full", hopper(3, 128, scheduler="grid"), True),
    (256, "causal", hopper(2, 64, scheduler="dynamic", separate_out=False), False),
    (64, "causal", hopper(3, 128, scheduler="static", separate_out=False, direct_out=True), False),
    (64, "causal", hopper(3, 128, scheduler="dynamic", separate_out=False, direct_out=True), True),
    (64, "full", hopper(4, 64, scheduler="dynamic", separate_out=False, direct_out=True), False),
    (64, "causal", hopper(4, 64, scheduler="dynamic", separate_out=False, direct_out=True), True),
    (128, "causal", hopper(3, 64, scheduler="dynamic"), False),
)


@pytest.mark.parametrize(("head_dim", "mask", "schedule", "spilled"), SPILLED)
def test_what_spills_is_not_bet_on(
    head_dim: int, mask: str, schedule: Schedule, *, spilled: bool
) -> None:
    masks = {"full": [], "causal": ["causal"]}
    assert likely_spills(schedule, problem(head_dim=head_dim, mask=masks[mask])) is spilled


def test_heads_that_are_worked_on_side_by_side() -> None:
    """As the host code of the module counts them: K and V of a head at 4,096 keys are 2 MiB."""
    grouped = Shape(4, 32, 8, 4096, 4096)
    assert heads_abreast(problem(), hopper(group_mb=4), square(4096)) == 2
    assert heads_abreast(problem(), hopper(group_mb=4), grouped) == 8
    assert heads_abreast(problem(), hopper(group_mb=32), square(4096, heads=8)) == 8
    assert heads_abreast(problem(), hopper(group_mb=1), square(65536)) == 1
