"""Attention without tiling: three kernels that hand whole score matrices on through device memory.

before: Problem(spec, target)
after:  three TileGraphs: S = QK^T (scaled, modified, masked), P = softmax(S), O = PV
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy as sp

from flashgen.ir import ops
from flashgen.ir.graph import Loop, TileGraph
from flashgen.ir.ops import MemorySpace, Shape, Tensor, Tile
from flashgen.ir.symbols import BATCH, HEAD_DIM_V, HEAD_DIM_V_PADDED, NUM_Q_HEADS
from flashgen.passes.lowering import Lowering
from flashgen.problem import Problem
from flashgen.spec.symbolic import KV_LEN, Q_LEN

_HEAD = (Loop("head", sp.Integer(1)),)  # trips count per batch and query head


def naive_graphs(problem: Problem) -> Iterator[TileGraph]:
    """The graphs of the three kernels, in the order in which they run."""
    yield _Naive(problem).score_kernel()
    yield _Naive(problem).softmax_kernel()
    yield _Naive(problem).value_kernel()


class _Naive(Lowering):
    """Tiles are whole matrices of one head; S and P have the dtype of q, as an eager framework's.

    Score pipeline and mask are taken to be part of the first kernel, which is more than an eager
    framework does for its user.
    """

    rows = Q_LEN
    keys = KV_LEN

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, "single_tile")

    def space_of(self, *, rows: bool, keys: bool) -> MemorySpace:
        return "smem"

    def score_kernel(self) -> TileGraph:
        scores = self.masked_scores()
        self._hand_on("S", self._rounded("scores_rounded", scores))
        return self._finish("naive_scores")

    def softmax_kernel(self) -> TileGraph:
        scores = self._take("S")
        m_i = self.reg("m_i", self.row_tile, "fp32")
        l_i = self.reg("l_i", self.row_tile, "fp32")
        probs = self.reg("probs", self.score_tile, "fp32")
        softmax = ops.Softmax("softmax", 0, *self.score_tile)
        self.builder.emit(softmax, reads=[scores], writes=[probs, m_i, l_i])
        if self.spec.sink == "per_head":
            l_i = self.with_sink(m_i, l_i, level=0)
        dtype = self.spec.dtype.q
        normalized = self.reg("probs_normalized", self.score_tile, dtype, in_place_of=probs.name)
        normalize = ops.Normalize("normalize", 0, dtype)
        self.builder.emit(normalize, reads=[probs, l_i], writes=[normalized])
        self._hand_on("P", normalized)
        return self._finish("naive_softmax")

    def value_kernel(self) -> TileGraph:
        probs = self._take("P")
        v_tile = self.load_v()
        acc = self.reg("acc", (self.rows, HEAD_DIM_V_PADDED), "fp32")
        matmul = ops.Matmul(
            "pv",
            0,
            rows=self.rows,
            columns=HEAD_DIM_V,
            inner=self.keys,
            left=probs.name,
            right=v_tile.name,
        )
        self.builder.emit(matmul, reads=[probs, v_tile], writes=[acc])
        out = self.reg("out_tile", acc.shape, self.spec.dtype.out, in_place_of=acc.name)
        self.builder.emit(ops.Cast("round_out", 0, out.dtype), reads=[acc], writes=[out])
        shape: Shape = (self.rows, HEAD_DIM_V)
        self.store("out", out, shape, (BATCH, NUM_Q_HEADS, *shape))
        return self._finish("naive_values")

    def _rounded(self, name: str, tile: Tile) -> Tile:
        dtype = self.spec.dtype.q
        rounded = self.reg(name, tile.shape, dtype, in_place_of=tile.name)
        self.builder.emit(ops.Cast("round_scores", 0, dtype), reads=[tile], writes=[rounded])
        return rounded

    def _hand_on(self, name: str, tile: Tile) -> None:
        self.store(name, tile, self.score_tile, (BATCH, NUM_Q_HEADS, *self.score_tile))

    def _take(self, name: str) -> Tile:
        whole = (BATCH, NUM_Q_HEADS, *self.score_tile)
        array = Tensor(name, 0, shape=whole, dtype=self.spec.dtype.q, role="input")
        return self.load_tile(name, name, array, shape=self.score_tile, level=0, space="smem")

    def _finish(self, stage: str) -> TileGraph:
        return self.builder.finish(self.problem.name, stage, "naive", _HEAD)
