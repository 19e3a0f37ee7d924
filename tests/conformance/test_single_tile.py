"""What a kernel without a key loop computes: the interpreter's loads are those that are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from property.drawn import kernel_of
from triton.runtime.interpreter import InterpreterBuilder

from flashgen.passes.count import visits, walks
from flashgen.schedule.model import KernelKind, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

Q_LEN, KV_LEN, BLOCK_M, BLOCK_N = 50, 20, 16, 32
NOTHING: list[Any] = [{"expr": "k > q + 1000"}]
FIRST_ROWS: list[Any] = [{"expr": "row < 5"}]
LAST_KEYS: list[Any] = ["causal", {"window": {"left": 3}}]


@pytest.mark.parametrize(
    ("mask", "walked"),
    [(["causal"], 3), (LAST_KEYS, 3), (FIRST_ROWS, 1), (NOTHING, 0), ([], 4)],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["loop", "single_tile"])
def test_key_tiles_are_loaded_as_often_as_is_counted(
    kernel: KernelKind, mask: list[Any], walked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 queries, 20 keys: the loop skips query tiles that see none, a single tile computes all."""
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=mask)
    schedule = Schedule(kernel=kernel, block_m=BLOCK_M, block_n=BLOCK_N, num_warps=4, num_stages=1)
    q, k, v = (torch.randn(1, 1, length, 16).half() for length in (Q_LEN, KV_LEN, KV_LEN))
    loads: list[set[int]] = []
    plain = InterpreterBuilder.create_masked_load

    def watched(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        rows = (ptrs.data[mask.data.astype(bool)].astype("int64") - k.data_ptr()) // (16 * 2)
        keys = {int(row) for row in rows if 0 <= row < KV_LEN}
        loads.extend([keys] if keys else [])
        return plain(self, ptrs, mask, *others)

    attention = kernel_of(spec, schedule)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    out, lse = attention(q, k, v)
    shape = Shape(1, 1, 1, Q_LEN, KV_LEN)
    seen = visits(spec, shape, BLOCK_M, BLOCK_N, kernel=kernel)
    assert seen.tiles == len(loads) == (4 if kernel == "single_tile" else walked)
    assert seen.keys == len(set().union(*loads))
    found = walks(spec, shape, BLOCK_M, BLOCK_N, kernel=kernel)
    assert (found.total, found.longest) == (seen.tiles, min(1, seen.tiles))
    assert not out[lse == float("-inf")].any()
