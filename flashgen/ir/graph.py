"""The tile graph: operations joined by edges that carry tiles, with a frozen networkx view.

Order and neighbours, which every kernel needs, are read from the edges. Importing networkx takes a
fifth of the time in which a kernel is planned; it is done for the view.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, TypeVar

import sympy as sp

from flashgen.fingerprint import fingerprint_text
from flashgen.ir.ops import Op, Tile

if TYPE_CHECKING:
    import networkx as nx

OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True)
class Loop:
    """One loop of the nest, outer first: what it walks, and how often its body runs in all.

    `trips` counts executions of the body per batch and query head, those of the enclosing loops
    included: ceiling(q_len/block_m) for the query tiles, visited_tiles for the inner loop.
    """

    name: str
    trips: sp.Expr


@dataclass(frozen=True)
class Edge:
    """The tiles that `producer` hands to `consumer` (names of operations)."""

    producer: str
    consumer: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class TileGraph:
    """One attention kernel as operations on tiles, equal by content, printable and picklable.

    `stage` names the border that the graph has passed (see verify.py); `loop_order` the order of
    the nest in `loops`. `ops` and `edges` are sorted by name; use `ordered` to walk.
    """

    name: str
    stage: str
    loop_order: str
    loops: tuple[Loop, ...]
    ops: tuple[Op, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def nx(self) -> nx.DiGraph[str]:
        """The frozen networkx view: nodes are names with attribute `op`, edges have `tiles`."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        for op in self.ops:
            graph.add_node(op.name, op=op)
        for edge in self.edges:
            graph.add_edge(edge.producer, edge.consumer, tiles=edge.tiles)
        return nx.freeze(graph)

    @cached_property
    def ordered(self) -> tuple[Op, ...]:
        """Operations in execution order: topological, then by name. The same in every process."""
        sorter = self._sorter()
        sorter.prepare()
        names: list[str] = []
        ready = list(sorter.get_ready())
        heapq.heapify(ready)
        while ready:
            names.append(heapq.heappop(ready))
            sorter.done(names[-1])
            for name in sorter.get_ready():
                heapq.heappush(ready, name)
        return tuple(self.by_name[name] for name in names)

    @cached_property
    def cycle(self) -> tuple[str, ...]:
        """Operations that depend on each other, which a graph must not have; usually none."""
        try:
            self._sorter().prepare()
        except CycleError as error:
            return tuple(error.args[1])
        return ()

    def _sorter(self) -> TopologicalSorter[str]:
        sorter = TopologicalSorter({op.name: () for op in self.ops})
        for edge in self.edges:
            sorter.add(edge.consumer, edge.producer)
        return sorter

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Operations by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Every tile once, in the order in which `ordered` produces them."""
        return tuple(dict.fromkeys(t for op in self.ordered for t in self.outputs(op)))

    def inputs(self, op: Op) -> tuple[Tile, ...]:
        """The tiles that `op` reads, by the names of their producers."""
        return tuple(tile for edge in self._into.get(op.name, ()) for tile in edge.tiles)

    def outputs(self, op: Op) -> tuple[Tile, ...]:
        """The tiles that `op` makes, each once."""
        made = (tile for edge in self._out_of.get(op.name, ()) for tile in edge.tiles)
        return tuple(dict.fromkeys(made))

    @cached_property
    def _into(self) -> Mapping[str, list[Edge]]:
        """Edges by consumer, sorted by producer as `edges` are."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.consumer, []).append(edge)
        return found

    @cached_property
    def _out_of(self) -> Mapping[str, list[Edge]]:
        """Edges by producer, sorted by consumer as `edges` are."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.producer, []).append(edge)
        return found

    def consumers(self, tile: Tile) -> tuple[Op, ...]:
        """The operations that read `tile`, in execution order."""
        return tuple(op for op in self.ordered if tile in self.inputs(op))

    def of_kind(self, kind: type[OpT]) -> Iterator[OpT]:
        """The operations of this class, in execution order."""
        return (op for op in self.ordered if isinstance(op, kind))

    @cached_property
    def digest(self) -> str:
        """64 hex characters that differ when anything in the graph does."""
        lines = [self.name, self.stage, self.loop_order]
        lines += [repr(item) for item in (*self.loops, *self.ops, *self.edges)]
        return fingerprint_text("\n".join(lines))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, object]:
        """Only the fields travel: what is cached is built again where it is needed."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class GraphBuilder:
    """Collects operations in the order of the algorithm, joined by the tiles they read."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._producers: dict[str, Op] = {}
        self._tiles: dict[tuple[str, str], list[Tile]] = {}

    def emit(self, op: Op, *, reads: Iterable[Tile] = (), writes: Iterable[Tile] = ()) -> None:
        """Add `op`, which reads tiles that were written before and writes new ones."""
        for tile in reads:
            producer = self._producers[tile.name]
            self._tiles.setdefault((producer.name, op.name), []).append(tile)
        for tile in writes:
            self._producers[tile.name] = op
        self._ops.append(op)

    def announce(self, producer: Op, tile: Tile) -> None:
        """Let `producer`, emitted before, write one more tile."""
        self._producers[tile.name] = producer

    def finish(self, name: str, stage: str, loop_order: str, loops: Sequence[Loop]) -> TileGraph:
        """The graph of everything that was emitted."""
        edges = (Edge(*ends, tuple(tiles)) for ends, tiles in self._tiles.items())
        return TileGraph(
            name=name,
            stage=stage,
            loop_order=loop_order,
            loops=tuple(loops),
            ops=tuple(sorted(self._ops, key=lambda op: op.name)),
            edges=tuple(sorted(edges, key=lambda edge: (edge.producer, edge.consumer))),
        )
