"""Which Hopper schedules suite `fa-paper` times in which case: the one table of them.

The tuner's and the default's choices take part besides. A row that cannot be used for a case (too
much shared memory, too many registers) is left out there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.bench.fa_cases import GRID, FaCase
from flashgen.bench.gluon_variants import schedule, shared
from flashgen.schedule.model import Schedule


@dataclass(frozen=True)
class Row:
    """Schedules for the cases that it names; what is left out holds for all."""

    head_dim: int
    schedules: tuple[Schedule, ...]
    causal: bool | None = None
    lengths: tuple[int, int] = (0, 2**30)  # first and last

    def serves(self, case: FaCase) -> bool:
        return (
            case.head_dim == self.head_dim
            and self.causal in (None, case.causal)
            and self.lengths[0] <= case.length <= self.lengths[1]
        )


SHORT, LONG = (0, 2048), (2048, 2**30)
PLAIN: tuple[Row, ...] = (
    Row(64, (schedule(3, 128, 4, "dynamic", direct_out=True),), lengths=LONG),
    Row(
        64,
        (schedule(3, 128, 4, "dynamic", direct_out=True, group_mb=64),),
        causal=True,
        lengths=(8192, 8192),
    ),
    Row(64, (shared("dynamic", 32),)),
    Row(64, (shared("dynamic", 4),), lengths=SHORT),
    Row(
        64,
        (schedule(4, 64, 4, "dynamic", direct_out=True, group_mb=4),),
        causal=False,
        lengths=SHORT,
    ),
    Row(128, (schedule(3, 64, 3, "dynamic", separate_out=True),)),
    Row(128, (schedule(3, 64, 4, "dynamic", direct_out=True),), lengths=LONG),
    Row(
        128,
        (schedule(3, 64, 4, "dynamic", direct_out=True, group_mb=64),),
        causal=True,
        lengths=(16384, 2**30),
    ),
    Row(
        128,
        (
            schedule(3, 64, 3, "static", separate_out=True, group_mb=4),
            schedule(3, 64, 3, "dynamic", separate_out=True, group_mb=4),
        ),
        lengths=SHORT,
    ),
    Row(128, (schedule(2, 128, 2, "dynamic", separate_out=True),)),
    Row(
        128,
        (schedule(2, 128, 2, "static", separate_out=True, q_buffers=2, group_mb=4),),
        lengths=SHORT,
    ),
    Row(
        256,
        (
            schedule(2, 64, 2, "dynamic", direct_out=True),
            schedule(2, 64, 2, "dynamic", direct_out=True, group_mb=4),
        ),
    ),
    Row(256, (schedule(2, 64, 2, "static", direct_out=True, group_mb=4),), lengths=SHORT),
    Row(256, (schedule(2, 64, 2, "grid"),), lengths=LONG),
)

# Variants with schedules of their own; the others take those of plain attention.
NARROW: tuple[Schedule, ...] = (
    schedule(3, 64, 3, "dynamic", separate_out=True, group_mb=256),
    schedule(3, 64, 4, "dynamic", direct_out=True, group_mb=256),
    schedule(3, 64, 3, "dynamic", separate_out=True, group_mb=64),
)
VARIANTS: Mapping[str, tuple[Schedule, ...]] = {
    "documents": (
        *NARROW,
        schedule(2, 128, 2, "dynamic", separate_out=True, group_mb=64),
        schedule(2, 64, 4, "dynamic", separate_out=True, group_mb=256),
    ),
    "bias": (
        schedule(3, 64, 2, "dynamic", direct_out=True),
        schedule(2, 64, 3, "dynamic", separate_out=True),
        schedule(2, 64, 3, "dynamic", direct_out=True),
    ),
    "window512": NARROW,
    "window4096": NARROW,
    "sinks-window128": (
        shared("dynamic", 32),
        shared("dynamic", 4),
        schedule(3, 64, 4, "dynamic", direct_out=True, group_mb=64),
    ),
}

# Cases with many more, whose five best are shown: no result is to hang on one lucky schedule.
WIDE_CASES: tuple[str, ...] = tuple(f"grid/d{d}/n8192/causal" for d in (64, 128, 256))
WIDE: Mapping[int, tuple[Schedule, ...]] = {
    64: (
        schedule(3, 128, 4, "grid", direct_out=True),
        schedule(3, 64, 4, "dynamic", direct_out=True),
        shared("dynamic", 4),
        schedule(2, 128, 4, "dynamic", separate_out=True),
    ),
    128: (
        schedule(3, 64, 3, "grid", separate_out=True),
        schedule(3, 64, 3, "dynamic", separate_out=True, group_mb=4),
        schedule(2, 128, 2, "grid"),
    ),
    256: (
        schedule(2, 64, 2, "dynamic"),
        schedule(2, 64, 2, "grid", direct_out=True),
    ),
}


def schedules_for(case: FaCase) -> tuple[Schedule, ...]:
    """The table's schedules of a case, each once, in its order."""
    own = VARIANTS.get(case.kind)
    if own is None:
        rows = (row for row in PLAIN if row.serves(case))
        own = tuple(each for row in rows for each in row.schedules)
    wide = WIDE[case.head_dim] if case.id in WIDE_CASES else ()
    return tuple(dict.fromkeys((*own, *wide)))


def baselines_for(case: FaCase) -> tuple[Schedule, ...]:
    """Schedules of the plain causal attention that a variant is held against."""
    return () if case.group == GRID else schedules_for(case.baseline)[:2]
