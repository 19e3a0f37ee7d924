"""Groups 2 and 3: head dimensions, shared memory, and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from asked import assert_gradient_refused, assert_right, attend, randn
from property.drawn import Drawn, built

from flashgen.compiler.choose import choose
from flashgen.compiler.choose import compile as compile_spec
from flashgen.errors import ScheduleError, TensorError
from flashgen.problem import Problem
from flashgen.schedule.budget import budget
from flashgen.schedule.model import Bucket, Schedule, all_buckets
from flashgen.schedule.space import check, default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.target import Target, get_target


@pytest.mark.parametrize(
    "head_dim",
    [1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 65, 80, 96, 100, 127, 160, 192, 200, 255, 256],
)
def test_d1_d5_d9_any_head_dim(head_dim: int) -> None:
    assert_right({"head_dim": head_dim, "dtype": "fp32"}, (1, 2, 2, 4, 20), ("loop", 16, 16))
    assert_right({"head_dim": head_dim, "dtype": "fp16", "mask": ["causal"]}, (1, 1, 1, 17, 40))


@pytest.mark.parametrize(("qk", "v"), [(192, 128), (128, 192), (31, 72), (72, 1), (1, 40)])
def test_d1_values_of_another_width(qk: int, v: int) -> None:
    assert_right({"head_dim": {"qk": qk, "v": v}, "dtype": "fp16"}, (1, 2, 1, 17, 40))


def test_d3_head_dim_72_reads_nothing_beside_its_tensors() -> None:
    """Four runs with NaN all around the tensors: bit-equal and finite."""
    spec = AttentionSpec(head_dim=72, dtype="fp16", layout="bshd")
    drawn = Drawn(spec={"head_dim": 72, "dtype": "fp16", "layout": "bshd"}, sizes=(1, 2, 2, 33, 33))
    drawn = replace(drawn, forms={"q": "padded", "k": "padded_16", "v": "fused"})
    call = built(drawn)
    first, first_lse = attend(spec, call.q, call.k, call.v)
    assert bool(torch.isfinite(first).all())
    for _ in range(3):
        poison = torch.full((1 << 16,), torch.nan)
        again, again_lse = attend(spec, call.q, call.k, call.v)
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)
        del poison


@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-h100-sxm", "nvidia-a100-80gb"])
def test_d7_r8_head_dim_512_gets_small_tiles(target: str) -> None:
    problem = Problem(
        AttentionSpec(head_dim=512, dtype="bf16", mask=["causal"]), get_target(target)
    )
    large = Schedule(block_m=64, block_n=32, num_warps=4, num_stages=3)
    if target.startswith("nvidia-h"):
        rejection = check(large, problem)
        assert rejection is not None
        assert rejection.reason == "smem_bytes"
        assert rejection.required > rejection.limit == 232448
    schedule = default_schedule(problem, Bucket(None, None))
    assert budget(problem).smem_bytes_of(schedule) <= problem.target.smem_per_block_bytes


def test_d7_head_dim_512_is_right() -> None:
    assert_right({"head_dim": 512, "dtype": "bf16"}, (1, 1, 1, 17, 40), None)


def test_d8_length_and_head_dim_swapped() -> None:
    spec = AttentionSpec(name="swapped", head_dim=1024, dtype="fp32")
    with pytest.raises(ScheduleError) as error:
        choose(Problem(spec, get_target("nvidia-h200")), None)
    text = str(error.value)
    for part in (
        "head_dim 1024",
        "the largest head_dim that fits here is",
        "[batch, heads, length, head_dim]",
    ):
        assert part in text
    kernel = compile_spec(AttentionSpec(head_dim=64, dtype="fp32"))
    with pytest.raises(TensorError) as wrong:
        kernel(*(randn(8, 1, 64, 1024) for _ in range(3)))
    assert "head dim 1024" in str(wrong.value)
    assert "head dim 64" in str(wrong.value)


# ---- limits --------------------------------------------------------------------------------------

SM_86 = get_target("nvidia-rtx-3090")


def with_limit(smem_bytes: int) -> Target:
    return replace(SM_86, smem_per_block_bytes=smem_bytes)


@pytest.mark.parametrize("head_dim", [128, {"qk": 192, "v": 128}, 256])
def test_r1_r3_forward_fits_where_shared_memory_is_small(head_dim: object) -> None:
    assert SM_86.smem_per_block_bytes == 101376
    problem = Problem(AttentionSpec(head_dim=head_dim, dtype="bf16", mask=["causal"]), SM_86)
    for bucket in all_buckets():
        schedule = default_schedule(problem, bucket)
        assert check(schedule, problem) is None
        assert budget(problem, schedule.kernel).smem_bytes_of(schedule) <= 101376


def test_r1_backward_is_refused() -> None:
    assert_gradient_refused({"head_dim": 128, "dtype": "bf16"}, (1, 2, 2, 17, 17), "q", "k", "v")


def test_r5_r9_every_rejected_tile_is_listed() -> None:
    problem = Problem(AttentionSpec(name="tight", head_dim=64, dtype="bf16"), with_limit(1024))
    bucket = Bucket(None, None)
    space = enumerate_space(problem, bucket)
    assert not space.feasible
    with pytest.raises(ScheduleError) as error:
        default_schedule(problem, bucket)
    assert error.value.rejections == space.rejections
    assert len(space.rejections) > 100
    assert all(
        reason.limit == 1024 for _, reason in space.rejections if reason.reason == "smem_bytes"
    )
    assert "smem_bytes: needs" in str(error.value)
    assert "target has 1024 B" in str(error.value)


def test_r7_the_model_and_the_reported_tiles_agree() -> None:
    problem = Problem(AttentionSpec(head_dim={"qk": 192, "v": 128}, dtype="bf16"), SM_86)
    default = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=3)
    rejection = check(default, problem)
    assert rejection is not None
    assert rejection.reason == "smem_bytes"
    assert check(Schedule(block_m=128, block_n=32, num_warps=8, num_stages=2), problem) is None


def test_r9_a_schedule_that_does_not_fit_is_refused_with_the_reason() -> None:
    spec = AttentionSpec(head_dim=256, dtype="bf16")
    kernel = compile_spec(
        spec, schedule=Schedule(block_m=256, block_n=256, num_warps=8, num_stages=4)
    )
    q, k, v = (randn(1, 1, 4, 256, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ScheduleError, match=r"smem_bytes: needs \d+ B, target has 232448 B"):
        kernel(q, k, v)
