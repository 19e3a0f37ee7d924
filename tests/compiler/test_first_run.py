"""First runs of Hopper kernels in a process with a deadline, without a GPU: processes that hang,
crash, cannot start or answer wrongly, and what the caller gets instead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_first_runs import (
    BREAKS_PTXAS,
    COMPILES_FOR_EVER,
    CRASHES,
    GOOD,
    HANGS,
    RAISES,
    SPILLS,
    WRONG,
    compared,
)

from flashgen import freeze
from flashgen.compiler import building, choose, first_run, verification
from flashgen.compiler.cases import Case
from flashgen.compiler.first_run import Deadlines, Elsewhere, FirstRuns, Task, first_cases
from flashgen.compiler.verification import CaseResult
from flashgen.errors import FlashgenWarning, FrozenError
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.runtime.check import Sizes
from flashgen.runtime.frozen import thaw
from flashgen.runtime.interpret import interpreting
from flashgen.runtime.launch import Attention, Loaded
from flashgen.runtime.load import load_module
from flashgen.runtime.said import forget
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import verdicts
from flashgen.tune.verdicts import HUNG, Machine, recall, subject_of

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="hopper", head_dim=64, dtype="fp16", mask="causal")
MACHINE = Machine("NVIDIA H200", "570.86.15", "2.11.0", "3.6.0", "of triton")
CPU = torch.device("cpu")
SIZES = Sizes(1, 2, 2, 300, 400)
pytestmark = pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
RUNNER = "fake_first_runs:FakeRunner"
QUICK = Deadlines(start=120.0, compile=1.0, run=1.0)


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_triton_cache: Path
) -> Iterator[Path]:
    """A cache of its own, short deadlines, and a file of what processes were asked."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared_triton_cache))
    monkeypatch.setenv("FAKE_FIRST_RUNS", str(tmp_path / "asked"))
    for name in ("FLASHGEN_TRY_FIRST", "FLASHGEN_FROZEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(first_run, "DEADLINES", QUICK)
    verdicts.forget_here()
    forget()
    yield tmp_path
    verdicts.forget_here()
    thaw()


def plan_of(schedule: Schedule) -> tuple[Plan, Path]:
    return choose.plan(SPEC, TARGET, schedule=schedule, has_lse=False, machine=lambda: MACHINE)


def allowed(schedule: Schedule, runner: str = RUNNER) -> bool:
    plan, path = plan_of(schedule)
    guard = FirstRuns(SPEC, lambda _: TARGET, runner, lambda _: MACHINE)
    return guard(CPU, plan, path, schedule, SIZES)


def verdict_of(schedule: Schedule) -> verdicts.Verdict | None:
    verdicts.forget_here()
    plan, _ = choose._made(SPEC, TARGET, schedule, {}, has_lse=False)
    return recall(subject_of(plan, SPEC.display_name, schedule, MACHINE))


def asked(folder: Path) -> list[str]:
    """What processes were asked, without their numbers."""
    path = folder / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines]


def test_a_good_one_is_tried_once_on_this_machine(fresh: Path) -> None:
    assert allowed(GOOD)
    tried = asked(fresh)
    assert [line.partition(" ")[0] for line in tried] == ["compile", "run", "run", "run"]
    verdicts.forget_here()  # as in the next process
    assert allowed(GOOD)
    assert asked(fresh) == tried
    found = verdict_of(GOOD)
    assert found is not None
    assert found.state == "proven"


@pytest.mark.parametrize(
    ("schedule", "state", "reason"),
    [
        (HANGS, "hung", "no answer within 1 s, running b2 h4:2 q129 k131 plain"),
        (COMPILES_FOR_EVER, "hung", f"no answer within 1 s, compiling {COMPILES_FOR_EVER}"),
        (
            SPILLS,
            "refused",
            "serialised wgmma (ptxas C7510): must be at most 0 (got 1); "
            "spill_bytes: must be at most 0 (got 208)",
        ),
    ],
)
def test_a_bad_one_is_never_tried_again(
    fresh: Path, schedule: Schedule, state: str, reason: str
) -> None:
    assert not allowed(schedule)
    found = verdict_of(schedule)
    assert found is not None
    assert (found.state, found.reason) == (state, reason)
    tried = asked(fresh)
    plan, _ = plan_of(schedule)
    assert schedule not in {each for _, each in plan.choices}
    assert asked(fresh) == tried


