"""What a kernel needs, as formulas that come from walking its tile graph.

Nothing here knows an algorithm: bytes are tile bytes times trips, FLOPs are counted by the
operations, on-chip bytes are the tiles that live at the same time. The formulas are SymPy
expressions over the names of `ir/symbols.py`; `Budget` binds them to a problem and evaluates them.

Two models of on-chip bytes are kept apart. `textbook_smem_bytes` is the papers' constraint: every
loaded tile and one fp32 score tile. `smem_bytes` is what Triton allocates: see `smem_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import sympy as sp

from flashgen.dtypes import get_dtype
from flashgen.ir import ops
from flashgen.ir.graph import TileGraph
from flashgen.ir.ops import Op, Tile
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
    NUM_STAGES,
    NUM_WARPS,
    Q_LEN,
    VISIBLE_PAIRS,
    VISITED_TILES,
)
from flashgen.passes.lower import Kernel, lower
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.spec.model import Shape
from flashgen.target import Target

MatmulUnit = Literal["wgmma", "tcgen05", "mma", "fma", "mfma"]

REG_BYTES = 4
FMA_REGS_PER_RESULT = 4
# Triton on sm_100 adds mbarriers (8 bytes each) and the scratch of a row reduction across warps.
TCGEN05_SCRATCH_PER_WARP = 256
TCGEN05_BARRIER_BYTES = 64
# Shared tiles that a matmul reads start at multiples of 1,024 bytes; a one-dimensional tile between
# them (ids of documents) costs up to this much.
SMALL_TILE_BYTES = 1024


def matmul_unit(target: Target, dtype: str, block_m: int, num_warps: int) -> MatmulUnit:
    """What multiplies the tiles of such a schedule; it decides how Triton uses shared memory.

    wgmma (sm_90) and tcgen05 (sm_100) need 64 rows and whole groups of 4 warps; fp32 is multiplied
    outside the tensor cores on NVIDIA, everything else by warp-level mma.
    """
    if target.vendor == "amd":
        return "mfma"
    if dtype == "fp32":
        return "fma"
    wide = block_m >= 64 and num_warps % 4 == 0
    if wide and target.arch == "sm_90":
        return "wgmma"
    if wide and target.arch == "sm_100":
        return "tcgen05"
    return "mma"


# **** on-chip bytes ****


@cache
def textbook_smem_bytes(graph: TileGraph) -> sp.Expr:
    """Every loaded tile once, at its true width, and one score tile.

    flash2: 4*block_m*block_n + w*(block_m*head_dim_qk + block_n*(head_dim_qk + head_dim_v)).
    """
    loaded = (
        tile.bytes
        for op in graph.of_kind(ops.Load)
        for tile in graph.inputs(op)
        if tile.space == "hbm"
    )
    scores = (
        tile.bytes
        for op in graph.of_kind(ops.Matmul)
        for tile in graph.outputs(op)
        if tile.shape == (BLOCK_M, BLOCK_N)
    )
    return sp.expand(sp.Add(*loaded, *scores))


@cache
def smem_bytes(graph: TileGraph, unit: MatmulUnit) -> sp.Expr:
    """Shared memory as Triton allocates it (Triton 3.6 to 3.8, `metadata.shared`).

    Pipelined (num_stages > 1): what stays for the whole loop, plus num_stages copies of a matmul's
    operands where the matmul itself is asynchronous (wgmma, tcgen05), one copy less where it is
    not, and one less of other staged tiles. Not pipelined: the largest set of tiles that are read
    at the same time. Without a loop: all operands, because v is loaded before the scores are
    computed. Probs change hands between warps through shared memory where warps split the
    columns of the output: mma does when block_m < head_dim_v_padded, fma always, wgmma and tcgen05
    never. mfma (AMD) takes each operand to registers on its own, q before the loop; whether probs
    change hands there differs, so they are counted.
    """
    exchange = _probs_exchange_bytes(graph, unit)
    if unit == "mfma":
        return _through_registers(graph, exchange)
    fixed = _fixed_bytes(graph, unit)
    staged = [tile for tile in graph.tiles if tile.staged]
    operands = _operands(graph)
    if not staged:
        return fixed + _loaded_up_front(graph, exchange)
    one_by_one = _largest_live_set(graph, exchange)
    depth = NUM_STAGES if unit in ("wgmma", "tcgen05") else NUM_STAGES - 1
    pipelined = sp.Add(
        *(tile.bytes for tile in graph.tiles if tile.space == "smem" and not tile.staged),
        *(tile.bytes * (depth if tile.name in operands else NUM_STAGES - 1) for tile in staged),
        exchange,
        REG_BYTES * BLOCK_M if unit == "fma" else 0,  # a row reduction across warps
    )
    if unit == "tcgen05":  # tiles that no matmul reads are kept beside q and k
        one_by_one += sp.Add(
            *(t.bytes for t in staged if t.name not in operands and len(t.shape) > 1)
        )
    return sp.Piecewise(
        (fixed + one_by_one, sp.Le(NUM_STAGES, 1)),
        (fixed + _max(pipelined, _epilogue_bytes(graph)), True),
    )


def _operands(graph: TileGraph) -> frozenset[str]:
    return frozenset(n for op in graph.of_kind(ops.Matmul) for n in (op.left, op.right))


def _probs_exchange_bytes(graph: TileGraph, unit: MatmulUnit) -> sp.Expr:
    """Bytes of the probabilities that change hands, as left operand of the second matmul."""
    probs = _reg_operands(graph)
    if unit in ("fma", "mfma"):
        return sp.Add(*(tile.bytes for tile in probs))
    if unit != "mma":
        return sp.Integer(0)
    needed = sp.Add(*(tile.bytes * _row_padding(tile) for tile in probs))
    return sp.Piecewise((needed, sp.Lt(BLOCK_M, HEAD_DIM_V_PADDED)), (sp.Integer(0), True))


def _reg_operands(graph: TileGraph) -> tuple[Tile, ...]:
    """The left operands of matmuls that come from registers: the probabilities."""
    return tuple(
        tile
        for op in graph.of_kind(ops.Matmul)
        for tile in graph.inputs(op)
        if tile.name == op.left and tile.space == "reg"
    )


def _row_padding(tile: Tile) -> sp.Expr:
    """Rows of 4-byte probs are padded against bank conflicts, by up to an eighth (measured)."""
    return sp.Rational(9, 8) if get_dtype(tile.dtype).bytes == 4 else sp.Integer(1)


def _loaded_up_front(graph: TileGraph, exchange: sp.Expr) -> sp.Expr:
    """All operands at once; once the scores are there, probs may use the place of q and k."""
    operands = _operands(graph)
    shared = [tile for tile in graph.tiles if tile.space == "smem" and tile.name in operands]
    beside_probs = [
        tile
        for op in graph.of_kind(ops.Matmul)
        if any(tile in _reg_operands(graph) for tile in graph.inputs(op))
        for tile in graph.inputs(op)
        if tile.space == "smem"
    ]
    return _largest(
        [
            sp.Add(*(tile.bytes for tile in shared)),
            sp.Add(*(tile.bytes for tile in beside_probs), exchange),
            _epilogue_bytes(graph),
        ]
    )


def _largest_live_set(graph: TileGraph, exchange: sp.Expr) -> sp.Expr:
    """The most bytes of shared tiles that one operation needs, each tile loaded just before it.

    A tile from outside a loop stays alive during all of it.
    """
    deepest = len(graph.loops) - 1
    shared = [tile for tile in graph.tiles if tile.space == "smem"]
    resident = [tile for tile in shared if tile.level < deepest]
    probs = _reg_operands(graph)
    needs: list[sp.Expr] = [_epilogue_bytes(graph)]
    for op in graph.ordered:
        read = [tile for tile in graph.inputs(op) if tile.space == "smem" and tile not in resident]
        need = sp.Add(*(tile.bytes for tile in (*resident, *read)))
        if isinstance(op, ops.Matmul) and any(tile in probs for tile in graph.inputs(op)):
            need += exchange
        if read:
            needs.append(need)
    return _largest(needs)


def _through_registers(graph: TileGraph, exchange: sp.Expr) -> sp.Expr:
    """What mfma needs: staged tiles num_stages - 1 deep, any other tile only on its way through."""
    shared = [tile for tile in graph.tiles if tile.space == "smem"]
    one_by_one = _largest([*(tile.bytes for tile in shared), exchange, _epilogue_bytes(graph)])
    staged = [tile.bytes for tile in shared if tile.staged]
    if not staged:
        return one_by_one
    pipelined = (NUM_STAGES - 1) * sp.Add(*staged) + exchange
    return sp.Piecewise((one_by_one, sp.Le(NUM_STAGES, 1)), (_max(one_by_one, pipelined), True))


def _epilogue_bytes(graph: TileGraph) -> sp.Expr:
    """The output tile changes its layout through shared memory before it is stored."""
    return _largest(
        tile.bytes
        for op in graph.of_kind(ops.Store)
        for tile in graph.inputs(op)
        if len(tile.shape) > 1
    )


def _fixed_bytes(graph: TileGraph, unit: MatmulUnit) -> sp.Expr:
    small = any(tile.staged and len(tile.shape) < 2 for tile in graph.tiles)
    fixed = sp.Integer(SMALL_TILE_BYTES if small else 0)
    if unit == "tcgen05":
        fixed += TCGEN05_SCRATCH_PER_WARP * NUM_WARPS + TCGEN05_BARRIER_BYTES
    return fixed


# **** registers ****


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
    return _largest(
        sp.Add(*(size for first, last, size in spans.values() if first <= index <= last))
        for index in range(len(order))
    )


# **** traffic and work ****


@cache
def tile_traffic_bytes(graph: TileGraph) -> sp.Expr:
    """Bytes that cross between L2 or device memory and the chip: tile bytes times trips, in all."""
    moved = sp.Add(
        *(tile.bytes * _trips(graph, tile) for tile in graph.tiles if tile.space == "hbm")
    )
    return BATCH * NUM_Q_HEADS * sp.expand(moved)


@cache
def dram_bytes(graph: TileGraph) -> sp.Expr:
    """The floor of device-memory traffic: every array read or written exactly once."""
    return sp.Add(*(op.bytes for op in graph.of_kind(ops.Tensor)))


@cache
def visited_flops(graph: TileGraph) -> sp.Expr:
    """FLOPs of all visited tiles, those of masked scores inside them included."""
    work = sp.Add(*(op.flops * _trips(graph, op) for op in graph.ordered))
    return BATCH * NUM_Q_HEADS * sp.factor_terms(work)


@cache
def flops(graph: TileGraph) -> sp.Expr:
    """FLOPs per visible pair, times visible pairs: two matmuls and 5 per score."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph.ordered)


