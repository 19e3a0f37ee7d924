"""Group 7: alignment, windows and ALiBi mean what the spec says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asked import MINUS_INF, assert_right, attend, oracle, randn

from flashgen.spec.model import AttentionSpec

TILES: tuple[Any, ...] = (("loop", 16, 16), ("single_tile", 16, 32), None)


def shown(spec: AttentionSpec, queries: int, keys: int, tile: Any = None) -> list[list[int]]:
    """The keys that each query sees, read off the output: values are one-hot, scores all equal."""
    q, k = torch.zeros(1, 1, queries, 16), torch.zeros(1, 1, keys, 16)
    v = torch.eye(keys, spec.head_dim.v).view(1, 1, keys, spec.head_dim.v)
    out, _ = attend(spec, q, k, v, tile=tile)
    return [row.nonzero().flatten().tolist() for row in out[0, 0]]


def spec_of(keys: int, **fields: Any) -> AttentionSpec:
    return AttentionSpec(head_dim={"qk": 16, "v": keys}, dtype="fp32", **fields)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("queries", "keys", "align", "counts"),
    [
        (2, 5, "bottom_right", [4, 5]),
        (2, 5, "top_left", [1, 2]),
        (5, 2, "bottom_right", [0, 0, 0, 1, 2]),
        (5, 2, "top_left", [1, 2, 2, 2, 2]),
        (1, 100, "bottom_right", [100]),  # A4: one query at position 99
    ],
)
def test_a1_a4_alignment(queries: int, keys: int, align: str, counts: list[int], tile: Any) -> None:
    if tile is not None and tile[0] == "single_tile" and keys > tile[2]:
        tile = ("loop", 16, 64)  # fp32 tiles hold no more than 64 keys
    found = shown(spec_of(keys, mask=["causal"], align=align), queries, keys, tile)
    assert found == [list(range(count)) for count in counts]


@pytest.mark.parametrize("tile", TILES)
def test_a1_rows_above_the_triangle_are_empty(tile: Any) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"])
    q, k, v = randn(1, 1, 5, 16), randn(1, 1, 2, 16), randn(1, 1, 2, 16)
    out, lse = attend(spec, q, k, v, tile=tile)
    assert torch.equal(out[0, 0, :3], torch.zeros(3, 16))
    assert lse[0, 0].isinf().tolist() == [True, True, True, False, False]
    assert bool((lse[0, 0, :3] == MINUS_INF).all())


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("queries", [1, 3, 7])
def test_a2_few_queries_many_keys(queries: int, align: str) -> None:
    assert_right(
        {"head_dim": 128, "dtype": "fp16", "mask": ["causal"], "align": align},
        (1, 2, 1, queries, 128),
    )


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("left", "right"), [(4, None), (4, 0), (0, 0), (3, 2), (None, 2), (0, None), (None, 0)]
)
def test_a5_windows_include_both_ends(left: int | None, right: int | None, tile: Any) -> None:
    window = {side: n for side, n in (("left", left), ("right", right)) if n is not None}
    found = shown(spec_of(16, mask=[{"window": window}]), 16, 16, tile)
    low, high = 16 if left is None else left, 16 if right is None else right
    assert found == [list(range(max(0, q - low), min(16, q + high + 1))) for q in range(16)]


@pytest.mark.parametrize("tile", TILES)
def test_a7_window_of_a_decoded_token(tile: Any) -> None:
    """One query at the end of 16 keys, window of 4: exactly the last 4 + itself."""
    for mask in (["causal", {"window": {"left": 4}}], [{"window": {"left": 4, "right": 0}}]):
        assert shown(spec_of(16, mask=mask), 1, 16, tile) == [[11, 12, 13, 14, 15]]


def test_a7_decoding_step_by_step_equals_prefill() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal", {"window": {"left": 4}}])
    q, k, v = (randn(1, 2, 12, 16, seed=n) for n in range(3))
    whole, whole_lse = attend(spec, q, k, v)
    for step in range(12):
        out, lse = attend(spec, q[:, :, step : step + 1], k[:, :, : step + 1], v[:, :, : step + 1])
        assert torch.allclose(out, whole[:, :, step : step + 1], atol=1e-6)
        assert torch.allclose(lse, whole_lse[:, :, step : step + 1], atol=1e-6)


def test_a9_a_right_side_of_zero_is_a_bound() -> None:
    bounded = shown(spec_of(8, mask=[{"window": {"left": 3, "right": 0}}]), 8, 8)
    unbounded = shown(spec_of(8, mask=[{"window": {"left": 3}}]), 8, 8)
    assert bounded[2] == [0, 1, 2]
    assert unbounded[2] == list(range(8))


ALIBI: dict[str, Any] = {
    "head_dim": 16,
    "dtype": "fp32",
    "score": [{"alibi": "slopes"}],
    "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
}


@pytest.mark.parametrize(
    "mask", [[], ["causal"], [{"window": {"left": 20, "right": 3}}], [{"expr": "k >= q"}]]
)
def test_a12_a13_alibi_of_a_cache_equals_that_of_the_whole(mask: Any) -> None:
    spec = AttentionSpec(**ALIBI, mask=mask)
    q, k, v = (randn(1, 4, 64, 16, seed=n) for n in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    whole, whole_lse = attend(spec, q, k, v, slopes=slopes)
    for tile in (("loop", 16, 16), ("single_tile", 16, 64), None):
        out, lse = attend(spec, q[:, :, 63:], k, v, tile=tile, slopes=slopes)
        assert torch.allclose(out, whole[:, :, 63:], atol=1e-6)
        assert torch.allclose(lse, whole_lse[:, :, 63:], atol=1e-5)


@pytest.mark.parametrize("tile", TILES)
def test_a14_the_bias_is_minus_slope_times_distance(tile: Any) -> None:
    spec = AttentionSpec(**ALIBI)
    q, v = torch.zeros(1, 1, 4, 16), randn(1, 1, 4, 16)
    out, lse = attend(spec, q, q, v, tile=tile, slopes=torch.ones(1))
    distance = (torch.arange(4)[:, None] - torch.arange(4)[None, :]).abs().float()
    assert torch.allclose(out[0, 0], torch.softmax(-distance, dim=1) @ v[0, 0], atol=1e-6)
    assert torch.allclose(lse[0, 0], torch.logsumexp(-distance, dim=1), atol=1e-6)
    expected, _ = oracle(spec, q, q, v, slopes=torch.ones(1))
    assert torch.allclose(out.double(), expected, atol=1e-6)


def test_u2_a_window_wider_than_the_sequence_hides_nothing() -> None:
    for tile in TILES:
        wide = shown(spec_of(8, mask=[{"window": {"left": 100, "right": 100}}]), 8, 8, tile)
        assert wide == [list(range(8))] * 8
        causal = shown(spec_of(8, mask=["causal", {"window": {"left": 100}}]), 8, 8, tile)
        assert causal == [list(range(q + 1)) for q in range(8)]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_c17_a_mask_that_depends_on_the_batch(batch: int) -> None:
    for mask in (
        "b % 2 == 0 or k <= q",
        "k < 3 * b + 1",
        "hk == 0 and k <= q or h == 1",
        "k < limit[b]",
    ):
        inputs = {"limit": {"shape": ["batch"], "dtype": "int32"}} if "limit" in mask else {}
        spec = {"head_dim": 16, "dtype": "fp32", "mask": [{"expr": mask}], "inputs": inputs}
        assert_right(spec, (batch, 2, 1, 8, 20))


HEADS = {"t": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "fp32"}}
BATCHES = {"t": {"shape": ["batch", "q_len", "kv_len"], "dtype": "bool"}}


@pytest.mark.parametrize(
    ("field", "expression", "inputs"),
    [
        ("score", "s + t[h // 2, row, k]", HEADS),
        ("score", "s + t[floor(h * 0.5), row // 2, k]", HEADS),
        ("mask", "t[h % 2, q, k] > 0", HEADS),
        ("mask", "t[b + 1, row, k]", BATCHES),  # the last batch sees nothing
    ],
)
@pytest.mark.parametrize("loop_order", ["flash2", "flash1"])
def test_computed_heads_and_batches(
    field: str, expression: str, inputs: dict[str, Any], loop_order: str
) -> None:
    spec = {
        "head_dim": 64,
        "dtype": "bf16",
        "loop_order": loop_order,
        field: [{"expr": expression}],
        "inputs": inputs,
    }
    assert_right(spec, (2, 4, 2, 20, 40), TILES[0] if loop_order == "flash2" else None)


CONDITIONAL = {
    "score": "where(k <= where(3 > row, 13, q), s, 0.0)",
    "mask": "where(k <= where(h < 1, 13, q), 1, 0) == 1 or k < where(row > k, 5, 2)",
}


@pytest.mark.parametrize("field", CONDITIONAL)
@pytest.mark.parametrize("loop_order", ["flash2", "flash1"])
def test_conditions_that_compare_conditional_values(field: str, loop_order: str) -> None:
    spec = {"head_dim": 16, "dtype": "fp16", "loop_order": loop_order}
    item = {field: [{"expr": CONDITIONAL[field]}]}
    assert_right({**spec, **item}, (1, 2, 1, 20, 40), TILES[0] if loop_order == "flash2" else None)
