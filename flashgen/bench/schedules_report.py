"""Suite `schedules`, read: measured times, and the order that the model of time gives.

The record holds what was measured; the model is applied here. So it is to the Hopper schedules of
suite `fa-paper`, whose table of the model's order is made here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from flashgen.bench.fa_cases import find
from flashgen.bench.fa_figures import OURS
from flashgen.bench.fa_schedules import schedules_for
from flashgen.bench.markdown import number, table
from flashgen.bench.ranking import MIN_CORRELATION, Ranking, rank
from flashgen.bench.record import CaseRecord, Record
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.schedule.predict import Machine, Prediction, predict
from flashgen.spec.parse import parse_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target


def measured_us(case: CaseRecord) -> dict[str, float]:
    """Medians by schedule, of those that were timed."""
    return {r.name: 1e3 * r.ms.median for r in case.results if r.ms is not None}


def predictions(
    case: CaseRecord, target_id: str, *, compiled: bool = False
) -> dict[str, Prediction]:
    """The model's, by schedule; compiled: with the registers and spills that the compiler said."""
    problem = _problem(case.facts["spec"], target_id)
    shape = Shape(**case.shape)
    found: dict[str, Mapping[str, Any]] = case.facts["schedules"]
    return {
        name: _predict(
            problem,
            Schedule.from_dict(facts["fields"]),
            shape,
            _machine(facts["compiled"]) if compiled else None,
        )
        for name, facts in found.items()
    }


@cache
def _problem(spec: str, target_id: str) -> Problem:
    return Problem(parse_spec(spec), get_target(target_id))


@cache
def _predict(
    problem: Problem, schedule: Schedule, shape: Shape, machine: Machine | None
) -> Prediction:
    """A report is made again after each case."""
    return predict(problem, schedule, shape, machine=machine)


def _machine(compiled: Mapping[str, Any]) -> Machine | None:
    regs, spilled = compiled.get("regs_per_thread"), compiled.get("spill_bytes")
    return None if regs is None or spilled is None else Machine(regs, spilled)


def ranking(case: CaseRecord, target_id: str, *, compiled: bool = False) -> Ranking:
    """How well the model orders the schedules of a case."""
    predicted = predictions(case, target_id, compiled=compiled)
    return rank(measured_us(case), {name: p.time_us for name, p in predicted.items()})


def rankings(record: Record) -> dict[str, Ranking]:
    """Those of all cases of a record of this suite, by case."""
    return {
        case.id: ranking(case, record.target) for case in record.cases if len(measured_us(case)) > 1
    }


# **** Hopper schedules ****

# How much longer than the fastest the model's first choice may take.
MOST_LOST = 0.05


def hopper_ranking(case: CaseRecord, target_id: str) -> Ranking:
    """How well the model orders the Hopper schedules of a case of suite `fa-paper`.

    ValueError where fewer than two were timed.
    """
    timed = measured_us(case)
    schedules = {f"{OURS}{each}": each for each in schedules_for(find(case.id))}
    problem = Problem(find(case.id).spec, get_target(target_id))
    predicted = {
        str(schedule): _predict(problem, schedule, Shape(**case.shape), None).time_us
        for name, schedule in schedules.items()
        if name in timed
    }
    return rank({name.removeprefix(OURS): us for name, us in timed.items()}, predicted)


def hopper_rankings(record: Record) -> dict[str, Ranking]:
    """Those of all cases of a record of suite `fa-paper` in which two or more were timed."""
    found = {}
    for case in record.cases:
        with suppress(ValueError):
            found[case.id] = hopper_ranking(case, record.target)
    return found


