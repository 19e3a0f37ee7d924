"""Device-memory traffic: the floor, and what L2 does not hold until it is used again.

The floor is what no kernel can avoid: every input read and every output written once; of keys and
values those in tiles that some query sees a key of. Tile traffic above it is served by L2 as long
as what concurrent programs use again stays there. The constants and forms below were found with
Nsight Compute on an H200 (`flashgen bench --suite counters`).

L2 holds less than its size: `SHARE_HELD` of it, and where it has two halves, lines that SMs of both
only read lie in both of them.

flash2: programs that run at the same time and share K and V walk them at about the same pace, so
what one of them reads the others find in L2. The next wave of programs reads the keys that its rows
see again, in the same order: all of them from memory where they do not fit, none where they do.

flash1: a program reads its K and V once, and its rows' q and state once for each key tile. Splits
of one head walk the same q at the same pace, and share what they read of it. Programs stand at
different places, so that lines of a working set that is too large are missed as if replacement were
random. Of the state that stays, a share is written to memory all the same before it is replaced.
What a merge reads was written by all programs before it, and is missed in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.passes.count import Visits
from flashgen.problem import Problem
from flashgen.schedule.budget import Figures
from flashgen.schedule.model import Schedule
from flashgen.schedule.space import programs_per_sm
from flashgen.spec.model import Shape
from flashgen.target import Target

STATE_BYTES_PER_ROW = 2 * 4  # m_i and l_i, fp32
SHARE_HELD = 0.78  # of L2, by data that is used again (flash1, working sets of 40 to 110 MB)
CLEANED = 0.5  # of the state that L2 holds until it is replaced, the share written before (flash1)
# L2 in two halves, each of which caches what its own SMs read: NVIDIA's architecture papers of A100
# ("two partitions"), H100 and B200.
TWO_HALVES = frozenset({"sm_80", "sm_90", "sm_100"})


@dataclass(frozen=True)
class DramTraffic:
    """Bytes between L2 and device memory, and how the model comes to them.

    `working_set_bytes` is what programs in flight use again, as often as L2 has to hold it;
    `held_bytes` find room. `reused_bytes` is how much of the tile traffic above the floor asks for
    it, `missed_bytes` the part of that which comes from memory, `written_back_bytes` what is
    written there of a workspace.
    """

    floor_bytes: int
    working_set_bytes: int
    held_bytes: int
    reused_bytes: int
    missed_bytes: int
    written_back_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The model's figure."""
        return self.floor_bytes + self.missed_bytes + self.written_back_bytes

    @property
    def fits_l2(self) -> bool:
        return self.working_set_bytes <= self.held_bytes


def dram_bytes_model(
    problem: Problem, schedule: Schedule, shape: Shape, figures: Figures, seen: Visits
) -> DramTraffic:
    """The model for one launch; `figures` are those of the same schedule, shape and mask.

    seen: tile pairs per batch and query head, as in `Budget.figures`.
    """
    model = _flash1 if schedule.keys_outside else _flash2
    return model(problem, schedule, shape, figures, seen)


def held_bytes(target: Target) -> int:
    """What L2 holds of data that is used again."""
    return round(SHARE_HELD * target.l2_bytes)


def copies(target: Target) -> int:
    """How often a line lies in L2 that SMs in all of its parts only read."""
    return 2 if target.arch in TWO_HALVES else 1


def missed_share(working_set: float, held: float) -> float:
    """The share of reads that miss where a working set is used over and over.

    With random replacement a line outlives a round of n reads, of which n*x missed, with
    probability exp(-n*x/held): x = 1 - exp(-x * working_set / held), and 0 where all fits.

    >>> [round(missed_share(size, 100), 2) for size in (90, 110, 150, 300)]
    [0.0, 0.18, 0.58, 0.94]
    """
    if working_set <= held:
        return 0.0
    share = 1.0
    for _ in range(200):  # contracts, slowest near `held`
        share = 1 - math.exp(-share * working_set / held)
    return share


