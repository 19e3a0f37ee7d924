"""Suite `counters` with a program that stands for Nsight Compute; its report from a record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_report import record_of

from flashgen.bench import counters_program, counters_suite, ncu
from flashgen.bench.counter_cases import (
    LENGTHS,
    MASKS,
    TILES_OF,
    CounterCase,
    case_of,
    counter_cases,
)
from flashgen.bench.counters_report import agreement, agreements, counted
from flashgen.bench.counters_suite import Chosen, case_record, run_counters
from flashgen.bench.ncu import DRAM_READ, DRAM_WRITTEN, READ, WRITTEN, KernelCounters
from flashgen.bench.record import CaseRecord, Record
from flashgen.bench.report import progress_line, render
from flashgen.bench.run import Run
from flashgen.problem import Problem
from flashgen.schedule.space import check
from flashgen.target import get_target
from flashgen.tune.ahead import Compiled, Job

CPU = torch.device("cpu")
TARGET = get_target("nvidia-h200")
GOOD = Compiled(1.5, smem_bytes=4096, regs_per_thread=80, spill_bytes=0)

# Prints three kernels for each case, as ncu does: the attention, and what empties the cache.
FAKE_NCU = f"""#!{sys.executable}
import json, sys
arguments = sys.argv[1:]
if arguments == ["--query-metrics"]:
    for name in {list(ncu.METRICS)!r}:
        print(name.partition(".")[0], " something")
    raise SystemExit
metrics = arguments[arguments.index("--metrics") + 1].split(",")
wanted = json.loads(arguments[-1])
assert arguments[-3:-1] == ["-m", "flashgen.bench.counters_program"]
if any("flash1" in case for case in wanted["cases"]):
    raise SystemExit("ERROR: flash1 went wrong")
rows = []
for number, case in enumerate(wanted["cases"][: -1 if len(wanted["cases"]) > 1 else None]):
    rows.append(["flashgen case", number, "attention_fwd", 1000.0])
    rows.append(["flashgen case", number, "attention_merge", 24.0])
    if wanted["write_back"]:
        rows.append(["flashgen after", number, "reduce_kernel", 7.0])
with open(arguments[arguments.index("--log-file") + 1], "w") as log:
    print('==PROF== Profiling "a" - 0: 0%....50%....100% - 5 passes', file=log)
    header = ["ID", "Kernel Name", "Grid Size", "Range", *metrics]
    print(",".join(f'"{{name}}"' for name in header), file=log)
    print('"","","",""' + ',"byte"' * len(metrics), file=log)
    for place, (label, number, kernel, value) in enumerate(rows):
        cells = [place, kernel, "(4, 1, 1)", f"{{label}} {{number}}:none", *[value] * len(metrics)]
        print(",".join(f'"{{cell}}"' for cell in cells), file=log)
