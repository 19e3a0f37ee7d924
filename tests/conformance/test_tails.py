"""Groups 1 and 9 of the conformance cases: lengths against tiles, empty and variable lengths."""

from __future__ import annotations

import pytest
import torch
from asked import (
    assert_finite,
    assert_gradient_refused,
    assert_refused,
    assert_right,
    attend,
    oracle,
    randn,
)

from flashgen.errors import TensorError
from flashgen.spec.model import AttentionSpec

DENSE_MASK = {
    "mask": [{"expr": "m[row, k]"}],
    "inputs": {"m": {"shape": ["q_len", "kv_len"], "dtype": "bool"}},
}


@pytest.mark.parametrize("length", [17, 33, 63, 65, 97, 129])
def test_t1_score_change_and_mask_just_past_a_tile(length: int) -> None:
    spec = {"head_dim": 64, "dtype": "bf16", "mask": ["causal"], "score": [{"expr": "s + (q - k)"}]}
    assert_right(spec, (1, 1, 1, length, length))


def test_t1_backward_is_refused() -> None:
    spec = {"head_dim": 64, "dtype": "bf16", "mask": ["causal"], "score": [{"expr": "s + (q - k)"}]}
    assert_gradient_refused(spec, (1, 1, 1, 33, 33), "q", "k", "v")


@pytest.mark.parametrize("length", [1, 15, 16, 31, 64])
def test_t2_keys_fewer_than_a_tile(length: int) -> None:
    for mask in ([], ["causal"], [{"window": {"left": 5}}]):
        assert_right(
            {"head_dim": 64, "dtype": "fp16", "mask": mask},
            (1, 2, 1, length, length),
            ("loop", 16, 128),
        )


def test_t2_paged_is_refused() -> None:
    spec = {"head_dim": 64, "dtype": "fp16", "kv_cache": {"paged": {"page_size": 16}}}
    assert_refused(spec, "kv_cache: paged")


def test_t4_a_mask_longer_than_the_sequence_is_an_error() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", **DENSE_MASK)
    q, k, v = (randn(1, 1, 40, 16) for _ in range(3))
    for shape in ((64, 64), (40, 64), (64, 40), (39, 40)):
        with pytest.raises(TensorError, match=r"m: .*\[40, 40\] = \[q_len, kv_len\]"):
            attend(spec, q, k, v, m=torch.ones(shape, dtype=torch.bool))
    assert_right({"head_dim": 16, "dtype": "fp32", **DENSE_MASK}, (1, 1, 1, 40, 40))


@pytest.mark.parametrize("tile", [("loop", 16, 32), ("single_tile", 16, 128), None])
def test_t6_strongly_negative_scores(tile: tuple[str, int, int] | None) -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16")
    q = torch.full((1, 2, 1, 64), 30.0, dtype=torch.bfloat16)
    k = torch.full((1, 2, 128, 64), -30.0, dtype=torch.bfloat16) + randn(
        1, 2, 128, 64, dtype=torch.bfloat16
    )
    v = randn(1, 2, 128, 64, dtype=torch.bfloat16)
    out, lse = attend(spec, q, k, v, tile=tile)
    expected, expected_lse = oracle(spec, q, k, v)
    assert_finite(out, lse)
    assert torch.allclose(out.double(), expected, atol=0.05)
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5)


@pytest.mark.parametrize("keys", [1, 2, 19, 20, 33])
def test_t7_one_query(keys: int) -> None:
    assert_right({"head_dim": 128, "dtype": "fp16"}, (2, 4, 4, 1, keys))
    assert_right({"head_dim": 128, "dtype": "fp16"}, (2, 4, 4, 1, keys), None)


@pytest.mark.parametrize(("queries", "keys"), [(32, 64), (64, 32), (31, 65), (5, 97)])
def test_t8_other_numbers_of_queries_and_keys(queries: int, keys: int) -> None:
    for mask in ([], ["causal"]):
        assert_right({"head_dim": 64, "dtype": "fp16", "mask": mask}, (1, 2, 2, queries, keys))


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_t10_keys_longer_than_queries(align: str) -> None:
    assert_right(
        {"head_dim": 64, "dtype": "fp16", "mask": ["causal"], "align": align}, (1, 1, 1, 16, 128)
    )


