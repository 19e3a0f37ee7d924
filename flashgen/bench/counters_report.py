"""Suite `counters`, read: the models' bytes beside those that were counted.

The record holds what was counted; the models are applied here, so that a better model, or a worse
one, shows in the table of the same record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashgen.bench.markdown import number, table
from flashgen.bench.ncu import DRAM_READ, DRAM_WRITTEN, READ, WRITTEN
from flashgen.bench.record import CaseRecord, Record
from flashgen.passes.count import visible_pairs, visits
from flashgen.problem import Problem
from flashgen.schedule.budget import Figures, budget_for
from flashgen.schedule.dram import DramTraffic, dram_bytes_model
from flashgen.schedule.model import Schedule
from flashgen.spec.parse import parse_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target

TILE_TRAFFIC_WITHIN = 0.05
DRAM_WITHIN = 0.15
LOCAL = (
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
)


@dataclass(frozen=True)
class Counted:
    """Bytes of one call, all of its kernels together.

    `left` was written to memory only when other data drove it out of L2, after the call.
    """

    read: int
    written: int
    dram_read: int
    dram_written: int
    left: int

    @property
    def tile_traffic(self) -> int:
        """Between L2 and the SMs."""
        return self.read + self.written

    @property
    def dram(self) -> int:
        """Between L2 and memory, with what was left to write."""
        return self.dram_read + self.dram_written + self.left


@dataclass(frozen=True)
class Agreement:
    """One case: the models, the counters, and the models' share of what was counted, less 1."""

    id: str
    figures: Figures
    dram: DramTraffic
    counted: Counted

    @property
    def tile_traffic_error(self) -> float:
        return self.figures.tile_traffic_bytes / max(1, self.counted.tile_traffic) - 1

    @property
    def dram_error(self) -> float:
        return self.dram.total_bytes / max(1, self.counted.dram) - 1

    @property
    def good(self) -> bool:
        """Whether both models are as close as they have to be."""
        return (
            abs(self.tile_traffic_error) <= TILE_TRAFFIC_WITHIN
            and abs(self.dram_error) <= DRAM_WITHIN
        )


def counted(case: CaseRecord) -> Counted:
    """What a case's counters say."""
    facts = case.facts
    return Counted(
        read=_sum(facts["cold"], READ),
        written=_sum(facts["cold"], WRITTEN),
        dram_read=_sum(facts["alone"], DRAM_READ),
        dram_written=_sum(facts["alone"], DRAM_WRITTEN),
        left=_sum(facts["after"], DRAM_WRITTEN),
    )


def _sum(kernels: Iterable[Mapping[str, Any]], metric: str) -> int:
    return round(sum(kernel["counters"].get(metric, 0.0) for kernel in kernels))


def agreement(case: CaseRecord, target_id: str) -> Agreement:
    """The models of a case's schedule and shape against its counters."""
    problem = Problem(parse_spec(case.facts["spec"]), get_target(target_id))
    schedule = Schedule.from_dict(case.facts["schedule"])
    figures, dram = _modelled(problem, schedule, Shape(**case.shape))
    return Agreement(case.id, figures, dram, counted(case))


@cache
def _modelled(problem: Problem, schedule: Schedule, shape: Shape) -> tuple[Figures, DramTraffic]:
    """The models of one call; a report is made again after each case."""
    spec = problem.spec
    seen = visits(
        spec,
        shape,
        schedule.block_m,
        schedule.block_n,
        num_kv_splits=schedule.num_kv_splits or 1,
        kernel=schedule.kernel,
    )
    figures = budget_for(problem, schedule).figures(
        schedule,
        shape,
        visited_tiles=seen.tiles,
        visible_pairs=visible_pairs(spec, shape),
        first_visits=seen.first_visits,
        visited_keys=seen.keys,
        key_tiles=seen.key_tiles,
    )
    dram = dram_bytes_model(problem, schedule, shape, figures, seen)
    return figures, dram


def agreements(record: Record) -> tuple[Agreement, ...]:
    """Those of all cases of a record of this suite."""
    return tuple(agreement(case, record.target) for case in record.cases)


