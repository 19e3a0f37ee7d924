"""Suite `loop-orders`, read: both orders as measured, and what the models say of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from flashgen.bench.markdown import number, table
from flashgen.bench.record import CaseRecord, Record
from flashgen.bench.schedules_report import measured_us, per, time_cells
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.schedule.orders import OrderEstimate, estimate
from flashgen.schedule.space import in_order
from flashgen.spec.parse import parse_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target

MEGABYTE = 1e6


def orders_parts(record: Record) -> list[str]:
    """The parts of the report."""
    note = (
        "The faster order of each case, how many times as fast as the other it was, and what the "
        "model had predicted; of flash1 the fastest number of splits counts. Traffic is what tiles "
        "move between L2 and the SMs, DRAM what the model expects device memory to move."
    )
    header = ["case", "faster", "by", "predicted faster", "by", "flash2 us", "flash1 us", "splits"]
    rows = [row for case in record.cases if (row := _summary(case, record.target)) is not None]
    return [
        f"## Which order is faster\n\n{note}\n\n{table(header, rows)}",
        *(f"## {case.id}\n\n{_times(case, record.target)}" for case in record.cases),
    ]


def estimates(case: CaseRecord, target_id: str) -> dict[str, OrderEstimate]:
    """The models' figures of each schedule of a case, by its name."""
    shape = Shape(**case.shape)
    return {
        name: _estimate(case.facts["spec"], target_id, Schedule.from_dict(facts["fields"]), shape)
        for name, facts in case.facts["schedules"].items()
    }


@cache
def _estimate(spec: str, target_id: str, schedule: Schedule, shape: Shape) -> OrderEstimate:
    """A report is made again after each case."""
    problem = Problem(parse_spec(spec), get_target(target_id))
    return estimate(in_order(problem, schedule.loop_order), schedule, shape)


def _summary(case: CaseRecord, target_id: str) -> Sequence[str] | None:
    """One line; None where one of the orders was not timed."""
    predicted, times = estimates(case, target_id), measured_us(case)
    found = {
        order: [name for name in times if predicted[name].schedule.loop_order == order]
        for order in ("flash2", "flash1")
    }
    if not all(found.values()):
        return None
    best = {order: min(names, key=times.__getitem__) for order, names in found.items()}
    expected = {
        order: min(predicted[name].time_us for name in names) for order, names in found.items()
    }
    measured = {order: times[name] for order, name in best.items()}
    return [
        case.id,
        *_faster(measured),
        *_faster(expected),
        number(measured["flash2"]),
        number(measured["flash1"]),
        str(predicted[best["flash1"]].schedule.splits),
    ]


def _faster(times: dict[str, float]) -> Iterator[str]:
    fast, slow = sorted(times, key=times.__getitem__)
    yield fast
    yield f"{times[slow] / times[fast]:.2f}"


def _times(case: CaseRecord, target_id: str) -> str:
    times = measured_us(case)
    fastest = min(times.values(), default=0.0)
    rows = []
    for name, of in estimates(case, target_id).items():
        took = times.get(name)
        rows.append(
            [
                name,
                str(of.programs),
                *time_cells(took, fastest),
                number(of.time_us),
                per(of.time_us, took),
                number(of.tile_traffic_bytes / MEGABYTE),
                number(of.dram_bytes / MEGABYTE),
                per(of.tile_traffic_bytes / MEGABYTE, took),
            ]
        )
    header = [
        "schedule", "programs", "us", "of the fastest", "predicted us", "predicted / us",
        "traffic MB", "DRAM MB", "traffic TB/s",
    ]  # fmt: skip
    return table(header, rows)
