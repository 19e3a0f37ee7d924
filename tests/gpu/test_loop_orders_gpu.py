"""The flash1 order on the GPU: real barriers, and memory that carries state between key tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from property.drawn import Drawn, built, held_against_oracle, kernel_of, verdict
from property.masks import MASKS, SCORES

from flashgen.compiler.choose import compile as compile_spec
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

pytestmark = pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
SPLITS = (1, 3, None)
# Each compiles for some seconds: one of each kind of loop bounds, small tiles of many warps, whose
# threads share what they load and replace, and large ones.
KINDS = ("none", "window", "far-ranges", "two-ranges", "dilated", "documents", "scalar", "dense")
TILES: tuple[tuple[Any, tuple[int, int, int]], ...] = (
    (16, (16, 16, 8)),
    (40, (16, 64, 8)),
    (64, (32, 32, 4)),
    (128, (64, 64, 4)),
    (64, (64, 128, 8)),
    ({"qk": 128, "v": 72}, (128, 64, 8)),
)
DEFAULTS = ((31, "fp16"), (128, "bf16"), (256, "bf16"), (64, "fp32"), (96, "tf32"))


def schedule(tile: tuple[int, int, int], splits: int | None) -> Schedule:
    block_m, block_n, num_warps = tile
    return Schedule(
        loop_order="flash1",
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=1,
        num_kv_splits=splits,
    )


def assert_right(
    spec: dict[str, Any], sizes: tuple[int, int, int, int, int], given: Schedule, **more: Any
) -> None:
    drawn = Drawn(spec={**spec, "loop_order": "flash1"}, sizes=sizes, **more)
    call = built(drawn, "cuda")
    kernel = kernel_of(call.spec, given)
    out, lse = kernel(call.q, call.k, call.v, **call.inputs, **call.reserved)
    comparison = held_against_oracle(call, out, lse)
    assert comparison.ok, f"{given}: {comparison}"


@pytest.mark.parametrize("splits", [1, None])
@pytest.mark.parametrize("mask", KINDS)
def test_every_kind_of_mask(mask: str, splits: int | None) -> None:
    """333 rows and 401 keys, poisoned workspaces."""
    spec = {"head_dim": 64, "dtype": "bf16", "sink": "per_head", **MASKS[mask]}
    assert_right(spec, (2, 4, 2, 333, 401), schedule((64, 64, 4), splits), poison="seen_v")


@pytest.mark.parametrize("score", SCORES)
def test_every_score(score: str) -> None:
    spec = {"head_dim": 64, "dtype": "fp16", **MASKS["causal"], **SCORES[score]}
    assert_right(spec, (1, 4, 2, 200, 300), schedule((64, 64, 4), 2))


@pytest.mark.parametrize(("head_dim", "tile"), TILES, ids=str)
def test_every_tile(head_dim: Any, tile: tuple[int, int, int]) -> None:
    spec = {"head_dim": head_dim, "dtype": "bf16", "mask": "causal"}
    for splits in (1, 4):
        assert_right(spec, (1, 2, 1, 500, 700), schedule(tile, splits))


@pytest.mark.parametrize(("head_dim", "dtype"), DEFAULTS)
def test_default_schedules(head_dim: int, dtype: str) -> None:
    for sizes in ((1, 2, 1, 500, 700), (1, 4, 1, 1, 5000), (3, 50, 10, 300, 300)):
        spec = {"head_dim": head_dim, "dtype": dtype, "mask": "causal", "loop_order": "flash1"}
        comparison = verdict(Drawn(spec=spec, sizes=sizes), "cuda")
        assert comparison.ok, f"{sizes}: {comparison}"


@pytest.mark.parametrize("splits", SPLITS)
def test_runs_are_bit_equal(splits: int | None) -> None:
    """60 runs, the allocator full of NaN before each: a race or a read too early would show."""
    spec = AttentionSpec(head_dim=128, dtype="bf16", loop_order="flash1", mask="causal")
    kernel = compile_spec(spec, schedule=schedule((64, 128, 8), splits), return_lse=True)
    q, k, v = (torch.randn(2, 8, 2000, 128, device="cuda").bfloat16() for _ in range(3))
    first, first_lse = kernel(q, k, v)
    for _ in range(60):
        poison = [torch.full((64 << 20,), torch.nan, device="cuda") for _ in range(2)]
        del poison
        out, lse = kernel(q, k, v)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("splits", SPLITS)
def test_orders_agree_on_a_long_row(splits: int | None) -> None:
    """8192 by 8192: flash1's output against flash2's, both rounded once."""
    q, k, v = (torch.randn(1, 4, 8192, 128, device="cuda").bfloat16() for _ in range(3))
    fields = {"head_dim": 128, "dtype": "bf16", "mask": "causal"}
    flash2 = compile_spec(AttentionSpec(**fields), return_lse=True)(q, k, v)
    spec = AttentionSpec(**fields, loop_order="flash1")
    flash1 = compile_spec(spec, schedule=schedule((64, 128, 8), splits), return_lse=True)(q, k, v)
    assert torch.allclose(flash1[0].float(), flash2[0].float(), atol=0.02, rtol=0.02)
    assert torch.allclose(flash1[1], flash2[1], atol=1e-4)


def test_a_call_can_be_captured() -> None:
    """Workspace and both kernels in a CUDA graph, replayed on other values."""
    spec = AttentionSpec(head_dim=64, dtype="fp16", loop_order="flash1", mask="causal")
    kernel = compile_spec(spec, return_lse=True)
    q, k, v = (torch.randn(1, 4, 500, 64, device="cuda").half() for _ in range(3))
    kernel(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(q, k, v)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    again, again_lse = kernel(q, k, v)
    assert torch.equal(out, again)
    assert torch.equal(lse, again_lse)
