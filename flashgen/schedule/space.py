"""The single statement of what is feasible: tuner, default and stored configs all ask here.

`check` says why a schedule cannot be used; `enumerate_space` applies it to a grid;
`default_schedule` picks from what is left without measuring anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from flashgen.errors import ScheduleError
from flashgen.ir.symbols import BLOCK_M, BLOCK_N, HEAD_DIM_QK_PADDED, HEAD_DIM_V_PADDED
from flashgen.passes.lower import Order, order_of
from flashgen.problem import MIN_TILE_DIM, Problem
from flashgen.schedule import sm90
from flashgen.schedule.budget import Budget, budget, budget_for
from flashgen.schedule.families import FAMILIES, PORTABLE, families_here, missing_here
from flashgen.schedule.model import HOPPER, Bucket, Family, Rejection, Schedule
from flashgen.schedule.units import MatmulUnit
from flashgen.target import TARGETS, Target

# The family's tiles hold whole rows of q, k and v; wider ones were never calibrated or compiled.
MAX_HEAD_DIM = 512
MAX_STAGES = 4  # flash2; a loop of flash1 is not pipelined, because a barrier is part of each step
# fp32 matmuls are unrolled over the keys of a tile: with more they compile for half a minute.
FMA_MAX_BLOCK_N = 64
TMEM_COLUMNS = 512  # per SM of sm_100: 512 columns of 128 lanes, 4 bytes each

BLOCKS: tuple[int, ...] = (16, 32, 64, 128, 256)
WARPS: tuple[int, ...] = (4, 8)
STAGES: tuple[int, ...] = (1, 2, 3, 4)
ORDERS: tuple[Order, ...] = ("flash2", "flash1")
LAYOUT_HINT_HEAD_DIM = 512  # from here on, a head dim is more likely a length in the wrong place


@dataclass(frozen=True)
class Space:
    """All schedules of a grid: those that can be used, and those that cannot with the reason."""

    feasible: tuple[Schedule, ...]
    rejections: tuple[tuple[Schedule, Rejection], ...]

    def grouped(self) -> dict[str, tuple[tuple[Schedule, Rejection], ...]]:
        """Rejections by reason, most frequent reason first."""
        groups: dict[str, list[tuple[Schedule, Rejection]]] = {}
        for schedule, rejection in self.rejections:
            groups.setdefault(rejection.reason, []).append((schedule, rejection))
        ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        return {reason: tuple(found) for reason, found in ordered}


def check(schedule: Schedule, problem: Problem, bucket: Bucket | None = None) -> Rejection | None:
    """Why `schedule` cannot be used for `problem` (on shapes of `bucket`), or None if it can."""
    if schedule.family == HOPPER:
        return sm90.check(schedule, problem, bucket)
    for rule in (_check_shape, _check_kernel, _check_splits, _check_matmul):
        rejection = rule(schedule, problem, bucket)
        if rejection is not None:
            return rejection
    return _check_resources(schedule, problem)


def enumerate_space(
    problem: Problem, bucket: Bucket, families: tuple[Family, ...] = FAMILIES
) -> Space:
    """The grid of schedules for `bucket`, checked: feasible ones sorted, rejections with reasons.

    The same in every process. A family adds nothing where it does not serve the target, nor with a
    Triton that does not compile it; the untuned choice is one of the portable family's.
    """
    here = families_here(problem.target)
    return _enumerated(problem, bucket, tuple(each for each in families if each in here))


def unserved(family: Family, problem: Problem, bucket: Bucket | None = None) -> str | None:
    """Why a family has no schedule for the spec (in a bucket), whatever its numbers; None: it may
    have one."""
    if family != HOPPER:
        return None
    found = [str(each) for each in sm90.unserved(problem, bucket)]
    return missing_here(family, problem.target) or "; ".join(found) or None


@cache
def _enumerated(problem: Problem, bucket: Bucket, families: tuple[Family, ...]) -> Space:
    twin = _same_limits(problem.target)
    if twin != problem.target:
        return _enumerated(Problem(problem.spec, twin), bucket, families)
    feasible: list[Schedule] = []
    rejections: list[tuple[Schedule, Rejection]] = []
    grid = [*_grid(problem, bucket)] if PORTABLE in families else []
    if HOPPER in families:
        grid += sm90.grid(problem, bucket)
    for schedule in sorted(grid, key=lambda each: each.sort_key):
        rejection = check(schedule, problem, bucket)
        if rejection is None:
            feasible.append(schedule)
        else:
            rejections.append((schedule, rejection))
    if not feasible and bucket.kernel == "single_tile" and PORTABLE in families:
        return _as_loop(problem, bucket, rejections)
    return Space(tuple(feasible), tuple(rejections))


@cache
def default_schedule(problem: Problem, bucket: Bucket) -> Schedule:
    """The untuned choice: a measured one where there is one, else the least estimated cost.

    Short buckets share the choice of a coarser one, so that a build compiles few kernels.
    ScheduleError, with all rejections, says which tile is too large and what would fit.
    """
    if problem.spec.loop_order == "auto":
        from flashgen.schedule.orders import choose_order  # asks here for each order's schedule

        return choose_order(problem, bucket).schedule
    coarser = _coarser(bucket)
    if coarser != bucket:
        return default_schedule(problem, coarser)
    for schedule in _measured(problem, bucket):
        if check(schedule, problem, bucket) is None:
            return schedule
    prudent = _cheapest(problem, bucket)
    if prudent is not None:
        return prudent
    space = enumerate_space(problem, bucket, (PORTABLE,))
    if not space.feasible:
        every = enumerate_space(problem, bucket).rejections
        raise ScheduleError(_nothing_fits(problem, bucket, space), every)
    if bucket.kernel == "single_tile":
        return default_schedule(problem, Bucket(bucket.q_len_max, None))
    return min(space.feasible, key=lambda schedule: (_cost(schedule, problem), schedule))


@cache
def portable_schedule(problem: Problem) -> Schedule:
    """What serves beside a Hopper kernel, for tensors that TMA cannot take: the untuned choice for
    lengths that a Hopper kernel serves, which is the same for all of them."""
    if problem.spec.loop_order == "auto":
        problem = in_order(problem, "flash2")  # the only one that Hopper kernels have
    return default_schedule(problem, Bucket(None, None))


def _cheapest(problem: Problem, bucket: Bucket) -> Schedule | None:
    """The feasible, prudent schedule of least estimated cost; the rest of the grid goes unchecked:
    checking all takes 0.1 s, which a first call would wait for."""
    by_cost = sorted(_grid(problem, bucket), key=lambda each: (_cost(each, problem), each))
    fitting = (each for each in by_cost if check(each, problem, bucket) is None)
    return next((each for each in fitting if _is_prudent(each, problem)), None)


# **** the grid ****


def _grid(problem: Problem, bucket: Bucket) -> Iterator[Schedule]:
    if problem.spec.loop_order == "auto" and bucket.kernel == "loop":
        for order in ORDERS:
            yield from _grid(in_order(problem, order), bucket)
        return
    rows = [m for m in BLOCKS if bucket.q_len_max is None or m <= bucket.q_len_max]
    order = order_of(problem)
    if bucket.kernel == "single_tile":
        assert bucket.kv_len_max is not None
        for block_m in rows:
            for num_warps in WARPS:
                yield Schedule(
                    kernel="single_tile",
                    loop_order=order,
                    block_m=block_m,
                    block_n=bucket.kv_len_max,
                    num_warps=num_warps,
                    num_stages=1,
                )
        return
    caps = (None, 128) if _has_two_blocks_per_sm(problem) else (None,)
    for block_m in rows:
        for block_n in BLOCKS:
            for num_warps in WARPS:
                for num_stages in STAGES if order == "flash2" else (1,):
                    for maxnreg in caps:
                        yield Schedule(
                            loop_order=order,
                            block_m=block_m,
                            block_n=block_n,
                            num_warps=num_warps,
                            num_stages=num_stages,
                            maxnreg=maxnreg,
                            num_kv_splits=None if order == "flash1" else 1,
                        )


@cache
def in_order(problem: Problem, order: Order) -> Problem:
    """The same problem with the loop order decided."""
    return Problem(problem.spec.replace(loop_order=order), problem.target)


@cache
def _same_limits(target: Target) -> Target:
    """The catalogue's first GPU on which the same schedules are feasible, for the same reasons."""
    return next((other for other in TARGETS.values() if _limits(other) == _limits(target)), target)


