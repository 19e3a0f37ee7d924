"""The parts that every lowering has, and their order in a flash2 kernel.

`Lowering` emits loads, matmuls, score pipeline, mask, softmax and stores as operations on tiles;
its subclasses put them into another order (`lower_flash1.py`, `lower_naive.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import sympy as sp

from flashgen.dtypes import get_dtype
from flashgen.ir import ops
from flashgen.ir.graph import GraphBuilder, Loop, TileGraph
from flashgen.ir.ops import MemorySpace, Shape, Tensor, Tile
from flashgen.ir.symbols import (
    BATCH,
    BLOCK_M,
    BLOCK_N,
    HEAD_DIM_QK,
    HEAD_DIM_QK_PADDED,
    HEAD_DIM_V,
    HEAD_DIM_V_PADDED,
    KV_LEN,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    Q_LEN,
    QUERY_TILES,
    VISITED_TILES,
)
from flashgen.problem import Problem
from flashgen.spec.expr import Index, Name, Node, parse_expression, unparse, walk
from flashgen.spec.model import (
    Alibi,
    AttentionSpec,
    Bias,
    Causal,
    MaskItem,
    Same,
    ScoreItem,
    Softcap,
    Window,
)

Kernel = Literal["loop", "single_tile"]

START_VALUES = {"m_i": "-inf", "l_i": "0", "acc": "0"}

# What an axis of a declared input is called, and how many elements it has.
_EXTENTS: dict[str, sp.Expr] = {
    "batch": BATCH,
    "q_heads": NUM_Q_HEADS,
    "kv_heads": NUM_KV_HEADS,
    "q_len": Q_LEN,
    "kv_len": KV_LEN,
}


class Lowering:
    """The state of one lowering: the builder, and the tiles that several operations read.

    As it stands it lowers to the flash2 order: one program per query tile, key tiles inside.
    """

    rows: sp.Expr = BLOCK_M  # of a score tile
    keys: sp.Expr = BLOCK_N

    def __init__(self, problem: Problem, kernel: Kernel = "loop") -> None:
        self.problem = problem
        self.spec: AttentionSpec = problem.spec
        self.kernel: Kernel = kernel
        self.inner = 1 if kernel == "loop" else 0  # the level of what runs once per tile pair
        self.builder = GraphBuilder()
        self.loaded: dict[str, Tile] = {}

    @property
    def score_tile(self) -> tuple[sp.Expr, sp.Expr]:
        return self.rows, self.keys

    @property
    def row_tile(self) -> Shape:
        return (self.rows,)

    def level_of(self, *, rows: bool, keys: bool) -> int:
        """The loop level at which a tile that depends on these is loaded."""
        return self.inner if keys else 0

    def space_of(self, *, rows: bool, keys: bool) -> MemorySpace:
        """Where such a tile is kept: what is loaded anew for each step passes shared memory."""
        return "smem" if keys else "reg"

    def graph(self, *, return_lse: bool) -> TileGraph:
        scores = self.masked_scores()
        if self.kernel == "loop":
            acc, m_i, l_i = self.online_softmax(scores)
        else:
            acc, m_i, l_i = self.softmax(scores)
        self.epilogue(acc, m_i, l_i, return_lse=return_lse)
        loops = [Loop("query tile", QUERY_TILES)]
        if self.kernel == "loop":
            loops.append(Loop("key tile", VISITED_TILES))
        return self.builder.finish(self.problem.name, self.kernel, "flash2", loops)

    # **** scores: what goes into the exponent ****

    def masked_scores(self) -> Tile:
        """q·k, scaled, through the score pipeline, and -inf where the mask hides."""
        scores = self.scores(self.load_q())
        for place, item in enumerate(self.spec.score):
            scores = self.score(place, item, scores)
        return self.mask(scores)

    def scores(self, q_tile: Tile) -> Tile:
        k_tile = self.load_k()
        raw = self.reg("scores", self.score_tile, "fp32")
        matmul = ops.Matmul(
            "qk",
            self.inner,
            rows=self.rows,
            columns=self.keys,
            inner=HEAD_DIM_QK,
            left=q_tile.name,
            right=k_tile.name,
            transpose_right=True,
        )
        self.builder.emit(matmul, reads=[q_tile, k_tile], writes=[raw])
        scaled = self.reg("scores_scaled", self.score_tile, "fp32", in_place_of=raw.name)
        scale = ops.Scale("scale", self.inner, *self.score_tile)
        self.builder.emit(scale, reads=[raw], writes=[scaled])
        return scaled

    def score(self, place: int, item: ScoreItem, scores: Tile) -> Tile:
        """One step of the score pipeline, with the loads of what it reads."""
        kind, text = _score_text(item, self.spec)
        reads = [self.load_read(read) for read in _reads(text, self.spec)]
        name = f"score_{place}_{kind}"
        changed = self.reg(name, self.score_tile, "fp32", in_place_of=scores.name)
        op = ops.Score(f"apply_{name}", self.inner, *self.score_tile, kind, text)
        self.builder.emit(op, reads=[scores, *reads], writes=[changed])
        return changed

    def mask(self, scores: Tile) -> Tile:
        """-inf for keys that do not exist (a tail) and for those that a query may not see."""
        terms = ["k < kv_lens[b]" if self.spec.kv_lens == "per_batch" else "k < kv_len"]
        terms += [_mask_text(item, self.spec) for item in self.spec.mask]
        texts = [f"({term})" if " or " in term else term for term in terms if term]
        predicate = " and ".join(texts)
        reads = [self.load_read(read) for read in _reads(predicate, self.spec)]
        masked = self.reg("scores_masked", self.score_tile, "fp32", in_place_of=scores.name)
        op = ops.Mask("mask", self.inner, *self.score_tile, predicate)
        self.builder.emit(op, reads=[scores, *reads], writes=[masked])
        return masked

    # **** softmax and the second matmul ****

    def start_state(self) -> dict[str, Tile]:
        """What a query tile's rows carry from key tile to key tile, as it is before a step."""
        start = {}
        for name, (_, shape) in self.state_shapes().items():
            start[name] = self.reg(f"{name}_start", shape, "fp32", level=0)
            init = ops.Init(f"init_{name}", 0, START_VALUES[name])
            self.builder.emit(init, writes=[start[name]])
        return start

    def state_shapes(self) -> dict[str, tuple[Shape, Shape]]:
        """Shapes of the running state in memory and on chip: maximum, sum, accumulator."""
        return {
            "m_i": (self.row_tile, self.row_tile),
            "l_i": (self.row_tile, self.row_tile),
            "acc": ((self.rows, HEAD_DIM_V), (self.rows, HEAD_DIM_V_PADDED)),
        }

    def online_softmax(self, scores: Tile) -> tuple[Tile, Tile, Tile]:
        start = self.start_state()
        m_i = self.reg("m_i", self.row_tile, "fp32", in_place_of="m_i_start")
        l_i = self.reg("l_i", self.row_tile, "fp32", in_place_of="l_i_start")
        alpha = self.reg("alpha", self.row_tile, "fp32")
        probs = self.reg("probs", self.score_tile, "fp32", in_place_of=scores.name)
        self.builder.emit(
            ops.OnlineSoftmax("online_softmax", self.inner, *self.score_tile),
            reads=[scores, start["m_i"], start["l_i"]],
            writes=[probs, m_i, l_i, alpha],
        )
        rescaled = self.reg("acc_rescaled", start["acc"].shape, "fp32", in_place_of="acc_start")
        self.builder.emit(
            ops.Rescale("rescale", self.inner), reads=[start["acc"], alpha], writes=[rescaled]
        )
        return self.weighted_values(probs, accumulator=rescaled), m_i, l_i

    def softmax(self, scores: Tile) -> tuple[Tile, Tile, Tile]:
        m_i = self.reg("m_i", self.row_tile, "fp32")
        l_i = self.reg("l_i", self.row_tile, "fp32")
        probs = self.reg("probs", self.score_tile, "fp32", in_place_of=scores.name)
        softmax = ops.Softmax("softmax", self.inner, *self.score_tile)
        self.builder.emit(softmax, reads=[scores], writes=[probs, m_i, l_i])
        return self.weighted_values(probs, accumulator=None), m_i, l_i

    def weighted_values(self, probs: Tile, *, accumulator: Tile | None) -> Tile:
        """probs x v, with probs rounded to v's dtype where that is narrower than fp32."""
        dtype = self.spec.dtype.kv
        if get_dtype(dtype).bytes < get_dtype(probs.dtype).bytes:
            rounded = self.reg("probs_rounded", self.score_tile, dtype, in_place_of=probs.name)
            self.builder.emit(
                ops.Cast("round_probs", self.inner, dtype), reads=[probs], writes=[rounded]
            )
            probs = rounded
        v_tile = self.load_v()
        acc = self.reg(
            "acc",
            (self.rows, HEAD_DIM_V_PADDED),
            "fp32",
            in_place_of=accumulator.name if accumulator else None,
        )
        matmul = ops.Matmul(
            "pv",
            self.inner,
            rows=self.rows,
            columns=HEAD_DIM_V,
            inner=self.keys,
            left=probs.name,
            right=v_tile.name,
            accumulator=accumulator.name if accumulator else None,
        )
        operands = [probs, v_tile, *([accumulator] if accumulator else [])]
        self.builder.emit(matmul, reads=operands, writes=[acc])
        return acc

    # **** what happens once per query tile, at the end ****

    def epilogue(self, acc: Tile, m_i: Tile, l_i: Tile, *, return_lse: bool) -> None:
        if self.spec.sink == "per_head":
            l_i = self.with_sink(m_i, l_i, level=0)
        dtype = self.spec.dtype.out
        out_tile = self.reg(
            "out_tile", (self.rows, HEAD_DIM_V_PADDED), dtype, level=0, in_place_of=acc.name
        )
        self.builder.emit(ops.Normalize("normalize", 0, dtype), reads=[acc, l_i], writes=[out_tile])
        self.store(
            "out", out_tile, (self.rows, HEAD_DIM_V), (BATCH, NUM_Q_HEADS, Q_LEN, HEAD_DIM_V)
        )
        if return_lse:
            lse_tile = self.reg("lse_tile", self.row_tile, "fp32", level=0)
            self.builder.emit(ops.LogSumExp("log_sum_exp", 0), reads=[m_i, l_i], writes=[lse_tile])
            self.store("lse", lse_tile, self.row_tile, (BATCH, NUM_Q_HEADS, Q_LEN))

    def with_sink(self, m_i: Tile, l_i: Tile, *, level: int) -> Tile:
        """l_i with the sink's share of the denominator."""
        sink = self.load_tile(
            "sink",
            "sink",
            Tensor("sink", 0, shape=(NUM_Q_HEADS,), dtype="fp32", role="input"),
            shape=(),
            level=0,
            space="reg",
        )
        l_sink = self.reg("l_sink", self.row_tile, "fp32", level=level, in_place_of=l_i.name)
        self.builder.emit(ops.Sink("add_sink", level), reads=[l_i, m_i, sink], writes=[l_sink])
        return l_sink

    # **** tiles in and out ****

    def reg(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        *,
        level: int | None = None,
        in_place_of: str | None = None,
    ) -> Tile:
        at = self.inner if level is None else level
        return Tile(name, shape, dtype, "reg", at, in_place_of=in_place_of)

    def load_q(self) -> Tile:
        level = self.level_of(rows=True, keys=False)
        return self.load_vectors("q", self.spec.dtype.q, NUM_Q_HEADS, Q_LEN, level=level)

    def load_k(self) -> Tile:
        level = self.level_of(rows=False, keys=True)
        return self.load_vectors("k", self.spec.dtype.kv, NUM_KV_HEADS, KV_LEN, level=level)

    def load_v(self) -> Tile:
        level = self.level_of(rows=False, keys=True)
        return self.load_vectors("v", self.spec.dtype.kv, NUM_KV_HEADS, KV_LEN, level=level)

    def load_vectors(
        self, name: str, dtype: str, heads: sp.Expr, length: sp.Expr, *, level: int
    ) -> Tile:
        """A tile of q, k or v: rows of true width in memory, of padded width on chip."""
        rows = self.rows if name == "q" else self.keys
        width = HEAD_DIM_V if name == "v" else HEAD_DIM_QK
        padded = HEAD_DIM_V_PADDED if name == "v" else HEAD_DIM_QK_PADDED
        array = Tensor(name, 0, shape=(BATCH, heads, length, width), dtype=dtype, role="input")
        return self.load_tile(
            name,
            name,
            array,
            shape=(rows, width),
            on_chip=(rows, padded),
            level=level,
            space="smem",
        )

    def load_read(self, read: _Read) -> Tile:
        """The tile of one read of a declared input; what its indices read is loaded first."""
        if read.text in self.loaded:
            return self.loaded[read.text]
        indices = [self.load_read(inner) for inner in read.inner]
        shape = tuple(
            extent for used, extent in ((read.rows, self.rows), (read.keys, self.keys)) if used
        )
        level = self.level_of(rows=read.rows, keys=read.keys)
        space = self.space_of(rows=read.rows, keys=read.keys)
        tile = self.load_tile(
            read.text,
            read.text,
            read.array,
            shape=shape,
            level=level,
            space=space,
            indices=indices,
        )
        self.loaded[read.text] = tile
        return tile

    def load_tile(
        self,
        name: str,
        text: str,
        array: Tensor,
        *,
        shape: Shape,
        level: int,
        space: MemorySpace,
        on_chip: Shape | None = None,
        indices: list[Tile] | None = None,
    ) -> Tile:
        """Emit the array (once) and a load of a tile of it; returns the tile on chip."""
        if array.name not in self.loaded:
            self.loaded[array.name] = Tile(array.name, (), array.dtype, "hbm", 0)
            self.builder.emit(array)
        there = Tile(f"{text} in memory", shape, array.dtype, "hbm", level)
        self.builder.announce(array, there)
        staged = space == "smem" and level > 0
        here = Tile(f"{name}_tile", on_chip or shape, array.dtype, space, level, staged=staged)
        self.builder.emit(
            ops.Load(f"load_{name}", level), reads=[there, *(indices or ())], writes=[here]
        )
        return here

    def store(self, name: str, tile: Tile, shape: Shape, whole: Shape) -> None:
        there = Tile(f"{name} in memory", shape, tile.dtype, "hbm", 0)
        self.builder.emit(ops.Store(f"store_{name}", 0), reads=[tile], writes=[there])
        array = Tensor(name, 0, shape=whole, dtype=tile.dtype, role="output")
        self.builder.emit(array, reads=[there])