def counters_line(case: CaseRecord) -> str:
    """A finished case in one line."""
    found = counted(case)
    return (
        f"{case.id}: {_mb(found.tile_traffic)} MB between L2 and SMs, {_mb(found.dram)} MB to and "
        f"from memory, of which {_mb(found.left)} after the end"
    )


def counters_parts(record: Record) -> list[str]:
    """The parts of the report."""
    found = agreements(record)
    if not found:
        return ["Nothing was counted."]
    note = (
        "Bytes in MB (10⁶). Tile traffic: the model's loads and stores of tiles, against what "
        f"crossed between L2 and the SMs (`{READ}`, `{WRITTEN}`). Memory: the model's floor and "
        f"re-reads, against `{DRAM_READ}` and `{DRAM_WRITTEN}` of the kernels, run once with L2 "
        "full of other data, and what they left in L2 (left), which a read of other data after "
        "them drove out. Error: model / counted - 1; asked for: within "
        f"{TILE_TRAFFIC_WITHIN:.0%} and {DRAM_WITHIN:.0%}."
    )
    return [
        f"## Agreement\n\n{_summary(found)}",
        f"## Bytes, predicted and counted\n\n{note}\n\n{_bytes_table(found)}",
        f"## More counters\n\n{_more(record.cases)}",
    ]


def _summary(found: Sequence[Agreement]) -> str:
    rows = []
    for order in dict.fromkeys(each.id.partition("/")[0] for each in found):
        of_order = [each for each in found if each.id.startswith(f"{order}/")]
        rows.append(
            [
                order,
                str(len(of_order)),
                *_error_cells([each.tile_traffic_error for each in of_order], TILE_TRAFFIC_WITHIN),
                *_error_cells([each.dram_error for each in of_order], DRAM_WITHIN),
            ]
        )
    header = [
        "loop order", "cases", "tile traffic within", "least error", "greatest",
        "memory within", "least error", "greatest",
    ]  # fmt: skip
    return table(header, rows)


def _error_cells(errors: Sequence[float], within: float) -> list[str]:
    good = sum(abs(error) <= within for error in errors)
    return [str(good), f"{min(errors):+.1%}", f"{max(errors):+.1%}"]


def _bytes_table(found: Sequence[Agreement]) -> str:
    rows = [
        [
            each.id,
            _mb(each.figures.tile_traffic_bytes),
            _mb(each.counted.tile_traffic),
            _error(each.tile_traffic_error, TILE_TRAFFIC_WITHIN),
            _mb(each.dram.floor_bytes),
            _mb(each.dram.total_bytes),
            _mb(each.counted.dram),
            _error(each.dram_error, DRAM_WITHIN),
            _mb(each.counted.dram_read),
            _mb(each.counted.dram_written),
            _mb(each.counted.left),
        ]
        for each in found
    ]
    header = [
        "case", "tile traffic", "counted", "error", "floor", "memory", "counted", "error",
        "read", "written", "left",
    ]  # fmt: skip
    return table(header, rows)


def _error(error: float, within: float) -> str:
    text = f"{error:+.1%}"
    return text if abs(error) <= within else f"**{text}**"


def _mb(count: int) -> str:
    return number(count / 1e6)


_MORE = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "loads hit in L1, MB": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum", 32e-6),
    "local loads, MB": (LOCAL[0], 32e-6),
    "local stores, MB": (LOCAL[1], 32e-6),
    "L2 reads, MB": ("lts__t_sectors_srcunit_tex_op_read.sum", 32e-6),
    "L2 writes, MB": ("lts__t_sectors_srcunit_tex_op_write.sum", 32e-6),
    "hit in L2, MB": ("lts__t_sectors_srcunit_tex_lookup_hit.sum", 32e-6),
    "between partitions, MB": ("lts__t_sectors_srcunit_ltcfabric.sum", 32e-6),
}


def _more(cases: Sequence[CaseRecord]) -> str:
    rows = [
        [
            case.id,
            *(number(factor * _sum(case.facts["cold"], name)) for name, factor in _MORE.values()),
            str(case.facts["compiled"].get("spill_bytes", "")),
            str(case.facts["passes"][0]),
        ]
        for case in cases
    ]
    header = ["case", *_MORE, "spilled, bytes a thread", "passes"]
    return table(header, rows)
