"""The family gluon_sm90: what its kernels need, and when they can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import sympy as sp

from flashgen.dtypes import get_dtype
from flashgen.passes.inputs import collapse_broadcasts
from flashgen.passes.score_tile import score_tile
from flashgen.passes.visibility import Span, visibility
from flashgen.problem import Problem
from flashgen.schedule.model import SCHEDULERS, Bucket, Rejection, Schedule, Sm90
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

# Consumer warpgroups -> registers a thread of a consumer and of the producer: 64 Ki of an SM.
REGISTERS: Mapping[int, tuple[int, int]] = {2: (240, 24), 3: (160, 32)}
ROWS = 64  # of a consumer warpgroup
MAX_HEAD_DIM = 256
MAX_STAGES = 4
MAX_Q_BUFFERS = 2
BLOCKS_N: tuple[int, ...] = (64, 128)
TMA_BYTES = 16  # CUDA driver API, cuTensorMapEncodeTiled: strides and addresses are multiples


def check(schedule: Schedule, problem: Problem, bucket: Bucket | None = None) -> Rejection | None:
    """Why a schedule of the family cannot be used for `problem` (on shapes of `bucket`), or None
    if it can."""
    return next(_rejections(schedule, problem, bucket), None)


def _rejections(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Iterator[Rejection]:
    yield from unserved(problem, bucket)
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
    most = 1 if own.scheduler == "grid" or score_tile(problem.spec) else MAX_Q_BUFFERS
    if own.q_buffers > most:
        what = (
            "where tiles of the score are loaded"
            if own.scheduler != "grid"
            else "of scheduler grid"
        )
        yield Rejection(f"q_buffers {what}", own.q_buffers, most)
    if own.q_buffers > 1 and not own.separate_out:
        yield Rejection("separate_out of more than one q buffer", 0, 1, "at least")
    if not own.separate_out and problem.head_dim_qk_padded != problem.head_dim_v_padded:
        yield Rejection("separate_out where head dims differ", 0, 1, "at least")
    smem, limit = smem_bytes(schedule, problem), problem.target.smem_per_block_bytes
    if smem > limit:
        yield Rejection("smem_bytes", smem, limit)
    regs, share = least_regs_per_thread(schedule, problem), REGISTERS[schedule.consumers][0]
    if regs > share:
        yield Rejection("regs_per_thread", regs, share)


def grid(problem: Problem, bucket: Bucket) -> Iterator[Schedule]:
    """Every schedule of the family for `bucket`, feasible or not; none for short lengths."""
    if is_short(bucket):
        return
    for consumers, block_n, num_stages in product(REGISTERS, BLOCKS_N, range(1, MAX_STAGES + 1)):
        for own in _OWN:
            yield Schedule(
                family="gluon_sm90",
                block_m=ROWS * consumers,
                block_n=block_n,
                num_warps=4 * (consumers + 1),
                num_stages=num_stages,
                sm90=own,
            )


GROUPS_MB = (4, 32)
# A program for one tile has use for one q buffer, and more than one need an output buffer.
_OWN: tuple[Sm90, ...] = tuple(
    Sm90(scheduler=scheduler, q_buffers=q_buffers, separate_out=separate_out, group_mb=group_mb)
    for scheduler, q_buffers, separate_out, group_mb in product(
        SCHEDULERS, range(1, MAX_Q_BUFFERS + 1), (False, True), GROUPS_MB
    )
    if q_buffers == 1 or (separate_out and scheduler != "grid")
)


def is_short(bucket: Bucket) -> bool:
    """Whether tiles of 128 rows and more would be mostly empty, or one tile holds all keys."""
    return bucket.q_len_max is not None or bucket.kernel == "single_tile"


def unserved(problem: Problem, bucket: Bucket | None = None) -> Iterator[Rejection]:
    """What the family does not serve, whatever the schedule."""
    spec, target = problem.spec, problem.target
    if bucket is not None and is_short(bucket):
        yield Rejection("short lengths of gluon_sm90", 0, 0, "not served")
    if target.arch != "sm_90":
        yield Rejection(f"family gluon_sm90 on {target.arch}", 0, 0, "not served")
    if spec.dtype.q not in {"fp16", "bf16"} or not spec.dtype.q == spec.dtype.kv == spec.dtype.out:
        yield Rejection(f"dtype {spec.dtype.q} of gluon_sm90", 0, 0, "not served")
    if spec.loop_order == "flash1":
        yield Rejection("loop_order flash1 of gluon_sm90", 0, 0, "not served")
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        yield Rejection("head_dim of gluon_sm90", widest, MAX_HEAD_DIM)
    yield from _rows_that_tma_cannot_step_by(problem, searched=bucket is not None)
    if spec.kv_lens != "none":
        yield Rejection("kv_lens of gluon_sm90", 0, 0, "not served")
    spans = visibility(spec).spans
    if len(spans) != 1:
        yield Rejection("key ranges of a query tile in gluon_sm90", len(spans), 1, "exactly")
    if any(span.period for span in spans):
        yield Rejection("chunks of keys in gluon_sm90", 0, 0, "not served")
    if any(span.scan and _depends_on_head(span) for span in spans):
        yield Rejection("documents of each head in gluon_sm90", 0, 0, "not served")
    if any(span.scan and span.never_full for span in spans):
        yield Rejection("documents beside a mask of elements in gluon_sm90", 0, 0, "not served")


def _rows_that_tma_cannot_step_by(problem: Problem, *, searched: bool) -> Iterator[Rejection]:
    """Rows of the output lie one after the other; so do those of q and k in most calls, and a
    search is for these."""
    rows = {"output": problem.head_dim_v * problem.out_elem_bytes}
    if searched:
        rows["q and k"] = problem.head_dim_qk * problem.kv_elem_bytes
    for name, row_bytes in rows.items():
        if row_bytes % TMA_BYTES:
            yield Rejection(f"{name} rows of {row_bytes} B in gluon_sm90", 0, 0, "not served")


def _depends_on_head(span: Span) -> bool:
    """Whether which keys a query tile sees differs from head to head."""
    parts = [span.hull.start, span.hull.stop, span.full.start, span.full.stop]
    parts += [span.possible, span.always]
    if span.scan:
        parts += [span.scan.row_read, span.scan.key_read]
    return any(part.has(sym.H, sym.HK) for part in parts)


def smem_bytes(schedule: Schedule, problem: Problem, *, return_lse: bool = True) -> int:
    """Shared memory of one program, exactly as Triton 3.6 to 3.8 allocate it.

    Buffers lie one after the other, largest first, each from a multiple of 16 bytes on; then a byte
    for each warp that is not of the first consumer.
    """
    end = 0
    for size in sorted(_buffers(schedule, problem, return_lse=return_lse), reverse=True):
        end = -(-end // 16) * 16 + size
    return end + schedule.num_warps - 4


def _buffers(schedule: Schedule, problem: Problem, *, return_lse: bool) -> Iterator[int]:
    """Bytes of each buffer: tiles, barriers, the slot of the next tile, what roles are given."""
    own = schedule.sm90 or Sm90()
    q_tiles = schedule.consumers * own.q_buffers
    row_qk, row_v = (
        width * problem.elem_bytes
        for width in (problem.head_dim_qk_padded, problem.head_dim_v_padded)
    )
    yield q_tiles * ROWS * row_qk
    yield schedule.num_stages * schedule.block_n * row_qk
    yield schedule.num_stages * schedule.block_n * row_v
    if own.separate_out:
        yield schedule.consumers * ROWS * row_v
    tile = score_tile(problem.spec)
    if tile is not None:
        ring = schedule.num_stages * schedule.consumers
        yield ring * ROWS * schedule.block_n * get_dtype(tile.tensor.dtype).bytes
        yield from [BARRIER * ring] * 2
    yield from [BARRIER * q_tiles] * 2
    yield from [BARRIER * schedule.num_stages] * 4
    if own.scheduler == "dynamic":
        yield SLOT
        yield from [BARRIER * 2] * 2
    yield OPERANDS
    yield ODD * schedule.consumers
    yield _given_to_roles(problem, own, return_lse=return_lse)


def _only_compared_as_ids(spec: AttentionSpec) -> frozenset[str]:
    """The input of a document scan, where nothing else reads it."""
    seen = visibility(spec)
    scan = next((span.scan for span in seen.spans if span.scan), None)
    if scan is None:
        return frozenset()
    others = collapse_broadcasts(sym.score_expression(spec), spec).atoms(sp.Indexed)
    others |= seen.predicate.atoms(sp.Indexed) - {scan.row_read, scan.key_read}
    return frozenset({scan.name} - {str(read.base) for read in others})


BARRIER = 8
SLOT = 2 * 32 * 4
OPERANDS = 16 * 8  # pointers and strides of q, k and v, for a second walk
ODD = 16  # a number of each warp of a consumer: whether its rows came out right
_NUMBERS = 12  # as an argument: a buffer of numbers
_POINTER, _INT, _RING, _TILES = 8, 4, 16, 28  # as arguments: a ring of barriers, one of tiles


def _given_to_roles(problem: Problem, own: Sm90, *, return_lse: bool) -> int:
    """Bytes of the kernel's arguments and buffers that its roles use, handed over in memory."""
    spec, spans = problem.spec, visibility(problem.spec).spans
    tensor_maps, rings, tiles = 4, 6 + 1, 3 + own.separate_out
    integers = 6 + (spec.heads.group is None) + (own.scheduler != "grid")
    integers += any(span.heavy_last for span in spans)  # which counts tiles from the last
    wide = int(return_lse) + 2 * (spec.sink != "none")
    if own.scheduler == "dynamic":
        rings += 3
        wide += 1
    wide += any(span.scan is not None for span in spans)
    only_ids = _only_compared_as_ids(spec)
    for declared in spec.inputs:
        if declared.name in only_ids:
            continue  # a kernel before leaves its address beside the keys that rows see
        if not declared.shape:
            integers += 1
            continue
        moving = sum(extent != 1 for extent in declared.shape)
        is_dense = "q_len" in declared.shape and declared.shape[-1] == "kv_len"
        wide += 1 + moving - is_dense  # rows that are contiguous need no stride
    if score_tile(spec):
        tensor_maps, rings, tiles = tensor_maps + 1, rings + 2, tiles + 1
    buffers = _NUMBERS + _RING * rings + _TILES * tiles
    return buffers + _POINTER * (tensor_maps + wide) + _INT * integers


def least_regs_per_thread(schedule: Schedule, problem: Problem) -> int:
    """Registers that a consumer cannot do without: accumulator, scores, and probs as an operand."""
    per_warpgroup = ROWS * (problem.head_dim_v_padded + schedule.block_n + schedule.block_n // 2)
    return per_warpgroup // 128
