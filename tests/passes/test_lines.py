"""Counts over long lengths: the same as with an entry per tile, without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from passes.test_visibility import EXACT, spec_of

from flashgen.compiler.explaining import explain
from flashgen.passes import count
from flashgen.passes.count import visible_pairs, visits, walks
from flashgen.passes.key_tiles import floor_sum
from flashgen.passes.lines import NotLinearError, over
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

PERIODIC: tuple[Any, ...] = (
    [{"expr": "(q - k) % 4 == 0"}, "causal"],
    [{"expr": "(q - k) % 70 == 0"}, {"window": {"left": 300}}],
    [{"expr": "(k // 128) % 4 == (q // 128) % 4"}, "causal"],
    [{"expr": "(k // 24) % 5 == (q // 7) % 5"}],
    [{"expr": "(k // 16 - q // 16) % 6 == 1"}, {"window": {"left": 300}}],
)
TWO_RANGES: tuple[Any, ...] = (
    [{"expr": "k < 40 or q - k < 90"}, "causal"],
    [{"expr": "abs(q - k) > 70"}],
)
MASKS = (*EXACT, *PERIODIC, *TWO_RANGES)
LONG = 200_000_000


@pytest.fixture
def lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of rows fails: its blocks have none."""
    monkeypatch.setattr(count, "MANY", 0)
    monkeypatch.setattr(count, "BLOCK_ROWS", 0)


def drawn(mask: Any, align: str) -> list[tuple[Shape, int, int, int]]:
    rng = random.Random(f"{mask} {align}")
    return [
        (
            Shape(1, 2, 1, rng.randint(1, 700), rng.randint(1, 900)),
            rng.choice([1, 4, 16, 32, 60]),
            rng.choice([4, 16, 32, 48, 128]),
            rng.choice([1, 2, 3, 4, 8, 30]),
        )
        for _ in range(4)
    ]


def counted(mask: Any, align: str) -> list[Any]:
    spec = spec_of(mask, align)
    return [
        (
            visits(spec, shape, block_m, block_n, num_kv_splits=splits),
            walks(spec, shape, block_m, block_n),
            visible_pairs(spec, shape),
        )
        for shape, block_m, block_n, splits in drawn(mask, align)
    ]


@pytest.mark.parametrize(
    "align", ["bottom_right", pytest.param("top_left", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_lines_count_what_tiles_one_by_one_do(
    mask: Any, align: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count, "MANY", 10**9)
    one_by_one = counted(mask, align)
    request.getfixturevalue("lines_only")
    assert counted(mask, align) == one_by_one


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("mask", [*PERIODIC, *TWO_RANGES, ["causal"]], ids=repr)
def test_splits_are_those_that_have_a_visited_tile(mask: Any, splits: int) -> None:
    spec, shape = spec_of(mask), Shape(1, 1, 1, 500, 900)
    classes = count.tile_classes(spec, shape, 16, 32, {}) != count.EMPTY
    wanted = sum(bool(row[split::splits].any()) for row in classes for split in range(splits))
    found = visits(spec, shape, 16, 32, num_kv_splits=splits)
    assert (found.tiles, found.first_visits) == (classes.sum(), wanted)
    assert found.key_tiles >= classes.any(axis=0).sum()


@pytest.mark.usefixtures("lines_only")
@pytest.mark.parametrize(
    ("mask", "pairs", "tiles"),
    [
        ([], LONG**2, (LONG // 128) * (LONG // 64)),
        (["causal"], LONG * (LONG + 1) // 2, (LONG // 128) * (LONG // 128 + 1)),
        (
            ["causal", {"window": {"left": 4095}}],
            4096 * 4097 // 2 + (LONG - 4096) * 4096,
            (LONG // 128 - 32) * 66 + 2 * sum(range(1, 33)),
        ),
        # 48,828 chunks of 4096 and one of 512
        (
            [{"expr": "k // 4096 == q // 4096"}],
            48_828 * 4096**2 + 512**2,
            48_828 * 32 * 64 + 4 * 8,
        ),
        (
            [{"expr": "(q - k) % 4 == 0"}, "causal"],
            LONG * (LONG // 4 + 1) // 2,
            (LONG // 128) * (LONG // 128 + 1),
        ),
    ],
    ids=["none", "causal", "window", "chunks", "dilated"],
)
def test_long_lengths_are_counted_in_closed_form(mask: Any, pairs: int, tiles: int) -> None:
    spec, shape = spec_of(mask), Shape(1, 1, 1, LONG, LONG)
    assert visible_pairs(spec, shape) == pairs
    assert visits(spec, shape, 128, 64).tiles == walks(spec, shape, 128, 64).total == tiles


def test_long_masks_that_no_bound_describes_count_as_their_bounds() -> None:
    spec, shape = spec_of([{"expr": "k < 3 or k == q or k == q - 20"}]), Shape(1, 1, 1, LONG, LONG)
    # Keys 1 and 2 of row 0, and key 2 of row 1, beside what a causal mask shows.
    assert visible_pairs(spec, shape) == visible_pairs(spec_of(["causal"]), shape) + 3


@pytest.mark.parametrize(
    "function",
    [
        lambda t: 3 * t - 7,
        lambda t: np.maximum(5 * t - 1000, 17) // 12,
        lambda t: np.where(t % 6 == 4, t // 5, -t),
        lambda t: np.minimum((t * 7) // 3 % 11, 5) * 2 + abs(t - 4000),
        lambda t: (t // 10 + 3) * 4 % 9,
    ],
)
def test_sums_over_lines(function: Callable[[Any], Any]) -> None:
    plain = function(np.arange(10_007, dtype=np.int64))
    assert over(10_007, lambda t: function(t).sum()) == plain.sum()
    assert over(10_007, lambda t: function(t).max()) == plain.max()


@pytest.mark.parametrize(
    "function", [lambda t: t * t, lambda t: 0.5 * t, np.asarray, lambda t: t // (t + 1)]
)
def test_what_is_no_line_says_so(function: Callable[[Any], Any]) -> None:
    with pytest.raises(NotLinearError):
        over(10_007, function)


def test_floor_sums() -> None:
    rng = np.random.default_rng(0)
    counts, offsets = rng.integers(0, 40, 50), rng.integers(-300, 300, 50)
    for divisor, slope in ((7, 3), (512, 128), (5, 24), (1, 1), (36, 96)):
        wanted = [
            sum((slope * i + int(b)) // divisor for i in range(n))
            for n, b in zip(counts, offsets, strict=True)
        ]
        assert floor_sum(counts, divisor, slope, offsets).tolist() == wanted


@pytest.mark.usefixtures("lines_only")
@pytest.mark.parametrize("lengths", [(LONG, 4096), (4000, LONG), (LONG, LONG)], ids=str)
@pytest.mark.parametrize("mask", [["causal"], *PERIODIC[:3], *TWO_RANGES[:1]], ids=repr)
def test_long_lengths_are_explained_without_arrays_of_them(
    mask: Any, lengths: tuple[int, int]
) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=mask)
    found = explain(spec, shape=Shape(1, 1, 1, *lengths))
    assert found.mask.pairs == lengths[0] * lengths[1]
    assert 0 < found.mask.visited_tiles <= found.mask.tiles
