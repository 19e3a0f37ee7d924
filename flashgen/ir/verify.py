"""What a legal tile graph is, stated once and checked at each border between stages.

Inside a pass the border is trusted; at the border `verify` names the operation that is wrong and
prints it. A failure is a defect of flashgen, never the user's: hence an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy as sp

from flashgen.ir import ops, symbols
from flashgen.ir.graph import TileGraph
from flashgen.ir.ops import Op, Tile
from flashgen.ir.pretty import pretty_op


class GraphError(AssertionError):
    """A tile graph that breaks a rule: a pass is wrong. `node` names the operation."""

    def __init__(self, graph: TileGraph, node: str, rule: str, *, after: str = "") -> None:
        self.node, self.rule = node, rule
        op = graph.by_name.get(node)
        shown = f"\n  {pretty_op(graph, op)}" if op is not None else ""
        since = f" after {after}" if after else ""
        super().__init__(f"tile graph of {graph.name}{since}: {node}: {rule}{shown}")


@dataclass(frozen=True)
class Signature:
    """How many tiles an operation may read and make (least, most; None: no upper limit)."""

    inputs: tuple[int, int | None]
    outputs: tuple[int, int | None]


SIGNATURES: dict[type[Op], Signature] = {
    ops.Tensor: Signature((0, 1), (0, None)),
    ops.Load: Signature((1, None), (1, 1)),  # further inputs are tiles of indices
    ops.Store: Signature((1, 1), (1, 1)),
    ops.ConditionalLoad: Signature((1, 1), (1, 1)),
    ops.ConditionalStore: Signature((1, 1), (1, 1)),
    ops.Init: Signature((0, 0), (1, 1)),
    ops.Matmul: Signature((2, 3), (1, 1)),
    ops.Scale: Signature((1, 1), (1, 1)),
    ops.Score: Signature((1, None), (1, 1)),  # further inputs are what the expression reads
    ops.Mask: Signature((1, None), (1, 1)),
    ops.OnlineSoftmax: Signature((3, 3), (2, 4)),  # probs, m_i, l_i, alpha; what nobody reads is
    ops.Softmax: Signature((1, 1), (1, 3)),  # not on an edge
    ops.Cast: Signature((1, 1), (1, 1)),
    ops.Rescale: Signature((2, 2), (1, 1)),
    ops.Sink: Signature((3, 3), (1, 1)),
    ops.Normalize: Signature((2, 2), (1, 1)),
    ops.LogSumExp: Signature((2, 2), (1, 1)),
    ops.Merge: Signature((6, 6), (2, 3)),  # running m_i, l_i and acc, and a split's
}

_ANYWHERE = frozenset(
    {
        ops.Tensor,
        ops.Load,
        ops.Store,
        ops.Matmul,
        ops.Scale,
        ops.Score,
        ops.Mask,
        ops.Cast,
        ops.Sink,
        ops.Normalize,
        ops.LogSumExp,
    }
)
_WHOLE_ROWS = _ANYWHERE | {ops.Softmax}  # nothing to carry or rescale
_CARRIED = frozenset({ops.Init, ops.OnlineSoftmax, ops.Rescale})
LEGAL: dict[str, frozenset[type[Op]]] = {
    "loop": _ANYWHERE | _CARRIED | {ops.ConditionalLoad, ops.ConditionalStore},
    "single_tile": _WHOLE_ROWS,
    "merge": _ANYWHERE - {ops.Matmul} | {ops.Init, ops.ConditionalLoad, ops.Merge},
    "naive_scores": _WHOLE_ROWS,
    "naive_softmax": _WHOLE_ROWS,
    "naive_values": _WHOLE_ROWS,
}

Fault = tuple[str, str]  # name of the operation, the rule it breaks


def verify(graph: TileGraph, *, after: str = "") -> TileGraph:
    """`graph` itself if it keeps every rule; GraphError names the first operation that does not.

    `after` is the name of the pass that made the graph, for the message.
    """
    for rule in RULES:
        for node, broken in rule(graph):
            raise GraphError(graph, node, broken, after=after)
    return graph


def _edges_complete(graph: TileGraph) -> Iterator[Fault]:
    """Ends exist, names are unique, nothing depends on itself, every tile has one producer."""
    if len(graph.by_name) != len(graph.ops):
        names = [op.name for op in graph.ops]
        yield next(name for name in names if names.count(name) > 1), "name is used twice"
    made: dict[str, tuple[str, Tile]] = {}
    for edge in graph.edges:
        for end, other in ((edge.producer, edge.consumer), (edge.consumer, edge.producer)):
            if end not in graph.by_name:
                yield other, f"is joined to {end!r}, which does not exist"
        if not edge.tiles:
            yield edge.consumer, f"takes nothing from {edge.producer}"
        for tile in edge.tiles:
            before = made.setdefault(tile.name, (edge.producer, tile))
            if before != (edge.producer, tile):
                yield edge.producer, f"makes {tile.name}, which {before[0]} makes too"
    if graph.cycle:
        yield graph.cycle[0], "depends on its own result"


def _ops_legal(graph: TileGraph) -> Iterator[Fault]:
    """The stage knows the operation, and its inputs and outputs have the right number."""
    legal = LEGAL.get(graph.stage)
    for op in graph.ops:
        if legal is None:
            yield op.name, f"graph has the unknown stage {graph.stage!r}"
        elif type(op) not in legal:
            yield op.name, f"{op.kind} is not legal in a {graph.stage} graph"
        else:
            signature = SIGNATURES[type(op)]
            for what, count, (least, most) in (
                ("reads", len(graph.inputs(op)), signature.inputs),
                ("makes", len(graph.outputs(op)), signature.outputs),
            ):
                if count < least or (most is not None and count > most):
                    wanted = f"{least}" if least == most else f"{least} to {most or 'any number'}"
                    yield op.name, f"{op.kind} {what} {count} tiles, expected {wanted}"


def _levels_agree(graph: TileGraph) -> Iterator[Fault]:
    """A tile is made at its operation's level and leaves a loop only as running state."""
    state = {
        tile.name
        for tile in graph.tiles
        if tile.in_place_of and _root(graph, tile).level < tile.level
    }
    for op in graph.ops:
        if not 0 <= op.level < len(graph.loops):
            yield op.name, f"runs at level {op.level} of {len(graph.loops)} loops"
        for tile in graph.outputs(op):
            if tile.level != op.level and not isinstance(op, ops.Tensor):
                yield op.name, f"runs at level {op.level} and makes {tile.name} at {tile.level}"
            if tile.staged and (tile.space != "smem" or tile.level == 0):
                yield op.name, f"{tile.name} is staged, but is not a shared tile inside a loop"
        for tile in graph.inputs(op):
            if tile.level > op.level and not isinstance(op, ops.Tensor) and tile.name not in state:
                yield op.name, f"reads {tile.name}, which does not outlive its loop"


