"""The tile graph: what a kernel loads, multiplies, keeps and stores, with symbolic shapes."""

from __future__ import annotations

from flashgen.ir.graph import Edge, GraphBuilder, Loop, TileGraph
from flashgen.ir.ops import Op, Tile
from flashgen.ir.pretty import pretty
from flashgen.ir.verify import GraphError, verify

__all__ = [
    "Edge",
    "GraphBuilder",
    "GraphError",
    "Loop",
    "Op",
    "Tile",
    "TileGraph",
    "pretty",
    "verify",
]
