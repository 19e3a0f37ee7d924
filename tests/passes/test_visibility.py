"""Loop bounds by brute force: nothing visible outside the hull, everything visible inside full."""

from __future__ import annotations

import math
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import sympy as sp
import torch

from flashgen import reference
from flashgen.passes.count import all_visible_pairs, visible_pairs, visited_tiles, visits
from flashgen.passes.visibility import (
    Q_FIRST,
    Q_LAST,
    ROW_FIRST,
    ROW_LAST,
    Span,
    visibility,
)
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

# Masks whose hull must be exact: every tile inside it has a visible pair.
EXACT: tuple[Any, ...] = (
    [],
    ["causal"],
    [{"window": {"left": 9}}],
    [{"window": {"left": 5, "right": 3}}],
    ["causal", {"window": {"left": 20}}],
    [{"expr": "k < q"}],
    [{"expr": "k > q"}],
    [{"expr": "k == q"}],
    [{"expr": "abs(q - k) <= 7"}],
    [{"expr": "max(q - k, k - q) < 6"}],
    [{"expr": "k < reach or k <= q"}],
    [{"expr": "k < prefix[b] or k <= q"}],
    [{"expr": "k // 16 == q // 16"}],
    [{"expr": "k // 8 == q // 8"}, "causal"],
    [{"expr": "q // 8 - k // 8 < 3 and k <= q"}],
    [{"expr": "2 * k <= 3 * q + 5"}],
    [{"expr": "q / 2 < k"}],
    [{"expr": "min(q, 20) >= k"}],
    [{"expr": "max(k, 9) <= q"}],
    [{"expr": "min(k, q) < 11"}],
    [{"expr": "not (k > q or k < q - 10)"}],
    [{"expr": "not (q - k < 10)"}],
    [{"expr": "q_len > 20"}],
    [{"expr": "row < 13"}],
    [{"expr": "q >= 13 and k < 30"}],
    [{"expr": "h % 2 == 0 or k <= q"}],
    [{"expr": "kv_len - k > 7"}],
    [{"expr": "q - k < widths[h] and k <= q"}],
)
# Masks whose bounds need only be right.
SAFE: tuple[Any, ...] = (
    [{"expr": "k < 4 or (k <= q and q - k < 12)"}],
    [{"window": {"right": 2}}],
    [{"expr": "abs(q - k) > 7"}],
    [{"expr": "k != q"}],
    [{"expr": "k < 4 or q - k < 8"}],
    [{"expr": "k < 3 or k == q or k == q - 20"}],
    [{"expr": "(k // 4) % 3 == (q // 4) % 3"}],
    [{"expr": "(k // 16 - q // 16) % 2 == 0"}],
    [{"expr": "(q - k) % 8 == 0"}, "causal"],
    [{"expr": "(q - k) % 5 == 2"}],
    [{"expr": "(k % 8 == 7) or k // 8 == q // 8"}],
    [{"expr": "k % 3 < 2"}],
    [{"expr": "(k + 5) // 7 >= q // 3"}],
    [{"expr": "where(q < 8, 5, q) >= k"}],
    [{"expr": "k < 0.5 * q"}],
    [{"expr": "k * gain < q"}],
    [{"expr": "on or k <= q"}],
    [{"expr": "row % 2 == 0 or k <= q"}],
    [{"expr": "k >= starts[b, row]"}],
    [{"expr": "m[b, 0, row, k]"}, "causal"],
    [{"same": "doc"}],
    [{"same": "doc"}, "causal"],
    [{"expr": "doc[b, q] == doc[b, k] or k < 5"}],
    [{"expr": "doc[b, k + 3] == doc[b, q]"}],
    [{"expr": "(k <= q and q - k < 9) or (k // 8) % 4 == 1"}],
    [{"expr": "(q - k) % 4 == 0 and (q - k) % 6 == 0"}],
    [{"expr": "not (k < 6 and q > 9)"}],
    [{"expr": "abs(2 * q - k) <= 9"}],
    [{"expr": "k * q < 300"}],
    [{"expr": "k > q and k < q"}],
)
INPUTS: dict[str, tuple[list[int | str], str]] = {
    "prefix": (["batch"], "int32"),
    "reach": ([], "int32"),
    "gain": ([], "fp32"),
    "on": ([], "bool"),
    "widths": (["q_heads"], "int32"),
    "starts": (["batch", "q_len"], "int32"),
    "doc": (["batch", "kv_len"], "int32"),
    "m": (["batch", 1, "q_len", "kv_len"], "bool"),
}
CASES = [(mask, True) for mask in EXACT] + [(mask, False) for mask in SAFE]
SHAPES = 12  # random (q_len, kv_len, tile) for each mask and alignment