@cache
def matmul_flops(graph: TileGraph) -> sp.Expr:
    """The matmuls' share of `flops`: 2*(head_dim_qk + head_dim_v) per visible pair."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph.of_kind(ops.Matmul))


def _trips(graph: TileGraph, at: Op | Tile) -> sp.Expr:
    return graph.loops[at.level].trips


def _per_pair(counted: Iterable[Op]) -> sp.Expr:
    """FLOPs for one (query, key) pair: those of a tile, divided by the pairs in it."""
    return sp.expand(sp.Add(*(op.flops for op in counted)) / (BLOCK_M * BLOCK_N))


def _largest(needs: Iterable[sp.Expr]) -> sp.Expr:
    """Max of the needs, without those that another one exceeds term by term."""
    distinct = list(dict.fromkeys(sp.expand(need) for need in needs))
    kept = [
        need
        for need in distinct
        if not any(other != need and _exceeds(other, need) for other in distinct)
    ]
    return _max(*kept) if kept else sp.Integer(0)


def _max(*needs: sp.Expr) -> sp.Expr:
    """Max as written: SymPy's comparison of every pair would take most of the time spent here."""
    return needs[0] if len(needs) == 1 else sp.Max(*needs, evaluate=False)


def _exceeds(one: sp.Expr, other: sp.Expr) -> bool:
    """Whether one - other has no negative term; symbols are positive."""
    return all(term.is_nonnegative for term in sp.Add.make_args(sp.expand(one - other)))


