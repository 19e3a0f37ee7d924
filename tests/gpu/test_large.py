"""Offsets past 2^31, grids past 65,535, long context, memory: what only a GPU can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from property.drawn import Call, held_against_oracle

from flashgen import reference
from flashgen.compiler.choose import compile as compile_spec
from flashgen.runtime.launch import Attention
from flashgen.spec.model import AttentionSpec

CUDA = torch.device("cuda")
GIB = 2**30


@pytest.fixture(autouse=True)
def _enough_memory() -> None:
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 40 * GIB:
        pytest.skip("needs 40 GiB of GPU memory")


def kernel_of(**fields: Any) -> Attention:
    return compile_spec(AttentionSpec(**fields), return_lse=True)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device=CUDA)


def assert_part_right(
    kernel: Attention,
    out: torch.Tensor,
    lse: torch.Tensor,
    *qkv: torch.Tensor,
    rows: range | None = None,
    **inputs: Any,
) -> None:
    """A slice of a result (given with its operands) against the oracle."""
    call = Call(kernel.spec, *qkv, inputs=inputs)
    comparison = held_against_oracle(call, out, lse, rows)
    assert comparison.ok, str(comparison)


def test_i1_keys_kept_length_first_past_two_gibi_elements() -> None:
    """K kept as [kv, batch, dim] and viewed as [batch, 1, kv, dim]: strides of 700 * 128."""
    batch, keys = 700, 24000
    kernel = kernel_of(head_dim=128, dtype="bf16", mask=["causal"])
    store = randn(keys, batch, 128)
    k = store.permute(1, 0, 2).unsqueeze(1)
    assert (keys - 1) * k.stride(2) > 2**31
    q = randn(batch, 1, 64, 128, seed=1)
    out, lse = kernel(q, k, k)
    for b in (0, batch // 2, batch - 1):
        part = slice(b, b + 1)
        assert_part_right(kernel, out[part], lse[part], q[part], k[part], k[part])


@pytest.mark.parametrize("mask", [[], ["causal"], [{"window": {"left": 64}}]])
def test_i2_row_strides_past_two_gibi_elements(mask: Any) -> None:
    """A view with a row stride of 2^21 + 8 elements, 1025 rows: the last lies past 2^31."""
    stride, length = 2**21 + 8, 1025
    kernel = kernel_of(head_dim=64, dtype="fp16", mask=mask)
    store = torch.zeros(length * stride, dtype=torch.float16, device=CUDA)
    q, k, v = (store.as_strided((1, 1, length, 64), (0, 0, stride, 1), 64 * n) for n in range(3))
    for n, tensor in enumerate((q, k, v)):
        tensor.copy_(randn(1, 1, length, 64, dtype=torch.float16, seed=n))
    assert (length - 1) * stride > 2**31
    out, lse = kernel(q, k, v)
    plain, plain_lse = kernel(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.allclose(out, plain, atol=2e-3)
    assert torch.allclose(lse, plain_lse, atol=1e-5)
    assert_part_right(kernel, out, lse, q, k, v)


def test_i4_the_last_batch_of_a_tensor_past_two_gibi_elements() -> None:
    shape = (1025, 16, 2048, 64)
    kernel = kernel_of(head_dim=64, dtype="bf16", mask=["causal", {"window": {"left": 127}}])
    x = randn(*shape)
    assert x.numel() > 2**31
    out, lse = kernel(x, x, x)
    for b in (0, 1024):
        part = x[b : b + 1]
        assert_part_right(kernel, out[b : b + 1], lse[b : b + 1], part, part, part)


def test_i6_a_dense_mask_past_two_gibi_elements() -> None:
    inputs = {"m": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "bool"}}
    kernel = kernel_of(head_dim=64, dtype="bf16", mask=[{"expr": "m[b, h, row, k]"}], inputs=inputs)
    q = randn(8, 28, 4096, 64)
    mask = torch.empty(8, 28, 4096, 4096, dtype=torch.bool, device=CUDA)
    for b in range(8):
        mask[b] = torch.rand(28, 4096, 4096, device=CUDA) < 0.3
    assert mask.numel() > 2**31
    out, lse = kernel(q, q, q, m=mask)
    rows = range(4090, 4096)
    for b in (0, 7):
        one = q[b : b + 1]
        part, part_lse = out[b : b + 1, :, 4090:], lse[b : b + 1, :, 4090:]
        assert_part_right(kernel, part, part_lse, one, one, one, rows=rows, m=mask[b : b + 1])


def test_i6_a_mask_whose_batches_lie_far_apart() -> None:
    inputs = {"m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}}
    kernel = kernel_of(head_dim=32, dtype="fp16", mask=[{"expr": "m[b, h, row, k]"}], inputs=inputs)
    store = torch.zeros(2**31 + 256 * 256, dtype=torch.bool, device=CUDA)
    mask = store.as_strided((5, 1, 256, 256), (2**29, 0, 256, 1))
    mask.copy_(torch.rand(5, 1, 256, 256, device=CUDA) < 0.4)
    q = randn(5, 2, 256, 32, dtype=torch.float16)
    out, lse = kernel(q, q, q, m=mask)
    assert_part_right(kernel, out, lse, q, q, q, m=mask)


def test_i7_a_long_sequence_with_everything_visible() -> None:
    inputs = {"m": {"shape": [1, 1, "q_len", "kv_len"], "dtype": "bool"}}
    kernel = kernel_of(head_dim=64, dtype="bf16", mask=[{"expr": "m[b, h, row, k]"}], inputs=inputs)
    length = 49999
    q = randn(1, 8, length, 64)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=CUDA)
    assert mask.numel() > 2**31
    out, lse = kernel(q, q, q, m=mask)
    rows = range(length - 4, length)
    assert_part_right(kernel, out[:, :, -4:], lse[:, :, -4:], q, q, q, rows=rows, m=mask)


@pytest.mark.parametrize(
    ("batch", "heads", "length", "head_dim", "dtype"),
    [
        (100_000, 10, 1, 16, "fp32"),
        (65_536, 16, 8, 80, "fp16"),
        (10_923, 6, 3, 8, "fp32"),
        (1, 70_000, 2, 16, "bf16"),
    ],
)
def test_i9_i10_i12_more_than_65535_batches_or_heads(
    batch: int, heads: int, length: int, head_dim: int, dtype: str
) -> None:
    kernel = kernel_of(head_dim=head_dim, dtype=dtype)
    q = randn(batch, heads, length, head_dim, dtype=reference.torch_dtype(dtype))
    k = randn(batch, heads, 7, head_dim, dtype=reference.torch_dtype(dtype), seed=1)
    out, lse = kernel(q, k, k)
    for part in (slice(0, 2), slice(batch // 2, batch // 2 + 2), slice(max(0, batch - 2), batch)):
        assert_part_right(kernel, out[part], lse[part], q[part], k[part], k[part])


def test_u11_qwen_like_layer_at_262144_needs_no_memory_beside_its_results() -> None:
    """24:4 heads, d256, causal: peak extra memory is output and lse, the last rows are right."""
    length = 262_144
    kernel = kernel_of(head_dim=256, dtype="bf16", mask=["causal"], heads={"group": 6})
    q, k, v = (
        randn(1, 24, length, 256),
        randn(1, 4, length, 256, seed=1),
        randn(1, 4, length, 256, seed=2),
    )
    assert q.numel() * q.element_size() > 2**31
    kernel(q[:, :, :1024], k[:, :, :1024], v[:, :, :1024])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out, lse = kernel(q, k, v)
    end.record()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    results = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    print(f"\nN={length}: {start.elapsed_time(end):.0f} ms, extra {extra} B, results {results} B")
    assert results <= extra <= results + 1024  # the allocator rounds each block up to 512 B
    assert bool(torch.isfinite(lse).all())
    for rows in (range(length - 4, length), range(131_070, 131_074)):
        part = slice(rows.start, rows.stop)
        assert_part_right(kernel, out[:, :, part], lse[:, :, part], q, k, v, rows=rows)


def test_g8_grouped_heads_are_not_expanded() -> None:
    kernel = kernel_of(head_dim=128, dtype="bf16")
    q, k = randn(4, 16, 256, 128), randn(4, 2, 12_288, 128, seed=1)
    kernel(q[:1], k[:1], k[:1])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = kernel(q, k, k)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.numel() * 2 + lse.numel() * 4 + 1024
    assert_part_right(kernel, out[:1], lse[:1], q[:1], k[:1], k[:1])


def test_a_mask_costs_no_memory_per_pair() -> None:
    """Documents, a window and a prefix over 65,536 tokens: peak extra memory is the results."""
    inputs: dict[str, Any] = {
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
        "prefix": {"shape": ["batch"], "dtype": "int32"},
    }
    masks = ([{"same": "doc"}, "causal"], [{"expr": "k < prefix[b] or (k <= q and q - k < 512)"}])
    length = 65_536
    q = randn(1, 2, length, 64)
    doc = (torch.arange(length, device=CUDA, dtype=torch.int32) // 1000).view(1, -1)
    given = {"doc": doc, "prefix": torch.tensor([300], dtype=torch.int32, device=CUDA)}
    for mask in masks:
        name = "doc" if "doc" in repr(mask) else "prefix"
        kernel = kernel_of(head_dim=64, dtype="bf16", mask=mask, inputs={name: inputs[name]})
        arguments = {name: given[name]}
        short = {n: t[:, :128] if n == "doc" else t for n, t in arguments.items()}
        kernel(q[:, :, :128], q[:, :, :128], q[:, :, :128], **short)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = kernel(q, q, q, **arguments)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= out.numel() * 2 + lse.numel() * 4 + 1024
        rows = range(length - 6, length)
        assert_part_right(kernel, out[:, :, -6:], lse[:, :, -6:], q, q, q, rows=rows, **arguments)