def _spaces_agree(graph: TileGraph) -> Iterator[Fault]:
    """Tiles in device memory touch a tensor at one end and a load or a store at the other."""
    for edge in graph.edges:
        ends = graph.by_name[edge.producer], graph.by_name[edge.consumer]
        crosses = isinstance(ends[0], ops.Tensor) or isinstance(ends[1], ops.Tensor)
        for tile in edge.tiles:
            if crosses != (tile.space == "hbm"):
                yield edge.consumer, f"takes {tile.name} in {tile.space} from {edge.producer}"
        if crosses and not isinstance(
            ends[1 if isinstance(ends[0], ops.Tensor) else 0],
            (
                ops.Load,
                ops.Store,
            ),
        ):
            yield edge.consumer, f"reaches device memory without a load or store ({edge.producer})"


def _shapes_agree(graph: TileGraph) -> Iterator[Fault]:
    """Shapes fit each other: matmul extents, element-wise updates, padding only at loads."""
    for op in graph.ordered:
        inputs = {tile.name: tile for tile in graph.inputs(op)}
        outputs = graph.outputs(op)
        if isinstance(op, ops.Matmul):
            yield from _matmul_fits(op, inputs, outputs[0])
        elif isinstance(op, (ops.Scale, ops.Score, ops.Mask)):
            scores = (op.rows, op.columns)
            if outputs[0].shape != scores or all(t.shape != scores for t in inputs.values()):
                yield op.name, f"works on {_text(scores)}, but its tiles have other shapes"
        elif isinstance(op, (ops.Load, ops.Store)):
            memory, chip = _memory_and_chip(op, tuple(inputs.values()), outputs[0])
            if memory is None or memory.shape not in (chip.shape, _unpadded(chip.shape)):
                yield op.name, f"moves {chip.name} {_text(chip.shape)}, which memory does not hold"
        elif isinstance(op, ops.Cast) and outputs[0].shape not in {
            tile.shape for tile in inputs.values()
        }:
            yield op.name, "changes the shape"
        for tile in outputs:
            reused = tile.in_place_of and inputs.get(tile.in_place_of)
            if tile.in_place_of and not reused:
                yield op.name, f"{tile.name} takes the place of {tile.in_place_of}, not read here"
            elif reused and reused.shape != tile.shape:
                yield op.name, f"{tile.name} does not fit in the place of {reused.name}"


def _matmul_fits(op: ops.Matmul, inputs: dict[str, Tile], output: Tile) -> Iterator[Fault]:
    rows, columns, inner = (_padded((extent,))[0] for extent in (op.rows, op.columns, op.inner))
    wanted = {
        op.left: (rows, inner),
        op.right: (columns, inner) if op.transpose_right else (inner, columns),
    }
    if op.accumulator:
        wanted[op.accumulator] = (rows, columns)
    for name, shape in wanted.items():
        if name not in inputs:
            yield op.name, f"does not read its operand {name}"
        elif inputs[name].shape != shape:
            yield op.name, f"operand {name} is {_text(inputs[name].shape)}, needs {_text(shape)}"
    if output.shape != (rows, columns):
        yield op.name, f"makes {_text(output.shape)}, not {_text((rows, columns))}"


def _memory_and_chip(op: Op, inputs: tuple[Tile, ...], output: Tile) -> tuple[Tile | None, Tile]:
    if isinstance(op, ops.Store):
        return output, inputs[0]
    return next((tile for tile in inputs if tile.space == "hbm"), None), output


def _padded(shape: ops.Shape) -> ops.Shape:
    return tuple(sp.sympify(extent).xreplace(symbols.PADDED) for extent in shape)


def _unpadded(shape: ops.Shape) -> ops.Shape:
    plain = {padded: symbol for symbol, padded in symbols.PADDED.items()}
    return tuple(sp.sympify(extent).xreplace(plain) for extent in shape)


def _root(graph: TileGraph, tile: Tile) -> Tile:
    """The tile whose storage `tile` has taken over, directly or through others."""
    by_name = {t.name: t for t in graph.tiles}
    seen: set[str] = set()
    while tile.in_place_of in by_name and tile.name not in seen:
        seen.add(tile.name)
        tile = by_name[tile.in_place_of]
    return tile


def _text(shape: ops.Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


# In this order: later rules trust earlier ones.
RULES: tuple[Callable[[TileGraph], Iterator[Fault]], ...] = (
    _edges_complete,
    _ops_legal,
    _spaces_agree,
    _levels_agree,
    _shapes_agree,
)
