"""Registers that a kernel's tiles need, as a formula that comes from walking its tile graph."""

from __future__ import annotations

from functools import cache

import sympy as sp

from flashgen.ir import ops
from flashgen.ir.graph import TileGraph
from flashgen.ir.symbols import NUM_WARPS
from flashgen.schedule.largest import largest

REG_BYTES = 4


@cache
def regs_per_thread(graph: TileGraph, warp_size: int = 32) -> sp.Expr:
    """32-bit registers that each thread needs for tiles alone: a lower bound.

    The largest set of register tiles alive at the same time, spread over the program's threads.
    Updates in place share their storage; running state lives throughout its loop. Addresses, loop
    counters and operands on their way into a matmul come on top.
    """
    return sp.expand(_live_reg_bytes(graph)) / (REG_BYTES * warp_size * NUM_WARPS)


def _live_reg_bytes(graph: TileGraph) -> sp.Expr:
    root = {tile.name: tile.name for tile in graph.tiles}
    for tile in graph.tiles:
        if tile.in_place_of is not None:
            root[tile.name] = root.get(tile.in_place_of, tile.name)
    order = [op for op in graph.ordered if not isinstance(op, ops.Tensor)]
    place = {op.name: index for index, op in enumerate(order)}
    spans: dict[str, tuple[int, int, sp.Expr]] = {}
    loop = [place[op.name] for op in order if op.level == len(graph.loops) - 1]
    for tile in graph.tiles:
        if tile.space != "reg":
            continue
        used = [place[op.name] for op in graph.consumers(tile)]
        made = next(place[op.name] for op in order if tile in graph.outputs(op))
        outside = tile.level < len(graph.loops) - 1
        if outside and any(order[index].level > tile.level for index in used):
            used.append(loop[-1])
        first, last, size = spans.get(root[tile.name], (made, made, tile.bytes))
        spans[root[tile.name]] = (min(first, made), max(last, *used), size)
    return largest(
        sp.Add(*(size for first, last, size in spans.values() if first <= index <= last))
        for index in range(len(order))
    )
