"""Each rule of legality, by a graph that breaks it and the message that names the operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashgen.ir import Edge, GraphError, TileGraph, ops, verify
from flashgen.ir.symbols import BLOCK_M, BLOCK_N, HEAD_DIM_QK
from flashgen.passes.lower import lower
from flashgen.problem import Problem
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

GRAPH = lower(
    Problem(
        AttentionSpec(name="good", head_dim=64, dtype="bf16", mask="causal"),
        get_target("nvidia-h200"),
    )
)


def with_op(name: str, **changes: Any) -> TileGraph:
    """GRAPH with fields of one operation changed."""
    changed = tuple(
        dataclasses.replace(op, **changes) if op.name == name else op for op in GRAPH.ops
    )
    return dataclasses.replace(GRAPH, ops=changed)


def with_tile(name: str, **changes: Any) -> TileGraph:
    """GRAPH with fields of one tile changed, on every edge."""
    edges = tuple(
        dataclasses.replace(
            edge,
            tiles=tuple(
                dataclasses.replace(tile, **changes) if tile.name == name else tile
                for tile in edge.tiles
            ),
        )
        for edge in GRAPH.edges
    )
    return dataclasses.replace(GRAPH, edges=edges)


def without_edge(producer: str, consumer: str) -> TileGraph:
    kept = [edge for edge in GRAPH.edges if (edge.producer, edge.consumer) != (producer, consumer)]
    assert len(kept) < len(GRAPH.edges)
    return dataclasses.replace(GRAPH, edges=tuple(kept))


def with_edge(edge: Edge) -> TileGraph:
    return dataclasses.replace(GRAPH, edges=(*GRAPH.edges, edge))


def tile(name: str) -> ops.Tile:
    return next(tile for tile in GRAPH.tiles if tile.name == name)


def test_a_legal_graph_passes_through() -> None:
    assert verify(GRAPH) is GRAPH


CASES: dict[str, tuple[TileGraph, str, str]] = {
    "name twice": (
        dataclasses.replace(GRAPH, ops=(*GRAPH.ops, GRAPH.by_name["mask"])),
        "mask",
        "name is used twice",
    ),
    "dangling edge": (
        with_edge(Edge("nobody", "mask", (tile("scores"),))),
        "mask",
        "is joined to 'nobody', which does not exist",
    ),
    "empty edge": (
        with_edge(Edge("load_q", "mask", ())),
        "mask",
        "takes nothing from load_q",
    ),
    "two producers": (
        with_edge(Edge("scale", "pv", (tile("probs_rounded"),))),
        "scale",
        "makes probs_rounded, which round_probs makes too",
    ),
    "cycle": (
        with_edge(Edge("mask", "scale", (tile("scores_masked"),))),
        "scale",
        "depends on its own result",
    ),
    "unknown stage": (
        dataclasses.replace(GRAPH, stage="baked"),
        "init_acc",
        "graph has the unknown stage 'baked'",
    ),
    "op of another stage": (
        dataclasses.replace(GRAPH, stage="single_tile"),
        "init_acc",
        "init is not legal in a single_tile graph",
    ),
    "input missing": (
        without_edge("load_k", "qk"),
        "load_k",
        "load makes 0 tiles, expected 1",
    ),
    "state missing": (
        without_edge("init_m_i", "online_softmax"),
        "init_m_i",
        "init makes 0 tiles, expected 1",
    ),
    "memory without a load": (
        with_tile("probs_rounded", space="hbm"),
        "pv",
        "takes probs_rounded in hbm from round_probs",
    ),
    "load that stays in memory": (
        with_tile("q in memory", space="smem"),
        "load_q",
        "takes q in memory in smem from q",
    ),
    "level beyond the loops": (
        with_op("mask", level=2),
        "mask",
        "runs at level 2 of 2 loops",
    ),
    "tile at another level": (
        with_tile("alpha", level=0),
        "online_softmax",
        "runs at level 1 and makes alpha at 0",
    ),
    "staged register": (
        with_tile("alpha", staged=True),
        "online_softmax",
        "alpha is staged, but is not a shared tile inside a loop",
    ),
    "inner tile used outside": (
        with_tile("acc", in_place_of=None),
        "normalize",
        "reads acc, which does not outlive its loop",
    ),
    "matmul extents": (
        with_op("qk", inner=BLOCK_N),
        "qk",
        "operand q_tile is [block_m, head_dim_qk_padded], needs [block_m, block_n]",
    ),
    "matmul operand": (
        with_op("qk", left="k_tile_2"),
        "qk",
        "does not read its operand k_tile_2",
    ),
    "matmul result": (
        with_tile("scores", shape=(BLOCK_N, BLOCK_M)),
        "qk",
        "makes [block_n, block_m], not [block_m, block_n]",
    ),
    "score shape": (
        with_op("scale", rows=BLOCK_N),
        "scale",
        "works on [block_n, block_n], but its tiles have other shapes",
    ),
    "load shape": (
        with_tile("v in memory", shape=(BLOCK_N, HEAD_DIM_QK)),
        "load_v",
        "moves v_tile [block_n, head_dim_v_padded], which memory does not hold",
    ),
    "place of a stranger": (
        with_tile("acc", in_place_of="acc_start"),
        "pv",
        "acc takes the place of acc_start, not read here",
    ),
    "place too small": (
        with_tile("l_i", shape=(BLOCK_N,)),
        "online_softmax",
        "l_i does not fit in the place of l_i_start",
    ),
}


@pytest.mark.parametrize(("graph", "node", "rule"), CASES.values(), ids=CASES.keys())
def test_a_broken_rule_names_the_operation(graph: TileGraph, node: str, rule: str) -> None:
    with pytest.raises(GraphError) as caught:
        verify(graph, after="some pass")
    assert (caught.value.node, caught.value.rule) == (node, rule)
    assert str(caught.value).startswith(f"tile graph of good after some pass: {node}: {rule}\n  ")


def test_the_failing_operation_is_printed() -> None:
    with pytest.raises(GraphError, match=r"\n  scores = matmul\(q_tile k_tile\.T\)   # reg fp32"):
        verify(with_op("qk", inner=BLOCK_N))