# **** one problem's numbers ****


@dataclass(frozen=True)
class Figures:
    """A kernel's needs on one shape, as numbers: bytes, FLOPs, and programs in the grid."""

    tile_traffic_bytes: int
    dram_bytes: int
    matmul_flops: int
    flops: int
    visited_flops: int


@dataclass(frozen=True)
class Budget:
    """The formulas of one problem and kernel kind, with the problem's numbers at hand.

    Formulas keep every symbol; `smem_bytes_of` and the like put the problem and a schedule in. Each
    formula is compiled to a Python function once.
    """

    problem: Problem
    graph: TileGraph

    @property
    def formulas(self) -> Mapping[str, sp.Expr]:
        """The formulas by name, for printing; `smem_bytes` is that of the target's widest unit."""
        widest = matmul_unit(self.problem.target, self.problem.spec.dtype.q, 128, 8)
        return {
            "textbook_smem_bytes": textbook_smem_bytes(self.graph),
            "smem_bytes": smem_bytes(self.graph, widest),
            "regs_per_thread": regs_per_thread(self.graph, self.problem.target.warp_size),
            "tile_traffic_bytes": tile_traffic_bytes(self.graph),
            "dram_bytes": dram_bytes(self.graph),
            "matmul_flops": matmul_flops(self.graph),
            "flops": flops(self.graph),
            "visited_flops": visited_flops(self.graph),
        }

    def textbook_smem_bytes_of(self, block_m: int, block_n: int) -> int:
        """The textbook constraint's left side for a tile shape, in bytes."""
        formula = textbook_smem_bytes(self.graph)
        dims = (self.problem.head_dim_qk, self.problem.head_dim_v)
        compiled = _compiled((BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V), formula)
        return int(compiled(block_m, block_n, *dims))

    def smem_bytes_of(self, schedule: Schedule) -> int:
        """Shared memory that Triton will allocate for `schedule`, in bytes."""
        unit = self.unit(schedule)
        if unit not in self._smem:
            self._smem[unit] = _compiled(_SCHEDULE, smem_bytes(self.graph, unit))
        return int(self._smem[unit](*self._numbers(schedule)))

    def regs_per_thread_of(self, schedule: Schedule) -> int:
        """Registers per thread that tiles occupy; a lower bound of what the assembler needs.

        An fma matmul keeps about FMA_REGS_PER_RESULT operands at hand for each result (measured).
        """
        tiles = self._regs(*self._numbers(schedule))
        fma = self.unit(schedule) == "fma"
        return math.ceil(tiles * (FMA_REGS_PER_RESULT if fma else 1))

    def unit(self, schedule: Schedule) -> MatmulUnit:
        """What multiplies the tiles of `schedule`."""
        dtype = self.problem.spec.dtype.q
        return matmul_unit(self.problem.target, dtype, schedule.block_m, schedule.num_warps)

    def figures(
        self, schedule: Schedule, shape: Shape, *, visited_tiles: int, visible_pairs: int
    ) -> Figures:
        """Bytes and FLOPs of one launch; the last two arguments are per batch and query head."""
        numbers = (
            *self._numbers(schedule),
            shape.batch,
            shape.q_heads,
            shape.kv_heads,
            shape.q_len,
            shape.kv_len,
            visited_tiles,
            visible_pairs,
        )
        return Figures(**{name: int(of(*numbers)) for name, of in self._launch.items()})

    def _numbers(self, schedule: Schedule) -> tuple[int, ...]:
        """The arguments of formulas compiled for `_SCHEDULE`."""
        return (
            schedule.block_m,
            schedule.block_n,
            schedule.num_warps,
            schedule.num_stages,
            *self._head_dims,
        )

    @cached_property
    def _head_dims(self) -> tuple[int, int, int, int]:
        problem = self.problem
        return (
            problem.head_dim_qk,
            problem.head_dim_v,
            problem.head_dim_qk_padded,
            problem.head_dim_v_padded,
        )

    @cached_property
    def _smem(self) -> dict[MatmulUnit, Callable[..., float]]:
        """Compiled formulas of `smem_bytes` by unit, filled as they are needed."""
        return {}

    @cached_property
    def _regs(self) -> Callable[..., float]:
        return _compiled(_SCHEDULE, regs_per_thread(self.graph, self.problem.target.warp_size))

    @cached_property
    def _launch(self) -> dict[str, Callable[..., float]]:
        formulas = {
            "tile_traffic_bytes": tile_traffic_bytes(self.graph),
            "dram_bytes": dram_bytes(self.graph),
            "matmul_flops": matmul_flops(self.graph),
            "flops": flops(self.graph),
            "visited_flops": visited_flops(self.graph),
        }
        return {name: _compiled(_LAUNCH, formula) for name, formula in formulas.items()}


@cache
def _compiled(arguments: tuple[sp.Symbol, ...], formula: sp.Expr) -> Callable[..., float]:
    """`formula` as a Python function of `arguments`; equal formulas share one."""
    function: Callable[..., float] = sp.lambdify(arguments, formula, modules="math")
    return function


@cache
def budget(problem: Problem, kernel: Kernel = "loop", *, return_lse: bool = False) -> Budget:
    """The budget of `problem`'s kernel of that kind; built once per process."""
    return Budget(problem, lower(problem, kernel, return_lse=return_lse))


_SCHEDULE = (
    BLOCK_M,
    BLOCK_N,
    NUM_WARPS,
    NUM_STAGES,
    HEAD_DIM_QK,
    HEAD_DIM_V,
    HEAD_DIM_QK_PADDED,
    HEAD_DIM_V_PADDED,
)
_LAUNCH = (
    *_SCHEDULE,
    BATCH,
    NUM_Q_HEADS,
    NUM_KV_HEADS,
    Q_LEN,
    KV_LEN,
    VISITED_TILES,
    VISIBLE_PAIRS,
)
