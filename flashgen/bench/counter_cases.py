"""What is held against the GPU's counters: specs, shapes and schedules, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flashgen.problem import Problem
from flashgen.schedule.dram import splits_that_fill
from flashgen.schedule.model import LoopOrder, Schedule
from flashgen.schedule.space import check
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune.candidates import Candidates

Mask = Literal["full", "causal", "window"]

TOKENS = 16384
HEADS = 16
LENGTHS = (4096, 1024, 16384)
MASKS: tuple[Mask, ...] = ("full", "causal", "window")
ORDERS: tuple[LoopOrder, ...] = ("flash2", "flash1")
WINDOW = 512  # keys, the query's own included
TILES = ((64, 64, 4), (128, 64, 8), (128, 32, 8))  # block_m, block_n, num_warps
# flash1 holds q and the state of a tile beside its scores: with 4 warps 64x64 spills 120 B a
# thread, traffic that no tile has.
TILES_OF = {"flash2": TILES, "flash1": ((64, 64, 8), *TILES[1:])}
LARGE_TILE = (128, 128, 8)  # spills some registers at head_dim 128
MAX_STAGES = 3


@dataclass(frozen=True, kw_only=True)
class CounterCase:
    """One launch of one kernel; `group` query heads share a K/V head."""

    loop_order: LoopOrder
    mask: Mask
    length: int
    tile: tuple[int, int, int] = TILES[0]
    head_dim: int = 128
    heads: int = HEADS
    group: int = 1
    batch: int = 1

    @property
    def id(self) -> str:
        """E.g. `flash2/causal/n4096/128x64`; what differs from the grid comes behind."""
        block_m, block_n, _ = self.tile
        more = f"/d{self.head_dim}" if self.head_dim != 128 else ""
        if self.group != 1:
            more += f"/h{self.heads}:{self.heads // self.group}"
        return f"{self.loop_order}/{self.mask}/n{self.length}/{block_m}x{block_n}{more}"

    @property
    def spec(self) -> AttentionSpec:
        mask: list[object] = [] if self.mask == "full" else ["causal"]
        if self.mask == "window":
            mask.append({"window": {"left": WINDOW - 1, "right": 0}})
        return AttentionSpec(
            name=f"counters_{self.loop_order}_{self.mask}_d{self.head_dim}_g{self.group}",
            head_dim=self.head_dim,
            dtype="bf16",
            heads={"group": self.group},
            mask=mask,
            loop_order=self.loop_order,
        )

    @property
    def shape(self) -> Shape:
        kv_heads = self.heads // self.group
        return Shape(self.batch, self.heads, kv_heads, self.length, self.length)

    def candidates(self, target: Target, schedule: Schedule) -> Candidates:
        """The module that holds the schedule's kernels, the same in every process."""
        return Candidates.of(Problem(self.spec, target), [schedule], has_lse=False)

    def schedule(self, target: Target) -> Schedule | None:
        """The tile with as many stages as fit, up to 3; None where it does not fit at all."""
        block_m, block_n, num_warps = self.tile
        problem = Problem(self.spec, target)
        for num_stages in range(MAX_STAGES, 0, -1):
            found = Schedule(
                loop_order=self.loop_order,
                block_m=block_m,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=num_stages,
            )
            if self.loop_order == "flash1":
                splits = splits_that_fill(problem, found, self.shape)
                found = replace(found, num_kv_splits=splits)
            if check(found, problem) is None:
                return found
        return None


def counter_cases() -> tuple[CounterCase, ...]:
    """The grid, lengths and masks before tiles, and then what is not in it."""
    grid = [
        CounterCase(loop_order=order, mask=mask, length=length, tile=tile, batch=TOKENS // length)
        for order in ORDERS
        for tile in TILES_OF[order]
        for length in LENGTHS
        for mask in MASKS
    ]
    return (*grid, *_beyond_the_grid())


def _beyond_the_grid() -> list[CounterCase]:
    """Other head dims, shared K/V heads, a large tile, and keys that do not fit in L2."""
    found: list[CounterCase] = []
    long: tuple[tuple[Mask, int], ...] = (("full", 65536), ("full", 131072), ("causal", 131072))
    for order in ORDERS:
        small = TILES_OF[order][0]
        causal = CounterCase(loop_order=order, mask="causal", length=4096, tile=small)
        found += [
            replace(causal, batch=4, head_dim=64),
            replace(causal, heads=32, group=4),
            replace(causal, mask="full", batch=4, tile=LARGE_TILE),
        ]
    found += [
        CounterCase(loop_order="flash2", mask=mask, length=length, heads=2, tile=TILES[1])
        for mask, length in long
    ]
    wide = CounterCase(
        loop_order="flash2", mask="causal", length=4096, head_dim=256, heads=8, tile=TILES[1]
    )
    return [*found, wide]


def case_of(case_id: str) -> CounterCase:
    """The case with that id; KeyError for none."""
    return {case.id: case for case in counter_cases()}[case_id]
