"""Suite `loop-orders` on the CPU, with a small shape and made-up times; its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from fake_clock import FakeClock
from test_report import record_of

from flashgen.bench import orders_report, orders_suite, schedules_suite, suites
from flashgen.bench.orders_report import estimates, orders_parts
from flashgen.bench.orders_suite import order_plan, order_plans, spec_of
from flashgen.bench.record import CaseRecord, Record, Result
from flashgen.bench.report import render
from flashgen.bench.run import Run
from flashgen.bench.schedules_report import measured_us
from flashgen.bench.schedules_suite import Plan, measure_plan, schedule_facts
from flashgen.bench.suites import Request, run_all
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.schedule.orders import OrderEstimate
from flashgen.schedule.space import check
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune.ahead import Compiled, Job
from flashgen.tune.summary import summarise

CPU = torch.device("cpu")
TARGET = get_target("nvidia-h200")
GOOD = Compiled(1.5, smem_bytes=4096, regs_per_thread=80, spill_bytes=0)
SPEC = AttentionSpec(
    name="small", head_dim=16, dtype="fp16", heads={"group": 2}, mask=["causal"], loop_order="auto"
)
FLASH1 = Schedule(loop_order="flash1", block_m=16, block_n=32, num_warps=4, num_stages=1)
SCHEDULES = (
    Schedule(block_m=16, block_n=32, num_warps=4, num_stages=1),
    FLASH1,
    replace(FLASH1, num_kv_splits=3),
)
SMALL = Plan(SPEC, Shape(1, 2, 1, 20, 70), SCHEDULES)


def test_every_case_has_both_orders_and_all_schedules_fit() -> None:
    found = order_plans(TARGET)
    assert len({plan.id for plan in found}) == len(found) >= 10
    for plan in found:
        problem = Problem(plan.spec, TARGET)
        assert all(check(schedule, problem) is None for schedule in plan.schedules)
        orders = [schedule.loop_order for schedule in plan.schedules]
        assert orders[0] == "flash2"
        assert set(orders[1:]) == {"flash1"}
        splits = [schedule.splits for schedule in plan.schedules[1:]]
        assert splits[0] == 1
        assert splits == sorted(set(splits))


def test_no_more_splits_than_key_tiles() -> None:
    plan = order_plan(spec_of("full", 128, "bf16"), Shape(1, 1, 1, 4096, 1024), TARGET)
    assert max(s.splits for s in plan.schedules) == 1024 // 128


def test_both_orders_are_checked_and_timed() -> None:
    known = dict.fromkeys(SCHEDULES, GOOD)
    clock = FakeClock(default=25.0)
    case = measure_plan(SMALL, SMALL.candidates(TARGET), known, clock, CPU, l2_bytes=1, rounds=2)
    assert list(measured_us(case)) == list(map(str, SCHEDULES))
    assert all(r.accuracy is not None and r.error is None for r in case.results)
    record = record_of("loop-orders", [case])
    again = Record.from_json(record.to_json())
    assert not again.wrong
    assert render(again) == render(record)


@pytest.mark.slow
def test_the_suite_runs_by_name_and_stops_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeCompiling:
        def __enter__(self) -> FakeCompiling:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, jobs: object) -> None:
            pass

        def wait_for(self, jobs: list[Job], until: float) -> Mapping[Job, Compiled]:
            return dict.fromkeys(jobs, GOOD)

    monkeypatch.setattr(schedules_suite, "Compiling", FakeCompiling)
    monkeypatch.setattr(suites, "order_plans", lambda target: [SMALL])
    for budget_s, ran in ((100.0, 1), (0.0, 0)):
        record = record_of("loop-orders", [])
        run = Run(record, lambda line: None, budget_s=budget_s)
        request = Request(("loop-orders",), seconds=budget_s)
        run_all({"loop-orders": run}, request, FakeClock(default=25.0), CPU, l2_bytes=1)
        assert run.record.complete
        assert len(run.record.cases) == ran
        assert len(run.record.not_run) == 1 - ran


@pytest.fixture
def a_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model that only knows how many programs share the keys."""

    def simple(problem: Problem, schedule: Schedule, shape: Shape) -> OrderEstimate:
        programs = shape.q_heads * schedule.splits
        return OrderEstimate(
            schedule=schedule,
            time_us=4000.0 / programs,
            tile_traffic_bytes=10**6 * programs,
            dram_bytes=10**5 * programs,
            programs=programs,
        )

    monkeypatch.setattr(orders_report, "estimate", simple)
    orders_report._estimate.cache_clear()
    yield
    orders_report._estimate.cache_clear()


def a_record() -> Record:
    """Made-up times: the model's own, with flash1 twice as slow."""
    cases = []
    for mask, head_dim, dtype, shape in orders_suite.CASES[-2:]:
        plan = order_plan(spec_of(mask, head_dim, dtype), shape, TARGET)
        facts = {
            "spec": plan.spec.to_yaml(),
            "default": str(plan.schedules[0]),
            "schedules": schedule_facts(plan.schedules, dict.fromkeys(plan.schedules, GOOD)),
        }
        case = CaseRecord(plan.id, "made_up", "made_up", vars(plan.shape), facts=facts)
        times = {
            name: of.time_us * (2.0 if of.schedule.loop_order == "flash1" else 1.0)
            for name, of in estimates(case, TARGET.id).items()
        }
        results = tuple(Result(name, ms=summarise([1e-3 * us])) for name, us in times.items())
        cases.append(replace(case, results=results))
    return record_of("loop-orders", cases)


@pytest.mark.usefixtures("a_model")
def test_the_report_has_both_orders_and_the_models_figures(
    golden: Callable[[str, str], None],
) -> None:
    record = a_record()
    golden("bench/loop-orders.md", render(record))


@pytest.mark.usefixtures("a_model")
def test_a_case_without_one_order_has_no_line_of_its_own() -> None:
    (case, other) = a_record().cases
    failed = tuple(
        Result(r.name, error="OutOfResources") if "flash1" in r.name else r for r in case.results
    )
    summary, *_ = orders_parts(record_of("loop-orders", [replace(case, results=failed), other]))
    assert case.id not in summary
    assert other.id in summary
