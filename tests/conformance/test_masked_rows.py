"""Group 5: rows that see no key, sinks, and what stands for minus infinity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from asked import MINUS_INF, assert_call_right, assert_finite, assert_right, attend, oracle, randn
from property.drawn import Call

from flashgen.runtime.merge import merge
from flashgen.spec.model import AttentionSpec

TILES: tuple[Any, ...] = (("loop", 16, 16), ("loop", 16, 32), ("single_tile", 16, 32), None)
DENSE = {
    "mask": [{"expr": "m[row, k]"}],
    "inputs": {"m": {"shape": ["q_len", "kv_len"], "dtype": "bool"}},
}
BIAS = {
    "score": [{"bias": {"tensor": "rel"}}],
    "inputs": {"rel": {"shape": ["q_len", "kv_len"], "dtype": "fp32"}},
}


@pytest.mark.parametrize("tile", TILES)
def test_m1_rows_with_every_key_masked(tile: Any) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", **DENSE)
    q, k, v = (randn(1, 1, 8, 16, seed=n) for n in range(3))
    shown = torch.ones(8, 8, dtype=torch.bool).tril()
    shown[4:] = False
    out, lse = attend(spec, q, k, v, tile=tile, m=shown)
    assert torch.equal(out[:, :, 4:], torch.zeros(1, 1, 4, 16))
    assert torch.equal(lse[:, :, 4:], torch.full((1, 1, 4), MINUS_INF))
    assert_call_right(Call(spec, q, k, v, {"m": shown}), tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("hidden", [MINUS_INF, torch.finfo(torch.float32).min])
def test_m1_rows_with_every_key_biased_away(tile: Any, hidden: float) -> None:
    """-inf hides; so does fp32's lowest number, which leaves its range in base 2. Never NaN."""
    spec = AttentionSpec(head_dim=16, dtype="fp32", **BIAS)
    q, k, v = (randn(1, 1, 8, 16, seed=n) for n in range(3))
    bias = torch.zeros(8, 8)
    bias[4:] = hidden
    bias[:4, 5:] = hidden
    out, lse = attend(spec, q, k, v, tile=tile, rel=bias)
    assert torch.equal(out[:, :, 4:], torch.zeros(1, 1, 4, 16))
    assert torch.equal(lse[:, :, 4:], torch.full((1, 1, 4), MINUS_INF))
    expected, expected_lse = oracle(spec, q, k, v, rel=torch.where(bias < 0, MINUS_INF, 0.0))
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(6, 8), (10, 8), (33, 8), (8, 33)])
def test_m1_causal_with_other_numbers_of_keys(queries: int, keys: int) -> None:
    for align in ("bottom_right", "top_left"):
        spec = {"head_dim": 16, "dtype": "fp32", "mask": ["causal"], "align": align}
        assert_right(spec, (1, 2, 2, queries, keys))


@pytest.mark.parametrize("head_dim", [32, 512])
def test_m2_leading_masked_tiles_with_sinks(head_dim: int) -> None:
    """Queries whose first key tiles hold nothing, and queries that see nothing at all."""
    spec = {
        "head_dim": head_dim,
        "dtype": "fp16",
        "sink": "per_head",
        "mask": [{"expr": "k >= 40 and (row >= 14 or k > 999)"}],
    }
    assert_right(spec, (1, 2, 1, 20, 70), None if head_dim == 512 else ("loop", 16, 16))
    built = AttentionSpec(**spec)
    q, k = randn(1, 2, 20, head_dim).half(), randn(1, 1, 70, head_dim).half()
    sink = torch.tensor([0.5, -2.0])
    out, lse = attend(built, q, k, k, tile=None, sink=sink)
    assert torch.equal(out[:, :, :14], torch.zeros(1, 2, 14, head_dim).half())
    assert torch.equal(lse[:, :, :14], sink.view(1, 2, 1).expand(1, 2, 14))
    assert_finite(out, lse)


@pytest.mark.parametrize("tile", TILES)
def test_m4_real_logits_below_any_sentinel(tile: Any) -> None:
    """One key, q·k about -524288 before scaling: out = v, lse right."""
    spec = AttentionSpec(head_dim=128, dtype="bf16", scale=1)
    q = torch.full((1, 1, 1, 128), -448.0, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 128), 9.125, dtype=torch.bfloat16)
    v = randn(1, 1, 1, 128, dtype=torch.bfloat16)
    out, lse = attend(spec, q, k, v, tile=tile)
    assert torch.equal(out, v)
    assert lse.item() == pytest.approx(-448.0 * 9.125 * 128, rel=1e-6)


def test_m4_a_bias_of_minus_five_hundred_thousand_is_a_score() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", **BIAS)
    q, k, v = (randn(1, 1, 8, 16, seed=n) for n in range(3))
    assert_call_right(Call(spec, q, k, v, {"rel": torch.full((8, 8), -5e5)}), None)


