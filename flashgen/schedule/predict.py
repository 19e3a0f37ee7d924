"""How long a launch takes, estimated well enough to rank schedules: a roofline with its losses.

A program's walk is a chain: multiply, softmax, multiply, rescale, and what the loop itself costs;
the sum is the latency L of one key tile. An SM that holds p programs overlaps their chains until
one of its units is busy all the time: with R the longest time that a tile keeps one unit busy, p
tiles take L + (p - 1)·R (the bound of a closed queue whose customers do not wait for each other
more than they must). From there, programs fill the SMs wave by wave, the last one perhaps not
full, and the whole cannot be faster than its bytes from device memory.

Cycles are those of the clock that the target's rates were stated for. `Costs` holds what is not in
the catalogue; its numbers were fitted to times measured on an H200 (tiles of `schedule/space.py`,
with and without a causal mask: within 12% at head_dim 128 and 256), and stand for other GPUs until
those are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import sympy as sp

from flashgen.passes.count import Inputs, Visits, Walks, visible_pairs, visits, walks
from flashgen.passes.lowering import Kernel
from flashgen.problem import Problem
from flashgen.schedule.budget import Budget, budget_for
from flashgen.schedule.dram import dram_bytes_model, for_shape, grid_programs
from flashgen.schedule.model import HOPPER, Schedule
from flashgen.schedule.predict_sm90 import hopper_work
from flashgen.schedule.roofline import matmul_rate
from flashgen.schedule.space import programs_per_sm, regs_limit
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.spec.symbolic import score_expression


@dataclass(frozen=True)
class Costs:
    """Cycles and rates that no catalogue has. Rates are per cycle and SM."""

    launch_us: float = 2.5
    program: float = 5500.0  # addresses, loop bounds, a last wait, beside its own loads and stores
    step: float = 180.0  # barriers and waiting for copies and matmuls, for each key tile
    exps: float = 16.0
    instructions: float = 128.0
    softmax: float = 2.5  # instructions a score beside its exponential
    mask: float = 6.0  # instructions a score of a partial tile
    l2_bytes: float = 44.0
    smem_bytes: float = 128.0
    load_latency: float = 1000.0
    exchange: float = 250.0  # probabilities or row sums change hands between warps
    spilled_bytes: float = 96.0
    thrift: float = 45.0  # registers that a kernel with a cap does without before it spills
    mma_share: float = 0.6  # of the wgmma rate, by warp-level instructions on sm_90
    memory_share: float = 0.87  # of the catalogue's bandwidth


COSTS = Costs()
TRANSCENDENTAL = (sp.exp, sp.log, sp.tanh)
WGMMA_ROWS, MMA_ROWS, MMA_DEPTH = 64, 16, 16


@dataclass(frozen=True)
class Machine:
    """What the compiler said of a kernel, where it was compiled: better than an estimate."""

    regs_per_thread: int
    spill_bytes: int


@dataclass(frozen=True)
class Step:
    """One key tile of one program, in cycles: its parts, and what is left when it runs alone.

    `matmul`, `softmax`, `rescale`, `copy` keep a unit busy; `waiting` keeps none.
    """

    matmul: float
    softmax: float
    rescale: float
    copy: float
    waiting: float

    @property
    def latency(self) -> float:
        """Of the chain; copies run beside it."""
        return self.matmul + self.softmax + self.rescale + self.waiting

    @property
    def busiest(self) -> float:
        """The longest time that one unit is busy."""
        return max(self.matmul, self.softmax + self.rescale, self.copy)

    def rounds(self, programs: int) -> float:
        """Cycles in which each of `programs` on one SM is done with one key tile."""
        return self.latency + (programs - 1) * self.busiest


@dataclass(frozen=True)
class Prediction:
    """A launch's time and where it goes.

    per_sm: programs that an SM holds; waves: how often all SMs are filled; compute_us: of the walks
    on the SMs; memory_us: of the bytes from device memory; launch_us on top of the longer of them.
    """

    step: Step
    per_sm: int
    programs: int
    waves: float
    compute_us: float
    memory_us: float
    launch_us: float

    @property
    def time_us(self) -> float:
        """Both at once are a little slower than the longer of them."""
        longer = max(self.compute_us, self.memory_us)
        shorter = min(self.compute_us, self.memory_us)
        if not longer:
            return self.launch_us
        return self.launch_us + longer * (1 + (shorter / longer) ** 4) ** 0.25

    @property
    def bound(self) -> str:
        return "compute" if self.compute_us >= self.memory_us else "memory"


def predicted_time_us(
    problem: Problem, schedule: Schedule, shape: Shape, *, machine: Machine | None = None
) -> float:
    """Microseconds of one launch, for ranking schedules: see the module for what is in it."""
    return predict(problem, schedule, shape, machine=machine).time_us


def predict(
    problem: Problem,
    schedule: Schedule,
    shape: Shape,
    *,
    inputs: Inputs | None = None,
    machine: Machine | None = None,
    costs: Costs = COSTS,
) -> Prediction:
    """The prediction with its parts; inputs: what the mask reads, where it is known."""
    schedule = for_shape(problem, schedule, shape)
    needs = budget_for(problem, schedule)
    tile, splits = (schedule.positions, schedule.block_n), schedule.splits_for(shape.kv_len)
    walked = _walks(problem.spec, shape, *tile, inputs, schedule.kernel)
    seen = _visits(problem.spec, shape, *tile, splits, inputs, schedule.kernel)
    figures = needs.figures(
        schedule,
        shape,
        visited_tiles=seen.tiles,
        visible_pairs=_visible_pairs(problem.spec, shape)
        if inputs is None
        else visible_pairs(problem.spec, shape, inputs),
        first_visits=seen.first_visits,
        visited_keys=seen.keys,
        key_tiles=seen.key_tiles,
    )
    dram = dram_bytes_model(problem, schedule, shape, figures, seen)
    programs, target = grid_programs(schedule, shape), problem.target
    if schedule.family == HOPPER:
        step, per_sm, cycles, waves = _on_hopper(problem, schedule, shape, walked, inputs)
    else:
        heads = shape.batch * shape.q_heads
        moved = figures.tile_traffic_bytes / max(1, heads * seen.tiles)
        step = _step(needs, schedule, walked, moved, machine, costs)
        fixed = _fixed_cycles(problem, schedule, costs)
        per_sm = _per_sm(needs, schedule, machine)
        cycles, waves = _makespan(problem, schedule, walked, splits, programs, per_sm, step, fixed)
    return Prediction(
        step=step,
        per_sm=per_sm,
        programs=programs,
        waves=waves,
        compute_us=1e6 * cycles / target.clock_hz,
        memory_us=1e6 * dram.total_bytes / (costs.memory_share * target.dram_bytes_per_s),
        launch_us=costs.launch_us * len((needs.graph, *needs.others)),
    )


def _on_hopper(
    problem: Problem, schedule: Schedule, shape: Shape, walked: Walks, inputs: Inputs | None
) -> tuple[Step, int, float, float]:
    """(step of a warpgroup, programs an SM holds, cycles, waves) of the family gluon_sm90."""
    positions = WGMMA_ROWS // schedule.packed_heads
    rows = _walks(problem.spec, shape, positions, schedule.block_n, inputs)
    found = hopper_work(
        problem,
        schedule,
        shape,
        of_tiles=walked,
        of_warpgroups=rows,
        score_work=_score_work(problem, tanh=1 if problem.spec.dtype.q == "bf16" else 2),
    )
    step = Step(found.matmul, found.softmax, 0.0, found.copy, found.waiting)
    return step, 1, found.cycles, found.waves


def _walks(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    inputs: Inputs | None,
    kernel: Kernel = "loop",
) -> Walks:
    if inputs is None:
        return _walks_unknown(spec, shape, block_m, block_n, kernel=kernel)
    return walks(spec, shape, block_m, block_n, inputs, kernel=kernel)


def _visits(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    num_kv_splits: int,
    inputs: Inputs | None,
    kernel: Kernel,
) -> Visits:
    if inputs is None:
        return _visits_unknown(spec, shape, block_m, block_n, num_kv_splits, kernel)
    return visits(spec, shape, block_m, block_n, inputs, num_kv_splits=num_kv_splits, kernel=kernel)


# Inputs not known: many schedules share a tile.
_walks_unknown = cache(walks)


@cache
def _visits_unknown(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    num_kv_splits: int,
    kernel: Kernel,
) -> Visits:
    return visits(spec, shape, block_m, block_n, num_kv_splits=num_kv_splits, kernel=kernel)


@cache
def _visible_pairs(spec: AttentionSpec, shape: Shape) -> int:
    """The same for every schedule; 4 s for 16,384 x 16,384 pairs that no closed form counts."""
    return visible_pairs(spec, shape)


# **** one key tile ****


def _step(
    needs: Budget,
    schedule: Schedule,
    walked: Walks,
    moved: float,
    machine: Machine | None,
    costs: Costs,
) -> Step:
    scores = schedule.block_m * schedule.block_n
    exps, instructions = _score_work(needs.problem)
    instructions += costs.softmax + costs.mask * walked.partial_share
    softmax = scores * (exps / costs.exps + instructions / costs.instructions)
    matmul = _matmul_cycles(needs, schedule, costs)
    rescale = schedule.block_m * needs.problem.head_dim_v_padded / costs.instructions
    copy = moved / costs.l2_bytes
    waiting = costs.step + _exchange(needs, schedule, costs)
    waiting += _spill_cycles(needs, schedule, machine, costs)
    chain = matmul + softmax + rescale + waiting
    return Step(
        matmul=matmul,
        softmax=softmax,
        rescale=rescale,
        copy=copy,
        waiting=waiting + _exposed(schedule.num_stages, chain, copy, costs),
    )


def _score_work(problem: Problem, tanh: int = 2) -> tuple[float, float]:
    """(exponentials and the like, other instructions) of a score, the softmax's own included.

    tanh: how many of these one is: an exponential and a division, or an instruction of its own.
    """
    score = score_expression(problem.spec)
    functions = [f for f in sp.preorder_traversal(score) if isinstance(f, TRANSCENDENTAL)]
    slow = sum(tanh if isinstance(f, sp.tanh) else 1 for f in functions)
    return 1.0 + slow, float(sp.count_ops(score))


def _matmul_cycles(needs: Budget, schedule: Schedule, costs: Costs) -> float:
    """Both matmuls, with what small tiles cost: operands come from shared memory."""
    problem, unit = needs.problem, needs.unit(schedule)
    target, bytes_ = problem.target, problem.kv_elem_bytes
    rate = matmul_rate(target, problem.spec.dtype.q) / target.sm_count / target.clock_hz
    block_m, block_n = schedule.block_m, schedule.block_n
    dims = (problem.head_dim_qk_padded, problem.head_dim_v_padded)
    flops = 2.0 * block_m * block_n * sum(dims)
    if unit in ("fma", "mfma"):
        return flops / rate
    if unit in ("wgmma", "tcgen05"):
        # Each instruction of 64 rows reads its part of q and all of k, of v only v.
        groups = max(1.0, schedule.num_warps / 4 / (block_m / WGMMA_ROWS))
        row_tiles = max(1.0, block_m / WGMMA_ROWS)
        reads_q = groups * block_m * dims[0] * bytes_ / costs.smem_bytes
        reads_k = row_tiles * block_n * dims[0] * bytes_ / costs.smem_bytes
        first = max(2.0 * block_m * block_n * dims[0] / rate, reads_q + reads_k)
        reads_v = row_tiles * block_n * dims[1] * bytes_ / costs.smem_bytes
        return first + max(2.0 * block_m * block_n * dims[1] / rate, reads_v)
    # Each warp reads the columns that it multiplies with its 16 rows.
    along_m = min(schedule.num_warps, max(1, block_m // MMA_ROWS))
    along_n = schedule.num_warps / along_m
    reads = along_m * block_n * sum(dims) * bytes_ + along_n * block_m * dims[0] * bytes_
    return max(flops / rate / costs.mma_share, reads / costs.smem_bytes)


def _exchange(needs: Budget, schedule: Schedule, costs: Costs) -> float:
    """Where warps share rows, row sums and probabilities pass through shared memory."""
    rows = schedule.num_warps * MMA_ROWS
    if needs.unit(schedule) == "fma" or rows <= schedule.block_m:
        return 0.0
    return costs.exchange


def _exposed(num_stages: int, chain: float, copy: float, costs: Costs) -> float:
    """Cycles in which a program waits for its next tiles: they are asked for some tiles ahead."""
    if num_stages <= 1:
        return 2 * costs.load_latency + copy
    return max(0.0, costs.load_latency + copy - (num_stages - 1) * chain)


def _spill_cycles(
    needs: Budget, schedule: Schedule, machine: Machine | None, costs: Costs
) -> float:
    """Registers that do not fit are stored and loaded again, once a key tile."""
    threads = schedule.num_warps * needs.problem.target.warp_size
    if machine is not None:
        spilled = float(machine.spill_bytes)
    else:
        thrift = 0.0 if schedule.maxnreg is None else costs.thrift
        limit = regs_limit(schedule, needs.problem) + thrift
        spilled = 4 * max(0.0, _wanted_regs(needs, schedule) - limit)
    return 2 * spilled * threads / costs.spilled_bytes


def _wanted_regs(needs: Budget, schedule: Schedule) -> float:
    """Registers that a thread would like to have; where there are fewer, it spills.

    Beside the tiles: addresses of the copies of keys and values, 16 bytes each, positions and masks
    of the scores, and a part that depends on the unit. Fitted to what Triton 3.6 and ptxas made of
    70 schedules at head_dim 64 and 128 on sm_90: within 60 of registers and spills in nine of ten.
    """
    problem, unit = needs.problem, needs.unit(schedule)
    tiles = needs.regs_per_thread_of(schedule)
    if unit == "fma":
        return tiles + 60.0
    threads = schedule.num_warps * problem.target.warp_size
    key_bytes = (problem.head_dim_qk_padded + problem.head_dim_v_padded) * problem.kv_elem_bytes
    copies = schedule.block_n * key_bytes / 16 / threads
    if unit in ("wgmma", "tcgen05"):
        return tiles + 60 + 3 * copies + 0.75 * schedule.block_m * schedule.block_n / threads
    return tiles + 90 + 4 * copies + 1.2 * schedule.block_m


# **** the grid ****


def _fixed_cycles(problem: Problem, schedule: Schedule, costs: Costs) -> float:
    """What a program does once: its rows in and out; nothing hides its first key tile."""
    rows = problem.head_dim_qk * problem.elem_bytes + problem.head_dim_v * problem.out_elem_bytes
    keys = (problem.head_dim_qk + problem.head_dim_v) * problem.kv_elem_bytes
    moved = schedule.block_m * rows + schedule.block_n * keys
    return costs.program + costs.load_latency + moved / costs.l2_bytes


def _per_sm(needs: Budget, schedule: Schedule, machine: Machine | None) -> int:
    """Programs that an SM holds; with the compiler's registers where they are known."""
    regs = min(_wanted_regs(needs, schedule), regs_limit(schedule, needs.problem))
    if machine is not None:
        regs = machine.regs_per_thread
    target = needs.problem.target
    threads = schedule.num_warps * target.warp_size
    found = programs_per_sm(schedule, needs.problem)
    found["registers"] = target.regs_per_sm // (threads * 8 * math.ceil(regs / 8))
    return max(1, min(found.values()))


def _makespan(
    problem: Problem,
    schedule: Schedule,
    walked: Walks,
    splits: int,
    programs: int,
    per_sm: int,
    step: Step,
    fixed: float,
) -> tuple[float, float]:
    """(cycles, waves) from the first program to the last."""
    sms = problem.target.sm_count
    if not programs:
        return 0.0, 0.0
    mean, longest = walked.mean, float(walked.longest)
    if schedule.keys_outside:
        mean = longest = walked.total / splits

    def duration(tiles: float, at_once: int) -> float:
        return fixed + tiles * step.rounds(at_once)

    waves = programs / (sms * per_sm)
    full, rest = divmod(programs, sms * per_sm)
    last = math.ceil(rest / sms)
    if longest <= 1.02 * mean:
        return full * duration(mean, per_sm) + (duration(mean, last) if last else 0.0), waves
    if not full:
        return duration(longest, last), waves
    # Programs of different lengths leave no waves; heavy ones start first, light ones fill the end.
    spread = waves * duration(mean, per_sm) + 0.25 * duration(mean, per_sm)
    return max(spread, duration(longest, per_sm)), waves
