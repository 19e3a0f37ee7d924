"""The flash1 order, whole and split: every mask, score and format, with poisoned workspaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asked import MINUS_INF, attend, randn
from property.drawn import Drawn, kernel_of, verdict
from property.masks import MASKS, SCORES
from triton.runtime.interpreter import InterpreterBuilder

from flashgen import reference
from flashgen.passes.count import visits
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec, Shape

SPLITS = (1, 2, 3, None)
SIZES = (1, 2, 1, 49, 70)  # batch, heads, lengths: 4 query tiles, 5 key tiles


def assert_right(
    spec: dict[str, Any], sizes: tuple[int, int, int, int, int], splits: int | None, **drawn: Any
) -> None:
    drawn = {"tile": ("loop", 16, 16), **drawn}
    comparison = verdict(
        Drawn(spec={**spec, "loop_order": "flash1"}, sizes=sizes, splits=splits, **drawn)
    )
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize(
    ("splits", "sink", "poison"),
    [(1, "none", "seen_v"), pytest.param(3, "per_head", "", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str, splits: int, sink: str, poison: str) -> None:
    spec = {"head_dim": 16, "dtype": "fp16", "sink": sink, **MASKS[mask]}
    assert_right(spec, SIZES, splits, poison=poison or "unseen", seed=len(mask))


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("mask", ["none", "causal", "two-ranges", "dilated", "documents", "dense"])
def test_masks_with_used_lengths(mask: str, splits: int) -> None:
    """kv_lens: some batches have fewer key tiles than there are splits, or no key."""
    spec = {"head_dim": 16, "dtype": "fp16", "kv_lens": "per_batch", **MASKS[mask]}
    assert_right(spec, (3, 1, 1, 33, 70), splits, seed=splits)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("mask", "splits"),
    [("none", 1), ("causal", 2), pytest.param("dense", 1, marks=pytest.mark.slow)],
)
def test_every_score(mask: str, score: str, splits: int) -> None:
    spec = {"head_dim": 16, "dtype": "fp16", **MASKS[mask], **SCORES[score]}
    spec["inputs"] = {**MASKS[mask].get("inputs", {}), **SCORES[score].get("inputs", {})}
    assert_right(spec, (1, 2, 1, 33, 40), splits)


@pytest.mark.parametrize(
    ("dtype", "splits"),
    [("bf16", 1), ("fp32", 1), ("fp32", 2), ("tf32", 2), ({"q": "fp32", "out": "fp16"}, 1)],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [33, {"qk": 48, "v": 20}, {"qk": 8, "v": 40}], ids=str)
def test_every_format_and_head_dim(head_dim: Any, dtype: Any, splits: int) -> None:
    spec = {"head_dim": head_dim, "dtype": dtype, "mask": "causal", "sink": "per_head"}
    assert_right(spec, (1, 2, 1, 17, 40), splits)


@pytest.mark.parametrize("splits", (1, 9))
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(0, 20), (20, 0), (0, 0), (1, 1), (1, 70), (15, 17), (16, 16), (17, 32), (64, 1), (65, 33)],
)
def test_every_length(q_len: int, kv_len: int, splits: int) -> None:
    """9 splits are more than key tiles. Without keys: output 0 and lse -inf, or the sink."""
    for fields in ({}, {"mask": "causal", "sink": "per_head"}):
        spec = {"head_dim": 16, "dtype": "fp16", **fields}
        assert_right(spec, (1, 1, 1, q_len, kv_len), splits)


@pytest.mark.parametrize("form", ["length_first", "heads_last", "dim_outer", "offset", "fused"])
@pytest.mark.parametrize(("layout", "splits"), [("bhsd", 1), ("bshd", 2)])
def test_every_stride(layout: str, splits: int, form: str) -> None:
    spec = {"head_dim": 24, "dtype": "fp16", "layout": layout, "mask": "causal"}
    assert_right(spec, (2, 2, 1, 20, 33), splits, forms=dict.fromkeys("qkv", form))


@pytest.mark.parametrize("tile", [("loop", 16, 32), ("loop", 32, 16), ("loop", 64, 32)])
@pytest.mark.parametrize(
    ("mask", "splits"), [("window", 2), ("two-ranges", 1), ("far-ranges", 2), ("dilated", 2)]
)
def test_every_tile_shape(mask: str, splits: int, tile: tuple[str, int, int]) -> None:
    spec = {"head_dim": 16, "dtype": "fp16", **MASKS[mask]}
    assert_right(spec, (1, 1, 1, 97, 129), splits, tile=tile)


@pytest.mark.parametrize("group", [1, 3])
def test_grouped_heads(group: int) -> None:
    for heads in ({"group": group}, None):
        spec = {"head_dim": 16, "dtype": "fp16", "mask": "causal"}
        assert_right({**spec, "heads": heads} if heads else spec, (2, 2 * group, 2, 20, 40), 2)


@pytest.mark.parametrize("splits", SPLITS)
def test_huge_scores_need_no_second_walk(splits: int | None) -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16", loop_order="flash1", mask="causal")
    x = torch.full((1, 1, 40, 64), 133120.0, dtype=torch.bfloat16)
    drawn = Drawn(spec=spec.canonical(), sizes=(1, 1, 1, 40, 40), tile=("loop", 16, 16))
    schedule = Schedule.from_dict({**drawn_schedule(drawn), "num_kv_splits": splits})
    out, lse = kernel_of(spec, schedule)(x, x, x)
    assert torch.equal(out, x)
    assert bool(torch.isfinite(lse).all())


def drawn_schedule(drawn: Drawn) -> dict[str, Any]:
    assert drawn.schedule is not None
    return drawn.schedule.to_dict()


@pytest.mark.parametrize("value", [float("inf"), MINUS_INF, float("nan")])
@pytest.mark.parametrize("splits", (1, 2))
def test_values_that_are_not_finite(value: float, splits: int) -> None:
    """Column 3 of key 20: rows that see it have it there, all other rows are as without it.

    In a tile that the mask cuts, with two such keys of which a row sees one, all its columns are
    NaN: where they come from is not told apart.
    """
    spec = AttentionSpec(head_dim=16, dtype="fp32", loop_order="flash1", mask="causal")
    q, k, v = (randn(1, 1, 48, 16, seed=n) for n in range(3))
    schedule = Schedule(
        loop_order="flash1", block_m=16, block_n=16, num_warps=4, num_stages=1,
        num_kv_splits=splits,
    )  # fmt: skip
    plain, plain_lse = kernel_of(spec, schedule)(q, k, v)
    odd = v.clone()
    odd[0, 0, 20, 3] = value
    out, lse = kernel_of(spec, schedule)(q, k, odd)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[:, :, :20], plain[:, :, :20])
    rest = [column for column in range(16) if column != 3]
    assert torch.allclose(out[:, :, 20:, rest], plain[:, :, 20:, rest], atol=1e-6)
    seen = out[0, 0, 20:, 3]
    assert bool(seen.isnan().all() if value != value else (seen == value).all())  # noqa: PLR0124
    odd[0, 0, 22, 5] = value
    out, _ = kernel_of(spec, schedule)(q, k, odd)
    assert bool(out[0, 0, 20:22].isnan().all())
    assert torch.equal(out[:, :, :20], plain[:, :, :20])


@pytest.mark.parametrize("splits", SPLITS)
def test_runs_agree_bit_by_bit(splits: int | None) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp16", loop_order="flash1", mask="causal")
    schedule = Schedule(
        loop_order="flash1", block_m=16, block_n=16, num_warps=4, num_stages=1,
        num_kv_splits=splits,
    )  # fmt: skip
    q, k, v = (randn(1, 2, 40, 16, seed=n).half() for n in range(3))
    kernel = kernel_of(spec, schedule)
    first = kernel(q, k, v)
    for _ in range(2):
        assert all(map(torch.equal, kernel(q, k, v), first))


@pytest.mark.parametrize("loop_order", ["flash1", "auto"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 40), (40, 200), (1, 300)])
def test_default_schedules(loop_order: str, q_len: int, kv_len: int) -> None:
    drawn = Drawn(
        spec={"head_dim": 16, "dtype": "fp16", "mask": "causal", "loop_order": loop_order},
        sizes=(1, 2, 1, q_len, kv_len),
    )
    comparison = verdict(drawn)
    assert comparison.ok, str(comparison)


def test_orders_agree() -> None:
    """Both orders of one spec on one call: equal but for rounding."""
    q, k, v = (randn(1, 2, 50, 16, seed=n) for n in range(3))
    found = []
    for order in ("flash2", "flash1"):
        spec = AttentionSpec(head_dim=16, dtype="fp32", loop_order=order, mask="causal")
        found.append(attend(spec, q, k, v, tile=None))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


KEYS_OF_A_TILE = 16


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (["causal", {"window": {"left": 9}}], 2),
        ([{"expr": "k < 5 or k > q - 9"}, "causal"], 1 + 1),
        ([{"expr": "k // 32 == q // 32"}], 2),
        ([{"expr": "k < 40"}], 3),
        ([{"expr": "k >= 200"}], 4),
        ([{"expr": "k > q"}], 1),
        (["causal"], 16),
        ([], 16),
    ],
    ids=str,
)
def test_key_tiles_that_nothing_sees_are_not_loaded(
    mask: Any, tiles: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queries at the end of 250 keys: the interpreter's loads are those of the model."""
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=mask, loop_order="flash1")
    shape = Shape(1, 1, 1, 2, 250)
    q, k, v = (torch.randn(1, 1, length, 16).half() for length in (2, 250, 250))
    loaded: set[int] = set()
    plain = InterpreterBuilder.create_masked_load

    def watched(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        rows = (ptrs.data[mask.data.astype(bool)].astype("int64") - k.data_ptr()) // (16 * 2)
        loaded.update(int(row) for row in rows if 0 <= row < 250)
        return plain(self, ptrs, mask, *others)

    schedule = Schedule(
        loop_order="flash1",
        block_m=16,
        block_n=KEYS_OF_A_TILE,
        num_warps=4,
        num_stages=1,
        num_kv_splits=splits,
    )
    kernel = kernel_of(spec, schedule)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    out, _ = kernel(q, k, v)
    seen = visits(spec, shape, 16, KEYS_OF_A_TILE, num_kv_splits=splits)
    assert (len(loaded), len({row // KEYS_OF_A_TILE for row in loaded})) == (seen.keys, tiles)
    assert seen.key_tiles == tiles
    torch.testing.assert_close(
        out.double(), reference.attention(spec, q, k, v)[0].double(), atol=2e-3, rtol=0
    )