def test_a_wrong_answer_is_remembered() -> None:
    assert not allowed(WRONG)
    found = verdict_of(WRONG)
    assert found is not None
    assert found.state == "wrong"
    assert found.refusal.startswith("differs from the oracle: WRONG")


@pytest.mark.parametrize(
    ("schedule", "runner", "reason"),
    [
        (CRASHES, RUNNER, "the process ended by SIGABRT: an illegal memory access, running b2 "),
        (BREAKS_PTXAS, RUNNER, "RuntimeError: PassManager::run failed"),
        (RAISES, RUNNER, "b2 h4:2 q129 k131 plain: OutOfResources: shared memory"),
        (
            GOOD,
            "fake_first_runs:no_gpu",
            "no process could be had that tries it: RuntimeError: CUDA error: device 0 is busy",
        ),
        (GOOD, "no_such_module:Runner", "no process could be had that tries it: ModuleNotFound"),
    ],
)
def test_what_may_be_luck_is_for_this_process(schedule: Schedule, runner: str, reason: str) -> None:
    assert not allowed(schedule, runner)
    (found,) = verdicts._HERE.values()
    assert found.refusal.startswith(reason)
    assert schedule not in {each for _, each in plan_of(schedule)[0].choices}
    assert verdict_of(schedule) is None


