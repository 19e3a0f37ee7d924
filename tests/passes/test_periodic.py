"""Pairs of masks with periodic parts: counted exactly at lengths at which none is looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from flashgen import AttentionSpec
from flashgen.compiler import choose
from flashgen.passes import count
from flashgen.passes.count import visible_matrix, visible_pairs
from flashgen.schedule.orders import choose_order
from flashgen.spec.parts import Shape
from flashgen.target import get_target

LONG = 2**27


def spec_of(*mask: str, **fields: Any) -> AttentionSpec:
    items = [item if item == "causal" else {"expr": item} for item in mask]
    return AttentionSpec(head_dim=16, dtype="bf16", mask=items, **fields)


def one_head(q_len: int, kv_len: int) -> Shape:
    return Shape(batch=1, q_heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len)


PERIODIC = (
    "(q - k) % {m} == 1",
    "(q // {c} - k // {c}) % {m} <= 1",
    "min(q % {m}, k % {c}) == 0",
    "(q + 5 * k) % {m} < {c}",
    "where(k % {m} == 1, q % {c}, 1) == 1",
    "abs(q % {m} - k % {m}) <= 1",
    "row % {m} != k % {m}",
    "(k // {c}) % {m} == 0",
    "(q * k + {c} * k * k) % {m} == 1",
)
LIMITS = (
    "k <= q",
    "k > q - {d}",
    "q // {d} == k // {d}",
    "k // {d} <= q // {d}",
    "k // {d} != q // {d}",
    "2 * k <= q",
    "3 * k + {d} > 2 * q",
    "k == q",
    "k != q",
    "k <= max(q - {d}, {d})",
    "k * 2 > kv_len",
    "q < {d}",
    "row // 2 >= k",
)


def drawn_term(rng: random.Random, depth: int) -> str:
    if not depth or rng.random() < 0.3:
        form = rng.choice(rng.choice((PERIODIC, LIMITS)))
        m, c, d = rng.choice((3, 4, 8, 12)), rng.choice((2, 3, 4, 6)), rng.choice((3, 10, 17, 64))
        return form.format(m=m, c=c, d=d)
    parts = [drawn_term(rng, depth - 1) for _ in range(2)]
    joined = rng.choice((" and ", " or ")).join(f"({part})" for part in parts)
    return f"not ({joined})" if rng.random() < 0.2 else joined


@pytest.mark.parametrize("seed", range(6))
def test_drawn_masks_are_counted_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By arrays of rows, and by lines that stand for them."""
    rng = random.Random(seed)
    for _ in range(8):
        spec = spec_of(drawn_term(rng, 2), align=rng.choice(("bottom_right", "top_left")))
        for q_len, kv_len in ((1, 200), (133, 60), (40, 1), (150, 170)):
            shape = one_head(q_len, kv_len)
            wanted = int(visible_matrix(spec, shape, {}).sum())
            for many in (0, 2**12):
                monkeypatch.setattr(count, "MANY", many)
                count._pairs_unknown.cache_clear()
                assert visible_pairs(spec, shape) == wanted, (spec.mask, spec.align, shape, many)


@pytest.fixture
def none_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: object, rows: object) -> int:
        raise AssertionError("pairs are looked at one by one")

    monkeypatch.setattr(count, "_pairs_one_by_one", refuse)
    count._pairs_unknown.cache_clear()


def local_and_strided(n: int) -> int:
    """The last 128 keys of each row, and one of each 128 before these."""
    chunks = n // 128
    return 128 * n - 128 * 127 // 2 + 128 * chunks * (chunks - 1) // 2


# Of n queries and keys, n a multiple of all periods.
LONG_MASKS: dict[tuple[str, ...], Callable[[int], int]] = {
    ("(q - k) % 16 == 1", "(q // 4 - k // 4) % 2 == 1"): lambda n: n * n // 64,
    ("causal", "(q - k) % 16 == 0", "k % 8 == 0"): lambda n: (n // 16 + 1) * n // 16,
    ("k * k % 8 == 1",): lambda n: n * n // 2,
    ("(q * k) % 4 == 2",): lambda n: n * n // 4,
    ("causal", "q - k < 128 or (q - k) % 128 == 0"): local_and_strided,
}


@pytest.mark.parametrize("mask", LONG_MASKS, ids=" and ".join)
@pytest.mark.usefixtures("none_looked_at")
def test_long_masks_are_counted_exactly(mask: tuple[str, ...]) -> None:
    assert visible_pairs(spec_of(*mask), one_head(LONG, LONG)) == LONG_MASKS[mask](LONG)


@pytest.mark.usefixtures("none_looked_at")
def test_one_row_of_many_keys_is_counted_without_an_entry_for_each() -> None:
    spec = spec_of("causal", "min(q % 5, k % 3) == 0")
    assert visible_pairs(spec, one_head(1, LONG)) == -(-LONG // 3)


@pytest.mark.usefixtures("none_looked_at")
def test_choosing_an_order_looks_at_no_pairs() -> None:
    mask = ("(q - k) % 16 == 1", "(q // 4 - k // 4) % 2 == 1")
    choose_order.cache_clear()
    choose.plan(spec_of(*mask, loop_order="auto"), get_target("nvidia-h200"), has_lse=True)


def test_a_mask_is_counted_once_for_all_orders_and_scores() -> None:
    count._pairs_unknown.cache_clear()
    mask = ("(q // (k % 5 + 1)) % 3 == 1",)  # neither periodic nor a limit
    shape = one_head(64, 64)
    for order in ("flash2", "flash1", "auto"):
        for scale in (0.5, 1.0):
            visible_pairs(spec_of(*mask, loop_order=order, scale=scale), shape)
    assert count._pairs_unknown.cache_info().misses == 1


def test_pairs_of_many_keys_are_looked_at_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "BLOCK_PAIRS", 64)
    spec, shape = spec_of("(q // (k % 5 + 1)) % 3 == 1"), one_head(3, 1000)
    count._pairs_unknown.cache_clear()
    assert visible_pairs(spec, shape) == int(visible_matrix(spec, shape, {}).sum())


@pytest.mark.parametrize("value", [3, 2.5, True])
def test_scalars_are_numbers_of_the_mask(value: float) -> None:
    dtype = {int: "int32", float: "fp32", bool: "bool"}[type(value)]
    term = "(on and k % 2 == 0) or k <= q" if dtype == "bool" else "k % 4 < on and k <= q"
    spec = spec_of(term, inputs={"on": {"shape": [], "dtype": dtype}})
    shape = one_head(30, 40)
    wanted = int(visible_matrix(spec, shape, {"on": value}).sum())
    assert visible_pairs(spec, shape, {"on": value}) == wanted
