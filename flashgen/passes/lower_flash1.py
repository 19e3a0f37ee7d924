"""Flash-1: key tiles outside, query tiles inside, as flashgen builds it and as it was published.

before: Problem(spec, target)
after:  TileGraph whose running state (acc, m_i, l_i) is loaded and stored at each step
"""

from __future__ import annotations

from typing import Literal

from flashgen.ir import ops
from flashgen.ir.graph import GraphBuilder, Loop, TileGraph
from flashgen.ir.ops import MemorySpace, Shape, Tensor, Tile
from flashgen.ir.symbols import (
    BATCH,
    BLOCK_M,
    FIRST_VISITS,
    HEAD_DIM_V,
    HEAD_DIM_V_PADDED,
    KEY_TILES,
    NUM_KV_SPLITS,
    NUM_Q_HEADS,
    Q_LEN,
    QUERY_TILES,
    VISITED_TILES,
)
from flashgen.passes.lowering import START_VALUES, Lowering
from flashgen.problem import Problem

# Steps, per batch and query head, that find a query tile's state in the workspace; as many leave it
# there, because each first visit has its last.
CARRIED_STEPS = VISITED_TILES - FIRST_VISITS


class Flash1(Lowering):
    """As built: the state waits in fp32, from a query tile's first key tile to its last one.

    One program per batch, query head and split of the keys. It loads each of its key and value
    tiles once. For a query tile that sees the key tile it loads q, and the state unless this is the
    first such key tile; it stores the state unless it is the last, and then output and lse instead.
    Of a split, output and lse are partial, in fp32, and written for every query tile.
    """

    def __init__(self, problem: Problem, *, split: bool = False) -> None:
        super().__init__(problem, "loop")
        self.split = split

    def level_of(self, *, rows: bool, keys: bool) -> int:
        return self.inner if rows else 0

    def space_of(self, *, rows: bool, keys: bool) -> MemorySpace:
        return "smem" if rows else "reg"

    def graph(self, *, return_lse: bool) -> TileGraph:
        acc, m_i, l_i = self.online_softmax(self.masked_scores())
        self.suspend({"acc": acc, "m_i": m_i, "l_i": l_i})
        self.results(acc, m_i, l_i, return_lse=return_lse)
        loops = [Loop("key tile", KEY_TILES), Loop("query tile", VISITED_TILES)]
        return self.builder.finish(self.problem.name, self.kernel, "flash1", loops)

    def start_state(self) -> dict[str, Tile]:
        """The state out of the workspace, or as it starts."""
        start = {}
        for name, (there, here) in self.state_shapes().items():
            array = Tensor(f"{name}_kept", 0, self._kept(there), "fp32", "workspace")
            self.builder.emit(array)
            source = Tile(f"{name} in workspace", there, "fp32", "hbm", self.inner)
            self.builder.announce(array, source)
            start[name] = self.reg(f"{name}_start", here, "fp32")
            load = ops.ConditionalLoad(
                f"load_{name}",
                self.inner,
                condition="unless first key tile of these rows",
                otherwise=START_VALUES[name],
                trips=CARRIED_STEPS,
            )
            self.builder.emit(load, reads=[source], writes=[start[name]])
        return start

    def suspend(self, state: dict[str, Tile]) -> None:
        """The state back into the workspace."""
        for name, (shape, _) in self.state_shapes().items():
            there = Tile(f"{name} to workspace", shape, "fp32", "hbm", self.inner)
            store = ops.ConditionalStore(
                f"keep_{name}",
                self.inner,
                condition="unless last key tile of these rows",
                trips=CARRIED_STEPS,
            )
            self.builder.emit(store, reads=[state[name]], writes=[there])
            array = Tensor(f"{name}_kept_after", 0, self._kept(shape), "fp32", "workspace")
            self.builder.emit(array, reads=[there])

    def results(self, acc: Tile, m_i: Tile, l_i: Tile, *, return_lse: bool) -> None:
        """What the last key tile of a query tile stores."""
        if self.spec.sink == "per_head" and not self.split:  # else the merge adds it, once
            l_i = self.with_sink(m_i, l_i, level=self.inner)
        dtype = "fp32" if self.split else self.spec.dtype.out
        out = self.reg("out_tile", (self.rows, HEAD_DIM_V_PADDED), dtype, in_place_of=acc.name)
        normalize = ops.Normalize("normalize", self.inner, dtype)
        self.builder.emit(normalize, reads=[acc, l_i], writes=[out])
        self._store_last("out", out, (self.rows, HEAD_DIM_V), (HEAD_DIM_V,))
        if return_lse or self.split:
            lse = self.reg("lse_tile", self.row_tile, "fp32")
            log_sum_exp = ops.LogSumExp("log_sum_exp", self.inner)
            self.builder.emit(log_sum_exp, reads=[m_i, l_i], writes=[lse])
            self._store_last("lse", lse, self.row_tile, ())

    def _store_last(self, name: str, tile: Tile, shape: Shape, width: Shape) -> None:
        whole = (BATCH, NUM_Q_HEADS, Q_LEN, *width)
        array = Tensor(name, 0, whole, tile.dtype, "output")
        if self.split:
            array = partial(name, width)
        there = Tile(f"{array.name} in memory", shape, tile.dtype, "hbm", self.inner)
        store = ops.ConditionalStore(
            f"store_{name}",
            self.inner,
            condition="after last key tile of these rows",
            trips=QUERY_TILES * (NUM_KV_SPLITS if self.split else 1),
        )
        self.builder.emit(store, reads=[tile], writes=[there])
        self.builder.emit(array, reads=[there])

    def _kept(self, tile: Shape) -> Shape:
        """The workspace that holds such a tile's rows, for all heads and splits."""
        splits = (NUM_KV_SPLITS,) if self.split else ()
        return (BATCH, NUM_Q_HEADS, *splits, Q_LEN, *tile[1:])


