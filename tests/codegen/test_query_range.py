"""Which query tiles see a key tile: the printed range against a count of all pairs of tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.codegen.expr import TritonPrinter
from flashgen.codegen.query_range import QueryRange, query_range
from flashgen.codegen.render import render
from flashgen.compiler.choose import choose
from flashgen.passes.count import tile_classes
from flashgen.passes.visibility import visibility
from flashgen.problem import Problem
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import get_target

NAMES = {sym.Q_LEN: "q_len", sym.KV_LEN: "kv_len"}
FUNCTIONS = {"tl": SimpleNamespace(maximum=max, minimum=min)}


def spec_of(mask: Any, **fields: Any) -> AttentionSpec:
    return AttentionSpec(head_dim=16, dtype="fp16", mask=mask, **fields)


WITH_SCALAR = {"expr": "k <= q and q - k < reach"}


def range_of(spec: AttentionSpec) -> QueryRange | None:
    return query_range(visibility(spec).spans, spec, TritonPrinter(NAMES))


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([], QueryRange("", "", "")),
        ("causal", QueryRange("n_start + q_len - kv_len", "", "")),
        (
            {"window": {"left": 9, "right": 4}},
            QueryRange(
                "n_start + q_len - kv_len - 4", "BLOCK_N + n_start + q_len + 9 - kv_len", ""
            ),
        ),
        ([{"expr": "k < 100"}], QueryRange("", "", "100 > n_start")),
        ([{"expr": "2 * k <= q"}], None),
        ([{"expr": "k < 4 or abs(q - k) < 12"}], None),
        (["causal", {"expr": "k // 24 == q // 24"}], None),
        ([{"expr": "row < 20"}], None),
    ],
    ids=str,
)
def test_what_a_range_says(mask: Any, found: QueryRange | None) -> None:
    assert range_of(spec_of(mask)) == found


@given(
    mask=st.sampled_from(
        (
            [],
            "causal",
            [{"window": {"left": 9}}],
            [{"window": {"left": 3, "right": 30}}],
            [{"expr": "q - k > 17 and q - k < 60"}],
            [{"expr": "k >= q and k < 70"}],
            [{"expr": "k <= row and k >= 20"}],
            ["causal", {"window": {"left": 20}}, {"expr": "k < row + 5"}],
        )
    ),
    align=st.sampled_from(("bottom_right", "top_left")),
    q_len=st.integers(1, 150),
    kv_len=st.integers(1, 150),
    block_m=st.sampled_from((16, 32)),
    block_n=st.sampled_from((16, 64)),
)
def test_the_range_holds_just_the_visited_tiles(
    mask: Any, align: str, q_len: int, kv_len: int, block_m: int, block_n: int
) -> None:
    spec = spec_of(mask, align=align)
    found = range_of(spec)
    assert found is not None
    shape = Shape(batch=1, q_heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len)
    classes = tile_classes(spec, shape, block_m, block_n, {})
    for key_tile in range(classes.shape[1]):
        seen = set(tiles_of(found, key_tile * block_n, q_len, kv_len, block_m, block_n))
        assert seen == set(classes[:, key_tile].nonzero()[0].tolist())


def test_the_tile_size_has_no_dtype_to_widen() -> None:
    """`BLOCK_N` is a constexpr: a sum that needs 64 bits widens another of its terms."""
    fields = {"inputs": {"reach": {"shape": [], "dtype": "int32"}}, "loop_order": "flash1"}
    spec = AttentionSpec(head_dim=64, dtype="bf16", mask=[WITH_SCALAR], **fields)
    problem = Problem(spec, get_target("nvidia-h200"))
    text = render(problem, choose(problem, None), has_lse=True).text
    assert "n_start.to(tl.int64) + " in text
    assert "BLOCK_N.to(" not in text


def tiles_of(
    found: QueryRange, n_start: int, q_len: int, kv_len: int, block_m: int, block_n: int
) -> range:
    """As templates/macros/query_tiles.jinja makes them of the texts."""
    values = {"n_start": n_start, "q_len": q_len, "kv_len": kv_len, "BLOCK_N": block_n}
    start, stop = 0, -(-q_len // block_m)
    if found.first_row:
        row = max(eval(found.first_row, FUNCTIONS, values), 0)
        start = row // block_m if row < q_len else stop
    if found.stop_row:
        stop = min(-(-max(eval(found.stop_row, FUNCTIONS, values), 0) // block_m), stop)
    if found.condition and not eval(found.condition, FUNCTIONS, values):
        stop = 0
    return range(start, stop)