def _limits(target: Target) -> tuple[object, ...]:
    """All of a target that a check reads."""
    return (
        target.vendor,
        target.arch,
        target.warp_size,
        target.smem_per_block_bytes,
        target.regs_per_sm,
        target.max_regs_per_thread,
        target.max_threads_per_block,
    )


def _as_loop(
    problem: Problem, bucket: Bucket, rejections: list[tuple[Schedule, Rejection]]
) -> Space:
    """The loop kernel handles any number of keys: what is left where one tile is too large."""
    loop = enumerate_space(problem, Bucket(bucket.q_len_max, None), (PORTABLE,))
    return Space(loop.feasible, (*rejections, *loop.rejections))


def _has_two_blocks_per_sm(problem: Problem) -> bool:
    """Whether a cap of 128 registers, for two programs per SM, can pay: d <= 64 on sm_90."""
    narrow = max(problem.head_dim_qk_padded, problem.head_dim_v_padded) <= 64
    return problem.target.arch == "sm_90" and narrow


# **** feasibility ****


def _check_shape(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Rejection | None:
    """Numbers that no kernel of the family can have, whatever the problem."""
    for name in ("block_m", "block_n", "num_warps"):
        value = getattr(schedule, name)
        if value < 1 or value & (value - 1):
            return Rejection(name, value, 0, "power of two")
    for name in ("block_m", "block_n"):
        if getattr(schedule, name) < MIN_TILE_DIM:
            return Rejection(name, getattr(schedule, name), MIN_TILE_DIM, "at least")
    threads = schedule.num_warps * problem.target.warp_size
    if threads > problem.target.max_threads_per_block:
        return Rejection("threads_per_block", threads, problem.target.max_threads_per_block)
    if schedule.num_stages < 1:
        return Rejection("num_stages", schedule.num_stages, 1, "at least")
    deepest = 1 if schedule.loop_order == "flash1" else MAX_STAGES
    if schedule.num_stages > deepest:
        return Rejection("num_stages", schedule.num_stages, deepest)
    return None


def _check_kernel(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Rejection | None:
    """A single tile has no pipeline and must hold all keys of the bucket."""
    if problem.spec.loop_order not in (schedule.loop_order, "auto"):
        return Rejection("loop_order", 0, 0, "as in the spec")
    if schedule.kernel == "loop":
        return None
    if schedule.num_stages > 1:
        return Rejection("num_stages of a single tile", schedule.num_stages, 1)
    if bucket is not None and (bucket.kv_len_max is None or bucket.kv_len_max > schedule.block_n):
        least = bucket.kv_len_max if bucket.kv_len_max is not None else schedule.block_n + 1
        return Rejection("block_n of a single tile", schedule.block_n, least, "at least")
    return None


def _check_splits(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Rejection | None:
    """Only the flash1 loop has programs that share the keys of a head."""
    splits = schedule.num_kv_splits
    if splits is not None and splits < 1:
        return Rejection("num_kv_splits", splits, 1, "at least")
    if splits != 1 and (schedule.loop_order == "flash2" or schedule.kernel == "single_tile"):
        name = f"num_kv_splits of {schedule.kernel} {schedule.loop_order}"
        return Rejection(name, 2 if splits is None else splits, 1)
    return None


def _check_matmul(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Rejection | None:
    """What the matmul instructions and the family's tiles allow."""
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return Rejection("head_dim", widest, MAX_HEAD_DIM)
    if problem.kv_elem_bytes == 1 and schedule.block_n < 2 * MIN_TILE_DIM:
        return Rejection("block_n", schedule.block_n, 2 * MIN_TILE_DIM, "at least")
    return None


def _check_resources(schedule: Schedule, problem: Problem) -> Rejection | None:
    """Shared memory, tensor memory and registers against the target's limits.

    By lower bounds (`benchmarks/compiler`): what is rejected could not be launched, or would spill
    its tiles. What needs more than its bounds shows when it is compiled.
    """
    if schedule.num_kv_splits is None:  # a call may run either kernel
        rejections = (_check_resources(replace(schedule, num_kv_splits=n), problem) for n in (1, 2))
        return next((found for found in rejections if found is not None), None)
    target = problem.target
    needs = budget_for(problem, schedule)
    smem = needs.least_smem_bytes_of(schedule)
    if smem > target.smem_per_block_bytes:
        return Rejection("smem_bytes", smem, target.smem_per_block_bytes)
    if needs.unit(schedule) == "tcgen05":
        columns = _tmem_columns(schedule, problem)
        if columns > TMEM_COLUMNS:
            return Rejection("tmem_columns", columns, TMEM_COLUMNS)
    regs = needs.least_regs_per_thread_of(schedule)
    limit = regs_limit(schedule, problem)
    return Rejection("regs_per_thread", regs, limit) if regs > limit else None


def regs_limit(schedule: Schedule, problem: Problem) -> int:
    """Registers that a thread can have: the hardware's limit, the SM's share, and maxnreg."""
    target = problem.target
    share = target.regs_per_sm // (schedule.num_warps * target.warp_size)
    return min(target.max_regs_per_thread, share, schedule.maxnreg or share)


def _tmem_columns(schedule: Schedule, problem: Problem) -> int:
    """Tensor-memory columns of the accumulator and the scores; 64 rows use half a column."""
    lanes = max(1, schedule.block_m // 128)
    return lanes * (problem.head_dim_v_padded + schedule.block_n)


# **** the default ****


def _is_prudent(schedule: Schedule, problem: Problem) -> bool:
    """Whether it can be used unmeasured: it fits as estimated, not only by lower bounds."""
    needs = budget_for(problem, schedule)
    return (
        not (needs.unit(schedule) == "fma" and schedule.block_n > FMA_MAX_BLOCK_N)
        and needs.smem_bytes_of(schedule) <= problem.target.smem_per_block_bytes
        and needs.regs_per_thread_of(schedule) <= regs_limit(schedule, problem)
    )


def _coarser(bucket: Bucket) -> Bucket:
    """The bucket whose default serves `bucket` as well: launching costs more than idle rows there.

    17 to 64 rows share a tile of 64, up to 64 keys a tile of 64, and where one tile holds all keys
    64 rows are enough for any number of queries: at most 7 kernels for all buckets.
    """
    q_len_max, kv_len_max = bucket.q_len_max, bucket.kv_len_max
    if q_len_max == 32:
        q_len_max = 64
    if bucket.kernel == "loop":
        return Bucket(q_len_max, None)
    if kv_len_max in (16, 32):
        kv_len_max = 64
    return Bucket(q_len_max or 64, kv_len_max)


def _measured(problem: Problem, bucket: Bucket) -> Iterator[Schedule]:
    """Schedules that were timed, or for fp32 compiled, in preference to what a model says.

    sm_90, 16 bits: `_SM90_TILES`, timed on an H200 (bf16, N = 512 to 16k, triton 3.6).
    """
    spec = problem.spec
    if bucket.kernel == "single_tile":
        return
    if order_of(problem) == "flash1":
        yield from _compiled_flash1(problem, bucket)
        return
    if spec.dtype.q == "fp32" and problem.target.vendor == "nvidia":
        widest = max(problem.head_dim_qk_padded, problem.head_dim_v_padded)
        for extent, block_m, block_n, num_stages in _FP32_TILES:
            if widest <= extent and block_m <= (bucket.q_len_max or block_m):
                yield Schedule(block_m=block_m, block_n=block_n, num_warps=8, num_stages=num_stages)
    sixteen_bits = problem.elem_bytes == problem.kv_elem_bytes == 2
    if problem.target.arch != "sm_90" or not sixteen_bits or bucket.q_len_max is not None:
        return
    widest = max(problem.head_dim_qk_padded, problem.head_dim_v_padded)
    for extent, with_score_tiles, block_m, block_n, num_warps, num_stages, maxnreg in _SM90_TILES:
        if widest <= extent and with_score_tiles >= _reads_score_tiles(problem):
            yield Schedule(
                block_m=block_m,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=num_stages,
                maxnreg=maxnreg,
            )


# Padded head dim up to, whether it also serves kernels that read [block_m, block_n] inputs, and the
# schedule. TFLOP/s at N = 512 / 2k / 8k / 16k, no mask; causal (H200, triton 3.6):
#   d64   64x64/4/3/128   350 438 466 469; 209 361 438 450
#         128x64/8/3/128  335 418 449 454; 202 348 427 441
#   d128  64x64/4/3       361 478 519 525; 245 403 486 523
#         128x64/8/3      319 445 490 499; 206 364 455 500
#   d256  128x64/8/2      355 483 522 520; 213 359 468 508
#         128x32/8/3      343 449 486 492; 214 349 428 494
# A causal bias at d128, N = 4k: 128x64/8/3 339, 64x64/4/3 274 (spills 112 bytes).
_SM90_TILES: tuple[tuple[int, bool, int, int, int, int, int | None], ...] = (
    (64, False, 64, 64, 4, 3, 128),
    (128, False, 64, 64, 4, 3, None),
    (128, True, 128, 64, 8, 3, None),
    (256, True, 128, 64, 8, 3, None),  # fits where head_dim_v is smaller (192/128)
    (256, True, 128, 64, 8, 2, None),
    (256, True, 128, 64, 8, 1, None),
)


def _reads_score_tiles(problem: Problem) -> bool:
    """Whether the kernel loads tiles of block_m x block_n: a bias, a dense mask."""
    graph = budget(problem).graph
    return any(tile.staged and tile.shape == (BLOCK_M, BLOCK_N) for tile in graph.tiles)


# fp32: the largest tiles, by padded head dim, that Triton 3.7 compiles (sm_90) to 74 to 208
# registers without spilling; twice the rows spill hundreds of bytes per thread.
_FP32_TILES: tuple[tuple[int, int, int, int], ...] = (
    (64, 64, 32, 2),
    (128, 32, 16, 2),
    (256, 16, 32, 2),
    (512, 16, 16, 1),
)


def _compiled_flash1(problem: Problem, bucket: Bucket) -> Iterator[Schedule]:
    """The tiles of `_FLASH1_TILES` for sm_90; not timed."""
    size = problem.elem_bytes
    if problem.target.arch != "sm_90" or size not in _FLASH1_TILES:
        return
    widest = max(problem.head_dim_qk_padded, problem.head_dim_v_padded)
    for extent, block_m, block_n, num_warps in _FLASH1_TILES[size]:
        if widest <= extent and block_m <= (bucket.q_len_max or block_m):
            yield Schedule(
                loop_order="flash1",
                block_m=block_m,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=1,
                num_kv_splits=None,
            )


# Bytes of an element -> padded head dim up to, block_m, block_n, warps: as many keys as Triton 3.7
# compiles (causal) without spilling more than 72 bytes per thread, because the state of a row is
# read and written once for each key tile.
_FLASH1_TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    2: (
        (64, 64, 128, 8),
        (64, 16, 128, 8),
        (128, 64, 128, 8),
        (128, 16, 128, 8),
        (256, 64, 64, 8),
        (256, 16, 64, 8),
    ),
    4: ((64, 64, 64, 8), (64, 16, 64, 8), (128, 32, 32, 8), (128, 16, 64, 8)),
}
# Accumulator and score registers per thread up to which the compiler was seen not to spill.
_SPILL_FREE: dict[MatmulUnit, int] = {
    "wgmma": 160,
    "tcgen05": 160,
    "mma": 96,
    "mfma": 160,
    "fma": 64,
}
# Registers on top of those: addresses, masks, operands on their way.
_OTHER_REGS: dict[MatmulUnit, int] = {"wgmma": 80, "tcgen05": 80, "mma": 110, "mfma": 80, "fma": 60}
_PIPELINE_COST: dict[int, float] = {1: 0.30, 2: 0.05, 3: 0.0, 4: 0.01}


def _cost(schedule: Schedule, problem: Problem) -> float:
    """Estimated time per score, in arbitrary units: what a tile shape adds to an ideal kernel.

    Weights are chosen so that the measured order of tiles on an H200 and the fastest tile reported
    for d192/128 on sm_86 come out; the roofline itself is the same for all candidates.
    """
    needs = budget_for(problem, schedule)
    unit = needs.unit(schedule)
    block_m, block_n, warps = schedule.block_m, schedule.block_n, schedule.num_warps
    again, per_step = float(block_m), block_n  # keys and values are read again for each query tile
    if schedule.loop_order == "flash1":  # q and the state for each key tile, 10 bytes a dim for 4
        again, per_step = 0.4 * block_n, block_m
    regs = needs.regs_per_thread_of(schedule)
    spilled = max(0, regs - _SPILL_FREE[unit])
    unrolled = 0.3 if unit == "fma" and block_n > 32 else 0.0
    # Warps without 16 rows of their own share work (fma spreads any tile over all threads).
    idle_rows = 1.0 if unit == "fma" else max(1.0, 16 * warps / block_m)
    return (
        16 / again
        + 4 / per_step  # loop, reductions, rescaling
        + (block_m + block_n) / 1024  # masked scores in partial tiles, rows past the end
        + _PIPELINE_COST[schedule.num_stages]
        + 0.01 * spilled
        + unrolled
        + 0.10 * (idle_rows - 1)
        + 0.30 * _idle_share(schedule, needs, regs + _OTHER_REGS[unit])
    )


def _idle_share(schedule: Schedule, needs: Budget, regs: int) -> float:
    """How far an SM is from the 8 resident warps that keep its units busy: 0 to 1."""
    programs = min(_programs_by_resource(schedule, needs, regs).values())
    return max(0.0, 1 - max(1, programs) * schedule.num_warps / 8)


def programs_per_sm(schedule: Schedule, problem: Problem) -> dict[str, int]:
    """Programs that an SM can hold, as far as each resource goes; the least of them counts.

    Registers are estimated: those of tiles and `_OTHER_REGS`. A CUDA SM keeps 1 KiB of shared
    memory of each program for itself.
    """
    needs = budget_for(problem, schedule)
    regs = needs.regs_per_thread_of(schedule) + _OTHER_REGS[needs.unit(schedule)]
    return _programs_by_resource(schedule, needs, regs)


def _programs_by_resource(schedule: Schedule, needs: Budget, regs: int) -> dict[str, int]:
    target = needs.problem.target
    threads = schedule.num_warps * target.warp_size
    limit = regs_limit(schedule, needs.problem)
    return {
        "shared memory": target.smem_per_sm_bytes // (needs.smem_bytes_of(schedule) + 1024),
        "registers": target.regs_per_sm // (threads * min(regs, limit)),
        "threads": target.max_threads_per_sm // threads,
    }


# **** when nothing fits ****


def _nothing_fits(problem: Problem, bucket: Bucket, space: Space) -> str:
    """The message of ScheduleError: the dimension, the limit, what would fit, the usual mistake."""
    by_size = sorted(space.rejections, key=lambda item: (*_size(item[0]), item[0]))
    smallest, rejection = by_size[0]
    dims = problem.spec.head_dim
    head_dim = f"{dims.qk}" if dims.qk == dims.v else f"{dims.qk}/{dims.v}"
    lines = [
        f"{problem.name}: head_dim {head_dim} ({problem.spec.dtype.q}): no schedule fits "
        f"{problem.target.id}",
        f"  the smallest of {len(by_size)} schedules, {smallest}, fails: {rejection}",
    ]
    if rejection.reason == "smem_bytes":
        lines.append(f"  its tiles in shared memory: {_smem_tiles(problem, smallest)}")
        least: dict[str, int] = {}
        for schedule, other in by_size:
            if other.reason == "smem_bytes":
                least.setdefault(f"{schedule.block_m}x{schedule.block_n}", other.required)
        lines.append("  needs by tile: " + ", ".join(f"{t} {b} B" for t, b in least.items()))
    largest = _largest_head_dim(problem, bucket)
    if largest:
        lines.append(f"  hint: the largest head_dim that fits here is {largest}.")
    if max(dims.qk, dims.v) >= LAYOUT_HINT_HEAD_DIM:
        axes = {"bshd": "[batch, length, heads, head_dim]", "packed": "[tokens, heads, head_dim]"}
        expected = axes.get(problem.spec.layout, "[batch, heads, length, head_dim]")
        lines.append(
            f"  hint: is {max(dims.qk, dims.v)} the sequence length? "
            f"q, k and v are {expected} (layout: {problem.spec.layout})."
        )
    return "\n".join(lines)


def _size(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.block_m * schedule.block_n, schedule.num_stages, schedule.num_warps


def _smem_tiles(problem: Problem, schedule: Schedule) -> str:
    """One copy of each shared tile: name, bytes, shape."""
    sizes = {
        BLOCK_M: schedule.block_m,
        BLOCK_N: schedule.block_n,
        HEAD_DIM_QK_PADDED: problem.head_dim_qk_padded,
        HEAD_DIM_V_PADDED: problem.head_dim_v_padded,
    }
    shared = [t for t in budget(problem, schedule.kernel).graph.tiles if t.space == "smem"]
    return ", ".join(
        f"{tile.name} {tile.bytes.xreplace(sizes)} B "
        f"({'x'.join(str(extent.xreplace(sizes)) for extent in tile.shape)})"
        for tile in shared
    )


def _largest_head_dim(problem: Problem, bucket: Bucket) -> int | None:
    """The largest power of two for which the same spec has a feasible schedule; None: none."""
    extent = MAX_HEAD_DIM
    while extent >= MIN_TILE_DIM:
        spec = problem.spec.replace(head_dim=extent)
        if enumerate_space(Problem(spec, problem.target), bucket, (PORTABLE,)).feasible:
            return extent
        extent //= 2
    return None
