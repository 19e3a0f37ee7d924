"""Lowering: a problem becomes the tile graphs of its kernels.

before: Problem(spec, target)
after:  TileGraph: loads, matmuls, score pipeline, mask, softmax and stores, in one loop order
"""

from __future__ import annotations

from typing import Literal

from flashgen.ir.graph import TileGraph
from flashgen.ir.verify import verify
from flashgen.passes.lower_flash1 import Flash1, Merge, PublishedFlash1
from flashgen.passes.lower_naive import naive_graphs
from flashgen.passes.lowering import Kernel, Lowering
from flashgen.problem import Problem

__all__ = [
    "Kernel",
    "Order",
    "lower",
    "lower_merge",
    "lower_naive",
    "lower_published_flash1",
    "order_of",
]

Order = Literal["flash2", "flash1"]


def lower(
    problem: Problem,
    kernel: Kernel = "loop",
    *,
    loop_order: Order | None = None,
    return_lse: bool = False,
    split: bool = False,
) -> TileGraph:
    """The tile graph of `problem`, verified, in `loop_order` (None: the spec's).

    flash2: one program per query tile walks the key tiles with an online softmax. flash1: one
    program per split of the keys walks its key tiles, and for each of them the query tiles that see
    it, whose state waits in a workspace; `split` says that there are several such programs, which
    leave their states for `lower_merge`. `kernel` "single_tile" is the algorithm where one key
    tile holds all keys, so that nothing is carried or rescaled: the two orders are one there.
    `return_lse` adds the log-sum-exp of each row as a second output.
    """
    if kernel == "loop" and (loop_order or order_of(problem)) == "flash1":
        graph = Flash1(problem, split=split).graph(return_lse=return_lse)
    else:
        graph = Lowering(problem, kernel).graph(return_lse=return_lse)
    return verify(graph, after="lower")


def order_of(problem: Problem) -> Order:
    """The loop order that a spec asks for; `auto` starts from flash2."""
    return "flash1" if problem.spec.loop_order == "flash1" else "flash2"


def lower_merge(problem: Problem, *, return_lse: bool = False) -> TileGraph:
    """The kernel that joins the states of a flash1 kernel whose keys were split."""
    return verify(Merge(problem).graph(return_lse=return_lse), after="lower_merge")


def lower_published_flash1(problem: Problem) -> TileGraph:
    """Flash-1 as published: output in its own dtype, m and l read and written at every step.

    Nobody compiles it; it is where the textbook's byte counts come from.
    """
    graph = PublishedFlash1(problem).graph(return_lse=False)
    return verify(graph, after="lower_published_flash1")


def lower_naive(problem: Problem) -> tuple[TileGraph, TileGraph, TileGraph]:
    """Attention without tiling: S = QK^T, P = softmax(S), O = PV, S and P in device memory.

    The tiles of its three kernels are whole matrices of one head: each kernel reads its operands
    once and writes its result once, the least that it can move.
    """
    scores, softmax, values = (
        verify(graph, after="lower_naive") for graph in naive_graphs(problem)
    )
    return scores, softmax, values
