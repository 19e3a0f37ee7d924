"""The counts that bytes and times are computed from are those of the kernels, and of the mask.

The interpreter's loads and stores of tiles are counted by the array that they lie in; what is
visible, element by element, by plain Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from property.drawn import kernel_of
from triton.runtime.interpreter import InterpreterBuilder

from flashgen import reference
from flashgen.passes.count import visible_pairs, visits, walks
from flashgen.schedule.model import KernelKind, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

Q_LEN, KV_LEN, BLOCK_M, BLOCK_N = 50, 70, 16, 16
Mask = list[Any]

# A spec's mask and whether query q (aligned to the bottom right) of some row sees key k.
MASKS: dict[str, tuple[Mask, Callable[[int, int, int], bool]]] = {
    "everything": ([], lambda row, q, k: True),
    "causal": (["causal"], lambda row, q, k: k <= q),
    "window": (["causal", {"window": {"left": 3}}], lambda row, q, k: q - 3 <= k <= q),
    # At the start of a tile: kernels visit a tile that both ends of an empty range lie in.
    "late keys": ([{"expr": "k >= 48"}], lambda row, q, k: k >= 48),
    "some rows": ([{"expr": "row < 5"}], lambda row, q, k: row < 5),
    "rows of the second tile": (
        [{"expr": "row >= 16 and row < 20"}],
        lambda row, q, k: 16 <= row < 20,
    ),
    "nothing": ([{"expr": "k > q + 1000"}], lambda row, q, k: False),
}


def by_elements(name: str, kv_len: int) -> tuple[int, set[tuple[int, int]]]:
    """(visible pairs, pairs of a query tile and a key tile that hold one)."""
    _, sees = MASKS[name]
    seen = [
        (row, k)
        for row in range(Q_LEN)
        for k in range(kv_len)
        if sees(row, row + kv_len - Q_LEN, k)
    ]
    return len(seen), {(row // BLOCK_M, k // BLOCK_N) for row, k in seen}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """`moves(spec, schedule, q, k, v)`: how many tiles a call loads and stores, by array.

    Loads and stores whose mask hides every element do not count. "key tiles": different ones.
    """

    def call(
        spec: AttentionSpec, schedule: Schedule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Counter[str]:
        attention = kernel_of(spec, schedule)
        found: Counter[str] = Counter()
        key_tiles = set()
        places = {
            name: range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for name, tensor in (("q", q), ("k", k), ("v", v))
        }
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def touched(ptrs: Any, mask: Any) -> tuple[str, int] | None:
            """(array, first address) of a tile; what is in none of the arrays is state."""
            if ptrs.data.ndim < 2 or not mask.data.any():
                return None
            first = int(ptrs.data[mask.data.astype(bool)].min())
            return next((name for name, at in places.items() if first in at), "state"), first

        def loads(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
            where = touched(ptrs, mask)
            if where:
                name, first = where
                found[f"{name} loads"] += 1
                if name == "k":
                    key_tiles.add((first - k.data_ptr()) // (16 * 2) // BLOCK_N)
            return load(self, ptrs, mask, *others)

        def stores(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
            found["stores"] += touched(ptrs, mask) is not None
            return store(self, ptrs, value, mask, *others)

        with monkeypatch.context() as watching:
            watching.setattr(InterpreterBuilder, "create_masked_load", loads)
            watching.setattr(InterpreterBuilder, "create_masked_store", stores)
            out, _ = attention(q, k, v)
        expected = reference.attention(spec, q, k, v)[0]
        torch.testing.assert_close(out.double(), expected.double(), atol=2e-3, rtol=0)
        found["key tiles"] = len(key_tiles)
        return found

    return call


def qkv(kv_len: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    lengths = (Q_LEN, kv_len, kv_len)
    return tuple(torch.randn(1, 1, n, 16, generator=generator).half() for n in lengths)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("kernel", "kv_len"), [("loop", KV_LEN), ("loop", 12), ("single_tile", 12), ("single_tile", 16)]
)
def test_key_tiles_of_flash2(
    kernel: KernelKind, kv_len: int, name: str, moves: Callable[..., Counter[str]]
) -> None:
    """The loop skips what nothing sees; a single tile is computed by every query tile."""
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=MASKS[name][0])
    schedule = Schedule(kernel=kernel, block_m=BLOCK_M, block_n=BLOCK_N, num_warps=4, num_stages=1)
    shape = Shape(1, 1, 1, Q_LEN, kv_len)
    pairs, tiles = by_elements(name, kv_len)
    assert visible_pairs(spec, shape) == pairs
    if kernel == "single_tile":
        tiles = {(tile, 0) for tile in range(4)}
    seen = visits(spec, shape, BLOCK_M, BLOCK_N, kernel=kernel)
    key_tiles = {key_tile for _, key_tile in tiles}
    assert seen.tiles == len(tiles)
    assert seen.key_tiles == len(key_tiles)
    assert seen.keys == sum(min(BLOCK_N, kv_len - BLOCK_N * tile) for tile in key_tiles)
    walked = walks(spec, shape, BLOCK_M, BLOCK_N, kernel=kernel)
    longest = max(Counter(tile for tile, _ in tiles).values(), default=0)
    assert (walked.query_tiles, walked.total, walked.longest) == (4, seen.tiles, longest)

    found = moves(spec, schedule, *qkv(kv_len))
    assert found["k loads"] == found["v loads"] == seen.tiles
    assert found["key tiles"] == seen.key_tiles
    assert found["q loads"] == found["stores"] == walked.query_tiles


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("splits", "kv_len"), [(1, KV_LEN), (2, KV_LEN), (3, KV_LEN), (1, 12), (8, 12), (8, 40)]
)
def test_key_tiles_of_flash1(
    splits: int, kv_len: int, name: str, moves: Callable[..., Counter[str]]
) -> None:
    """No more splits than key tiles are launched; those asked for are merged, even a single one."""
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=MASKS[name][0], loop_order="flash1")
    schedule = Schedule(
        loop_order="flash1",
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        num_warps=4,
        num_stages=1,
        num_kv_splits=splits,
    )
    launched = schedule.splits_for(kv_len)
    assert launched == min(splits, -(-kv_len // BLOCK_N))
    _, tiles = by_elements(name, kv_len)
    seen = visits(spec, Shape(1, 1, 1, Q_LEN, kv_len), BLOCK_M, BLOCK_N, num_kv_splits=launched)
    first_visits = len({(tile, key_tile % launched) for tile, key_tile in tiles})
    assert (seen.tiles, seen.first_visits) == (len(tiles), first_visits)
    assert seen.key_tiles == len({key_tile for _, key_tile in tiles})

    found = moves(spec, schedule, *qkv(kv_len))
    assert found["q loads"] == seen.tiles
    assert found["k loads"] == found["v loads"] == found["key tiles"] == seen.key_tiles
    if splits == 1:  # the last visit writes output; rows that see nothing are written at once
        assert found["state loads"] == seen.tiles - seen.first_visits
        assert found["stores"] == seen.tiles + 4 - seen.first_visits
    else:  # each visit writes state, which the merge reads, and writes the output
        assert found["state loads"] == seen.tiles
        assert found["stores"] == seen.tiles + 4


def test_pairs_under_conditional_values() -> None:
    """A comparison of them, as the condition of another, is counted pair by pair."""
    expression = "where(k <= where(row < 3, 13, q), 1, 0) == 1"
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=[{"expr": expression}])
    offset = KV_LEN - Q_LEN
    seen = sum(
        k <= (13 if row < 3 else row + offset) for row in range(Q_LEN) for k in range(KV_LEN)
    )
    assert visible_pairs(spec, Shape(1, 1, 1, Q_LEN, KV_LEN)) == seen