def hopper_parts(record: Record) -> list[str]:
    """What the report of suite `fa-paper` says of the model."""
    note = (
        "The model's order of the Hopper schedules that were timed (`flashgen.schedule.predict`), "
        "as the model is now. Place: where in that order the fastest one stands. Correlation: "
        "Spearman's, of ranks. Loss: how much longer than the fastest the model's first choice "
        f"takes; {MOST_LOST:.0%} may not be passed."
    )
    rows = [
        [
            name,
            str(of.count),
            str(of.place),
            f"{of.correlation:.2f}",
            f"{of.loss:.1%}{'' if of.loss <= MOST_LOST else ' **(late)**'}",
            of.fastest,
            of.first,
        ]
        for name, of in hopper_rankings(record).items()
    ]
    if not rows:
        return []
    header = ["case", "schedules", "place", "correlation", "loss", "fastest", "the model's first"]
    return [f"## The model's order\n\n{note}\n\n{table(header, rows)}"]


# **** the report of suite `schedules` ****


def schedules_line(case: CaseRecord) -> str:
    """A finished case in one line."""
    times = measured_us(case)
    if not times:
        return f"{case.id}: no schedule was timed"
    fastest, slowest = min(times, key=times.__getitem__), max(times.values())
    return (
        f"{case.id}: {len(times)} schedules, {number(times[fastest])} us ({fastest}) to "
        f"{number(slowest)} us"
    )


def schedules_parts(record: Record) -> list[str]:
    """The parts of the report."""
    note = (
        "The model orders a spec's schedules before any of them is compiled. Place: where in that "
        "order the fastest measured one stands; it has to be in the first third, and Spearman's "
        f"rank correlation at least {MIN_CORRELATION}. Loss: how much longer than the fastest the "
        "model's first choice takes. Compiled: correlation with the registers and spills that the "
        "compiler reports. Schedules were chosen by a fixed rule that knows no model: the default, "
        "what differs from it in one field, and an even choice of the tile shapes that fit."
    )
    found = rankings(record)
    rows = [
        [
            case.id,
            str(of.count),
            f"{of.place}{'' if of.top_third else ' **(late)**'}",
            f"{of.correlation:.2f}{'' if of.correlation >= MIN_CORRELATION else ' **(low)**'}",
            f"{ranking(case, record.target, compiled=True).correlation:.2f}",
            f"{of.loss:.0%}",
            of.fastest,
            of.first,
        ]
        for case in record.cases
        if (of := found.get(case.id)) is not None
    ]
    header = [
        "case", "schedules", "place", "correlation", "compiled", "loss", "fastest",
        "the model's first",
    ]  # fmt: skip
    return [
        f"## The model's order\n\n{note}\n\n{table(header, rows)}",
        *(f"## {case.id}\n\n{_times(case, record.target)}" for case in record.cases),
    ]


def _times(case: CaseRecord, target_id: str) -> str:
    times, predicted = measured_us(case), predictions(case, target_id)
    order = sorted(predicted, key=lambda name: (predicted[name].time_us, name))
    fastest = min(times.values(), default=0.0)
    rows = []
    for name in sorted(predicted, key=lambda name: (times.get(name, float("inf")), name)):
        compiled = case.facts["schedules"][name]["compiled"]
        took = times.get(name)
        rows.append(
            [
                name + (" (default)" if name == case.facts["default"] else ""),
                *time_cells(took, fastest),
                number(predicted[name].time_us),
                str(order.index(name) + 1),
                per(predicted[name].time_us, took),
                *_compiled_cells(compiled),
            ]
        )
    header = [
        "schedule", "us", "of the fastest", "predicted us", "place", "predicted / us",
        "registers", "spilled, bytes", "shared, bytes",
    ]  # fmt: skip
    return table(header, rows)


def time_cells(took: float | None, fastest: float) -> tuple[str, str]:
    """The microseconds of a schedule, and how many times those of the fastest one."""
    return (number(took) if took else "failed", per(took, fastest))


def per(value: float | None, whole: float | None) -> str:
    """A ratio; nothing where one of the two was not measured."""
    return f"{value / whole:.2f}" if value and whole else ""


def _compiled_cells(compiled: Mapping[str, Any]) -> Sequence[str]:
    names = ("regs_per_thread", "spill_bytes", "smem_bytes")
    return [str(compiled.get(name, "")) for name in names]
