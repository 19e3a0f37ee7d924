"""Bytes that a kernel moves and FLOPs that it does, from walking its tile graph.

Bytes are tile bytes times trips; FLOPs are counted by the operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import sympy as sp

from flashgen.ir import ops
from flashgen.ir.graph import TileGraph
from flashgen.ir.ops import Op, Tile
from flashgen.ir.symbols import (
    BATCH,
    BLOCK_M,
    BLOCK_N,
    KV_LEN,
    NUM_Q_HEADS,
    Q_LEN,
    VISIBLE_PAIRS,
    VISITED_KEYS,
)


@cache
def tile_traffic_bytes(graph: TileGraph) -> sp.Expr:
    """Bytes that cross between L2 or device memory and the chip: tile bytes times trips, in all.

    flash2, of N x N and one head dim: w*N*d*(2 + 2*T_r). flash1 as published: w*N*d*(2 + 3*T_c),
    and 16*N*T_c of statistics. flash1 as built: w*N*d*(2 + T_c) of k, v and q, w*N*d of output, and
    2*(4*N*d + 8*N)*(T_c - 1) of state, which neither the first key tile reads nor the last writes.
    """
    return BATCH * NUM_Q_HEADS * _moved(graph, [t for t in graph.tiles if t.space == "hbm"])


@cache
def loaded_bytes(graph: TileGraph) -> sp.Expr:
    """The loads' share of `tile_traffic_bytes`: what comes from L2 to the chip."""
    tiles = [tile for op in graph.of_kind(ops.Load) for tile in graph.inputs(op)]
    return BATCH * NUM_Q_HEADS * _moved(graph, [tile for tile in tiles if tile.space == "hbm"])


@cache
def state_bytes(graph: TileGraph) -> sp.Expr:
    """The share of `tile_traffic_bytes` that goes to and from a workspace."""
    tiles = [tile for tile in graph.tiles if tile.space == "hbm" and is_state(graph, tile)]
    return BATCH * NUM_Q_HEADS * _moved(graph, tiles)


def _moved(graph: TileGraph, tiles: Iterable[Tile]) -> sp.Expr:
    """Bytes of these tiles on all trips of one batch and query head."""
    moves = {
        tile.name: op
        for op in graph.ordered
        if isinstance(op, (ops.Load, ops.Store))
        for tile in (*graph.inputs(op), *graph.outputs(op))
        if tile.space == "hbm"
    }
    return sp.expand(sp.Add(*(tile.bytes * _trips(graph, moves[tile.name]) for tile in tiles)))


def is_state(graph: TileGraph, tile: Tile) -> bool:
    """Whether a tile in device memory is part of a workspace."""
    return any(
        isinstance(end, ops.Tensor) and end.role == "workspace"
        for edge in graph.edges
        if tile in edge.tiles
        for end in (graph.by_name[edge.producer], graph.by_name[edge.consumer])
    )


@cache
def footprint_bytes(graph: TileGraph) -> sp.Expr:
    """What inputs and outputs take in device memory: whole arrays, whatever the mask shows."""
    return sp.Add(*(op.bytes for op in _arrays(graph)))


@cache
def dram_bytes(graph: TileGraph) -> sp.Expr:
    """The floor of device-memory traffic: every input and output read or written exactly once.

    Of k and v that is what visited key tiles hold (naive attention reads all). A workspace is not
    in it: it may stay in L2.
    """
    visited = {} if graph.loop_order == "naive" else {KV_LEN: VISITED_KEYS}
    return sp.Add(
        *(
            op.bytes.xreplace(visited) if op.name in ("k", "v") else op.bytes
            for op in _arrays(graph)
        )
    )


def _arrays(graph: TileGraph) -> list[ops.Tensor]:
    """Inputs and outputs."""
    return [op for op in graph.of_kind(ops.Tensor) if op.role != "workspace"]


@cache
def workspace_bytes(graph: TileGraph) -> sp.Expr:
    """Bytes of all workspaces; one that is read and written counts once."""
    written = {
        op.name: op.bytes
        for op in graph.of_kind(ops.Tensor)
        if op.role == "workspace" and graph.inputs(op)
    }
    return sp.Add(*written.values())


@cache
def visited_flops(graph: TileGraph) -> sp.Expr:
    """FLOPs of all visited tiles, those of masked scores inside them included."""
    work = sp.Add(*(op.flops * graph.loops[op.level].trips for op in graph.ordered))
    return BATCH * NUM_Q_HEADS * sp.factor_terms(work)


@cache
def flops(graph: TileGraph) -> sp.Expr:
    """FLOPs per visible pair, times visible pairs: two matmuls and 5 per score."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph, graph.ordered)


@cache
def matmul_flops(graph: TileGraph) -> sp.Expr:
    """The matmuls' share of `flops`: 2*(head_dim_qk + head_dim_v) per visible pair."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph, graph.of_kind(ops.Matmul))


def _trips(graph: TileGraph, op: Op) -> sp.Expr:
    """How often a load or store moves its tile, per batch and query head."""
    if isinstance(op, (ops.ConditionalLoad, ops.ConditionalStore)):
        return op.trips
    return graph.loops[op.level].trips


def _per_pair(graph: TileGraph, counted: Iterable[Op]) -> sp.Expr:
    """FLOPs for one (query, key) pair: those of a score tile, divided by the pairs in it."""
    pairs = Q_LEN * KV_LEN if graph.loop_order == "naive" else BLOCK_M * BLOCK_N
    return sp.expand(sp.Add(*(op.flops for op in counted)) / pairs)
