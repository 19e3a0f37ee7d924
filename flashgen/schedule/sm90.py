"""The family gluon_sm90: what its kernels need, when they can be used, what serves beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashgen.passes.visibility import visibility
from flashgen.problem import Problem
from flashgen.schedule.model import Rejection, Schedule, Sm90

# Consumer warpgroups -> registers a thread of a consumer and of the producer: 64 Ki of an SM.
REGISTERS: Mapping[int, tuple[int, int]] = {2: (240, 24), 3: (160, 32)}
ROWS = 64  # of a consumer warpgroup
MAX_HEAD_DIM = 256
MAX_STAGES = 4
BLOCKS_N: tuple[int, ...] = (64, 128)


def check(schedule: Schedule, problem: Problem) -> Rejection | None:
    """Why a schedule of the family cannot be used for `problem`, or None if it can."""
    return next(_rejections(schedule, problem), None)


def _rejections(schedule: Schedule, problem: Problem) -> Iterator[Rejection]:
    yield from _unserved(problem)
    own = schedule.sm90 or Sm90()
    if schedule.kernel != "loop":
        yield Rejection("kernel of gluon_sm90: single_tile", 0, 0, "not served")
    if schedule.block_m not in {ROWS * consumers for consumers in REGISTERS}:
        yield Rejection("block_m of gluon_sm90", schedule.block_m, 0, "128 or 192")
    warps = 4 * (schedule.consumers + 1)
    if schedule.num_warps != warps:
        yield Rejection("num_warps of gluon_sm90", schedule.num_warps, warps, "exactly")
    if schedule.block_n not in BLOCKS_N:
        yield Rejection("block_n of gluon_sm90", schedule.block_n, 0, "64 or 128")
    if schedule.num_stages > MAX_STAGES:
        yield Rejection("num_stages", schedule.num_stages, MAX_STAGES)
    if schedule.maxnreg is not None:
        yield Rejection("maxnreg of gluon_sm90", schedule.maxnreg, 0, "not served")
    if schedule.num_kv_splits != 1:
        yield Rejection("num_kv_splits of gluon_sm90", schedule.num_kv_splits or 0, 1, "exactly")
    if own.q_buffers > 1 and own.scheduler == "grid":
        yield Rejection("q_buffers of a grid", own.q_buffers, 1)
    if own.q_buffers > MAX_Q_BUFFERS:
        yield Rejection("q_buffers", own.q_buffers, MAX_Q_BUFFERS)
    if not own.separate_out and problem.head_dim_qk_padded != problem.head_dim_v_padded:
        yield Rejection("separate_out where head dims differ", 0, 1, "at least")
    smem, limit = smem_bytes(schedule, problem), problem.target.smem_per_block_bytes
    if smem > limit:
        yield Rejection("smem_bytes", smem, limit)
    regs, share = least_regs_per_thread(schedule, problem), REGISTERS[schedule.consumers][0]
    if regs > share:
        yield Rejection("regs_per_thread", regs, share)


MAX_Q_BUFFERS = 2


def _unserved(problem: Problem) -> Iterator[Rejection]:
    """What the family does not serve, whatever the schedule."""
    spec, target = problem.spec, problem.target
    if target.arch != "sm_90":
        yield Rejection(f"family gluon_sm90 on {target.arch}", 0, 0, "not served")
    if spec.dtype.q not in {"fp16", "bf16"} or not spec.dtype.q == spec.dtype.kv == spec.dtype.out:
        yield Rejection(f"dtype {spec.dtype.q} of gluon_sm90", 0, 0, "not served")
    if spec.loop_order == "flash1":
        yield Rejection("loop_order flash1 of gluon_sm90", 0, 0, "not served")
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        yield Rejection("head_dim of gluon_sm90", widest, MAX_HEAD_DIM)
    if spec.kv_lens != "none":
        yield Rejection("kv_lens of gluon_sm90", 0, 0, "not served")
    spans = visibility(spec).spans
    if len(spans) != 1:
        yield Rejection("key ranges of a query tile in gluon_sm90", len(spans), 1, "exactly")
    if any(span.period for span in spans):
        yield Rejection("chunks of keys in gluon_sm90", 0, 0, "not served")
    if any(span.scan for span in spans):
        yield Rejection("documents in gluon_sm90", 0, 0, "not served")


def smem_bytes(schedule: Schedule, problem: Problem) -> int:
    """Shared memory of one program: tiles of q, k, v and output, barriers, and what roles share."""
    own = schedule.sm90 or Sm90()
    tiles = ROWS * schedule.consumers * own.q_buffers * problem.head_dim_qk_padded
    tiles += (
        schedule.num_stages
        * schedule.block_n
        * (problem.head_dim_qk_padded + problem.head_dim_v_padded)
    )
    if own.separate_out:
        tiles += ROWS * schedule.consumers * problem.head_dim_v_padded
    barriers = 2 * schedule.consumers * own.q_buffers + 4 * schedule.num_stages
    return tiles * problem.elem_bytes + 8 * barriers


def least_regs_per_thread(schedule: Schedule, problem: Problem) -> int:
    """Registers that a consumer cannot do without: accumulator, scores, and probs as an operand."""
    per_warpgroup = ROWS * (problem.head_dim_v_padded + schedule.block_n + schedule.block_n // 2)
    return per_warpgroup // 128


def portable_schedule(problem: Problem) -> Schedule:
    """The portable kernel beside a Hopper kernel, for tensors that TMA cannot take."""
    wide = max(problem.head_dim_qk_padded, problem.head_dim_v_padded) > 128
    return Schedule(block_m=64, block_n=32 if wide else 64, num_warps=4, num_stages=2)
