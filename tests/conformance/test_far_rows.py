"""Group 8: elements more than 2**31 of them away from the first of their head, in a few pages.

Offsets have 64 bits in the kernels' text. Triton's interpreter, which runs here, gives a stride the
32 that its number fits in, whatever the type of its parameter.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from asked import randn
from property.drawn import kernel_of

from flashgen.runtime.check import Sizes
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
NEAR = 2**23 - 8  # in 16-byte units, the farthest rows that count as aligned
APART = 2**25 + 1
ROWS, KEYS = 280, 70  # 279 * NEAR and 69 * APART are over 2**31
SCHEDULES = {
    "loop": Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1),
    "single tile": Schedule(
        kernel="single_tile", block_m=16, block_n=128, num_warps=4, num_stages=1
    ),
    **{
        f"flash1, {splits} splits": Schedule(
            loop_order="flash1",
            block_m=64,
            block_n=64,
            num_warps=4,
            num_stages=1,
            num_kv_splits=splits,
        )
        for splits in (1, 2)
    },
}


def far(tensor: torch.Tensor, *strides: int) -> torch.Tensor:
    """The same numbers with these strides, in memory of which only what is written is there."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, reach * tensor.element_size(), flags=flags)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=reach)
    return torch.as_strided(whole, tensor.shape, strides).copy_(tensor)


def qkv(q_len: int, kv_len: int, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    lengths = {"q": q_len, "k": kv_len, "v": kv_len}
    return {n: randn(1, 1, size, 16, dtype=dtype, seed=ord(n)) for n, size in lengths.items()}


def assert_as_near(
    schedule: str, fields: dict[str, Any], near: dict[str, Any], **moved: torch.Tensor
) -> None:
    """Of `moved` tensors the results are those of the same numbers side by side."""
    chosen = SCHEDULES[schedule]
    spec = AttentionSpec(head_dim=16, loop_order=chosen.loop_order, **fields)
    kernel = kernel_of(spec, chosen)
    found, expected = kernel(**{**near, **moved}), kernel(**near)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("stride", [NEAR, APART])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_far_rows(schedule: str, stride: int) -> None:
    keys = KEYS if stride == APART or schedule == "single tile" else ROWS
    near = qkv(KEYS if stride == APART else ROWS, keys)
    moved = {name: far(tensor, 1, 1, stride, 1) for name, tensor in near.items()}
    assert_as_near(schedule, {"dtype": "fp16", "mask": "causal"}, near, **moved)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_far_dims(schedule: str, dtype: str) -> None:
    near = qkv(20, 40, {"fp16": torch.float16, "fp32": torch.float32}[dtype])
    moved = {name: far(tensor, 1, 1, 1, 2**28) for name, tensor in near.items()}
    assert_as_near(schedule, {"dtype": dtype}, near, **moved)


INPUTS: dict[str, dict[str, Any]] = {
    "documents": {
        "mask": {"same": "doc"},
        "inputs": {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
    },
    "by row and key": {
        "score": {"bias": {"tensor": "rel"}},
        "inputs": {"rel": {"shape": ["q_len", "kv_len"], "dtype": "fp32"}},
    },
    "by number": {
        "score": {"expr": "s + table[k, 69]"},
        "inputs": {"table": {"shape": ["kv_len", 70], "dtype": "fp32"}},
    },
}


@pytest.mark.parametrize("use", INPUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_far_inputs(schedule: str, use: str) -> None:
    (name,) = INPUTS[use]["inputs"]
    value = randn(KEYS, KEYS)
    if name == "doc":
        value = (torch.arange(KEYS, dtype=torch.int32) // 30)[None]
    near = {**qkv(KEYS, KEYS), name: value}
    for strides in ((1, APART), (APART, 1)):
        assert_as_near(
            schedule, {"dtype": "fp16", **INPUTS[use]}, near, **{name: far(value, *strides)}
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_far_results(schedule: str) -> None:
    """Rows of an output that a caller gave."""
    chosen = SCHEDULES[schedule]
    spec = AttentionSpec(head_dim=16, dtype="fp16", loop_order=chosen.loop_order)
    kernel, near = kernel_of(spec, chosen), qkv(KEYS, KEYS)
    expected, expected_lse = kernel(**near)
    out, lse = far(torch.zeros_like(expected), 1, 1, APART, 1), torch.empty(1, 1, KEYS)
    kernel.interpret(Sizes(1, 1, 1, KEYS, KEYS), *near.values(), {}, out, lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
