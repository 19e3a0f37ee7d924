"""Groups 10 to 13: query heads per K/V head, merging by lse, refused gradients and dropout."""

from __future__ import annotations

from typing import Any

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

from flashgen.compiler.choose import compile as compile_spec
from flashgen.errors import TensorError
from flashgen.runtime.merge import merge
from flashgen.spec.model import AttentionSpec


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16])
@pytest.mark.parametrize("declared", [True, False])
def test_g1_g3_any_number_of_query_heads(group: int, declared: bool) -> None:
    spec: dict[str, Any] = {"head_dim": 16, "dtype": "fp16", "mask": ["causal"]}
    if declared:
        spec["heads"] = {"group": group}
    assert_right(
        spec, (1, 2 * group if group < 8 else group, 2 if group < 8 else 1, 1, 40), ("loop", 16, 64)
    )


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(33, 2), (3, 2), (2, 3), (1, 2), (4, 0)])
def test_g4_heads_that_do_not_divide(q_heads: int, kv_heads: int) -> None:
    kernel = compile_spec(AttentionSpec(head_dim=16, dtype="fp32"))
    q, k = randn(1, q_heads, 4, 16), randn(1, kv_heads, 4, 16)
    with pytest.raises(ValueError, match=f"{kv_heads} heads for {q_heads} query heads") as error:
        kernel(q, k, k)
    assert isinstance(error.value, TensorError)
    with pytest.raises(TensorError, match="4 query heads per K/V head"):
        compile_spec(AttentionSpec(head_dim=16, dtype="fp32", heads={"group": 4}))(q, k, k)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_g6_batched_groups_of_eight_at_head_dim_256(layout: str) -> None:
    spec = {"head_dim": 256, "dtype": "bf16", "mask": ["causal"], "layout": layout}
    assert_right(spec, (2, 8, 1, 9, 9), ("loop", 16, 16))
    assert_right(spec, (2, 8, 1, 1, 20), None)


def test_g6_g8_backward_is_refused() -> None:
    assert_gradient_refused(
        {"head_dim": 32, "dtype": "bf16", "mask": ["causal"]}, (1, 4, 2, 8, 8), "q", "k", "v"
    )


@pytest.mark.parametrize(("prefix", "suffix"), [(96, 32), (33, 1), (0, 20), (20, 0), (17, 64)])
@pytest.mark.parametrize("head_dim", [64, {"qk": 48, "v": 32}])
def test_l1_merged_parts_equal_one_call(prefix: int, suffix: int, head_dim: Any) -> None:
    spec = AttentionSpec(head_dim=head_dim, dtype="fp32")
    qk, v_dim = spec.head_dim.qk, spec.head_dim.v
    q, k = randn(1, 2, 5, qk), randn(1, 2, prefix + suffix, qk, seed=1)
    v = randn(1, 2, prefix + suffix, v_dim, seed=2)
    parts = [
        attend(spec, q, k[:, :, s], v[:, :, s]) for s in (slice(0, prefix), slice(prefix, None))
    ]
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    whole, whole_lse = oracle(spec, q, k, v)
    assert torch.allclose(out.double(), whole, atol=2e-6)
    assert torch.allclose(lse.double(), whole_lse, atol=2e-6)


def test_l1_lse_is_a_natural_logarithm() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"])
    q, k = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16)
    for tile in (("loop", 16, 16), ("single_tile", 16, 16), None):
        _, lse = attend(spec, q, k, k, tile=tile)
        assert torch.allclose(lse[0, 0], torch.log(torch.arange(1.0, 9.0)), atol=1e-6)


def test_l1_causal_parts_merge_in_either_order() -> None:
    """A prefix that all queries see and a causal rest, in three parts."""
    spec = AttentionSpec(head_dim=16, dtype="fp32")
    causal = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"])
    q, k, v = randn(1, 2, 20, 16), randn(1, 2, 50, 16, seed=1), randn(1, 2, 50, 16, seed=2)
    parts = [
        attend(spec, q, k[:, :, :10], v[:, :, :10]),
        attend(spec, q, k[:, :, 10:30], v[:, :, 10:30]),
        attend(causal, q, k[:, :, 30:], v[:, :, 30:]),
    ]
    whole, whole_lse = oracle(causal, q, k, v)
    for order in ((0, 1, 2), (2, 0, 1)):
        out, lse = merge([parts[n][0] for n in order], [parts[n][1] for n in order])
        assert torch.allclose(out.double(), whole, atol=2e-6)
        assert torch.allclose(lse.double(), whole_lse, atol=2e-6)


def test_l3_gradients_of_lse_are_refused() -> None:
    spec = AttentionSpec(head_dim=16, dtype="bf16")
    kernel = compile_spec(spec, return_lse=True)
    q, k, v = (randn(1, 2, 8, 16, seed=n, dtype=torch.bfloat16) for n in range(3))
    with pytest.raises(TensorError, match="q: got a tensor that requires grad"):
        kernel(q.requires_grad_(), k, v)


# ---- groups 12 and 13 ----------------------------------------------------------------------------

BIAS = {
    "score": [{"bias": {"tensor": "rel"}}],
    "inputs": {"rel": {"shape": ["q_len", "kv_len"], "dtype": "fp32"}},
}


@pytest.mark.parametrize(
    ("row", "fields", "wanted"),
    [
        ("b2", BIAS, "rel"),
        ("b4", BIAS, "rel"),
        ("b7", {"mask": [{"expr": "k < 5 or (k <= q and q - k < 9)"}]}, "k"),
        ("b9", {"sink": "per_head"}, "sink"),
        ("u10", {}, "q"),
    ],
)
def test_gradients_are_refused(row: str, fields: dict[str, Any], wanted: str) -> None:
    assert_gradient_refused({"head_dim": 16, "dtype": "fp32", **fields}, (1, 2, 2, 8, 8), wanted)


def test_b1_a_factor_on_the_score() -> None:
    spec = {
        "head_dim": 64,
        "dtype": "fp16",
        "score": [{"expr": "s * w"}],
        "inputs": {"w": {"shape": [], "dtype": "fp32"}},
    }
    assert_right(spec, (1, 1, 1, 33, 33))
    built = AttentionSpec(**spec)
    q, k, v = (randn(1, 1, 8, 64, seed=n).half() for n in range(3))
    number, _ = attend(built, q, k, v, w=0.5)
    tensor, _ = attend(built, q, k, v, w=torch.tensor(0.5))
    assert torch.equal(number, tensor)
    with pytest.raises(TensorError, match=r"^w: got a tensor that requires grad"):
        attend(built, q, k, v, w=torch.tensor(0.5, requires_grad=True))


def test_x5_dropout_is_refused() -> None:
    assert_refused({"head_dim": 64, "dtype": "bf16", "dropout": 0.1}, "dropout")


def test_x1_x2_x3_runs_are_bit_equal() -> None:
    spec = AttentionSpec(head_dim=32, dtype="fp16", mask=["causal"], **BIAS)
    q, k, v = (randn(1, 2, 40, 32, seed=n).half() for n in range(3))
    bias = randn(40, 40, seed=3)
    first = attend(spec, q, k, v, rel=bias)
    for _ in range(4):
        again = attend(spec, q, k, v, rel=bias)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
    assert_finite(*first)