@pytest.mark.parametrize("keys", [256, 257, 300])
def test_t11_one_query_just_past_a_tile(keys: int) -> None:
    assert_right(
        {"head_dim": 32, "dtype": "bf16", "scale": 1 / 32}, (1, 1, 1, 1, keys), ("loop", 16, 128)
    )
    assert_right({"head_dim": 32, "dtype": "bf16", "scale": 1 / 32}, (1, 1, 1, 1, keys), None)


@pytest.mark.parametrize("row", ["v1", "v3", "v9", "i14"])
def test_packed_lengths_are_refused(row: str) -> None:
    """V1 (empty sequences), V3 (tokens past the last), V9 (no sequence), I14 (80,000 sequences)."""
    backward = {"backward": True} if row in {"v1", "v3"} else {}
    assert_refused(
        {"head_dim": 256, "dtype": "bf16", "layout": "packed", **backward}, "layout: packed"
    )


@pytest.mark.parametrize("tile", [("loop", 16, 32), ("single_tile", 16, 16), None])
def test_v4_batch_of_zero(tile: tuple[str, int, int] | None) -> None:
    spec = AttentionSpec(head_dim=64, dtype="fp16", mask=["causal"])
    q, k, v = (
        randn(0, heads, length, 64).half() for heads, length in ((10, 395), (10, 16), (10, 16))
    )
    out, lse = attend(spec, q, k, v, tile=tile)
    assert out.shape == (0, 10, 395, 64)
    assert lse.shape == (0, 10, 395)


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(2, 0, 40), (0, 16, 40), (0, 0, 0), (2, 0, 0)]
)
def test_v5_nothing_to_compute(batch: int, queries: int, keys: int) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"], sink="per_head")
    q, k = randn(batch, 2, queries, 16), randn(batch, 1, keys, 16)
    out, lse = attend(spec, q, k, k, sink=torch.zeros(2))
    assert out.shape == q.shape
    assert lse.shape == (batch, 2, queries)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_v5_no_keys_at_all(layout: str) -> None:
    """Queries without a single key: output 0, lse -inf; with a sink, the sink."""
    shape = (2, 3, 4, 16) if layout == "bhsd" else (2, 4, 3, 16)
    empty = (2, 3, 0, 16) if layout == "bhsd" else (2, 0, 3, 16)
    q, k = randn(*shape), randn(*empty)
    for tile in (("loop", 16, 32), ("single_tile", 16, 16), None):
        out, lse = attend(
            AttentionSpec(head_dim=16, dtype="fp32", layout=layout), q, k, k, tile=tile
        )
        assert torch.equal(out, torch.zeros(shape))
        assert torch.equal(lse, torch.full((2, 3, 4), -torch.inf))
        sink = torch.tensor([0.3, -7.7, 100.0])
        spec = AttentionSpec(head_dim=16, dtype="fp32", layout=layout, sink="per_head")
        out, lse = attend(spec, q, k, k, tile=tile, sink=sink)
        assert torch.equal(out, torch.zeros(shape))
        assert torch.equal(lse, sink.view(1, 3, 1).expand(2, 3, 4))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 65, 127])
def test_v7_any_length(length: int) -> None:
    assert_right({"head_dim": 32, "dtype": "fp32", "mask": ["causal"]}, (1, 1, 1, length, length))


def test_v7_neighbouring_lengths_through_the_default_schedules() -> None:
    """Around each boundary of the shape buckets, kernels of both kinds."""
    for length in (15, 16, 17, 32, 33, 64, 65, 128, 129):
        assert_right(
            {"head_dim": 16, "dtype": "fp16", "mask": ["causal"]}, (1, 1, 1, 5, length), None
        )
