"""The model of time: what it must know whatever its constants are, and what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from flashgen.problem import Problem
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.predict import (
    COSTS,
    Machine,
    Prediction,
    Step,
    predict,
    predicted_time_us,
)
from flashgen.schedule.roofline import roofline
from flashgen.schedule.space import enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target

TILE = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=3)


def problem(target: str = "nvidia-h200", **fields: Any) -> Problem:
    spec = AttentionSpec(**{"head_dim": 128, "dtype": "bf16", "mask": ["causal"], **fields})
    return Problem(spec, get_target(target))


def square(length: int, heads: int = 16, batch: int = 1) -> Shape:
    return Shape(batch, heads, heads, length, length)


def test_no_work_takes_a_launch() -> None:
    assert predicted_time_us(problem(), TILE, Shape(0, 4, 4, 64, 64)) == COSTS.launch_us


def test_no_time_is_below_the_roofline() -> None:
    shape = square(4096)
    flops = 4 * 128 * 16 * 4096 * 4097 // 2
    floor = roofline(flops, 4 * 16 * 4096 * 128 * 2, get_target("nvidia-h200"), "bf16")
    for schedule in enumerate_space(problem(), bucket_of(4096, 4096)).feasible:
        found = predict(problem(), schedule, shape)
        assert floor.time_us < found.time_us < math.inf
        assert found.time_us >= max(found.compute_us, found.memory_us)


def test_longer_takes_longer() -> None:
    times = [predicted_time_us(problem(), TILE, square(n)) for n in (256, 512, 1024, 4096, 16384)]
    assert times == sorted(times)
    assert times[-1] > 10 * times[-2]  # 16 times the pairs


def test_a_mask_that_hides_more_takes_less() -> None:
    masks = [["causal", {"window": {"left": 511}}], ["causal"], []]
    times = [predicted_time_us(problem(mask=mask), TILE, square(8192)) for mask in masks]
    assert times == sorted(times)
    assert times[2] / times[1] == pytest.approx(2, rel=0.1)


def test_few_programs_leave_sms_idle() -> None:
    """One head's 16 programs take as long as 8 heads' 128, on 132 SMs."""
    plain = problem(mask=[])
    one, eight = (predict(plain, TILE, square(1024, heads)) for heads in (1, 8))
    assert one.compute_us == eight.compute_us
    assert one.waves < 0.1
    assert predict(plain, TILE, square(1024, 64)).compute_us > eight.compute_us


def test_the_last_wave_counts_as_far_as_it_is_full() -> None:
    plain = problem(mask=[])
    per_sm = predict(plain, TILE, square(1024)).per_sm
    full = 132 * per_sm  # programs at a time: 16 for each head
    heads = [full // 16, full // 16 + 1, 2 * (full // 16)]
    once, more, twice = (predict(plain, TILE, square(1024, n)).compute_us for n in heads)
    assert once < more < twice


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ("nvidia-b200", "nvidia-h200"),
        ("nvidia-h200", "nvidia-a100-80gb"),
        ("nvidia-a100-80gb", "nvidia-a10"),
    ],
)
def test_targets_differ(faster: str, slower: str) -> None:
    tile = replace(TILE, num_stages=2)
    one, other = (predicted_time_us(problem(t), tile, square(4096)) for t in (faster, slower))
    assert one < other


def test_decode_is_bound_by_memory() -> None:
    shape = Shape(64, 32, 32, 1, 8192)
    small = Schedule(block_m=16, block_n=64, num_warps=4, num_stages=3)
    found = predict(problem(), small, shape)
    assert found.bound == "memory"
    assert predict(problem(), TILE, square(4096)).bound == "compute"


def test_loads_that_nothing_hides_cost_time() -> None:
    times = [
        predicted_time_us(problem(), replace(TILE, num_stages=stages), square(4096))
        for stages in (1, 2)
    ]
    assert times[1] < times[0]


def test_score_work_is_counted() -> None:
    plain, capped = (problem(score=score) for score in ([], [{"softcap": 50.0}]))
    one, other = (predict(each, TILE, square(4096)).step.softmax for each in (plain, capped))
    assert other > 1.5 * one


def test_what_the_compiler_said_comes_before_estimates() -> None:
    lean, fat, spilling = (
        predict(problem(head_dim=64), TILE, square(4096), machine=Machine(regs, spilled))
        for regs, spilled in ((96, 0), (255, 0), (255, 400))
    )
    assert lean.per_sm > fat.per_sm == spilling.per_sm
    assert lean.time_us < fat.time_us < spilling.time_us


def test_flash1_moves_its_state_and_takes_longer() -> None:
    flash1 = replace(TILE, loop_order="flash1", num_stages=2)
    carried = predict(problem(loop_order="flash1"), flash1, square(4096))
    kept = predict(problem(), replace(TILE, num_stages=2), square(4096))
    assert carried.step.copy > 2 * kept.step.copy
    assert carried.time_us > kept.time_us


def test_programs_of_one_sm_overlap_until_a_unit_is_busy() -> None:
    step = Step(matmul=500.0, softmax=400.0, rescale=60.0, copy=300.0, waiting=240.0)
    assert step.latency == 1200.0
    assert step.busiest == 500.0
    assert [step.rounds(p) for p in (1, 2, 4)] == [1200.0, 1700.0, 2700.0]


def test_compute_and_memory_overlap() -> None:
    step = Step(1.0, 1.0, 1.0, 1.0, 1.0)
    found = Prediction(step, 1, 1, 1.0, compute_us=100.0, memory_us=50.0, launch_us=2.0)
    assert 102.0 < found.time_us < 104.0
    even = replace(found, memory_us=100.0)
    assert found.time_us < even.time_us < 130.0


# What `_SM90_TILES` was chosen from: TFLOP/s on an H200, N = 16,384, no mask (schedule/space.py).
MEASURED = {
    128: {(64, 64, 4, 3): 525, (128, 64, 8, 3): 500},
    256: {(128, 64, 8, 2): 520, (128, 32, 8, 3): 494},
}


@pytest.mark.parametrize("head_dim", MEASURED)
def test_tiles_that_were_measured_come_in_their_order(head_dim: int) -> None:
    heads = 2048 // head_dim
    times = {
        tile: predicted_time_us(
            problem(head_dim=head_dim, mask=[]),
            Schedule(
                **dict(zip(("block_m", "block_n", "num_warps", "num_stages"), tile, strict=True))
            ),
            square(16384, heads),
        )
        for tile in MEASURED[head_dim]
    }
    by_rate = sorted(MEASURED[head_dim], key=lambda tile: -MEASURED[head_dim][tile])
    assert sorted(times, key=times.__getitem__) == by_rate
