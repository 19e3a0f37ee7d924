"""Lowering, and the golden text of tile graphs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.ir import TileGraph, pretty, verify
from flashgen.ir import ops as tile_ops
from flashgen.passes.lower import lower, lower_merge, lower_naive, lower_published_flash1
from flashgen.problem import Problem
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

FULL: dict[str, Any] = {
    "name": "everything",
    "head_dim": {"qk": 192, "v": 128},
    "dtype": "bf16",
    "mask": [
        "causal",
        {"window": {"left": 4095}},
        {"same": "doc"},
        {"expr": "k < prefix[b] or seen[row // 2, k]"},
    ],
    "score": [
        {"softcap": 50.0},
        {"alibi": "slopes"},
        {"bias": {"tensor": "rel"}},
        {"expr": "s * gain"},
    ],
    "inputs": {
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
        "slopes": {"shape": ["q_heads"], "dtype": "fp32"},
        "rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"},
        "prefix": {"shape": ["batch"], "dtype": "int32"},
        "seen": {"shape": [64, "kv_len"], "dtype": "bool"},
        "gain": {"shape": [], "dtype": "fp32"},
    },
    "sink": "per_head",
    "kv_lens": "per_batch",
}


def graph_of(fields: dict[str, Any], **options: Any) -> TileGraph:
    return lower(Problem(AttentionSpec(**fields), get_target("nvidia-h200")), **options)


@pytest.mark.parametrize("kernel", ["loop", "single_tile"])
def test_the_plainest_graph(kernel: str, golden: Callable[[str, str], None]) -> None:
    graph = graph_of({"name": "plain", "head_dim": 64, "dtype": "fp32"}, kernel=kernel)
    golden(f"ir/plain-{kernel}.txt", pretty(graph))


@pytest.mark.parametrize("kernel", ["loop", "single_tile"])
def test_the_fullest_graph(kernel: str, golden: Callable[[str, str], None]) -> None:
    golden(f"ir/everything-{kernel}.txt", pretty(graph_of(FULL, kernel=kernel, return_lse=True)))


def test_only_a_loop_carries_and_rescales() -> None:
    loop = {type(op) for op in graph_of(FULL).ops}
    single = {type(op) for op in graph_of(FULL, kernel="single_tile").ops}
    assert loop - single == {tile_ops.OnlineSoftmax, tile_ops.Rescale, tile_ops.Init}
    assert single - loop == {tile_ops.Softmax}
    assert all(op.level == 0 for op in graph_of(FULL, kernel="single_tile").ops)


def test_lse_is_stored_only_on_request() -> None:
    def outputs(graph: TileGraph) -> list[str]:
        return [op.name for op in graph.of_kind(tile_ops.Tensor) if op.role == "output"]

    assert outputs(graph_of(FULL)) == ["out"]
    assert outputs(graph_of(FULL, return_lse=True)) == ["lse", "out"]


def test_tiles_of_inputs_follow_the_indices() -> None:
    graph = graph_of(FULL)
    found = {
        tile.name: (tuple(map(str, tile.shape)), tile.level, tile.staged)
        for tile in graph.tiles
        if "[" in tile.name and tile.space != "hbm"
    }
    assert found == {
        "doc[b, q]_tile": (("block_m",), 0, False),
        "doc[b, k]_tile": (("block_n",), 1, True),
        "slopes[h]_tile": ((), 0, False),
        "rel[b, h, row, k]_tile": (("block_m", "block_n"), 1, True),
        "prefix[b]_tile": ((), 0, False),
        "seen[row // 2, k]_tile": (("block_m", "block_n"), 1, True),
        "kv_lens[b]_tile": ((), 0, False),
    }


def test_an_index_that_is_read_is_loaded_first() -> None:
    graph = graph_of(
        {
            "head_dim": 64,
            "dtype": "bf16",
            "mask": [{"expr": "allowed[group[b, k], row] > 0"}],
            "inputs": {
                "allowed": {"shape": [16, "q_len"], "dtype": "int32"},
                "group": {"shape": ["batch", "kv_len"], "dtype": "int32"},
            },
        }
    )
    outer = "load_allowed[group[b, k], row]"
    assert "load_group[b, k]" in nx.ancestors(graph.nx, outer)
    (tile,) = graph.outputs(graph.by_name[outer])
    assert list(map(str, tile.shape)) == ["block_m", "block_n"]


def test_probs_are_rounded_only_for_narrow_values() -> None:
    def rounds(dtype: str) -> bool:
        return any(graph_of({"head_dim": 64, "dtype": dtype}).of_kind(tile_ops.Cast))

    assert [rounds(dtype) for dtype in ("bf16", "fp16", "fp32", "tf32")] == [
        True,
        True,
        False,
        False,
    ]


FLASH1: dict[str, Any] = {**FULL, "loop_order": "flash1"}


@pytest.mark.parametrize("split", [False, True])
def test_a_flash1_graph(split: bool, golden: Callable[[str, str], None]) -> None:
    graph = graph_of(FLASH1, return_lse=True, split=split)
    golden(f"ir/everything-flash1{'-split' if split else ''}.txt", pretty(graph))


def test_the_textbooks_graphs(golden: Callable[[str, str], None]) -> None:
    spec = AttentionSpec(name="plain", head_dim=64, dtype="fp32", sink="per_head")
    problem = Problem(spec, get_target("nvidia-h200"))
    graphs = [
        lower_merge(problem, return_lse=True),
        lower_published_flash1(problem),
        *lower_naive(problem),
    ]
    golden("ir/textbook.txt", "\n".join(map(pretty, graphs)))


def test_loop_orders_turn_the_nest_round() -> None:
    """flash2 keeps q and stages k and v, flash1 the reverse; both do the same to a score tile."""
    flash2, flash1 = graph_of(FULL), graph_of(FULL, loop_order="flash1")
    assert graph_of(FLASH1).loop_order == flash1.loop_order == "flash1"
    assert [loop.name for loop in flash2.loops] == ["query tile", "key tile"]
    assert [loop.name for loop in flash1.loops] == ["key tile", "query tile"]

    def staged(graph: TileGraph) -> set[str]:
        return {tile.name for tile in graph.tiles if tile.staged}

    assert {"k_tile", "v_tile", "doc[b, k]_tile"} <= staged(flash2)
    assert {"q_tile", "doc[b, q]_tile"} <= staged(flash1)
    assert "k_tile" not in staged(flash1)
    score_tiles = {t.name for t in flash2.tiles if t.staged and len(t.shape) == 2} - {
        "k_tile",
        "v_tile",
    }
    assert score_tiles < staged(flash1)
    arithmetic = (tile_ops.Matmul, tile_ops.Score, tile_ops.Mask, tile_ops.OnlineSoftmax)
    for kind in arithmetic:
        assert {op.name for op in flash1.of_kind(kind)} == {op.name for op in flash2.of_kind(kind)}


def test_one_key_tile_has_no_loop_order() -> None:
    assert graph_of(FLASH1, kernel="single_tile") == graph_of(FULL, kernel="single_tile")


def test_a_split_leaves_the_sink_to_the_merge() -> None:
    assert any(graph_of(FLASH1).of_kind(tile_ops.Sink))
    assert not any(graph_of(FLASH1, split=True).of_kind(tile_ops.Sink))


def test_equal_specs_give_equal_graphs_in_every_process() -> None:
    graph = graph_of(FULL)
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert hash(pickle.loads(pickle.dumps(graph))) == hash(graph)
    assert graph_of(FULL) == graph
    assert graph_of({**FULL, "sink": "none"}) != graph
    code = (
        "from flashgen.passes.lower import lower; from flashgen.problem import Problem\n"
        "from flashgen.spec.model import AttentionSpec; from flashgen.target import get_target\n"
        f"spec = AttentionSpec(**{FULL!r})\n"
        "print(lower(Problem(spec, get_target('nvidia-h200'))).digest)"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert done.stdout.strip() == graph.digest


@settings(max_examples=60)
@given(st.data())
def test_every_subset_of_features_lowers_to_a_legal_graph(data: st.DataObject) -> None:
    fields = dict(FULL)
    for name in ("mask", "score"):
        fields[name] = [item for item in FULL[name] if data.draw(st.booleans())]
    used = repr((fields["mask"], fields["score"]))
    fields["inputs"] = {name: value for name, value in FULL["inputs"].items() if name in used}
    fields["sink"] = data.draw(st.sampled_from(["none", "per_head"]))
    fields["kv_lens"] = data.draw(st.sampled_from(["none", "per_batch"]))
    fields["dtype"] = data.draw(st.sampled_from(["bf16", "fp16", "fp32", "tf32", "fp8_e4m3"]))
    kernel = data.draw(st.sampled_from(["loop", "single_tile"]))
    graph = graph_of(fields, kernel=kernel, return_lse=data.draw(st.booleans()))
    assert verify(graph) is graph
    read = {op.name for op in graph.of_kind(tile_ops.Tensor)} - {"out", "lse"}
    optional = {"sink"} if fields["sink"] != "none" else set()
    optional |= {"kv_lens"} if fields["kv_lens"] != "none" else set()
    assert read == {"q", "k", "v"} | set(fields["inputs"]) | optional
