"""On the GPU: schedules measured in processes of their own, repeated calls, calls in a capture."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen.compiler.choose import compile as compile_spec
from flashgen.compiler.choose import target_of
from flashgen.errors import CaptureError
from flashgen.problem import Problem
from flashgen.runtime.launch import Attention
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import default_schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.tune.measure import IsolatedMeasurer, gpu_measurer

SPEC = AttentionSpec(name="measured", head_dim=64, dtype="bf16", mask=["causal"])
SHAPE = Shape(2, 4, 4, 1024, 1024)
TILE = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=2)
OTHER = replace(TILE, block_m=128, num_warps=8)
TOO_LARGE = replace(TILE, block_m=256, block_n=256, num_warps=8, num_stages=4)


@pytest.fixture
def measurer() -> Iterator[IsolatedMeasurer]:
    target = target_of(torch.device("cuda", 0))
    made = gpu_measurer(SPEC, SHAPE, target, return_lse=True, deadline_s=60)
    assert isinstance(made, IsolatedMeasurer)
    yield made
    made.close()


def test_schedules_are_compiled_checked_timed_and_raced(measurer: IsolatedMeasurer) -> None:
    refused = measurer.prepare([TILE, OTHER, TOO_LARGE])
    assert list(refused) == [TOO_LARGE]
    found = measurer.measure(TILE)
    assert found.measured, found.reason
    assert found.low_us <= found.time_us <= found.high_us  # type: ignore[operator]
    raced = measurer.race([TILE, OTHER])
    assert all(each.measured for each in raced.values())
    assert not measurer.measure(TOO_LARGE).measured


def test_a_process_that_is_killed_is_replaced(measurer: IsolatedMeasurer) -> None:
    assert measurer.measure(TILE).measured
    before = measurer.pids()[1]
    os.kill(before, signal.SIGKILL)
    assert measurer.measure(TILE).state == "crashed"
    assert measurer.measure(TILE).measured
    assert measurer.pids()[1] != before


def test_no_launch_in_a_worker_compiles(measurer: IsolatedMeasurer) -> None:
    """What was compiled ahead is what the launch looks for: the cache has no new kernel after."""
    problem = Problem(SPEC, target_of(torch.device("cuda", 0)))
    default = default_schedule(problem, bucket_of(SHAPE.q_len, SHAPE.kv_len))
    assert measurer.prepare([default, OTHER]) == {}
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    before = set(folder.iterdir())
    assert measurer.measure(default).measured
    assert measurer.measure(OTHER).measured
    assert len(set(folder.iterdir()) - before) <= 1  # Triton 3.6 builds a C launcher


def qkv(seed: int, length: int = 200) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(2, 4, length, 64, device="cuda").bfloat16() for _ in range(3)]


def attention(scale: float, *, return_lse: bool = False) -> Attention:
    return compile_spec(SPEC.replace(scale=scale), return_lse=return_lse)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_is_the_first_one_again(return_lse: bool) -> None:
    repeated = attention(0.21, return_lse=return_lse)
    repeated(*qkv(0))
    assert len(repeated._repeats) == 1
    for seed in (1, 2):
        got = repeated(*qkv(seed))
        wanted = attention(0.21, return_lse=return_lse)(*qkv(seed))
        for one, other in zip(
            got if return_lse else [got], wanted if return_lse else [wanted], strict=True
        ):
            assert torch.equal(one, other)
    assert len(repeated._repeats) == 1


def test_repeated_calls_follow_the_current_stream() -> None:
    repeated = attention(0.22)
    tensors = qkv(0)
    wanted = repeated(*tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.empty_like(each) for each in tensors]
        torch.cuda._sleep(20_000_000)
        for one, other in zip(late, tensors, strict=True):
            one.copy_(other)
        got = repeated(*late)
    stream.synchronize()
    assert torch.equal(got, wanted)


def test_a_first_call_in_a_capture_is_refused_and_later_ones_are_captured() -> None:
    kernel = attention(0.23)
    tensors = qkv(0)
    graph = torch.cuda.CUDAGraph()
    expected = pytest.raises(CaptureError, match="make one call with these lengths before")
    with expected, torch.cuda.graph(graph):
        kernel(*tensors)
    torch.cuda.synchronize()
    wanted = kernel(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*tensors)
        shorter = kernel(*(each[:, :, :190] for each in tensors))  # the same kernel
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    assert torch.equal(shorter, kernel(*(each[:, :, :190] for each in tensors)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own_launch() -> None:
    kernel = attention(0.24)
    first = qkv(0)
    wanted = kernel(*first)
    there = [each.to("cuda:1") for each in first]
    for _ in range(2):
        assert torch.equal(kernel(*there).cpu(), wanted.cpu())
    assert torch.equal(kernel(*first), wanted)