@dataclass(frozen=True)
class _Read:
    """One element-wise read of an input: the text, and which positions its indices depend on."""

    text: str
    array: Tensor
    rows: bool
    keys: bool
    inner: tuple[_Read, ...]  # reads inside the indices


def _reads(text: str, spec: AttentionSpec) -> list[_Read]:
    """The distinct reads of declared inputs in an expression, outermost ones only."""
    return list(dict.fromkeys(_outermost(parse_expression(text), spec)))


def _outermost(node: Node, spec: AttentionSpec) -> Iterator[_Read]:
    if isinstance(node, (Index, Name)) and (array := _array(node.name, spec)) is not None:
        inside = [part for child in node.children for part in walk(child)]
        names = {part.name for part in inside if isinstance(part, Name)}
        inner = tuple(dict.fromkeys(r for child in node.children for r in _outermost(child, spec)))
        yield _Read(unparse(node), array, bool(names & {"q", "row"}), "k" in names, inner)
        return
    for child in node.children:
        yield from _outermost(child, spec)


# Names that operations of the graph have: an input called so is told apart.
_OPERATIONS = re.compile(
    "scale|mask|merge|rescale|normalize|softmax|online_softmax|add_sink|log_sum_exp"
    "|(load|store|score|init|round|matmul)_.*|.*_matmul|acc|m_i|l_i|qk|pv"
)


