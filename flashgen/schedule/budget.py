"""What a kernel needs, as formulas that come from walking its tile graph.

Nothing here knows an algorithm: bytes are tile bytes times trips, FLOPs are counted by the
operations, on-chip bytes are the tiles that live at the same time. The formulas are SymPy
expressions over the names of `ir/symbols.py`; `Budget` binds them to a problem and evaluates them.

Two models of on-chip bytes are kept apart. `textbook_smem_bytes` is the papers' constraint: every
loaded tile and one fp32 score tile. `smem_bytes` is what Triton allocates: see `smem_bytes`.

`budget` covers what flashgen builds; `naive_budget` and `published_flash1_budget` the textbook's
algorithms, which nobody compiles, for comparison.
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
    FIRST_VISITS,
    HEAD_DIM_QK,
    HEAD_DIM_QK_PADDED,
    HEAD_DIM_V,
    HEAD_DIM_V_PADDED,
    KV_LEN,
    NUM_KV_HEADS,
    NUM_KV_SPLITS,
    NUM_Q_HEADS,
    NUM_STAGES,
    NUM_WARPS,
    Q_LEN,
    VISIBLE_PAIRS,
    VISITED_TILES,
)
from flashgen.passes.lower import (
    Kernel,
    Order,
    lower,
    lower_merge,
    lower_naive,
    lower_published_flash1,
    order_of,
)
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import TARGETS, Target

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

    4*block_m*block_n + w*(block_m*head_dim_qk + block_n*(head_dim_qk + head_dim_v)), in both loop
    orders: what a loop carries lives in registers, wherever it comes from.
    """
    loaded = (
        tile.bytes
        for op in graph.of_kind(ops.Load)
        for tile in graph.inputs(op)
        if tile.space == "hbm" and not _is_state(graph, tile)
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

    flash2 keeps q and stages k and v; flash1 keeps k and v and stages q. Its state (acc, m_i, l_i)
    goes from the workspace to registers and back.
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
    """Bytes that cross between L2 or device memory and the chip: tile bytes times trips, in all.

    flash2, of N x N and one head dim: w*N*d*(2 + 2*T_r). flash1 as published: w*N*d*(2 + 3*T_c),
    and 16*N*T_c of statistics. flash1 as built: w*N*d*(2 + T_c) of k, v and q, w*N*d of output, and
    2*(4*N*d + 8*N)*(T_c - 1) of state, which neither the first key tile reads nor the last writes.
    """
    return BATCH * NUM_Q_HEADS * _moved(graph, [t for t in graph.tiles if t.space == "hbm"])


@cache
def loaded_bytes(graph: TileGraph) -> sp.Expr:
    """The loads' share of `tile_traffic_bytes`: what comes from L2 to the chip."""
    tiles = [tile for op in graph.of_kind(ops.Load) for tile in graph.inputs(op)]
    return BATCH * NUM_Q_HEADS * _moved(graph, [tile for tile in tiles if tile.space == "hbm"])


@cache
def state_bytes(graph: TileGraph) -> sp.Expr:
    """The share of `tile_traffic_bytes` that goes to and from a workspace."""
    tiles = [tile for tile in graph.tiles if tile.space == "hbm" and _is_state(graph, tile)]
    return BATCH * NUM_Q_HEADS * _moved(graph, tiles)


def _moved(graph: TileGraph, tiles: Iterable[Tile]) -> sp.Expr:
    """Bytes of these tiles on all trips of one batch and query head."""
    moves = {
        tile.name: op
        for op in graph.ordered
        if isinstance(op, (ops.Load, ops.Store))
        for tile in (*graph.inputs(op), *graph.outputs(op))
        if tile.space == "hbm"
    }
    return sp.expand(sp.Add(*(tile.bytes * _trips(graph, moves[tile.name]) for tile in tiles)))


def _is_state(graph: TileGraph, tile: Tile) -> bool:
    """Whether a tile in device memory is part of a workspace."""
    return any(
        isinstance(end, ops.Tensor) and end.role == "workspace"
        for edge in graph.edges
        if tile in edge.tiles
        for end in (graph.by_name[edge.producer], graph.by_name[edge.consumer])
    )


@cache
def dram_bytes(graph: TileGraph) -> sp.Expr:
    """The floor of device-memory traffic: every input and output read or written exactly once.

    A workspace is not in it: it may stay in L2.
    """
    return sp.Add(*(op.bytes for op in graph.of_kind(ops.Tensor) if op.role != "workspace"))


@cache
def workspace_bytes(graph: TileGraph) -> sp.Expr:
    """Bytes of all workspaces; one that is read and written counts once."""
    written = {
        op.name: op.bytes
        for op in graph.of_kind(ops.Tensor)
        if op.role == "workspace" and graph.inputs(op)
    }
    return sp.Add(*written.values())


@cache
def visited_flops(graph: TileGraph) -> sp.Expr:
    """FLOPs of all visited tiles, those of masked scores inside them included."""
    work = sp.Add(*(op.flops * graph.loops[op.level].trips for op in graph.ordered))
    return BATCH * NUM_Q_HEADS * sp.factor_terms(work)


@cache
def flops(graph: TileGraph) -> sp.Expr:
    """FLOPs per visible pair, times visible pairs: two matmuls and 5 per score."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph, graph.ordered)


@cache
def matmul_flops(graph: TileGraph) -> sp.Expr:
    """The matmuls' share of `flops`: 2*(head_dim_qk + head_dim_v) per visible pair."""
    return BATCH * NUM_Q_HEADS * VISIBLE_PAIRS * _per_pair(graph, graph.of_kind(ops.Matmul))


def _trips(graph: TileGraph, op: Op) -> sp.Expr:
    """How often a load or store moves its tile, per batch and query head."""
    if isinstance(op, (ops.ConditionalLoad, ops.ConditionalStore)):
        return op.trips
    return graph.loops[op.level].trips


def _per_pair(graph: TileGraph, counted: Iterable[Op]) -> sp.Expr:
    """FLOPs for one (query, key) pair: those of a score tile, divided by the pairs in it."""
    pairs = Q_LEN * KV_LEN if graph.loop_order == "naive" else BLOCK_M * BLOCK_N
    return sp.expand(sp.Add(*(op.flops for op in counted)) / pairs)


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

LAUNCH_FORMULAS: Mapping[str, Callable[[TileGraph], sp.Expr]] = {
    "tile_traffic_bytes": tile_traffic_bytes,
    "dram_bytes": dram_bytes,
    "matmul_flops": matmul_flops,
    "flops": flops,
    "visited_flops": visited_flops,
    "loaded_bytes": loaded_bytes,
    "state_bytes": state_bytes,
    "workspace_bytes": workspace_bytes,
}


@dataclass(frozen=True)
class Figures:
    """A launch's needs on one shape, as numbers: bytes and FLOPs, all its kernels together.

    `dram_bytes` is the floor; `loaded_bytes` and `state_bytes` are shares of `tile_traffic_bytes`.
    """

    tile_traffic_bytes: int
    dram_bytes: int
    matmul_flops: int
    flops: int
    visited_flops: int
    loaded_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Budget:
    """The formulas of one problem and kernel kind, with the problem's numbers at hand.

    `graph` is the kernel that a schedule cuts into tiles; `others` run after it. Formulas keep
    every symbol; `smem_bytes_of` and the like put the problem and a schedule in. Each formula is
    compiled to a Python function once.
    """

    problem: Problem
    graph: TileGraph
    others: tuple[TileGraph, ...] = ()

    @property
    def formulas(self) -> Mapping[str, sp.Expr]:
        """The formulas by name, for printing; `smem_bytes` is that of the target's widest unit."""
        widest = matmul_unit(self.problem.target, self.problem.spec.dtype.q, 128, 8)
        return {
            "textbook_smem_bytes": textbook_smem_bytes(self.graph),
            "smem_bytes": smem_bytes(self.graph, widest),
            "regs_per_thread": regs_per_thread(self.graph, self.problem.target.warp_size),
            **{name: self._sum(LAUNCH_FORMULAS[name]) for name in _PRINTED},
        }

    def _sum(self, formula: Callable[[TileGraph], sp.Expr]) -> sp.Expr:
        """A formula over all kernels of the launch."""
        return sp.Add(*(formula(graph) for graph in (self.graph, *self.others)))

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
        self,
        schedule: Schedule | None,
        shape: Shape,
        *,
        visited_tiles: int,
        visible_pairs: int,
        first_visits: int | None = None,
    ) -> Figures:
        """Bytes and FLOPs of one launch; the last three arguments are per batch and query head.

        schedule: None where the formulas have no tiles (naive). first_visits: (query tile, split)
        pairs with a visited tile, which only flash1 asks for; None: all of them.
        """
        if first_visits is None:
            first_visits = 0
            if schedule is not None:
                first_visits = -(-shape.q_len // schedule.block_m) * schedule.splits
        numbers = (
            *self._numbers(schedule),
            schedule.splits if schedule else 1,
            shape.batch,
            shape.q_heads,
            shape.kv_heads,
            shape.q_len,
            shape.kv_len,
            visited_tiles,
            visible_pairs,
            min(first_visits, visited_tiles),
        )
        values = self._launch(*numbers)
        return Figures(**dict(zip(LAUNCH_FORMULAS, map(int, values), strict=True)))

    def _numbers(self, schedule: Schedule | None) -> tuple[int, ...]:
        """The arguments of formulas compiled for `_SCHEDULE`."""
        if schedule is None:
            return (1, 1, 1, 1, *self._head_dims)
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
    def _launch(self) -> Callable[..., tuple[float, ...]]:
        return _launch_function((self.graph, *self.others))


@cache
def _launch_function(graphs: tuple[TileGraph, ...]) -> Callable[..., tuple[float, ...]]:
    """The sums over all kernels of `LAUNCH_FORMULAS`, in one function: compiling is what costs."""
    sums = tuple(sp.Add(*(of(graph) for graph in graphs)) for of in LAUNCH_FORMULAS.values())
    function: Callable[..., tuple[float, ...]] = sp.lambdify(_LAUNCH, sums, modules="math")
    return function


@cache
def _compiled(arguments: tuple[sp.Symbol, ...], formula: sp.Expr) -> Callable[..., float]:
    """`formula` as a Python function of `arguments`; equal formulas share one."""
    function: Callable[..., float] = sp.lambdify(arguments, formula, modules="math")
    return function


@cache
def budget(
    problem: Problem,
    kernel: Kernel = "loop",
    *,
    loop_order: Order | None = None,
    return_lse: bool = False,
    split: bool = False,
) -> Budget:
    """The budget of `problem`'s kernel of that kind and order; built once per process.

    loop_order: None, the spec's. split: flash1 with the keys split over programs, and its merge.
    """
    order = loop_order or order_of(problem)
    graph = _lowered(problem.spec, kernel, order, return_lse, split)
    others = (lower_merge(problem, return_lse=return_lse),) if split and order == "flash1" else ()
    return Budget(problem, graph, others)


def budget_for(problem: Problem, schedule: Schedule, *, return_lse: bool = False) -> Budget:
    """The budget of the kernel, or kernels, that `schedule` is one of.

    That of split keys where `num_kv_splits` is left to the call.
    """
    return budget(
        problem,
        schedule.kernel,
        loop_order=schedule.loop_order,
        return_lse=return_lse,
        split=schedule.num_kv_splits != 1,
    )


@cache
def naive_budget(problem: Problem) -> Budget:
    """What attention in three kernels needs, S and P in device memory; it takes no schedule.

    Without GQA, of N x N and one head dim, dram_bytes is the textbook's w*(4*N*d + 4*N^2).
    """
    scores, softmax, values = _lowered_naive(problem.spec)
    return Budget(problem, scores, (softmax, values))


@cache
def published_flash1_budget(problem: Problem) -> Budget:
    """The textbook's Flash-1: its traffic differs from that of the kernel flashgen builds."""
    return Budget(problem, lower_published_flash1(problem))


@cache
def _lowered(
    spec: AttentionSpec, kernel: Kernel, order: Order, return_lse: bool, split: bool
) -> TileGraph:
    """A graph depends on the spec alone: all targets share it, and its compiled formulas."""
    problem = Problem(spec, _ANY_TARGET)
    return lower(problem, kernel, loop_order=order, return_lse=return_lse, split=split)


@cache
def _lowered_naive(spec: AttentionSpec) -> tuple[TileGraph, TileGraph, TileGraph]:
    return lower_naive(Problem(spec, _ANY_TARGET))


_ANY_TARGET = next(iter(TARGETS.values()))


_PRINTED = ("tile_traffic_bytes", "dram_bytes", "matmul_flops", "flops", "visited_flops")
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
    NUM_KV_SPLITS,
    BATCH,
    NUM_Q_HEADS,
    NUM_KV_HEADS,
    Q_LEN,
    KV_LEN,
    VISITED_TILES,
    VISIBLE_PAIRS,
    FIRST_VISITS,
)