def spec_of(mask: Any, align: str = "bottom_right") -> AttentionSpec:
    names = [n for n in INPUTS if re.search(rf"\b{n}\b", repr(mask))]
    inputs = {n: {"shape": INPUTS[n][0], "dtype": INPUTS[n][1]} for n in names}
    return AttentionSpec(head_dim=16, dtype="fp32", mask=mask, align=align, inputs=inputs)


@dataclass(frozen=True)
class Case:
    """A random call: sizes, tile and inputs, and the dense mask of batches and heads 0 to 1."""

    shape: Shape
    block_m: int
    block_n: int
    inputs: dict[str, Any]
    visible: torch.Tensor

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """First and last row of each query tile."""
        starts = range(0, self.shape.q_len, self.block_m)
        return [(first, min(first + self.block_m, self.shape.q_len) - 1) for first in starts]


def cases(spec: AttentionSpec, count: int = SHAPES) -> list[Case]:
    rng = random.Random(zlib.crc32(repr(spec.mask).encode()))
    torch.manual_seed(rng.randrange(2**31))
    found = []
    for _ in range(count):
        q_len, kv_len = rng.choice((1, 3, 8, 17, 40, 64, 90)), rng.choice((1, 2, 16, 33, 64, 100))
        shape = Shape(2, 2, 1, q_len, kv_len)
        inputs: dict[str, Any] = {
            "prefix": torch.randint(-4, kv_len + 4, (2,)),
            "reach": rng.randrange(-4, kv_len + 4),
            "gain": rng.choice((0.5, 1.0, 2.5)),
            "on": rng.random() < 0.5,
            "widths": torch.randint(0, 20, (2,)),
            "starts": torch.randint(-2, kv_len + 2, (2, q_len)),
            "doc": torch.randint(0, 4, (2, kv_len)).sort(dim=1).values,
            "m": torch.rand(2, 1, q_len, kv_len) < 0.3,
        }
        declared = {i.name for i in spec.inputs}
        inputs = {n: v for n, v in inputs.items() if n in declared}
        sizes = {f: getattr(shape, f) for f in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")}
        visible = reference.mask(spec, **sizes, inputs=inputs)
        found.append(
            Case(shape, rng.choice((1, 4, 16, 32)), rng.choice((1, 4, 16, 32)), inputs, visible)
        )
    return found


class Bounds:
    """A span's bounds as plain Python functions of the tile, the batch and the head."""

    def __init__(self, spec: AttentionSpec, span: Span) -> None:
        self.spec, self.span = spec, span
        period = span.period
        self.parts = {
            "start": span.hull.start,
            "stop": span.hull.stop,
            "full_start": span.full.start,
            "full_stop": span.full.stop,
            "possible": span.possible,
            "always": span.always,
            **(
                {f"period_{f}": getattr(period, f) for f in ("start", "width", "period", "uniform")}
                if period
                else {}
            ),
        }
        self.reads = sorted({r for e in self.parts.values() for r in e.atoms(sp.Indexed)}, key=str)
        self.scalars = [sym.scalar(i) for i in spec.inputs if not i.shape]
        stands = [sp.Symbol(f"read_{n}", integer=True) for n in range(len(self.reads))]
        swap = dict(zip(self.reads, stands, strict=True))
        known = (Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST, sym.B, sym.H, sym.HK, sym.Q_LEN, sym.KV_LEN)
        functions = {"Max": max, "Min": min, "floor": math.floor, "ceiling": math.ceil}
        self.functions = {
            name: sp.lambdify(
                [*known, *self.scalars, *stands], e.xreplace(swap), modules=[functions, "math"]
            )
            for name, e in self.parts.items()
        }

    def at(self, case: Case, first: int, last: int, b: int, h: int) -> dict[str, Any]:
        offset = case.shape.kv_len - case.shape.q_len if self.spec.align == "bottom_right" else 0
        places = {sym.B: b, sym.H: h, sym.HK: h // 2}
        reads = [
            case.inputs[str(r.base)][tuple(places[i] for i in r.indices)].item() for r in self.reads
        ]
        scalars = [case.inputs[s.name] for s in self.scalars]
        known = (
            first + offset,
            last + offset,
            first,
            last,
            b,
            h,
            h // 2,
            case.shape.q_len,
            case.shape.kv_len,
        )
        return {n: f(*known, *scalars, *reads) for n, f in self.functions.items()}


def hull_and_full(
    bounds: Bounds, case: Case, first: int, last: int, b: int, h: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys lie in the span's hull, and in its full part: two bool tensors over the keys."""
    at = bounds.at(case, first, last, b, h)
    keys = torch.arange(case.shape.kv_len)
    hull = (keys >= at["start"]) & (keys < at["stop"]) & torch.tensor(bool(at["possible"]))
    full = (keys >= at["full_start"]) & (keys < at["full_stop"]) & torch.tensor(bool(at["always"]))
    if bounds.span.period:
        chunk = (keys - at["period_start"]) % at["period_period"] < at["period_width"]
        hull, full = hull & chunk, full & chunk & torch.tensor(bool(at["period_uniform"]))
    if bounds.span.scan:
        full = torch.zeros_like(full)  # decided at run time
    return hull, full & hull


# Where queries stand is decided before tiles are counted: one of the two will do for every run.
ALIGNS = ["bottom_right", pytest.param("top_left", marks=pytest.mark.slow)]


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("mask", [mask for mask, _ in CASES], ids=repr)
def test_outside_the_hull_nothing_and_inside_full_everything_is_visible(
    mask: Any, align: str
) -> None:
    spec = spec_of(mask, align)
    spans = [Bounds(spec, span) for span in visibility(spec).spans]
    for case in cases(spec):
        for b, h in ((0, 0), (1, 1)):
            for first, last in case.tiles:
                rows = case.visible[b, h, first : last + 1]
                inside = torch.zeros(case.shape.kv_len, dtype=torch.bool)
                for bounds in spans:
                    hull, full = hull_and_full(bounds, case, first, last, b, h)
                    inside |= hull
                    assert bool(rows[:, full].all()), (case.shape, first, last, bounds.parts)
                assert not bool(rows[:, ~inside].any()), (case.shape, first, last, spans)


def tiles_that_meet(visible: torch.Tensor, block_m: int, block_n: int) -> int:
    rows, keys = -visible.shape[0] % block_m, -visible.shape[1] % block_n
    padded = torch.nn.functional.pad(visible, (0, keys, 0, rows))
    blocks = padded.view(padded.shape[0] // block_m, block_m, -1, block_n)
    return int(blocks.any(dim=3).any(dim=1).sum())


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("mask", "exact"), CASES, ids=repr)
def test_visited_tiles(mask: Any, exact: bool, align: str) -> None:
    spec = spec_of(mask, align)
    for case in cases(spec):
        for b, h in ((0, 0), (1, 1)):
            needed = tiles_that_meet(case.visible[b, h], case.block_m, case.block_n)
            where = {"batch": b, "q_head": h}
            visited = visited_tiles(
                spec, case.shape, case.block_m, case.block_n, case.inputs, **where
            )
            # Rows that see nothing may cost a tile: where their empty range begins inside one.
            exactly = exact and bool(case.visible[b, h].any(dim=1).all())
            assert visited == needed if exactly else visited >= needed, case
            unknown = visited_tiles(spec, case.shape, case.block_m, case.block_n, **where)
            assert visited <= unknown <= len(case.tiles) * -(-case.shape.kv_len // case.block_n)


def keys_of_tiles_that_meet(visible: torch.Tensor, block_n: int) -> int:
    keys = torch.arange(visible.shape[1])
    seen = torch.unique(keys[visible.any(dim=0)] // block_n)
    return int(torch.isin(keys // block_n, seen).sum())


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("mask", "exact"), CASES, ids=repr)
def test_visited_keys(mask: Any, exact: bool, align: str) -> None:
    """Never fewer than those of key tiles with a visible pair, and just those where bounds are."""
    spec = spec_of(mask, align)
    for case in cases(spec):
        for b, h in ((0, 0), (1, 1)):
            needed = keys_of_tiles_that_meet(case.visible[b, h], case.block_n)
            tile, where = (case.block_m, case.block_n), {"batch": b, "q_head": h}
            found = visits(spec, case.shape, *tile, case.inputs, **where).keys
            exactly = exact and bool(case.visible[b, h].any(dim=1).all())
            assert found == needed if exactly else found >= needed, case
            unknown = visits(spec, case.shape, *tile, **where).keys
            assert found <= unknown <= case.shape.kv_len


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("mask", [mask for mask, _ in CASES], ids=repr)
def test_visible_pairs(mask: Any, align: str) -> None:
    spec = spec_of(mask, align)
    for case in cases(spec):
        for b, h in ((0, 0), (1, 1)):
            pairs = visible_pairs(spec, case.shape, case.inputs, batch=b, q_head=h)
            if spec.inputs or mask in EXACT:
                assert pairs == int(case.visible[b, h].sum()), case
            else:
                assert pairs >= int(case.visible[b, h].sum()), case
        if spec.inputs:
            total = all_visible_pairs(spec, case.shape, case.inputs)
            assert total == int(case.visible.sum()), case


def test_pairs_of_periodic_masks_are_exact() -> None:
    """Chunks and strides are counted in closed form."""
    for mask in (
        [{"expr": "(k // 4) % 3 == (q // 4) % 3"}, "causal"],
        [{"expr": "(q - k) % 8 == 0"}],
    ):
        spec = spec_of(mask)
        for case in cases(spec):
            assert visible_pairs(spec, case.shape) == int(case.visible[0, 0].sum())


def test_kv_lens_cut_and_shift() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"], kv_lens="per_batch")
    lengths = torch.tensor([5, 0, 12])
    shape = Shape(3, 1, 1, 4, 12)
    visible = reference.mask(
        spec, batch=3, q_heads=1, kv_heads=1, q_len=4, kv_len=12, kv_lens=lengths
    )
    assert all_visible_pairs(spec, shape, {"kv_lens": lengths}) == int(visible.sum())
    assert visited_tiles(spec, shape, 4, 4, {"kv_lens": lengths}, batch=0) == 2
    assert visited_tiles(spec, shape, 4, 4, {"kv_lens": lengths}, batch=1) == 0


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [(["causal"], 8256), (["causal", {"window": {"left": 511}}], 1116), ([], 16384)],
)
def test_tiles_of_theory(mask: Any, tiles: int) -> None:
    assert visited_tiles(spec_of(mask), Shape(1, 1, 1, 8192, 8192), 64, 64) == tiles


def test_long_lengths_cost_no_memory_per_pair() -> None:
    shape = Shape(1, 24, 4, 262_144, 262_144)
    assert visible_pairs(spec_of(["causal"]), shape) == 262_144 * 262_145 // 2
    assert visited_tiles(spec_of(["causal"]), shape, 128, 64) == 4_196_352
    windowed = spec_of(["causal", {"window": {"left": 4095}}])
    assert visible_pairs(windowed, shape) == 4096 * 4097 // 2 + (262_144 - 4096) * 4096


@pytest.mark.parametrize(
    ("mask", "full_tiles"),
    [
        (["causal"], 28),
        (["causal", {"window": {"left": 31}}], 7),
        ([{"expr": "k // 32 == q // 32"}], 16),
    ],
)
def test_full_tiles(mask: Any, full_tiles: int) -> None:
    """Tiles that need no mask code are found: 8 query tiles of 16 rows, 128 keys, tiles of 16."""
    spec = spec_of(mask)
    visible = reference.mask(spec, batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128)
    case = Case(Shape(1, 1, 1, 128, 128), 16, 16, {}, visible)
    (bounds,) = [Bounds(spec, span) for span in visibility(spec).spans]
    found = 0
    for first, last in case.tiles:
        _, full = hull_and_full(bounds, case, first, last, 0, 0)
        found += int(full.view(8, 16).all(dim=1).sum())
    assert found == full_tiles == int(visible[0, 0].view(8, 16, 8, 16).all(3).all(1).sum())
