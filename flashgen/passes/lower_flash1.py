"""Flash-1: key tiles outside, query tiles inside, as flashgen builds it and as it was published.

before: Problem(spec, target)
after:  TileGraph whose running state (acc, m_i, l_i) is loaded and stored at each step
"""

from __future__ import annotations

from typing import Literal

from flashgen.ir import ops
from flashgen.ir.graph import Loop, TileGraph
from flashgen.ir.ops import MemorySpace, Shape, Tensor, Tile
from flashgen.ir.symbols import (
    BATCH,
    FIRST_VISITS,
    HEAD_DIM_V,
    HEAD_DIM_V_PADDED,
    KEY_TILES,
    NUM_KV_SPLITS,
    NUM_Q_HEADS,
    Q_LEN,
    QUERY_TILES,
    VISITED_TILES,
    WALKED_KEY_TILES,
)
from flashgen.passes.lowering import START_VALUES, Lowering
from flashgen.problem import Problem

# Steps, per batch and query head, that find a query tile's state in the workspace. Not split, as
# many leave it there, because each first visit has its last.
CARRIED_STEPS = VISITED_TILES - FIRST_VISITS
# (query tile, split) pairs without a visit, of which the merge must know that they are empty.
UNVISITED = QUERY_TILES * NUM_KV_SPLITS - FIRST_VISITS
STATE = ("m_i", "l_i", "acc")


class Flash1(Lowering):
    """As built: the state waits in fp32, from a query tile's first key tile to its last one.

    One program per batch, query head and split of the keys. It loads each of its key and value
    tiles once, but those that no query tile visits. For a query tile that sees the key tile it
    loads q, and the state unless this is the first such key tile; it stores the state unless it is
    the last, and then output and lse instead. A split leaves its state in the workspace for the
    merge, and for query tiles that it does not visit the start values of m_i and l_i, which say so.
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
        if not self.split:
            self.results(acc, m_i, l_i, return_lse=return_lse)
        loops = [Loop("key tile", WALKED_KEY_TILES), Loop("query tile", VISITED_TILES)]
        return self.builder.finish(self.problem.name, self.kernel, "flash1", loops)

    def start_state(self) -> dict[str, Tile]:
        """The state out of the workspace, or as it starts."""
        start = {}
        for name, (there, here) in self.state_shapes().items():
            whole = kept_shape(there, split=self.split)
            array = Tensor(f"{name}_kept", 0, whole, "fp32", "workspace")
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
            self.builder.emit(self._keep(name), reads=[state[name]], writes=[there])
            whole = kept_shape(shape, split=self.split)
            array = Tensor(f"{name}_kept_after", 0, whole, "fp32", "workspace")
            self.builder.emit(array, reads=[there])

    def _keep(self, name: str) -> ops.ConditionalStore:
        condition, trips = "unless last key tile of these rows", CARRIED_STEPS
        if self.split:
            condition, trips = "always", VISITED_TILES
            if name != "acc":
                condition, trips = "always, and where no key tile is visited", trips + UNVISITED
        return ops.ConditionalStore(f"keep_{name}", self.inner, condition=condition, trips=trips)

    def results(self, acc: Tile, m_i: Tile, l_i: Tile, *, return_lse: bool) -> None:
        """What the last key tile of a query tile stores."""
        if self.spec.sink == "per_head":
            l_i = self.with_sink(m_i, l_i, level=self.inner)
        dtype = self.spec.dtype.out
        out = self.reg("out_tile", (self.rows, HEAD_DIM_V_PADDED), dtype, in_place_of=acc.name)
        normalize = ops.Normalize("normalize", self.inner, dtype)
        self.builder.emit(normalize, reads=[acc, l_i], writes=[out])
        self._store_last("out", out, (HEAD_DIM_V,))
        if return_lse:
            lse = self.reg("lse_tile", self.row_tile, "fp32")
            log_sum_exp = ops.LogSumExp("log_sum_exp", self.inner)
            self.builder.emit(log_sum_exp, reads=[m_i, l_i], writes=[lse])
            self._store_last("lse", lse, ())

    def _store_last(self, name: str, tile: Tile, width: Shape) -> None:
        there = Tile(f"{name} in memory", (self.rows, *width), tile.dtype, "hbm", self.inner)
        store = ops.ConditionalStore(
            f"store_{name}",
            self.inner,
            condition="after last key tile of these rows",
            trips=QUERY_TILES,
        )
        self.builder.emit(store, reads=[tile], writes=[there])
        array = Tensor(name, 0, (BATCH, NUM_Q_HEADS, Q_LEN, *width), tile.dtype, "output")
        self.builder.emit(array, reads=[there])


def kept_shape(tile: Shape, *, split: bool) -> Shape:
    """The workspace that holds such a tile's rows, for all heads and splits."""
    splits = (NUM_KV_SPLITS,) if split else ()
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
                Tensor(f"{name}_before", 0, kept_shape(there, split=False), dtype, "workspace"),
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


class Merge(Lowering):
    """The states that the splits left, one split after the other, into the result of each tile."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, "loop")

    def graph(self, *, return_lse: bool) -> TileGraph:
        before = [self._start(name) for name in STATE]
        parts = [self._part(name) for name in STATE]
        merged = [
            self.reg(name, tile.shape, "fp32", in_place_of=tile.name)
            for name, tile in zip(STATE, before, strict=True)
        ]
        merge = ops.Merge("merge", self.inner)
        self.builder.emit(merge, reads=[*before, *parts], writes=merged)
        m_i, l_i, acc = merged
        self.epilogue(acc, m_i, l_i, return_lse=return_lse)
        loops = [Loop("query tile", QUERY_TILES), Loop("split", QUERY_TILES * NUM_KV_SPLITS)]
        return self.builder.finish(self.problem.name, "merge", "flash1", loops)

    def _start(self, name: str) -> Tile:
        start = self.reg(f"{name}_start", self.state_shapes()[name][1], "fp32", level=0)
        self.builder.emit(ops.Init(f"init_{name}", 0, START_VALUES[name]), writes=[start])
        return start

    def _part(self, name: str) -> Tile:
        """One split's m_i and l_i of these rows, and its acc where a row saw a key."""
        there, here = self.state_shapes()[name]
        array = Tensor(f"{name}_kept", 0, kept_shape(there, split=True), "fp32", "workspace")
        self.builder.emit(array)
        source = Tile(f"{name} in workspace", there, "fp32", "hbm", self.inner)
        self.builder.announce(array, source)
        part = self.reg(f"{name}_part", here, "fp32")
        load: ops.Load = ops.Load(f"load_{name}", self.inner)
        if name == "acc":
            load = ops.ConditionalLoad(
                f"load_{name}",
                self.inner,
                condition="where a row saw a key of the split",
                otherwise="0",
                trips=FIRST_VISITS,
            )
        self.builder.emit(load, reads=[source], writes=[part])
        return part