print("not reached: the last one", file=sys.stderr)
"""


class FakeCompiling:
    """Has compiled everything already; one tile of it was refused."""

    def __enter__(self) -> FakeCompiling:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, jobs: Iterable[Job]) -> None:
        self.jobs = list(jobs)

    def wait_for(self, jobs: Iterable[Job], until: float) -> Mapping[Job, Compiled]:
        refused = Compiled(3.0, error="CompileError: no")
        return {job: refused if job.schedule.block_n == 32 else GOOD for job in jobs}


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ncu"
    tool.write_text(FAKE_NCU)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters_suite, "Compiling", FakeCompiling)
    monkeypatch.setattr(counters_suite, "unserved_features", lambda spec: ())


def a_run(only: tuple[str, ...], **more: object) -> tuple[Run, list[str]]:
    said: list[str] = []
    more = {"budget_s": 120.0, **more}
    return Run(record_of("counters", [], ceilings=()), said.append, only=only, **more), said


# ---- the grid


def test_the_grid_has_every_mask_length_tile_and_order() -> None:
    cases = counter_cases()
    assert len({case.id for case in cases}) == len(cases)
    for order in ("flash2", "flash1"):
        of_order = {(c.mask, c.length, c.tile) for c in cases if c.loop_order == order}
        assert {(m, n, t) for m in MASKS for n in LENGTHS for t in TILES_OF[order]} <= of_order
        assert len(TILES_OF[order]) == 3
    assert set(LENGTHS) == {1024, 4096, 16384}


def test_every_case_has_a_feasible_schedule_of_its_tile_and_order() -> None:
    for case in counter_cases():
        schedule = case.schedule(TARGET)
        assert schedule is not None
        assert (schedule.block_m, schedule.block_n, schedule.num_warps) == case.tile
        assert schedule.loop_order == case.loop_order == case.spec.loop_order
        assert check(schedule, Problem(case.spec, TARGET)) is None
        assert case_of(case.id) == case


def test_a_tile_that_does_not_fit_has_no_schedule() -> None:
    large = CounterCase(loop_order="flash2", mask="full", length=64, tile=(256, 256, 8))
    assert large.schedule(TARGET) is None


# ---- the run


@pytest.mark.usefixtures("fake_ncu")
def test_cases_are_counted_and_what_is_not_reached_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run, said = a_run(("flash2/full/n1024", "flash2/full/n4096/64x64"), out=out)
    run_counters(run, CPU)
    assert [case.id for case in run.record.cases] == [
        "flash2/full/n4096/64x64",
        "flash2/full/n1024/64x64",
    ]
    assert run.record.not_run == (
        "flash2/full/n1024/128x32: CompileError: no",
        "flash2/full/n1024/128x64: no counters: not reached, or it failed",
    )
    found = counted(run.record.cases[0])
    assert (found.read, found.written, found.tile_traffic) == (1024, 1024, 2048)
    assert (found.dram_read, found.dram_written, found.left, found.dram) == (1024, 1024, 7, 2055)
    facts = run.record.cases[0].facts
    assert facts["passes"] == [5, 5]
    assert len(facts["cold"][0]["counters"]) == len(ncu.METRICS)
    assert any("not reached: the last one" in line for line in said)
    assert Record.from_json(run.record.to_json()) == run.record
    assert "n4096/64x64" in render(run.record)
    kept = {path.name for path in (out / "nvidia-h200").iterdir()}
    assert kept == {"counters.json", "counters.md", "ncu-flash2-1.csv", "ncu-flash2-2.csv"}


@pytest.mark.usefixtures("fake_ncu")
def test_one_order_that_fails_leaves_the_other() -> None:
    run, said = a_run(("full/n4096/64x64",))
    run_counters(run, CPU)
    assert [case.group for case in run.record.cases] == ["flash2"]
    (left,) = run.record.not_run
    assert not [line for line in said if "what ncu printed" in line]  # nowhere to keep it
    assert (
        left == "flash1/full/n4096/64x64: bench: ncu profiled no kernel: ERROR: flash1 went wrong"
    )


@pytest.mark.usefixtures("fake_ncu")
def test_where_nothing_can_be_counted_the_suite_fails() -> None:
    run, _ = a_run(("flash1/full/n4096/64x64",))
    with pytest.raises(ncu.CounterError, match="flash1 went wrong"):
        run_counters(run, CPU)


@pytest.mark.usefixtures("fake_ncu")
def test_a_counter_that_is_needed_and_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.setattr(ncu, "available", lambda tool, wished: [n for n in wished if n != READ])
    run, _ = a_run(("flash2/full/n4096/64x64",))
    with pytest.raises(ncu.CounterError) as raised:
        run_counters(run, CPU)
    golden("errors/ncu-counter.txt", str(raised.value))


@pytest.mark.usefixtures("fake_ncu")
@pytest.mark.parametrize(
    ("only", "shares"),
    [
        (("flash2/full/n4096/64x64",), [1.0]),
        (("flash1/window/n16384",), [1.0]),
        (("flash2/full/n4096/64x64", "flash1/full/n4096"), [0.25, 1.0]),
    ],
)
def test_the_budget_is_shared_by_what_was_asked_for(
    only: tuple[str, ...], shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def keep(*_: object, limit_s: float, **__: object) -> ncu.Profile:
        limits.append(limit_s)
        return ncu.Profile((), None, ())

    monkeypatch.setattr(counters_suite, "_profile", keep)
    run, _ = a_run(only, budget_s=6000.0)
    run_counters(run, torch.device("cpu"))
    cases = [case for case in counter_cases() if run.wants(case.id)]
    orders = dict.fromkeys(case.loop_order for case in cases)
    assert len(orders) == len(shares)
    assert limits[::2] == limits[1::2] == pytest.approx([3000.0 * s for s in shares], rel=0.02)


@pytest.mark.usefixtures("fake_ncu")
def test_counters_that_are_only_wished_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "available", lambda tool, wished: ncu.NEEDED)
    run, said = a_run(("flash2/full/n4096/64x64",))
    run_counters(run, CPU)
    assert len(run.record.cases) == 1
    assert any("counters that are not here: gpu__time_duration.sum" in line for line in said)


@pytest.mark.usefixtures("fake_ncu")
def test_nothing_begins_when_the_budget_is_spent_and_unserved_orders_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = a_run(("flash2/full/n4096/64x64",), budget_s=0)
    run_counters(run, CPU)
    assert run.record.not_run == ("flash2, 1 cases: the budget of 0 s was spent",)
    monkeypatch.setattr(counters_suite, "unserved_features", lambda spec: ("loop_order: flash1",))
    run, _ = a_run(("flash1/full/n4096/64x64",))
    run_counters(run, CPU)
    assert run.record.not_run == ("flash1/full/n4096/64x64: not served yet: loop_order: flash1",)


def test_without_nsight_compute_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run, _ = a_run(())
    with pytest.raises(ncu.CounterError, match="not on the PATH"):
        run_counters(run, CPU)


# ---- what runs under Nsight Compute


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the program asks of CUDA, in order; it runs on the CPU."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: found.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: found.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("pop"))
    return found


TINY = CounterCase(loop_order="flash2", mask="causal", length=32, tile=(16, 16, 4), head_dim=16)


def test_a_case_is_profiled_in_a_range_of_its_number(diary: list[str]) -> None:
    counters_program.run_case(replace(TINY, heads=1), 5, CPU, None)
    assert diary == ["start", "flashgen case 5", "pop", "stop"]
    diary.clear()
    counters_program.run_case(replace(TINY, heads=1), 6, CPU, torch.ones(4))
    assert diary == ["start", "flashgen case 6", "pop", "flashgen after 6", "pop", "stop"]


def test_cases_that_fail_are_said_and_time_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(case: CounterCase, number: int, *_: object) -> None:
        raise RuntimeError(f"no {number}")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(counters_program, "run_case", fail)
    ids = [case.id for case in counter_cases()[:2]]
    counters_program.main({"cases": ids, "write_back": False, "seconds": 100.0})
    assert capsys.readouterr().err == (
        f"{ids[0]}: RuntimeError: no 0\n{ids[1]}: RuntimeError: no 1\n"
    )
    counters_program.main({"cases": ids, "write_back": False, "seconds": -1.0})
    assert capsys.readouterr().err == (  # it was started for the first one
        f"{ids[0]}: RuntimeError: no 0\nout of time before {ids[1]}\n"
    )


def test_the_program_gets_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def keep(tool: str, program: list[str], *_: object, flush: bool, limit_s: float) -> ncu.Profile:
        asked.append((json.loads(program[-1]), flush, limit_s))
        return ncu.Profile((), None, ())

    monkeypatch.setattr(ncu, "profile", keep)
    counters_suite._profile("ncu", ["a"], ["x"], Path("log"), write_back=True, limit_s=115.0)
    assert asked == [({"cases": ["x"], "write_back": True, "seconds": 80.0}, False, 115.0)]


# ---- the report


def a_case(case_id: str, share: float, dram_share: float = 1.0) -> CaseRecord:
    """A case in which the counters are this share of what the models say."""
    case = case_of(case_id)
    schedule = case.schedule(TARGET)
    assert schedule is not None

    def kernels(name: str, **counters: float) -> list[KernelCounters]:
        return [KernelCounters(name, "(64, 1, 1)", None, counters)]

    empty = [kernels("attention_fwd"), kernels("attention_fwd"), kernels("reduce_kernel")]
    blank = case_record(Chosen(case, schedule), GOOD, empty, passes=(5, 1))
    said = agreement(blank, TARGET.id)
    traffic, dram = said.figures.tile_traffic_bytes, said.dram.total_bytes
    full = [
        kernels(
            "attention_fwd",
            **{READ: 0.75 * share * traffic, WRITTEN: 0.25 * share * traffic},
        ),
        kernels(
            "attention_fwd",
            **{DRAM_READ: 0.5 * dram_share * dram, DRAM_WRITTEN: 0.25 * dram_share * dram},
        ),
        kernels("reduce_kernel", **{DRAM_WRITTEN: 0.25 * dram_share * dram, DRAM_READ: 1e9}),
    ]
    return case_record(Chosen(case, schedule), GOOD, full, passes=(5, 1))


def test_models_are_held_against_the_counters_of_all_kernels_of_a_call() -> None:
    found = agreement(a_case("flash2/causal/n4096/64x64", 0.96, 1.1), TARGET.id)
    assert found.tile_traffic_error == pytest.approx(1 / 0.96 - 1, abs=1e-6)
    assert found.dram_error == pytest.approx(1 / 1.1 - 1, abs=1e-6)
    assert found.good
    assert not agreement(a_case("flash2/causal/n4096/64x64", 0.94), TARGET.id).good
    assert not agreement(a_case("flash2/causal/n4096/64x64", 1.0, 0.86), TARGET.id).good


def test_the_models_are_those_of_the_case() -> None:
    """flash2, 16 heads of 4 batches: q, out once, k and v for each tile of 64 rows."""
    found = agreement(a_case("flash2/full/n4096/64x64", 1.0), TARGET.id)
    row = 4 * 16 * 4096 * 128 * 2
    assert found.figures.tile_traffic_bytes == row * (2 + 2 * 4096 // 64)
    assert found.dram.floor_bytes == 4 * row


def test_the_report_shows_models_and_counters(golden: Callable[[str, str], None]) -> None:
    cases = [
        a_case("flash2/causal/n4096/64x64", 0.96, 1.1),
        a_case("flash2/window/n1024/128x64", 1.08, 0.8),
    ]
    record = record_of("counters", cases, ceilings=())
    assert [found.good for found in agreements(record)] == [True, False]
    golden("bench/counters.md", render(record))
    golden("bench/counters-line.txt", progress_line(cases[0]))


def test_a_report_of_nothing_is_one_too() -> None:
    assert "Nothing was counted." in render(record_of("counters", []))