class PublishedFlash1(Flash1):
    """As published: O in its own dtype, normalised at each step, and m, l, loaded and stored."""

    def graph(self, *, return_lse: bool) -> TileGraph:
        acc, m_i, l_i = self.online_softmax(self.masked_scores())
        dtype = self.spec.dtype.out
        out = self.reg("out_tile", (self.rows, HEAD_DIM_V_PADDED), dtype, in_place_of=acc.name)
        normalize = ops.Normalize("normalize", self.inner, dtype)
        self.builder.emit(normalize, reads=[acc, l_i], writes=[out])
        for name, tile in (("out", out), ("m_i", m_i), ("l_i", l_i)):
            self._store_each(name, tile)
        loops = [Loop("key tile", KEY_TILES), Loop("query tile", VISITED_TILES)]
        return self.builder.finish(self.problem.name, self.kernel, "flash1_published", loops)

    def start_state(self) -> dict[str, Tile]:
        start = {}
        for name, (there, here) in self.state_shapes().items():
            dtype = self.spec.dtype.out if name == "acc" else "fp32"
            kept = self.load_tile(
                f"{name}_kept",
                f"{name} before",
                Tensor(f"{name}_before", 0, self._kept(there), dtype, "workspace"),
                shape=there,
                on_chip=here,
                level=self.inner,
                space="reg",
            )
            start[name] = self.reg(f"{name}_start", here, "fp32", in_place_of=kept.name)
            widen = ops.Cast(f"widen_{name}", self.inner, "fp32")
            self.builder.emit(widen, reads=[kept], writes=[start[name]])
        return start

    def _store_each(self, name: str, tile: Tile) -> None:
        width: Shape = (HEAD_DIM_V,) if name == "out" else ()
        there = Tile(f"{name} in memory", (self.rows, *width), tile.dtype, "hbm", self.inner)
        self.builder.emit(ops.Store(f"store_{name}", self.inner), reads=[tile], writes=[there])
        role: Literal["output", "workspace"] = "output" if name == "out" else "workspace"
        array = Tensor(name, 0, (BATCH, NUM_Q_HEADS, Q_LEN, *width), tile.dtype, role)
        self.builder.emit(array, reads=[there])


def partial(name: str, width: Shape) -> Tensor:
    """The array of one result of all splits: out (`width` elements a row) or lse (none)."""
    whole = (BATCH, NUM_Q_HEADS, NUM_KV_SPLITS, Q_LEN, *width)
    return Tensor(f"partial_{name}", 0, whole, "fp32", "workspace")


def merge_graph(problem: Problem, *, return_lse: bool) -> TileGraph:
    """Partial outputs and their lse, split after split, into the result of each query tile."""
    builder = GraphBuilder()
    sizes: dict[str, tuple[Shape, Shape, Shape]] = {  # width in the array, tile there, tile on chip
        "out": ((HEAD_DIM_V,), (BLOCK_M, HEAD_DIM_V), (BLOCK_M, HEAD_DIM_V_PADDED)),
        "lse": ((), (BLOCK_M,), (BLOCK_M,)),
    }
    before: list[Tile] = []
    read: list[Tile] = []
    for name, (width, there, here) in sizes.items():
        start = Tile(f"{name}_start", here, "fp32", "reg", 0)
        builder.emit(ops.Init(f"init_{name}", 0, "-inf" if name == "lse" else "0"), writes=[start])
        array = partial(name, width)
        builder.emit(array)
        source = Tile(f"{array.name} in memory", there, "fp32", "hbm", 1)
        builder.announce(array, source)
        part = Tile(f"{array.name}_tile", here, "fp32", "reg", 1)
        builder.emit(ops.Load(f"load_{array.name}", 1), reads=[source], writes=[part])
        before.append(start)
        read.append(part)
    merged = [
        Tile(t.name.replace("start", "merged"), t.shape, "fp32", "reg", 1, in_place_of=t.name)
        for t in before
    ]
    builder.emit(ops.Merge("merge", 1), reads=[*before, *read], writes=merged)
    _store_merged(builder, problem, merged, return_lse=return_lse)
    loops = [Loop("query tile", QUERY_TILES), Loop("split", QUERY_TILES * NUM_KV_SPLITS)]
    return builder.finish(problem.name, "merge", "flash1", loops)


def _store_merged(
    builder: GraphBuilder, problem: Problem, merged: list[Tile], *, return_lse: bool
) -> None:
    out, lse = merged
    dtype = problem.spec.dtype.out
    rounded = Tile("out_tile", out.shape, dtype, "reg", 0, in_place_of=out.name)
    builder.emit(ops.Cast("round_out", 0, dtype), reads=[out], writes=[rounded])
    stored: list[tuple[str, Tile, Shape]] = [("out", rounded, (HEAD_DIM_V,))]
    stored += [("lse", lse, ())] if return_lse else []
    for name, tile, width in stored:
        there = Tile(f"{name} in memory", (BLOCK_M, *width), tile.dtype, "hbm", 0)
        builder.emit(ops.Store(f"store_{name}", 0), reads=[tile], writes=[there])
        whole = (BATCH, NUM_Q_HEADS, Q_LEN, *width)
        builder.emit(Tensor(name, 0, whole, tile.dtype, "output"), reads=[there])
