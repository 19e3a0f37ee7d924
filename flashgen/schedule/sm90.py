"""The family gluon_sm90: what its kernels need, and when they can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import sympy as sp

from flashgen.dtypes import get_dtype
from flashgen.passes.inputs import collapse_broadcasts
from flashgen.passes.score_tile import score_tile
from flashgen.passes.visibility import Span, visibility
from flashgen.problem import Problem
from flashgen.schedule.model import SCHEDULERS, Bucket, Rejection, Schedule, Sm90, bucket_of
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

# (consumer warpgroups, programs on an SM) -> registers a thread of a consumer and of the producer:
# 64 Ki of an SM.
REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    (2, 1): (240, 24),
    (2, 2): (104, 24),
    (3, 1): (160, 32),
    (4, 1): (112, 24),
}
CONSUMERS: tuple[int, ...] = tuple(sorted({consumers for consumers, _programs in REGISTERS}))
SMEM_OF_PROGRAM = 1024  # kept by the system, CUDA C++ Programming Guide, compute capability 9.0
ROWS = 64  # of a consumer warpgroup
MAX_HEAD_DIM = 256
MAX_STAGES = 4
MAX_Q_BUFFERS = 2
LEAST_DIRECT = 32  # output columns that four threads write in 16 bytes each
BLOCKS_N: tuple[int, ...] = (64, 128)
TMA_BYTES = 16  # CUDA driver API, cuTensorMapEncodeTiled: strides and addresses are multiples


def check(schedule: Schedule, problem: Problem, bucket: Bucket | None = None) -> Rejection | None:
    """Why a schedule of the family cannot be used for `problem` (on shapes of `bucket`), or None
    if it can."""
    return next(_rejections(schedule, problem, bucket), None)


def _rejections(schedule: Schedule, problem: Problem, bucket: Bucket | None) -> Iterator[Rejection]:
    own = schedule.sm90 or Sm90()
    yield from _too_short(bucket, own.packed_heads)
    yield from _unserved(problem, searched=bucket is not None)
    yield from _of_form(schedule)
    yield from _unpackable(problem, own.packed_heads, direct_out=own.direct_out)
    roles = (schedule.consumers, own.programs_per_sm)
    if roles not in REGISTERS:
        most = max((programs for n, programs in REGISTERS if n == schedule.consumers), default=0)
        yield Rejection("programs_per_sm of gluon_sm90", own.programs_per_sm, most)
        return
    yield from _of_q_buffers(own, problem)
    yield from _of_output(own, problem)
    smem, target = smem_bytes(schedule, problem), problem.target
    if smem > target.smem_per_block_bytes:
        yield Rejection("smem_bytes", smem, target.smem_per_block_bytes)
    together = own.programs_per_sm * (smem + SMEM_OF_PROGRAM)
    if own.programs_per_sm > 1 and together > target.smem_per_sm_bytes:
        yield Rejection("smem_bytes of an SM", together, target.smem_per_sm_bytes)
    regs, share = least_regs_per_thread(schedule, problem), REGISTERS[roles][0]
    if regs > share:
        yield Rejection("regs_per_thread", regs, share)


def _of_form(schedule: Schedule) -> Iterator[Rejection]:
    """Of the numbers that all families have."""
    if schedule.kernel != "loop":
        yield Rejection("kernel of gluon_sm90: single_tile", 0, 0, "not served")
    if schedule.block_m not in {ROWS * consumers for consumers in CONSUMERS}:
        yield Rejection("block_m of gluon_sm90", schedule.block_m, 0, "128, 192 or 256")
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


def _of_q_buffers(own: Sm90, problem: Problem) -> Iterator[Rejection]:
    is_grid = own.scheduler == "grid"
    most = 1 if is_grid or score_tile(problem.spec) else MAX_Q_BUFFERS
    if own.q_buffers > most:
        what = "of scheduler grid" if is_grid else "where tiles of the score are loaded"
        yield Rejection(f"q_buffers {what}", own.q_buffers, most)
    if own.q_buffers > 1 and not own.overlapped:
        yield Rejection("overlapped of more than one q buffer", 0, 1, "at least")


def _of_output(own: Sm90, problem: Problem) -> Iterator[Rejection]:
    if own.direct_out and own.separate_out:
        yield Rejection("separate_out beside direct_out", 1, 0)
    dim_v = problem.head_dim_v_padded
    if own.direct_out and dim_v < LEAST_DIRECT:
        yield Rejection("head_dim_v of direct_out", dim_v, LEAST_DIRECT, "at least")
    if own.direct_out or own.separate_out:
        return
    if own.q_buffers > 1:
        yield Rejection("separate_out or direct_out of more than one q buffer", 0, 1, "at least")
    if problem.head_dim_qk_padded != dim_v:
        yield Rejection("separate_out or direct_out where head dims differ", 0, 1, "at least")


def grid(problem: Problem, bucket: Bucket) -> Iterator[Schedule]:
    """Every schedule of the family for `bucket`, feasible or not; for few rows those in which
    query heads share tiles, and none where one tile holds all keys."""
    own_parts = _OWN[NARROW_GROUPS_MB if _is_narrow(problem) else GROUPS_MB]
    for packed_heads in packings(problem, bucket):
        for consumers, block_n, stages in product(CONSUMERS, BLOCKS_N, range(1, MAX_STAGES + 1)):
            for own in own_parts:
                if (consumers, own.programs_per_sm) not in REGISTERS:
                    continue
                if packed_heads > 1 and own.direct_out:
                    continue
                yield Schedule(
                    family="gluon_sm90",
                    block_m=ROWS * consumers,
                    block_n=block_n,
                    num_warps=4 * (consumers + 1),
                    num_stages=stages,
                    sm90=replace(own, packed_heads=packed_heads),
                )


def _is_narrow(problem: Problem) -> bool:
    """Whether a query tile sees keys between two limits, which move with it."""
    return any(span.hull.start != -sp.oo or span.scan for span in visibility(problem.spec).spans)


def packings(problem: Problem, bucket: Bucket) -> tuple[int, ...]:
    """Numbers of query heads that share a tile in schedules for `bucket`.

    Where tiles of 128 rows are filled by the rows of one head, packing them gains nothing. A group
    that the call decides is taken from the spec's shapes; without one there is nothing to pack.
    """
    if bucket.kernel == "single_tile":
        return ()
    if bucket.q_len_max is None:
        return (1,)
    group = problem.spec.heads.group or _group_of_shapes(problem, bucket)
    found = (2**step for step in range(1, _most_packed(group).bit_length()))
    return tuple(each for each in found if not any(_unpackable(problem, each)))


def _group_of_shapes(problem: Problem, bucket: Bucket) -> int:
    """The largest group among the spec's shapes in a bucket."""
    shapes = [s for s in problem.spec.shapes if bucket_of(s.q_len, s.kv_len) == bucket]
    return max((s.q_heads // max(1, s.kv_heads) for s in shapes), default=1)


def _most_packed(group: int | None) -> int:
    """Heads that fill a warpgroup: those of a group, to the next power of two."""
    return ROWS if group is None else min(ROWS, 1 << (group - 1).bit_length())


def _unpackable(
    problem: Problem, packed_heads: int, *, direct_out: bool = False
) -> Iterator[Rejection]:
    """Why so many query heads cannot share a tile."""
    if packed_heads == 1:
        return
    spans, most = visibility(problem.spec).spans, _most_packed(problem.spec.heads.group)
    if packed_heads & (packed_heads - 1):
        yield Rejection("packed_heads", packed_heads, 0, "power of two")
    if packed_heads > most:
        yield Rejection("packed_heads", packed_heads, most)
    if score_tile(problem.spec):
        yield Rejection("packed_heads where tiles of the score are loaded", 0, 0, "not served")
    if any(span.scan for span in spans):  # whose keys are found for 64 positions at a time
        yield Rejection("packed_heads of documents", 0, 0, "not served")
    if any(_depends_on_head(span, sym.H) for span in spans):
        yield Rejection("packed_heads of key ranges for each head", 0, 0, "not served")
    if direct_out:
        yield Rejection("packed_heads of direct_out", 0, 0, "not served")


# Of all keys of the heads that are worked on side by side. Where a query tile sees few of them,
# more heads fit the L2 cache, and the heavy tiles of the last group matter less: 5% for documents,
# 2% for windows (H200, 16 heads of 16,384 keys).
GROUPS_MB, NARROW_GROUPS_MB = (4, 32), (64, 256)
OUTPUTS: tuple[Mapping[str, bool], ...] = (
    {},
    {"separate_out": True},
    {"direct_out": True},
)
# Products in turn lose 5 to 18% where a program has the SM for itself; two on one SM have too few
# registers for anything else (H200, d64 and d128, 2k and 16k keys).
SHARES: tuple[Mapping[str, Any], ...] = ({}, {"programs_per_sm": 2, "overlapped": False})
# A program for one tile has use for one q buffer, and more than one need q's buffer for q alone.
_OWN: Mapping[tuple[int, ...], tuple[Sm90, ...]] = {
    groups: tuple(
        Sm90(scheduler=scheduler, q_buffers=q_buffers, group_mb=group_mb, **out, **share)
        for scheduler, q_buffers, out, group_mb, share in product(
            SCHEDULERS, range(1, MAX_Q_BUFFERS + 1), OUTPUTS, groups, SHARES
        )
        if (q_buffers == 1 or (out and not share and scheduler != "grid"))
        and (not share or "direct_out" in out)
    )
    for groups in (GROUPS_MB, NARROW_GROUPS_MB)
}


def is_short(bucket: Bucket) -> bool:
    """Whether tiles of 128 rows of one head would be mostly empty, or one tile holds all keys."""
    return bucket.q_len_max is not None or bucket.kernel == "single_tile"


def _too_short(bucket: Bucket | None, packed_heads: int) -> Iterator[Rejection]:
    """Whether `is_short` stands in the way, though so many heads may share a tile."""
    if bucket is None or not is_short(bucket):
        return
    if packed_heads == 1 or bucket.kernel == "single_tile":
        yield Rejection("short lengths of gluon_sm90", 0, 0, "not served")


def unserved(problem: Problem, bucket: Bucket | None = None) -> Iterator[Rejection]:
    """What the family does not serve, whatever the schedule."""
    if bucket is not None and not packings(problem, bucket):
        yield from _too_short(bucket, 1)
    yield from _unserved(problem, searched=bucket is not None)


@cache
def _unserved(problem: Problem, *, searched: bool) -> tuple[Rejection, ...]:
    return tuple(_reasons(problem, searched=searched))


def _reasons(problem: Problem, *, searched: bool) -> Iterator[Rejection]:
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
    yield from _rows_that_tma_cannot_step_by(problem, searched=searched)
    if spec.kv_lens != "none":
        yield Rejection("kv_lens of gluon_sm90", 0, 0, "not served")
    spans = visibility(spec).spans
    if len(spans) != 1:
        yield Rejection("key ranges of a query tile in gluon_sm90", len(spans), 1, "exactly")
    if any(span.period for span in spans):
        yield Rejection("chunks of keys in gluon_sm90", 0, 0, "not served")
    if any(span.scan and _depends_on_head(span, sym.H, sym.HK) for span in spans):
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


def _depends_on_head(span: Span, *heads: sp.Symbol) -> bool:
    """Whether which keys a query tile sees differs from head to head, of queries or of keys."""
    parts = [span.hull.start, span.hull.stop, span.full.start, span.full.stop]
    parts += [span.possible, span.always]
    if span.scan:
        parts += [span.scan.row_read, span.scan.key_read]
    return any(part.has(*heads) for part in parts)


def smem_bytes(schedule: Schedule, problem: Problem) -> int:
    """Shared memory of one program, exactly as Triton 3.6 to 3.8 allocate it, with lse or without.

    Buffers lie one after the other, largest first, each from a multiple of 16 bytes on; then a byte
    for each warp that is not of the first consumer.
    """
    end = 0
    for size in sorted(_buffers(schedule, problem), reverse=True):
        end = -(-end // 16) * 16 + size
    return end + schedule.num_warps - 4


def _buffers(schedule: Schedule, problem: Problem) -> Iterator[int]:
    """Bytes of each buffer: tiles, barriers, records of query tiles, what roles are given."""
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
    yield PLACES * PLACE
    yield BARRIER * PLACES
    yield KEPT
    yield ODD * schedule.consumers
    yield _given_to_roles(problem, own)


@cache
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
PLACES, PLACE = 4, 32 * 4  # records of where query tiles are, and which keys they see
KEPT = 32 * 8  # pointers and strides of q, k, v and out, lengths, ...
ODD = 16  # a number of each warp of a consumer: whether its rows came out right
_NUMBERS = 12  # as an argument: a buffer of numbers
_POINTER, _INT, _RING, _TILES = 8, 4, 16, 28  # as arguments: a ring of barriers, one of tiles
_AXIS = 4  # more of a ring of tiles for each axis that they have beside the usual four


def _given_to_roles(problem: Problem, own: Sm90) -> int:
    """Bytes of the kernel's arguments and buffers that its roles use, handed over in memory."""
    spec, spans = problem.spec, visibility(problem.spec).spans
    tensor_maps, rings, tiles = 4 - own.direct_out, 6 + 1 + 2, 3 + own.separate_out
    has_scan = any(span.scan is not None for span in spans)
    integers = 7 + (spec.heads.group is None) - has_scan  # which leaves keys, not their number
    integers += any(span.heavy_last for span in spans)  # which counts tiles from the last
    wide = 2 * (spec.sink != "none")
    wide += own.scheduler == "dynamic"
    wide += has_scan
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
    if own.packed_heads > 1:
        buffers += _AXIS * (1 + own.separate_out)
    return buffers + _POINTER * (tensor_maps + wide) + _INT * integers


def least_regs_per_thread(schedule: Schedule, problem: Problem) -> int:
    """Registers that a consumer cannot do without: accumulator, scores, and while products overlap
    probs as an operand."""
    scores = schedule.block_n
    if schedule.sm90 is None or schedule.sm90.overlapped:
        scores += schedule.block_n // 2
    return ROWS * (problem.head_dim_v_padded + scores) // 128
