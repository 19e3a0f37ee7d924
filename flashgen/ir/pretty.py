"""A tile graph as text that a person reads from top to bottom, loop by loop."""

from __future__ import annotations

from flashgen.ir.graph import TileGraph
from flashgen.ir.ops import Matmul, Op, Shape, Tensor, Tile


def pretty(graph: TileGraph) -> str:
    """`graph` as text: arrays, then each operation under the loop that runs it. Deterministic."""
    lines = [
        f"tile graph of {graph.name}: {graph.stage} kernel, {graph.loop_order} order, "
        f"{len(graph.ops)} operations, {graph.digest[:12]}"
    ]
    lines += ["", "arrays in device memory"]
    lines += [
        f"  {op.name}: {op.dtype} {_shape(op.shape)}, {op.role}" for op in graph.of_kind(Tensor)
    ]
    for level, title, ops in _phases(graph):
        loop = graph.loops[level]
        lines += ["", f"{'  ' * level}{title} {loop.name}: {loop.trips} times"]
        lines += [f"{'  ' * level}  {pretty_op(graph, op)}" for op in ops]
    return "\n".join(lines) + "\n"


def pretty_op(graph: TileGraph, op: Op) -> str:
    """One operation as `outputs = kind(inputs; detail)   # where its outputs live`."""
    outputs = [tile for tile in graph.outputs(op) if tile.space != "hbm"]
    made = ", ".join(tile.name for tile in outputs)
    stored = [edge.consumer for edge in graph.edges if edge.producer == op.name]
    target = made or ", ".join(stored) or op.name
    inputs = ", ".join(tile.name for tile in graph.inputs(op))
    inside = "; ".join(part for part in (inputs, op.detail) if part)
    if isinstance(op, Matmul):
        inside = op.detail
    places = "; ".join(dict.fromkeys(_place(tile) for tile in outputs))
    return f"{target} = {op.kind}({inside})" + (f"   # {places}" if places else "")


def _place(tile: Tile) -> str:
    staged = " x num_stages" if tile.staged else ""
    reuse = f", in place of {tile.in_place_of}" if tile.in_place_of else ""
    return f"{tile.space} {tile.dtype} {_shape(tile.shape)}{staged}{reuse}"


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _phases(graph: TileGraph) -> list[tuple[int, str, list[Op]]]:
    """Operations grouped as they run: before the inner loop, inside it, after it."""
    import networkx as nx  # a kernel is planned without it

    body = [op for op in graph.ordered if not isinstance(op, Tensor)]
    inner = {op.name for op in body if op.level > 0}
    after = {name for op in inner for name in nx.descendants(graph.nx, op)} - inner
    phases = (
        (0, "for each", [op for op in body if op.level == 0 and op.name not in after]),
        (1, "for each", [op for op in body if op.level == 1]),
        (0, "then, for each", [op for op in body if op.name in after]),
    )
    return [phase for phase in phases if phase[2]]
