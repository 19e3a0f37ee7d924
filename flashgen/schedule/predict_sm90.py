"""What a launch of the family gluon_sm90 costs on its SMs; `predict.py` adds memory and the launch.

An SM holds one program or two, whose consumer warpgroups each walk the key tiles of their own 64
rows: positions of one head, or fewer of each of `packed_heads`, which share the walk. A step of one
of them is two matmuls and a softmax. Other warpgroups' matmuls hide softmaxes, the better the more
warpgroups there are: matmul and softmax add up as a p-norm, with p by their number.
That gives the family's share of the peak rate by head dim, 0.6 at 64, 0.76 at 128, 0.85 at 256
(for long sequences without a mask). What tiles of queries cost beside their steps depends on who
hands them out: a program for each tile begins anew each time, one that stays loads ahead.

`HopperCosts` was fitted to 338 times measured on an H200 (two runs of suite `fa-paper` before the
one of `benchmarks/nvidia-h200/fa-paper.json`: three head dims, 512 to 16k keys, causal or not,
windows, scores): 4.4% off in the mean square, 25% at the most (softcap), but for documents, whose
ids it does not see. `burst` and the tiles of static and dynamic schedulers were fitted anew to the
record itself, 158 times, 4.1% off. It stands for other Hopper GPUs until those are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from flashgen.dtypes import get_dtype
from flashgen.passes.count import Walks
from flashgen.passes.visibility import visibility
from flashgen.problem import Problem
from flashgen.schedule import sm90
from flashgen.schedule.model import Schedule, Scheduler, Sm90
from flashgen.schedule.roofline import matmul_rate
from flashgen.spec.model import Shape

Cycles = NDArray[np.float64]
SMALL_GROUP_BYTES = 4 << 20  # K and V of heads side by side that come without a wait
MOST_DEALT = 2**20  # query tiles that are dealt out one by one; the first ones stand for more


@dataclass(frozen=True)
class HopperCosts:
    """Cycles and rates that no catalogue has. Rates are per cycle and SM."""

    overlap: Mapping[int, float] = field(  # consumer warpgroups of an SM -> p of the p-norm
        hash=False, default_factory=lambda: {2: 1.737, 3: 2.388, 4: 2.895}
    )
    in_turn: float = 1.02  # of a step whose products do not overlap
    direct_out: float = 1700.0  # a query tile's: stores that nothing hides
    crowding: float = 0.012  # of the time of a step's copy: it meets the operands in shared memory
    step: float = 69.0  # barriers of a key tile, for each warpgroup
    ring: float = 2.0  # a step's, for one stage: that more are a little better was not measured
    # What a query tile costs beside its steps and half of its rows in and out.
    tile: Mapping[Scheduler, float] = field(
        hash=False, default_factory=lambda: {"grid": 8210.0, "static": 2860.0, "dynamic": 2660.0}
    )
    piped: float = 45.0  # less: the next tile's first scores come under this tile's last product
    shared_out: float = 5140.0  # a program that stays waits for output to leave q's buffer
    exps: float = 16.0
    instructions: float = 128.0
    softmax: float = 1.44  # instructions a score beside its exponential
    operation: float = 0.9  # instructions for each operation of the score pipeline
    mask: float = 2.95  # instructions a score of a partial tile
    dense_bytes: float = 25.0  # of inputs with an element for each score: loads that nothing hides
    l2_bytes: float = 42.4
    load_latency: float = 850.0
    # Of the time in which memory brings what the first tiles of a group of heads see, what nothing
    # hides: all SMs wait for it at once. A tenth between groups of 4 and 32 MiB at d256, 512 keys.
    burst: float = 0.2


HOPPER_COSTS = HopperCosts()
# Registers of a consumer beside its tiles, as ptxas of Triton 3.7 needed them in 94 kernels of
# plain attention (head dims 64 and 128, with and without a causal mask).
OTHER_REGS, MASK_REGS, OWN_OUT_REGS, DIRECT_OUT_REGS = 28, 6, -2, -6
SCHEDULER_REGS: Mapping[Scheduler, int] = {"grid": 0, "static": 4, "dynamic": 5}


@dataclass(frozen=True)
class HopperWork:
    """Cycles of a step of one warpgroup, by its parts, and from the first program to the last.

    `waiting` is what neither unit works on; `waves`: how often all SMs get a query tile.
    """

    matmul: float
    softmax: float
    copy: float
    waiting: float
    cycles: float
    waves: float


def hopper_work(
    problem: Problem,
    schedule: Schedule,
    shape: Shape,
    *,
    of_tiles: Walks,
    of_warpgroups: Walks,
    score_work: tuple[float, float],
    costs: HopperCosts = HOPPER_COSTS,
) -> HopperWork:
    """Of one launch. of_tiles: the walks of query tiles of `positions`, of_warpgroups: of what 64
    rows have of these; score_work: exponentials and the like of a score, and other operations."""
    matmul, softmax, copy, step = _step(problem, schedule, score_work, costs, shape.q_len)
    masked = costs.mask * sm90.ROWS * schedule.block_n / costs.instructions
    partial = of_warpgroups.total - of_warpgroups.full
    steps = (of_warpgroups.total * step + partial * masked) / max(1, of_tiles.query_tiles)
    cycles, waves = _makespan(problem, schedule, shape, of_tiles, steps, costs)
    cycles += costs.burst * _bursts(problem, schedule, shape, of_tiles)
    hidden = (matmul**2 + softmax**2) ** 0.5
    return HopperWork(matmul, softmax, copy, max(0.0, step - hidden), cycles, waves)


def likely_spills(schedule: Schedule, problem: Problem) -> bool:
    """Whether a consumer wants more registers than it has, for all that is known uncompiled: what
    spills is refused where it is compiled, so times are those of kernels that do not."""
    own, consumers = schedule.sm90 or Sm90(), schedule.consumers
    masked = visibility(problem.spec).predicate != sp.true
    wanted = sm90.least_regs_per_thread(schedule, problem) + OTHER_REGS
    wanted += SCHEDULER_REGS[own.scheduler] + MASK_REGS * masked + OWN_OUT_REGS * own.separate_out
    wanted += DIRECT_OUT_REGS * own.direct_out
    if own.q_buffers > 1:  # the next tile's scores in the place of this one's probabilities
        wanted += sm90.ROWS * schedule.block_n // 256
        if masked and consumers > min(sm90.CONSUMERS):  # all of these spilled
            return True
    return wanted > sm90.REGISTERS[consumers, own.programs_per_sm][0]


def _step(
    problem: Problem,
    schedule: Schedule,
    score_work: tuple[float, float],
    costs: HopperCosts,
    q_len: int,
) -> tuple[float, float, float, float]:
    """(matmul, softmax, copy, all of it): a key tile of one warpgroup. Those without rows of a
    short call hide nothing."""
    target, dims = problem.target, problem.head_dim_qk_padded + problem.head_dim_v_padded
    rate = matmul_rate(target, problem.spec.dtype.q) / target.sm_count / target.clock_hz
    exps, operations = score_work
    scores = sm90.ROWS * schedule.block_n
    matmul = 2.0 * scores * dims / rate
    instructions = costs.softmax + costs.operation * operations
    softmax = scores * (exps / costs.exps + instructions / costs.instructions)
    softmax += scores * _dense_bytes(problem) / costs.dense_bytes
    own = schedule.sm90 or Sm90()
    consumers = min(schedule.consumers, math.ceil(q_len * schedule.packed_heads / sm90.ROWS) or 1)
    consumers *= own.programs_per_sm
    p = costs.overlap.get(consumers, 1.0)
    copy = schedule.block_n * dims * problem.kv_elem_bytes / costs.l2_bytes
    step = (matmul**p + softmax**p) ** (1 / p) + costs.step + costs.ring / schedule.num_stages
    step *= 1.0 if own.overlapped else costs.in_turn
    step += costs.crowding * copy / schedule.consumers
    ahead = (schedule.num_stages - 1) * step * consumers
    step += max(0.0, costs.load_latency + copy - ahead) / consumers
    return matmul, softmax, copy, max(step, copy / schedule.consumers)


def _dense_bytes(problem: Problem) -> float:
    """Of inputs with an element for each score."""
    return sum(
        float(get_dtype(each.dtype).bytes)
        for each in problem.spec.inputs
        if "q_len" in each.shape and each.shape[-1] == "kv_len"
    )


def _makespan(
    problem: Problem,
    schedule: Schedule,
    shape: Shape,
    walked: Walks,
    steps: float,
    costs: HopperCosts,
) -> tuple[float, float]:
    """(cycles, waves); steps: cycles of all steps of the mean query tile."""
    own, sms = schedule.sm90 or Sm90(), problem.target.sm_count
    heads = shape.batch * schedule.tile_heads(shape.q_heads, shape.kv_heads)
    rows = walked.query_tiles
    if not heads * rows:
        return 0.0, 0.0
    fixed = _per_tile(problem, schedule, costs)
    lengths = fixed + _lengths(problem, walked, steps)
    waves = heads * rows / sms
    abreast = heads_abreast(problem, schedule, shape)
    if own.scheduler == "static":
        return _dealt(lengths, heads, abreast, sms), waves
    mean, longest, shortest = (float(f(lengths)) for f in (np.mean, np.max, np.min))
    if longest <= 1.02 * mean:  # alike: the last wave takes as long as a full one
        whole = math.ceil(waves) * mean
        return whole if waves <= 1 else (whole + waves * mean) / 2, waves
    last = (heads % abreast or abreast) * rows / sms  # the last group's heavy tiles come late
    spread = waves * mean + shortest / 2
    return max(spread, max(0.0, waves - last) * mean + longest), waves


def _per_tile(problem: Problem, schedule: Schedule, costs: HopperCosts) -> float:
    """Cycles of a query tile beside its steps."""
    own = schedule.sm90 or Sm90()
    row = problem.head_dim_qk_padded * problem.elem_bytes
    row += problem.head_dim_v_padded * problem.out_elem_bytes
    found = costs.tile[own.scheduler] + schedule.block_m * row / costs.l2_bytes / 2
    if own.q_buffers > 1:
        found -= costs.piped
    if own.direct_out:
        found += costs.direct_out
    elif own.scheduler != "grid" and not own.separate_out:
        found += costs.shared_out
    return found / own.programs_per_sm  # the other one works meanwhile


def _lengths(problem: Problem, walked: Walks, steps: float) -> Cycles:
    """Cycles of a head's query tiles, the longest first, as if their lengths fell evenly: those of
    causal masks do, and a window has few shorter ones."""
    heavy_first = any(span.heavy_last for span in visibility(problem.spec).spans)
    ratio = walked.longest / walked.mean if heavy_first and walked.total else 1.0
    longest = steps * ratio
    shortest = max(0.0, 2 * steps - longest)
    return np.linspace(longest, shortest, walked.query_tiles)


def heads_abreast(problem: Problem, schedule: Schedule, shape: Shape) -> int:
    """Query heads with tiles of their own (`tile_heads`) that are worked on side by side, as the
    module's host code counts them."""
    own = schedule.sm90 or Sm90()
    dims = problem.head_dim_qk + problem.head_dim_v
    head_bytes = max(1, shape.kv_len * dims * problem.kv_elem_bytes)
    heads = schedule.tile_heads(shape.q_heads, shape.kv_heads)
    group = heads // max(1, shape.kv_heads)
    most = shape.batch * heads
    return max(1, min(most, (own.group_mb << 20) // head_bytes * group))


def _bursts(problem: Problem, schedule: Schedule, shape: Shape, walked: Walks) -> float:
    """Cycles in which memory brings what the first tiles of all groups of heads see; of a small
    group nothing counts, since another one is still worked on."""
    abreast = heads_abreast(problem, schedule, shape)
    heads = shape.batch * schedule.tile_heads(shape.q_heads, shape.kv_heads)
    of_group = max(1, heads // max(1, shape.batch * shape.kv_heads))
    keys = min(shape.kv_len, walked.longest * schedule.block_n)
    dims = problem.head_dim_qk + problem.head_dim_v
    first = abreast / of_group * keys * dims * problem.kv_elem_bytes
    rate = problem.target.dram_bytes_per_s / problem.target.clock_hz
    return math.ceil(heads / abreast) * max(0.0, first - SMALL_GROUP_BYTES) / rate


def _dealt(lengths: Cycles, heads: int, abreast: int, sms: int) -> float:
    """The longest sum of tiles where program p gets tiles p, p + sms, … of the order in which the
    kernel numbers them: group of heads by group, in it heavy tiles first, of all its heads."""
    dealt = min(heads, max(abreast, MOST_DEALT // len(lengths)))
    groups = [min(abreast, dealt - first) for first in range(0, dealt, abreast)]
    order = np.concatenate([np.repeat(lengths, group) for group in groups])
    padded = np.concatenate([order, np.zeros(-len(order) % sms)])
    return float(padded.reshape(-1, sms).sum(axis=0).max()) * heads / dealt
