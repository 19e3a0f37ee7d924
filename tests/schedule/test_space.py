"""Feasible and not, the default schedule, and what is said when nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import ScheduleError
from flashgen.problem import Problem
from flashgen.schedule.budget import budget
from flashgen.schedule.model import Bucket, Rejection, Schedule, all_buckets, bucket_of
from flashgen.schedule.space import check, default_schedule, enumerate_space, regs_limit
from flashgen.spec.model import AttentionSpec
from flashgen.target import TARGETS, get_target

LONG = bucket_of(8192, 8192)
R7: dict[str, Any] = {"head_dim": {"qk": 192, "v": 128}, "dtype": "bf16"}


def problem_of(target: str = "nvidia-h200", **fields: Any) -> Problem:
    return Problem(
        AttentionSpec(**{"head_dim": 128, "dtype": "bf16", **fields}), get_target(target)
    )


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int, **fields: Any) -> Schedule:
    return Schedule(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, **fields
    )


# **** single rules ****


@pytest.mark.parametrize(
    ("schedule", "fields", "rejection"),
    [
        (tile(128, 64, 8, 3), {}, None),
        (tile(128, 128, 8, 4), {}, Rejection("smem_bytes", 294_912, 232_448)),
        (tile(48, 64, 4, 2), {}, Rejection("block_m", 48, 0, "power of two")),
        (tile(64, 96, 4, 2), {}, Rejection("block_n", 96, 0, "power of two")),
        (tile(64, 8, 4, 2), {}, Rejection("block_n", 8, 16, "at least")),
        (tile(64, 64, 3, 2), {}, Rejection("num_warps", 3, 0, "power of two")),
        (tile(64, 64, 64, 2), {}, Rejection("threads_per_block", 2048, 1024)),
        (tile(64, 64, 4, 0), {}, Rejection("num_stages", 0, 1, "at least")),
        (tile(64, 64, 4, 7), {}, Rejection("num_stages", 7, 4)),
        (
            tile(64, 64, 4, 1, loop_order="flash1"),
            {},
            Rejection("loop_order", 0, 0, "as in the spec"),
        ),
        (tile(64, 64, 4, 1, loop_order="flash1"), {"loop_order": "auto"}, None),
        (tile(64, 64, 4, 1, loop_order="flash1", num_kv_splits=8), {"loop_order": "flash1"}, None),
        (
            tile(64, 64, 4, 1, loop_order="flash1", num_kv_splits=None),
            {"loop_order": "flash1"},
            None,
        ),
        (
            tile(64, 64, 4, 2, loop_order="flash1"),
            {"loop_order": "flash1"},
            Rejection("num_stages", 2, 1),
        ),
        (
            tile(64, 64, 4, 2, num_kv_splits=2),
            {},
            Rejection("num_kv_splits of loop flash2", 2, 1),
        ),
        (
            tile(64, 64, 4, 2, num_kv_splits=None),
            {},
            Rejection("num_kv_splits of loop flash2", 2, 1),
        ),
        (tile(64, 64, 4, 2, num_kv_splits=0), {}, Rejection("num_kv_splits", 0, 1, "at least")),
        (tile(128, 64, 8, 2, maxnreg=96), {}, Rejection("regs_per_thread", 98, 96)),
        (tile(256, 32, 4, 1), {}, Rejection("regs_per_thread", 326, 255)),
        (tile(64, 64, 4, 2), {"head_dim": 520}, Rejection("head_dim", 520, 512)),
        (tile(64, 16, 4, 2), {"dtype": "fp8_e4m3"}, Rejection("block_n", 16, 32, "at least")),
        (tile(32, 128, 8, 1), {"dtype": "fp32", "head_dim": 64}, None),
    ],
)
def test_each_rule(schedule: Schedule, fields: dict[str, Any], rejection: Rejection | None) -> None:
    assert check(schedule, problem_of(**fields), LONG) == rejection


@pytest.mark.parametrize(
    ("block_n", "num_stages", "bucket", "rejection"),
    [
        (128, 1, bucket_of(500, 128), None),
        (128, 1, bucket_of(500, 30), None),
        (64, 1, bucket_of(500, 128), Rejection("block_n of a single tile", 64, 128, "at least")),
        (64, 1, LONG, Rejection("block_n of a single tile", 64, 8192, "at least")),
        (64, 1, Bucket(None, None), Rejection("block_n of a single tile", 64, 65, "at least")),
        (128, 2, bucket_of(500, 128), Rejection("num_stages of a single tile", 2, 1)),
    ],
)
def test_a_single_tile_holds_all_keys(
    block_n: int, num_stages: int, bucket: Bucket, rejection: Rejection | None
) -> None:
    schedule = tile(64, block_n, 4, num_stages, kernel="single_tile")
    assert check(schedule, problem_of(), bucket) == rejection


def test_tensor_memory_holds_accumulator_and_scores_on_sm_100() -> None:
    wide = problem_of("nvidia-b200", head_dim=512)
    assert check(tile(128, 16, 8, 1), wide) == Rejection("tmem_columns", 528, 512)


def test_tiles_reported_for_d192_128_on_sm_86() -> None:
    """64x64, 3 stages is over 101,376 B; 128x32, 2 stages, 8 warps fits and was fastest."""
    problem = problem_of("nvidia-a10", **R7)
    assert check(tile(64, 64, 4, 3), problem) == Rejection("smem_bytes", 139_264, 101_376)
    assert check(tile(128, 32, 8, 2), problem) is None
    assert default_schedule(problem, LONG) == tile(128, 32, 8, 2)


def test_d512_on_sm_90() -> None:
    problem = problem_of(head_dim=512)
    assert check(tile(64, 32, 4, 3), problem) == Rejection("smem_bytes", 262_144, 232_448)
    assert check(tile(32, 32, 4, 1), problem) is None


# **** the space ****


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_space_is_the_grid_cut_in_two(target: str, dtype: str) -> None:
    problem = problem_of(target, dtype=dtype)
    for bucket in (LONG, bucket_of(16, 300), bucket_of(40, 64)):
        space = enumerate_space(problem, bucket)
        assert space.feasible == tuple(sorted(space.feasible))
        assert all(check(schedule, problem, bucket) is None for schedule in space.feasible)
        assert all(check(schedule, problem, bucket) == why for schedule, why in space.rejections)
        tried = [*space.feasible, *(schedule for schedule, _ in space.rejections)]
        assert len(set(tried)) == len(tried)
        limit = bucket.q_len_max or 256
        assert all(schedule.block_m <= limit for schedule in space.feasible)


def test_rejections_are_grouped_by_reason() -> None:
    grouped = enumerate_space(problem_of(), LONG).grouped()
    assert list(grouped) == ["smem_bytes", "regs_per_thread", "smem_bytes of an SM"]
    assert all(why.required > why.limit for found in grouped.values() for _, why in found)


def test_register_caps_are_tried_where_two_programs_fit_an_sm() -> None:
    def caps(**fields: Any) -> set[int | None]:
        return {s.maxnreg for s in enumerate_space(problem_of(**fields), LONG).feasible}

    assert caps(head_dim=64) == {None, 128}
    assert caps(head_dim=128) == {None}
    assert caps(head_dim=64, target="nvidia-a100-80gb") == {None}


def test_keys_too_many_for_one_tile_go_to_the_loop() -> None:
    problem = problem_of("nvidia-a10", dtype="tf32", head_dim=512)
    space = enumerate_space(problem, bucket_of(4096, 64))
    assert {schedule.kernel for schedule in space.feasible} == {"loop"}
    assert {schedule.kernel for schedule, _ in space.rejections} == {"loop", "single_tile"}


def test_fp32_tiles_of_many_keys_are_feasible_but_no_default() -> None:
    problem = problem_of(dtype="fp32", head_dim=64)
    space = enumerate_space(problem, bucket_of(4096, 128))
    assert {schedule.kernel for schedule in space.feasible} == {"single_tile"}
    assert default_schedule(problem, bucket_of(64, 128)) == default_schedule(
        problem, bucket_of(64, 8192)
    )


def test_a_schedule_is_rejected_by_the_lower_bound_and_chosen_by_the_estimate() -> None:
    """sm_100: 32 B of barriers, in a gap of 1,024 B before q, are all that does not fit."""
    problem = problem_of("nvidia-b200", dtype="tf32", head_dim=32)
    limit = problem.target.smem_per_block_bytes
    schedule = tile(64, 256, 8, 3)
    needs = budget(problem)
    assert needs.least_smem_bytes_of(schedule) == 8192 + 2 * 3 * 256 * 32 * 4 <= limit
    assert needs.smem_bytes_of(schedule) == needs.least_smem_bytes_of(schedule) + 1024
    tight = dataclasses.replace(
        problem.target, smem_per_block_bytes=needs.least_smem_bytes_of(schedule)
    )
    assert check(schedule, Problem(problem.spec, tight)) is None
    assert default_schedule(Problem(problem.spec, tight), LONG) != schedule


# **** the default ****


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [
        (16, tile(64, 64, 4, 3, maxnreg=128)),
        (64, tile(64, 64, 4, 3, maxnreg=128)),
        (80, tile(64, 64, 4, 3)),
        (128, tile(64, 64, 4, 3)),
        ({"qk": 192, "v": 128}, tile(128, 64, 8, 3)),
        (192, tile(128, 64, 8, 2)),
        (256, tile(128, 64, 8, 2)),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_measured_defaults_on_an_h200(head_dim: Any, dtype: str, expected: Schedule) -> None:
    assert default_schedule(problem_of(head_dim=head_dim, dtype=dtype), LONG) == expected


def test_a_bias_leaves_no_room_for_the_register_cap() -> None:
    rel = {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "bf16"}
    biased = problem_of(head_dim=64, score=[{"bias": {"tensor": "rel"}}], inputs={"rel": rel})
    assert default_schedule(biased, LONG) == tile(128, 64, 8, 3)


@pytest.mark.parametrize("q_len", [1, 16, 32, 64])
def test_short_queries_take_small_tiles(q_len: int) -> None:
    for head_dim in (64, 128, 256):
        schedule = default_schedule(problem_of(head_dim=head_dim), bucket_of(q_len, 8192))
        assert schedule.block_m == (16 if q_len <= 16 else 64)
        assert schedule.num_warps == 4


@pytest.mark.parametrize("kv_len", [16, 32, 64, 128])
def test_few_keys_take_one_tile(kv_len: int) -> None:
    for head_dim in (64, 128, 256):
        schedule = default_schedule(problem_of(head_dim=head_dim), bucket_of(1000, kv_len))
        assert (schedule.kernel, schedule.block_n) == ("single_tile", max(64, kv_len))


@settings(max_examples=60)
@given(
    target=st.sampled_from(list(TARGETS)),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(["bf16", "fp16", "tf32", "fp32"]),
    bucket=st.sampled_from(all_buckets()),
)
def test_every_head_dim_up_to_256_has_a_default_everywhere(
    target: str, head_dim: int, dtype: str, bucket: Bucket
) -> None:
    problem = problem_of(target, head_dim=head_dim, dtype=dtype)
    schedule = default_schedule(problem, bucket)
    assert check(schedule, problem, bucket) is None
    assert schedule.block_m <= (128 if bucket.q_len_max is None else max(16, bucket.q_len_max * 2))
    needs = budget(problem, schedule.kernel)
    assert needs.smem_bytes_of(schedule) <= problem.target.smem_per_block_bytes
    assert needs.regs_per_thread_of(schedule) <= regs_limit(schedule, problem)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_all_buckets_share_few_defaults(target: str, dtype: str) -> None:
    for head_dim in (64, 128, 256):
        problem = problem_of(target, head_dim=head_dim, dtype=dtype)
        assert len({default_schedule(problem, bucket) for bucket in all_buckets()}) <= 7


# **** nothing fits ****


def test_swapped_length_and_head_dim_are_recognised(golden: Callable[[str, str], None]) -> None:
    """(8, 1, 1024, 1024) in fp32."""
    with pytest.raises(ScheduleError) as caught:
        default_schedule(problem_of(name="swapped", head_dim=1024, dtype="fp32"), LONG)
    golden("schedule/head-dim-1024.txt", str(caught.value))
    assert caught.value.exit_code == 5


def test_every_tile_and_its_bytes_are_listed_when_memory_is_too_small(
    golden: Callable[[str, str], None],
) -> None:
    target = dataclasses.replace(get_target("nvidia-h200"), smem_per_block_bytes=1024)
    problem = Problem(AttentionSpec(name="tiny", head_dim=64, dtype="bf16"), target)
    with pytest.raises(ScheduleError) as caught:
        default_schedule(problem, LONG)
    golden("schedule/smem-1-kib.txt", str(caught.value))
    assert len(caught.value.rejections) == len(enumerate_space(problem, LONG).rejections)