def grid_programs(schedule: Schedule, shape: Shape) -> int:
    """Programs of one launch."""
    if schedule.keys_outside:
        return shape.batch * shape.q_heads * schedule.splits_for(shape.kv_len)
    heads = shape.batch * schedule.tile_heads(shape.q_heads, shape.kv_heads)
    return heads * math.ceil(shape.q_len / schedule.positions)


def for_shape(problem: Problem, schedule: Schedule, shape: Shape) -> Schedule:
    """`schedule` as a call of this shape runs it: with splits, of which none lacks a key tile.

    Where the call decides, a single split is the whole kernel. A fixed number of splits stays one
    of two or more, also where there is one key tile: its module has no other kernel than that of
    splits, which runs once then, and a merge (`Schedule.splits_for`).
    """
    splits = schedule.num_kv_splits
    if splits is None:
        splits = splits_that_fill(problem, schedule, shape)
    key_tiles = math.ceil(shape.kv_len / schedule.block_n)
    return replace(schedule, num_kv_splits=min(splits, max(2, key_tiles)))


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
    problem: Problem, schedule: Schedule, shape: Shape, figures: Figures, seen: Visits
) -> DramTraffic:
    """K and V, read again by each wave of programs."""
    held = held_bytes(problem.target)
    kv_heads = shape.batch * shape.kv_heads
    if not (kv_heads and shape.q_heads and shape.q_len):
        return DramTraffic(figures.dram_bytes, 0, held, 0, 0)
    query_tiles = math.ceil(shape.q_len / schedule.positions)
    of_a_head = query_tiles * (schedule.tile_heads(shape.q_heads, shape.kv_heads) // shape.kv_heads)
    resident = resident_programs(problem, schedule, shape)
    in_flight = min(float(kv_heads), max(1.0, resident / of_a_head))
    together = max(1.0, resident / in_flight)  # programs of one K/V head
    waves = of_a_head / together  # the rest of one runs beside the next head's first
    of_one_tile = seen.tiles / query_tiles * schedule.block_n
    of_its_rows = together * schedule.positions * seen.keys / shape.q_len
    keys = min(seen.keys, of_one_tile + of_its_rows)  # that one wave reads
    key_bytes = problem.kv_elem_bytes * (problem.head_dim_qk + problem.head_dim_v)
    working_set = round(in_flight * keys * key_bytes * copies(problem.target))
    again = round(kv_heads * max(0.0, waves * keys - seen.keys) * key_bytes)
    missed = again if working_set > held else 0
    return DramTraffic(figures.dram_bytes, working_set, held, again, missed)


def _flash1(
    problem: Problem, schedule: Schedule, shape: Shape, figures: Figures, seen: Visits
) -> DramTraffic:
    """The state of rows, read and written by each visit but the first and the last; and q."""
    held = held_bytes(problem.target)
    heads, splits = shape.batch * shape.q_heads, schedule.splits_for(shape.kv_len)
    if not (heads and seen.tiles):
        return DramTraffic(figures.dram_bytes, 0, held, 0, 0)
    q_row = problem.elem_bytes * problem.head_dim_qk
    q_tile = schedule.block_m * q_row
    state_tile = schedule.block_m * (4 * problem.head_dim_v + STATE_BYTES_PER_ROW)
    tiles_at_hand = seen.tiles / seen.key_tiles * resident_programs(problem, schedule, shape)
    working_set = tiles_at_hand * (state_tile + copies(problem.target) * q_tile / splits)
    missed = missed_share(working_set, held)
    q_again = max(0.0, heads * (seen.tiles * q_tile / splits - shape.q_len * q_row))
    carried = heads * (seen.tiles - seen.first_visits) * state_tile
    merges = schedule.splits > 1  # also where a single one is launched
    left = heads * seen.first_visits * state_tile if merges else 0
    merged = missed_share(left, held) * left
    written = carried * (missed + CLEANED * (1 - missed)) if working_set > held else 0.0
    return DramTraffic(
        floor_bytes=figures.dram_bytes,
        working_set_bytes=round(working_set),
        held_bytes=held,
        reused_bytes=round(q_again + carried + left),
        missed_bytes=round(missed * (q_again + carried) + merged),
        written_back_bytes=round(left + max(written, min(carried, figures.workspace_bytes))),
    )