def test_m5_a_bf16_bias_of_the_lowest_number_hides() -> None:
    bias = {**BIAS, "inputs": {"rel": {"shape": ["q_len", "kv_len"], "dtype": "bf16"}}}
    spec = AttentionSpec(head_dim=16, dtype="bf16", **bias)
    q, k, v = (randn(1, 2, 20, 16, seed=n, dtype=torch.bfloat16) for n in range(3))
    shown = torch.ones(20, 20, dtype=torch.bool).tril()
    lowest = torch.where(shown, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    for tile in TILES:
        biased = attend(spec, q, k, v, tile=tile, rel=lowest)
        masked = attend(
            AttentionSpec(head_dim=16, dtype="bf16", **DENSE), q, k, v, tile=tile, m=shown
        )
        assert_finite(*biased)
        assert torch.allclose(biased[0].float(), masked[0].float(), atol=0.01)
        assert torch.allclose(biased[1], masked[1], atol=1e-4)


def test_m7_lse_of_a_row_tile_without_keys() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=[{"expr": "q >= 16 and q < 32"}])
    q, k, v = (randn(1, 1, 48, 16, seed=n) for n in range(3))
    out, lse = attend(spec, q, k, v, tile=("loop", 16, 16))
    assert bool((lse[0, 0, :16] == MINUS_INF).all())
    assert bool((lse[0, 0, 32:] == MINUS_INF).all())
    assert_finite(lse[0, 0, 16:32], out)


@pytest.mark.parametrize("sink", [100.0, -100.0, 0.5, 0.0, MINUS_INF])
@pytest.mark.parametrize("tile", TILES)
def test_m8_m14_sinks_of_any_size(tile: Any, sink: float) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", sink="per_head", mask=["causal"])
    q, k, v = (randn(1, 2, 20, 16, seed=n) * 0.1 for n in range(3))
    values = torch.tensor([sink, 0.25])
    assert_call_right(Call(spec, q, k, v, sink=values), tile)
    out, lse = attend(spec, q, k, v, tile=tile, sink=values)
    assert_finite(out, lse)
    if sink == 100.0:
        assert lse[0, 0, 0].item() == 100.0


@pytest.mark.parametrize("tile", TILES)
def test_m14_nothing_used_leaves_the_sink(tile: Any) -> None:
    spec = AttentionSpec(head_dim=16, dtype="bf16", sink="per_head", kv_lens="per_batch")
    q, k = randn(2, 1, 3, 16, dtype=torch.bfloat16), torch.full((2, 1, 32, 16), math.nan).bfloat16()
    k[1, :, :5] = 1.0
    out, lse = attend(
        spec, q, k, k, tile=tile, sink=torch.tensor([0.5]), kv_lens=torch.tensor([0, 5])
    )
    assert torch.equal(out[0], torch.zeros(1, 3, 16).bfloat16())
    assert torch.equal(lse[0], torch.full((1, 3), 0.5))
    assert_finite(out, lse)


def test_m10_a_table_is_never_read_outside() -> None:
    """A band, and a gather at q - k + 8: NaN lies around the table, none comes out."""
    spec = AttentionSpec(
        head_dim=16,
        dtype="fp32",
        mask=[{"expr": "abs(q - k) <= 8"}],
        score=[{"expr": "s + table[q - k + 8]"}],
        inputs={"table": {"shape": [17], "dtype": "fp32"}},
    )
    around = torch.full((1024,), math.nan)
    around[500:517] = randn(17)
    q, k, v = (randn(1, 2, 64, 16, seed=n) for n in range(3))
    for tile in TILES:
        if tile is None or tile[0] == "loop":
            assert_call_right(Call(spec, q, k, v, {"table": around[500:517]}), tile)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_m11_merging_empty_parts(layout: str) -> None:
    """Where both parts saw nothing the result is 0 and -inf, where one did it is the other."""
    out = [randn(2, 8, 8, 16, seed=n) for n in range(2)]
    lse = [randn(2, 8, 8, seed=n) for n in range(2)]
    empty = [
        torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(n)) < 0.5 for n in range(2)
    ]
    for part in range(2):
        lse[part][empty[part]] = MINUS_INF
        rows = empty[part].transpose(1, 2) if layout == "bshd" else empty[part]
        out[part][rows] = math.nan  # what is in an empty part plays no role
    merged, merged_lse = merge(out, lse, layout=layout)
    by_head = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    both, first = empty[0] & empty[1], ~empty[0] & empty[1]
    assert torch.equal(by_head(merged)[both], torch.zeros(int(both.sum()), 16))
    assert bool((merged_lse[both] == MINUS_INF).all())
    assert torch.equal(by_head(merged)[first], by_head(out[0])[first])
    assert torch.allclose(merged_lse[first], lse[0][first])
    assert_finite(merged, merged_lse[~both])