def _array(name: str, spec: AttentionSpec) -> Tensor | None:
    """The declared input (or kv_lens) of that name as an array; None for a plain symbol."""
    if name == "kv_lens":
        return Tensor(name, 0, shape=(BATCH,), dtype="int32", role="input")
    for declared in spec.inputs:
        if declared.name == name:
            shape = tuple(sp.sympify(_EXTENTS.get(str(e), e)) for e in declared.shape)
            label = f"{name} input" if _OPERATIONS.fullmatch(name) else name
            return Tensor(label, 0, shape=shape, dtype=declared.dtype, role="input")
    return None


def _score_text(item: ScoreItem, spec: AttentionSpec) -> tuple[str, str]:
    """The kind of a pipeline step and its new score, in the language of expressions."""
    if isinstance(item, Softcap):
        return "softcap", f"{item.cap!r} * tanh(s / {item.cap!r})"
    if isinstance(item, Alibi):
        return "alibi", f"s - {_element(item.input, ['h'], spec)} * abs(q - k)"
    if isinstance(item, Bias):
        return "bias", f"s + {_element(item.tensor, ['b', 'h', 'row', 'k'], spec)}"
    return "expr", item.expr


def _mask_text(item: MaskItem, spec: AttentionSpec) -> str:
    """What must hold for a key to be seen; "" for no condition."""
    if isinstance(item, Causal):
        return "k <= q"
    if isinstance(item, Same):
        return (
            f"{_element(item.input, ['b', 'q'], spec)} == {_element(item.input, ['b', 'k'], spec)}"
        )
    if isinstance(item, Window):
        sides = []
        if item.left is not None:
            sides.append(f"k >= q - {item.left}")
        if item.right is not None:
            sides.append(f"k <= q + {item.right}")
        return " and ".join(sides)
    return item.expr


def _element(name: str, indices: list[str], spec: AttentionSpec) -> str:
    """`name[...]` with as many of the indices, from the right, as the input has axes."""
    rank = len(spec.input(name).shape)
    return f"{name}[{', '.join(indices[len(indices) - rank :])}]" if rank else name
