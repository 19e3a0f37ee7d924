"""What a kernel needs: the formulas of `on_chip.py` and `traffic.py` with a problem's numbers.

Nothing there knows an algorithm: bytes are tile bytes times trips, FLOPs are counted by the
operations, on-chip bytes are the tiles that live at the same time. The formulas are SymPy
expressions over the names of `ir/symbols.py`; `Budget` binds them to a problem and evaluates them.

`budget` covers what flashgen builds; `naive_budget` and `published_flash1_budget` the textbook's
algorithms, which nobody compiles, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import sympy as sp

from flashgen.ir.graph import TileGraph
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
    VISITED_KEYS,
    VISITED_TILES,
    WALKED_KEY_TILES,
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
from flashgen.schedule import sm90
from flashgen.schedule.formula import function, functions
from flashgen.schedule.model import Schedule
from flashgen.schedule.on_chip import (
    TritonVersion,
    installed_triton,
    least_smem_bytes,
    smem_bytes,
    textbook_smem_bytes,
)
from flashgen.schedule.registers import regs_per_thread
from flashgen.schedule.traffic import (
    dram_bytes,
    flops,
    footprint_bytes,
    loaded_bytes,
    matmul_flops,
    state_bytes,
    tile_traffic_bytes,
    visited_flops,
    workspace_bytes,
)
from flashgen.schedule.units import MatmulUnit, matmul_unit
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import TARGETS

__all__ = [  # with the formulas, from where they are derived
    "Budget",
    "Figures",
    "budget",
    "budget_for",
    "dram_bytes",
    "flops",
    "footprint_bytes",
    "least_smem_bytes",
    "loaded_bytes",
    "matmul_flops",
    "naive_budget",
    "published_flash1_budget",
    "regs_per_thread",
    "smem_bytes",
    "state_bytes",
    "textbook_smem_bytes",
    "tile_traffic_bytes",
    "visited_flops",
    "workspace_bytes",
]

FMA_REGS_PER_RESULT = 4


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
    "footprint_bytes": footprint_bytes,
}


@dataclass(frozen=True)
class Figures:
    """A launch's needs on one shape, as numbers: bytes and FLOPs, all its kernels together.

    `dram_bytes` is the floor of what is moved, `footprint_bytes` what inputs and outputs take in
    memory; `loaded_bytes` and `state_bytes` are shares of `tile_traffic_bytes`.
    """

    tile_traffic_bytes: int
    dram_bytes: int
    matmul_flops: int
    flops: int
    visited_flops: int
    loaded_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0
    footprint_bytes: int = 0


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
        compiled = function((BLOCK_M, BLOCK_N, HEAD_DIM_QK, HEAD_DIM_V), formula)
        return int(compiled(block_m, block_n, *dims))

    def smem_bytes_of(
        self, schedule: Schedule, triton: TritonVersion | None = None, *, aligned: bool = True
    ) -> int:
        """Shared memory that Triton (None: the one here) will allocate for `schedule`, in bytes.

        aligned: rows of all tensors start at multiples of 16 bytes; others have fewer stages.
        Of the family gluon_sm90: in any version, of a kernel that writes lse.
        """
        if schedule.family == "gluon_sm90":
            return sm90.smem_bytes(schedule, self.problem)
        formula = self._smem(self.unit(schedule), triton or installed_triton(), aligned)
        return int(formula(*self._numbers(schedule)))

    def least_smem_bytes_of(self, schedule: Schedule) -> int:
        """A lower bound of `smem_bytes_of`, whatever the version of Triton."""
        if schedule.family == "gluon_sm90":
            return sm90.smem_bytes(schedule, self.problem)
        return int(self._smem(self.unit(schedule), None)(*self._numbers(schedule)))

    def _smem(
        self, unit: MatmulUnit, triton: TritonVersion | None, aligned: bool = True
    ) -> Callable[..., float]:
        """The formula for a version of Triton, or the lower bound; kept, as graphs hash slowly."""
        key = unit, triton, aligned
        if key not in self._kept:
            made = least_smem_bytes(self.graph, unit) if triton is None else None
            formula = (
                smem_bytes(self.graph, unit, triton, aligned=aligned) if made is None else made
            )
            self._kept[key] = function(_SCHEDULE, formula)
        return self._kept[key]

    def regs_per_thread_of(self, schedule: Schedule) -> int:
        """Registers per thread that tiles are likely to occupy.

        An fma matmul keeps about FMA_REGS_PER_RESULT operands at hand for each result (measured).
        """
        if schedule.family == "gluon_sm90":
            return sm90.least_regs_per_thread(schedule, self.problem)
        tiles = self._regs(*self._numbers(schedule))
        fma = self.unit(schedule) == "fma"
        return math.ceil(tiles * (FMA_REGS_PER_RESULT if fma else 1))

    def least_regs_per_thread_of(self, schedule: Schedule) -> int:
        """A lower bound of the registers per thread without which tiles are spilled."""
        return math.ceil(self._regs(*self._numbers(schedule)))

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
        visited_keys: int | None = None,
        key_tiles: int | None = None,
    ) -> Figures:
        """Bytes and FLOPs of one launch; the last five arguments are per batch and query head.

        schedule: None where the formulas have no tiles (naive). visited_tiles: with query tiles of
        its `positions`, in which heads share what they load. first_visits: (query tile, split)
        pairs with a visited tile, key_tiles: those that the outer loop walks; only flash1 asks for
        either. visited_keys: those of visited key tiles. None: all of them.
        """
        splits = schedule.splits_for(shape.kv_len) if schedule else 1
        if first_visits is None:
            first_visits = 0
            if schedule is not None:
                first_visits = -(-shape.q_len // schedule.block_m) * splits
        shared = 1.0
        if schedule is not None and shape.q_heads:
            shared = schedule.tile_heads(shape.q_heads, shape.kv_heads) / shape.q_heads
        if key_tiles is None:
            key_tiles = -(-shape.kv_len // schedule.block_n) if schedule is not None else 0
        numbers = (
            *self._numbers(schedule),
            splits,
            shape.batch,
            shape.q_heads,
            shape.kv_heads,
            shape.q_len,
            shape.kv_len,
            visited_tiles if shared == 1 else visited_tiles * shared,
            visible_pairs,
            min(first_visits, visited_tiles),
            shape.kv_len if visited_keys is None else visited_keys,
            key_tiles,
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
    def _kept(self) -> dict[tuple[MatmulUnit, TritonVersion | None, bool], Callable[..., float]]:
        """What `_smem` has compiled."""
        return {}

    @cached_property
    def _regs(self) -> Callable[..., float]:
        return function(_SCHEDULE, regs_per_thread(self.graph, self.problem.target.warp_size))

    @cached_property
    def _launch(self) -> Callable[..., tuple[float, ...]]:
        return _launch_function((self.graph, *self.others))


@cache
def _launch_function(graphs: tuple[TileGraph, ...]) -> Callable[..., tuple[float, ...]]:
    """The sums over all kernels of `LAUNCH_FORMULAS`, in one function."""
    sums = [sp.Add(*(of(graph) for graph in graphs)) for of in LAUNCH_FORMULAS.values()]
    return functions(_LAUNCH, sums)


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
    VISITED_KEYS,
    WALKED_KEY_TILES,
)
