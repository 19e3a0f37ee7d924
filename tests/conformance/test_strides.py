"""Group 8: views of every kind, unused slots of a cache, the same tensor three times."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from asked import assert_call_right, assert_finite, assert_refused, assert_right, attend, randn
from property.drawn import FORMS, Call

from flashgen.spec.model import AttentionSpec

TILES: tuple[Any, ...] = (("loop", 16, 16), ("single_tile", 16, 64), None)
PLAIN = AttentionSpec(head_dim=16, dtype="fp16", mask=["causal"])


def equals_contiguous(spec: AttentionSpec, *qkv: torch.Tensor, **others: Any) -> None:
    for tile in TILES[:2]:
        viewed = attend(spec, *qkv, tile=tile, **others)
        plain = attend(spec, *(t.contiguous() for t in qkv), tile=tile, **others)
        assert torch.equal(viewed[0], plain[0])
        assert torch.equal(viewed[1], plain[1])


def test_s1_v_is_a_transposed_view() -> None:
    spec = AttentionSpec(head_dim=128, dtype="fp16")
    q, k = randn(1, 2, 62, 128).half(), randn(1, 2, 62, 128, seed=1).half()
    x = randn(1, 62, 2 * 128, seed=2).half()
    equals_contiguous(spec, q, k, x.view(1, 62, 2, 128).transpose(1, 2))
    assert_right({"head_dim": 128, "dtype": "bf16"}, (1, 2, 2, 33, 62), forms={"v": "length_first"})


@pytest.mark.parametrize("heads_first", [True, False])
def test_s2_slices_of_fused_qkv(heads_first: bool) -> None:
    if heads_first:  # [batch, len, 3, heads, dim]
        fused = randn(2, 33, 3, 2, 16).half()
        q, k, v = (fused[:, :, n].transpose(1, 2) for n in range(3))
    else:  # [batch, len, heads, 3 * dim]
        fused = randn(2, 33, 2, 48).half()
        q, k, v = (part.transpose(1, 2) for part in fused.split(16, dim=-1))
    equals_contiguous(PLAIN, q, k, v)


def test_s4_interleaved_cache() -> None:
    cache = randn(3, 2, 2, 40, 16).half()  # [batch, k or v, heads, len, dim]
    equals_contiguous(PLAIN, randn(3, 2, 20, 16).half(), cache[:, 0], cache[:, 1])
    slots = randn(2, 40, 2, 2, 16).half()  # [batch, len, k or v, heads, dim]
    k, v = (slots[:, :, n].transpose(1, 2) for n in range(2))
    equals_contiguous(PLAIN, randn(2, 2, 20, 16).half(), k, v)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_s2_every_form_of_view(form: str, dtype: str) -> None:
    forms = {"q": form, "k": form, "v": form}
    for layout in ("bhsd", "bshd"):
        spec = {"head_dim": 40, "dtype": dtype, "mask": ["causal"], "layout": layout}
        assert_right(spec, (2, 4, 2, 20, 40), ("loop", 32, 32), forms=forms)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("poisoned", ["k", "v", "kv"])
@pytest.mark.parametrize("fill", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_s6_s11_unused_slots_hold_anything(poisoned: str, fill: float, tile: Any) -> None:
    """Used lengths 13 and 0 of 16 slots: bit-equal to a cache that is zero beyond."""
    spec = AttentionSpec(head_dim=16, dtype="fp16", kv_lens="per_batch", mask=["causal"])
    q = randn(3, 2, 4, 16).half()
    clean = {"k": randn(3, 1, 48, 16, seed=1).half(), "v": randn(3, 1, 48, 16, seed=2).half()}
    lengths = torch.tensor([13, 0, 33], dtype=torch.int32)
    dirty = {name: tensor.clone() for name, tensor in clean.items()}
    for batch, length in enumerate(lengths.tolist()):
        for name in ("k", "v"):
            clean[name][batch, :, length:] = 0
            dirty[name][batch, :, length:] = fill if name in poisoned else 0
    found = attend(spec, q, dirty["k"], dirty["v"], tile=tile, kv_lens=lengths)
    expected = attend(spec, q, clean["k"], clean["v"], tile=tile, kv_lens=lengths)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert_finite(found[0])


@pytest.mark.parametrize("lengths", [[1, 3], [3, 1], [0, 3]])
def test_s6_used_lengths_of_a_decode_step(lengths: list[int]) -> None:
    spec = AttentionSpec(head_dim=64, dtype="fp32", kv_lens="per_batch")
    q, k, v = randn(2, 3, 1, 64), randn(2, 3, 3, 64, seed=1), randn(2, 3, 3, 64, seed=2)
    for batch, length in enumerate(lengths):
        v[batch, :, length:] = math.nan
    call = Call(spec, q, k, v, kv_lens=torch.tensor(lengths))
    for tile in TILES:
        assert_call_right(call, tile)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_s6_masked_keys_hold_anything(value: float) -> None:
    """Keys that one row sees and another does not: what they hold reaches the first only."""
    for mask in (["causal"], [{"window": {"left": 3}}], [{"expr": "(k // 4) % 2 == (q // 4) % 2"}]):
        spec = AttentionSpec(head_dim=16, dtype="fp16", mask=mask, align="top_left")
        q, k, v = (randn(1, 1, 40, 16, seed=n).half() for n in range(3))
        v[:, :, 30] = value
        k[:, :, 25] = math.nan if value != math.inf else 1.0
        for tile in TILES[:2]:
            assert_call_right(Call(spec, q, k, v), tile)


@pytest.mark.parametrize("row", ["s7", "s11"])
def test_paged_caches_are_refused(row: str) -> None:
    size = 4 if row == "s11" else 16
    spec = {
        "head_dim": 64,
        "dtype": "bf16",
        "kv_cache": {"paged": {"page_size": size}},
        "kv_lens": "per_batch",
    }
    assert_refused(spec, "kv_cache: paged")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_s10_the_same_tensor_three_times(layout: str) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"], layout=layout)
    x = randn(2, 20, 20, 16)
    call = Call(
        spec,
        x[:, :2] if layout == "bhsd" else x[:, :, :2],
        *[x[:, :2] if layout == "bhsd" else x[:, :, :2]] * 2,
    )
    before = x.clone()
    for tile in TILES:
        assert_call_right(call, tile)
    assert torch.equal(x, before)


# ---- group 12: biases of every shape, forward ----------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        ["batch", "q_heads", "q_len", "kv_len"],
        ["q_len", "kv_len"],
        [1, "q_heads", "q_len", "kv_len"],
        ["batch", 1, 1, "kv_len"],
        ["batch", "q_heads", 1, 1],
        ["kv_len"],
        ["batch", 1, "q_len", 1],
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["contiguous", "padded", "padded_16", "dim_outer"])
def test_b2_b5_biases_broadcast(shape: list[Any], form: str) -> None:
    spec = {
        "head_dim": 16,
        "dtype": "fp16",
        "mask": ["causal"],
        "score": [{"bias": {"tensor": "rel"}}],
        "inputs": {"rel": {"shape": shape, "dtype": "fp16"}},
    }
    assert_right(spec, (2, 2, 1, 20, 40), ("loop", 16, 16), forms={"rel": form})


def test_b5_an_expanded_bias() -> None:
    spec = AttentionSpec(
        head_dim=16,
        dtype="fp32",
        score=[{"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "fp32"}},
    )
    q, k, v = randn(2, 2, 20, 16), randn(2, 2, 40, 16, seed=1), randn(2, 2, 40, 16, seed=2)
    for small in (randn(1, 2, 20, 40), randn(2, 1, 1, 40), randn(1, 1, 1, 1)):
        bias = small.expand(2, 2, 20, 40)
        assert 0 in bias.stride()
        for tile in TILES[:2]:
            assert_call_right(Call(spec, q, k, v, {"rel": bias}), tile)
