"""A first model of device-memory traffic: the floor, and the re-reads that do not fit in L2.

The floor is what no kernel can avoid: every input read and every output written once. Tile traffic
above it is served by L2 as long as what concurrent programs use again stays there.

flash2: programs that run at the same time and share K and V walk them at about the same pace, so
what one of them reads the others find in L2. The next wave of programs reads the keys that its rows
see, mostly the same ones, again; that costs nothing where what all heads in flight read fits in L2,
and else the share that does not fit.

flash1: a program reads its K and V once, and its rows' q and state once for each key tile. What all
programs in flight use again is their rows' q, acc, m_i and l_i. Of a workspace that is larger than
L2 the excess is written to device memory once, even where no read of it misses.

The share that misses is max(0, 1 - L2 / working set), as if replacement were random. Nothing here
was measured yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.problem import Problem
from flashgen.schedule.budget import Figures
from flashgen.schedule.model import Schedule
from flashgen.schedule.space import programs_per_sm
from flashgen.spec.model import Shape

STATE_BYTES_PER_ROW = 2 * 4  # m_i and l_i, fp32


@dataclass(frozen=True)
class DramTraffic:
    """Bytes between L2 and device memory, and how the model comes to them.

    `working_set_bytes` is what programs in flight use again, `reused_bytes` how much of the tile
    traffic above the floor asks for it, `missed_bytes` the part of that which L2 does not hold,
    `written_back_bytes` what leaves a workspace for want of room.
    """

    floor_bytes: int
    working_set_bytes: int
    l2_bytes: int
    reused_bytes: int
    missed_bytes: int
    written_back_bytes: int

    @property
    def total_bytes(self) -> int:
        """The model's figure."""
        return self.floor_bytes + self.missed_bytes + self.written_back_bytes

    @property
    def fits_l2(self) -> bool:
        return self.working_set_bytes <= self.l2_bytes


def dram_bytes_model(
    problem: Problem, schedule: Schedule, shape: Shape, figures: Figures, *, visited_tiles: int
) -> DramTraffic:
    """The model for one launch; `figures` are those of the same schedule, shape and mask.

    visited_tiles: per batch and query head, as in `Budget.figures`.
    """
    if schedule.loop_order == "flash1":
        working_set, reused = _flash1(problem, schedule, shape, figures)
    else:
        working_set, reused = _flash2(problem, schedule, shape, visited_tiles)
    l2_bytes = problem.target.l2_bytes
    missing = max(0.0, 1 - l2_bytes / working_set) if working_set else 0.0
    return DramTraffic(
        floor_bytes=figures.dram_bytes,
        working_set_bytes=working_set,
        l2_bytes=l2_bytes,
        reused_bytes=reused,
        missed_bytes=round(missing * reused),
        written_back_bytes=max(0, figures.workspace_bytes - l2_bytes),
    )


def grid_programs(schedule: Schedule, shape: Shape) -> int:
    """Programs of one launch."""
    if schedule.loop_order == "flash1":
        return shape.batch * shape.q_heads * schedule.splits
    return shape.batch * shape.q_heads * math.ceil(shape.q_len / schedule.block_m)


def for_shape(problem: Problem, schedule: Schedule, shape: Shape) -> Schedule:
    """`schedule` as a call of this shape runs it: with a number of splits."""
    if schedule.num_kv_splits is not None:
        return schedule
    return replace(schedule, num_kv_splits=splits_that_fill(problem, schedule, shape))


def splits_that_fill(problem: Problem, schedule: Schedule, shape: Shape) -> int:
    """The least power of two of flash1's key splits that gives nine in ten SMs work.

    More splits than that cost more, in state of their own, than the last SMs are worth. Generated
    modules count in the same way (`templates/triton/host_flash1.py.jinja`).
    """
    key_tiles = max(1, math.ceil(shape.kv_len / schedule.block_n))
    splits = 1
    while 2 * splits <= key_tiles and (
        10 * shape.batch * shape.q_heads * splits < 9 * problem.target.sm_count
    ):
        splits *= 2
    return splits


def resident_programs(problem: Problem, schedule: Schedule, shape: Shape) -> int:
    """Programs that run at the same time; at least one an SM."""
    per_sm = max(1, min(programs_per_sm(schedule, problem).values()))
    return min(grid_programs(schedule, shape), per_sm * problem.target.sm_count)


def _flash2(
    problem: Problem, schedule: Schedule, shape: Shape, visited_tiles: int
) -> tuple[int, int]:
    """(working set, bytes read again) of K and V."""
    kv_heads = shape.batch * shape.kv_heads
    if not (kv_heads and shape.q_heads and shape.q_len):
        return 0, 0
    query_tiles = math.ceil(shape.q_len / schedule.block_m)
    group = shape.q_heads // shape.kv_heads
    resident = resident_programs(problem, schedule, shape)
    in_flight = min(kv_heads, max(1, math.ceil(resident / (query_tiles * group))))
    together = max(1, resident // in_flight)  # programs of one K/V head
    waves = math.ceil(query_tiles * group / together)
    of_one_tile = visited_tiles / query_tiles * schedule.block_n
    of_its_rows = together * schedule.block_m * shape.kv_len / shape.q_len
    keys = min(shape.kv_len, of_one_tile + of_its_rows)  # that one wave reads
    key_bytes = problem.kv_elem_bytes * (problem.head_dim_qk + problem.head_dim_v)
    again = max(0.0, waves * keys - shape.kv_len)
    return round(in_flight * keys * key_bytes), round(kv_heads * again * key_bytes)


def _flash1(
    problem: Problem, schedule: Schedule, shape: Shape, figures: Figures
) -> tuple[int, int]:
    """(working set, bytes read or written again) of q and the state of its rows."""
    resident = resident_programs(problem, schedule, shape)
    row_bytes = problem.elem_bytes * problem.head_dim_qk
    row_bytes += 4 * problem.head_dim_v + STATE_BYTES_PER_ROW
    return resident * shape.q_len * row_bytes, max(
        0, figures.tile_traffic_bytes - figures.dram_bytes - figures.workspace_bytes
    )