def test_a_process_that_hangs_is_gone_with_all_that_it_started(fresh: Path) -> None:
    assert not allowed(HANGS)
    pid = int((fresh / "asked").read_text().split()[0])
    until = time.monotonic() + 60
    while _group(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _group(pid)


def _group(pgid: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(entry.name)
    return found


def test_the_setting_turns_trying_off_but_not_what_is_known(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not allowed(HANGS)
    tried = asked(fresh)
    monkeypatch.setenv("FLASHGEN_TRY_FIRST", "0")
    assert allowed(GOOD)
    assert asked(fresh) == tried
    assert verdict_of(GOOD) is None
    assert HANGS not in {each for _, each in plan_of(HANGS)[0].choices}


def test_frozen_it_is_not_tried(fresh: Path, golden: Callable[[str, str], None]) -> None:
    plan, path = plan_of(GOOD)
    guard = FirstRuns(SPEC, lambda _: TARGET, RUNNER, lambda _: MACHINE)
    freeze()
    with pytest.raises(FrozenError) as error:
        guard(CPU, plan, path, GOOD, SIZES)
    golden("errors/frozen-first-run.txt", str(error.value))
    assert asked(fresh) == []
    thaw()
    assert guard(CPU, plan, path, GOOD, SIZES)
    freeze()
    assert guard(CPU, plan, path, GOOD, SIZES)


@pytest.mark.slow
def test_threads_and_processes_share_one_trial(fresh: Path) -> None:
    folder = Path(__file__).parent
    program = (
        "from test_first_run import *\n"
        "first_run.DEADLINES = Deadlines(120.0, 60.0, 60.0)\n"
        "assert allowed(GOOD)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    plan_of(GOOD)
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(3)
    ]
    assert [process.wait(240) for process in processes] == [0, 0, 0]
    assert len(asked(fresh)) == 4
    assert not list(verdicts.folder().glob("*.lock"))


def test_cases_before_the_first_call() -> None:
    cases = first_cases(Problem(SPEC, TARGET), GOOD, Sizes(8, 32, 8, 5, 100_000))
    few, many, own = (case.shape for case in cases)
    assert few == Shape(2, 4, 2, 129, 131)
    assert 2 * TARGET.sm_count < 2 * many.batch * many.q_heads < 4 * TARGET.sm_count
    assert own == Shape(1, 2, 1, 5, 1024)
    assert [case.index % 3 for case in cases] == [0, 1, 0]  # hidden NaN in the second


# **** calls ****


class OnFakeGpu(Attention):
    """Takes the CPU for a GPU; interpreted kernels are launched, of the portable family only."""

    launched: list[Schedule]

    @staticmethod
    def _on_gpu(device: torch.device) -> bool:
        return True

    def _load(self, device: torch.device) -> Loaded:
        from flashgen.codegen.options import kernel_kinds, options

        plan, path = self._plan_for(device)
        module = load_module(path, interpreted=True)
        run = module.run

        def interpreted(seen: Any, given: Any, *tensors: Any) -> None:
            with interpreting():
                run(seen, given, *tensors)

        module.run = interpreted  # type: ignore[attr-defined]
        entries = dict(plan.entries)
        launches = {
            bucket: (s, getattr(module, entries[kernel_kinds(s)[0]]), options(s))
            for bucket, s in plan.choices
        }
        return Loaded(plan, module, launches)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[[Schedule], OnFakeGpu]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

    def make(schedule: Schedule) -> OnFakeGpu:
        guard = FirstRuns(SPEC, lambda _: TARGET, RUNNER, lambda _: MACHINE)
        return OnFakeGpu(SPEC, lambda _: plan_of(schedule), return_lse=False, guard=guard)

    return make


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 64).half() for _ in range(3))
    return q, k, v


def expected() -> torch.Tensor:
    q, k, v = (t.double() for t in qkv())
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_call_whose_kernel_hangs_is_served_by_the_portable_family(
    fresh: Path, call: Callable[[Schedule], OnFakeGpu], golden: Callable[[str, str], None]
) -> None:
    attention = call(HANGS)
    before = attention.report()
    out = attention(*qkv())
    assert torch.allclose(out.double(), expected(), atol=2e-3)  # type: ignore[union-attr]
    tried = asked(fresh)
    attention(*qkv())
    call(HANGS)(*qkv())
    assert asked(fresh) == tried
    golden("schedule/report-hung.txt", f"{before}\n\n{attention.report()}")


def test_the_note_is_said_once(call: Callable[[Schedule], OnFakeGpu]) -> None:
    attention = call(HANGS)
    with pytest.warns(FlashgenWarning) as said:
        attention(*qkv())
        attention(*qkv())
    notes = [str(each.message) for each in said if "is not used" in str(each.message)]
    assert notes == [
        f"schedule {HANGS} is not used: {HUNG}; family triton serves\n"
        "  hint: `flashgen list --hung` shows it, and with --forget it is tried again, in a "
        "process of its own."
    ]


def test_a_proven_one_is_launched_and_tensors_that_tma_cannot_take_are_said(
    fresh: Path, call: Callable[[Schedule], OnFakeGpu], golden: Callable[[str, str], None]
) -> None:
    attention = call(GOOD)
    with pytest.warns(FlashgenWarning, match="q has strides .* that TMA cannot take"):
        out = attention(*qkv())  # CPU tensors are none that TMA takes
    assert torch.allclose(out.double(), expected(), atol=2e-3)  # type: ignore[union-attr]
    tried = asked(fresh)
    attention(*qkv())
    assert asked(fresh) == tried
    golden("schedule/report-tma.txt", attention.report())


def test_threads_of_a_first_call_wait_for_one_trial(
    fresh: Path, call: Callable[[Schedule], OnFakeGpu]
) -> None:
    attention = call(GOOD)
    outs: list[Any] = []
    threads = [threading.Thread(target=lambda: outs.append(attention(*qkv()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 3
    assert len(asked(fresh)) == 4


# **** verification ****


def task_of(schedule: Schedule) -> Task:
    plan, path = plan_of(schedule)
    return Task(Problem(SPEC, TARGET), plan, path, 0)


def case_of(schedule: Schedule, index: int = 0) -> Case:
    return Case(schedule, Shape(1, 2, 2, 9, 9), "plain", index)


def test_cases_of_a_verification_run_elsewhere(fresh: Path) -> None:
    with Elsewhere(task_of(GOOD), MACHINE, RUNNER) as elsewhere:
        assert all(elsewhere.run(case_of(GOOD, index)).ok for index in range(3))
    assert [line.split()[0] for line in asked(fresh)] == ["compile", "run", "run", "run"]
    found = verdict_of(GOOD)
    assert found is not None
    assert found.state == "proven"


def test_one_that_hangs_is_not_run_for_its_other_cases(fresh: Path) -> None:
    with Elsewhere(task_of(HANGS), MACHINE, RUNNER) as elsewhere:
        results = [elsewhere.run(case_of(HANGS, index)) for index in range(3)]
    assert len(asked(fresh)) == 2
    said = "hung: no answer within 1 s, running b1 h2:2 q9 k9 plain"
    assert [result.failure for result in results] == [said] * 3
    found = verdict_of(HANGS)
    assert found is not None
    assert found.refusal == HUNG


def test_wrong_results_prove_nothing_and_are_judged_by_who_verifies() -> None:
    with Elsewhere(task_of(WRONG), MACHINE, RUNNER) as elsewhere:
        assert not elsewhere.run(case_of(WRONG)).ok
    assert verdict_of(WRONG) is None


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Hopper cases run in the fake's process; those of the portable family are all right."""
    monkeypatch.setattr(verification, "Elsewhere", partial(Elsewhere, runner=RUNNER))
    monkeypatch.setattr(verification, "_compile_first", lambda *_: None)
    monkeypatch.setattr(verification, "_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        verification, "run_case", lambda a, case, d, **_how: CaseResult(case, compared(ok=True))
    )
    for module in (verification, building, first_run):
        monkeypatch.setattr(module, "machine_here", lambda index: MACHINE)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(building, "_device_and_target", lambda given: (device, TARGET))
    return device


def test_a_verification_sends_hopper_cases_elsewhere(fresh: Path, fake_gpu: torch.device) -> None:
    plan, path = plan_of(GOOD)
    found = verification.verify_plan(SPEC, TARGET, plan, path, device=fake_gpu)
    assert found.ok
    assert {result.case.schedule for result in found.results} == {GOOD}
    assert len(asked(fresh)) == 1 + len(found.results)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (HANGS, HUNG),
        pytest.param(
            CRASHES,
            "the process ended by SIGABRT: an illegal memory access, running b2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_build_whose_kernel_hangs_or_crashes_is_made_again_without_it(
    fresh: Path, fake_gpu: torch.device, schedule: Schedule, reason: str
) -> None:
    result = building.build(SPEC, fresh / "out", schedule=schedule, return_lse=False)
    assert result.verified
    assert {kernel.schedule.family for kernel in result.kernels} == {"triton"}
    (warning,) = (each for each in result.warnings if "is not used" in each)
    assert f"{schedule} is not used: {reason}" in warning
    assert warning in result.report.read_text()
    tried = asked(fresh)
    building.build(SPEC, fresh / "out", schedule=schedule, return_lse=False)
    assert asked(fresh) == tried


def test_a_build_that_verified_it_leaves_it_proven_for_calls(
    fresh: Path, fake_gpu: torch.device
) -> None:
    result = building.build(SPEC, fresh / "out", schedule=GOOD, return_lse=False)
    assert result.verified
    assert {kernel.schedule for kernel in result.kernels} == {GOOD}
    tried = asked(fresh)
    verdicts.forget_here()
    assert allowed(GOOD)
    assert asked(fresh) == tried


def test_another_plan_is_made_where_the_verdict_is_of_another_machine() -> None:
    assert not allowed(HANGS)
    other = replace(MACHINE, driver="575.0")
    plan, _ = choose.plan(SPEC, TARGET, schedule=HANGS, has_lse=False, machine=lambda: other)
    assert {each for _, each in plan.choices} == {HANGS}
