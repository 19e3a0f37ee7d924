"""Suite `schedules` on the CPU, with small shapes and made-up times; its report from a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from fake_clock import FakeClock
from test_report import record_of

from flashgen.bench import schedules_report, schedules_suite
from flashgen.bench.record import CaseRecord, Record, Result
from flashgen.bench.report import progress_line, render
from flashgen.bench.run import Run
from flashgen.bench.schedules_report import measured_us, predictions, rankings
from flashgen.bench.schedules_suite import COUNT, Plan, measure_plan, plan_of, plans, run_schedules
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.schedule.predict import Machine, Prediction, Step
from flashgen.schedule.space import check
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune.ahead import Compiled, Job
from flashgen.tune.candidates import Candidates
from flashgen.tune.summary import summarise

CPU = torch.device("cpu")
TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="small", head_dim=16, dtype="fp16", heads={"group": 2}, mask=["causal"])
SHAPE = Shape(1, 2, 1, 40, 150)
TILES = tuple(
    Schedule(block_m=m, block_n=n, num_warps=4, num_stages=2) for m, n in ((16, 32), (32, 64))
)
SMALL = Plan(SPEC, SHAPE, TILES)
GOOD = Compiled(1.5, smem_bytes=4096, regs_per_thread=80, spill_bytes=0)
BAD = Compiled(45.0, error="compiling took over 45 s")


class FakeCompiling:
    """Has compiled everything already."""

    def __enter__(self) -> FakeCompiling:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, jobs: Iterable[Job]) -> None:
        self.jobs = list(jobs)

    def wait_for(self, jobs: Iterable[Job], until: float) -> Mapping[Job, Compiled]:
        return {job: GOOD if job.schedule == TILES[0] else BAD for job in jobs}


def test_every_spec_has_its_schedules_and_all_of_them_are_feasible() -> None:
    found = plans(TARGET)
    assert len(found) >= 5
    for plan in found:
        assert len(plan.schedules) == COUNT >= 30
        problem = Problem(plan.spec, TARGET)
        assert all(check(schedule, problem) is None for schedule in plan.schedules)


def test_schedules_are_checked_timed_and_recorded_with_their_fields() -> None:
    clock = FakeClock(default=25.0)
    known = {TILES[0]: GOOD, TILES[1]: BAD}
    case = measure_plan(SMALL, SMALL.candidates(TARGET), known, clock, CPU, l2_bytes=1, rounds=2)
    assert case.id == "small/b1/h2:1/q40/k150"
    assert measured_us(case) == {str(TILES[0]): pytest.approx(25_000.0)}
    timed, refused = case.results
    assert timed.accuracy is not None
    assert timed.accuracy.max_error <= timed.accuracy.bound
    assert timed.samples_ms == ()
    assert refused.error == BAD.error
    assert case.facts["default"] == str(TILES[0])
    fields = case.facts["schedules"][str(TILES[1])]
    assert Schedule.from_dict(fields["fields"]) == TILES[1]
    assert fields["compiled"] == {"seconds": 45.0, "error": BAD.error}
    assert case.facts["verified"] is True
    record = record_of("schedules", [case])
    again = Record.from_json(record.to_json())
    assert again == record
    assert not again.wrong
    assert render(again) == render(record)


def test_a_wrong_schedule_is_said_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(candidates: Candidates, schedule: Schedule) -> Callable[[], object]:
        return lambda: lambda a: torch.full_like(a.q, 0.5)

    monkeypatch.setattr(schedules_suite, "_builder", broken)
    case = measure_plan(
        SMALL, SMALL.candidates(TARGET), dict.fromkeys(TILES, GOOD), FakeClock(), CPU, l2_bytes=1
    )
    assert measured_us(case) == {}
    assert record_of("schedules", [case]).wrong == (case.id,)
    assert progress_line(case) == f"{case.id}: no schedule was timed"


def test_the_suite_waits_for_kernels_and_stops_with_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules_suite, "Compiling", FakeCompiling)
    monkeypatch.setattr(schedules_suite, "plans", lambda target: [SMALL])
    said: list[str] = []
    run = Run(record_of("schedules", []), said.append)
    run_schedules(run, FakeClock(default=25.0), CPU, l2_bytes=1)
    assert [case.id for case in run.record.cases] == [SMALL.id]
    assert any("1 compiled, 1 not; the slowest took 45 s" in line for line in said)
    run = Run(record_of("schedules", []), said.append, budget_s=0)
    run_schedules(run, FakeClock(), CPU, l2_bytes=1)
    assert run.record.not_run == (f"{SMALL.id}: the budget of 0 s was spent",)


def test_a_spec_that_is_not_served_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = replace(SMALL, spec=SPEC.replace(kv_cache={"paged": {"page_size": 16}}))
    monkeypatch.setattr(schedules_suite, "plans", lambda target: [paged])
    run = Run(record_of("schedules", []), lambda line: None)
    run_schedules(run, FakeClock(), CPU, l2_bytes=1)
    assert run.record.not_run == (f"{paged.id}: not served yet: kv_cache: paged",)


# ---- the report


@pytest.fixture
def a_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model of time that only knows how many scores a tile has."""

    def simple(
        problem: Problem, schedule: Schedule, shape: Shape, *, machine: Machine | None = None
    ) -> Prediction:
        step = Step(1.0, 1.0, 1.0, 1.0, 1.0)
        us = 2**17 / (schedule.block_m * schedule.block_n) + schedule.num_stages
        return Prediction(step, 1, 1, 1.0, us, 0.0, launch_us=2.0 + (machine is not None))

    monkeypatch.setattr(schedules_report, "predict", simple)
    schedules_report._predict.cache_clear()
    yield
    schedules_report._predict.cache_clear()


def a_record() -> Record:
    """Made-up times: the model's own, with every third schedule a good deal slower."""
    spec = AttentionSpec(name="made_up", head_dim=128, dtype="bf16", mask=["causal"])
    plan = plan_of(spec, Shape(1, 16, 16, 2048, 2048), TARGET, count=9)
    facts = {
        "spec": spec.to_yaml(),
        "default": str(plan.schedules[0]),
        "schedules": schedules_suite.schedule_facts(
            plan.schedules, dict.fromkeys(plan.schedules, GOOD)
        ),
    }
    case = CaseRecord(plan.id, spec.display_name, "made_up", vars(plan.shape), facts=facts)
    times = {n: p.time_us for n, p in predictions(case, TARGET.id).items()}
    results = [
        Result(name, ms=summarise([1e-3 * us * (1.5 if place % 3 == 1 else 1.0)]))
        for place, (name, us) in enumerate(times.items())
    ]
    failed = Result(results[-1].name, error="OutOfResources: shared memory")
    return record_of("schedules", [replace(case, results=(*results[:-1], failed))])


@pytest.mark.usefixtures("a_model")
def test_the_report_says_how_well_the_model_ranks(golden: Callable[[str, str], None]) -> None:
    record = a_record()
    (found,) = rankings(record).values()
    assert found.count == 8
    assert found.good
    golden("bench/schedules.md", render(record))


def test_a_report_of_nothing_is_one_too() -> None:
    assert "## The model's order" in render(record_of("schedules", []))
