"""Runners for processes that try Hopper kernels, without a GPU: the schedule says what happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from flashgen.compiler.cases import Case
from flashgen.compiler.first_run import Task
from flashgen.compiler.verification import CaseResult
from flashgen.errors import ScheduleError
from flashgen.schedule.model import Rejection, Schedule, Scheduler, Sm90

if TYPE_CHECKING:
    from flashgen.reference import Comparison


def hopper(stages: int, scheduler: Scheduler = "grid") -> Schedule:
    return Schedule(
        family="gluon_sm90",
        block_m=128,
        block_n=64,
        num_warps=12,
        num_stages=stages,
        sm90=Sm90(scheduler=scheduler, separate_out=True),
    )


GOOD, HANGS, CRASHES, WRONG = (hopper(stages) for stages in range(1, 5))
SPILLS, COMPILES_FOR_EVER, RAISES, BREAKS_PTXAS = (hopper(s, "dynamic") for s in range(1, 5))
REJECTIONS = (
    Rejection("serialised wgmma (ptxas C7510)", 1, 0),
    Rejection("spill_bytes", 208, 0),
)


def hang() -> None:
    """In a call that no signal handler interrupts, with a child of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    subprocess.run(["sleep", "1000"], check=False)


def compared(*, ok: bool) -> Comparison:
    from flashgen.reference import Comparison

    nothing: dict[str, Any] = {"lse_error": 0.0, "lse_bound": 1.0, "misplaced": 0, "unclean": 0}
    return Comparison(max_error=0.25 if ok else 3.0, bound=0.5, **nothing)


def result_of(case: Case, ok: bool) -> CaseResult:
    return CaseResult(case, compared(ok=ok))


class Answer:
    """A `CaseResult` once it is read: the process that sends it need not load torch, which takes
    longer than all that it does."""

    def __init__(self, case: Case, ok: bool) -> None:
        self._given = case, ok

    def __reduce__(self) -> tuple[Any, ...]:
        return result_of, self._given


class FakeRunner:
    """Answers, or does not; notes in the environment's file who was asked what."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def compile(self, schedule: Schedule) -> None:
        self._note(f"compile {schedule}")
        if schedule == COMPILES_FOR_EVER:
            hang()
        if schedule == BREAKS_PTXAS:
            raise RuntimeError("PassManager::run failed")
        if schedule == SPILLS:
            raise ScheduleError("the kernel: spills", REJECTIONS)

    def run(self, case: Case) -> CaseResult | Answer:
        self._note(f"run {case}")
        if case.schedule == HANGS:
            hang()
        if case.schedule == CRASHES:
            print("an illegal memory access", file=sys.stderr, flush=True)
            os.abort()
        if case.schedule == RAISES:
            return CaseResult(case, None, failure="OutOfResources: shared memory")
        return Answer(case, case.schedule != WRONG)

    @staticmethod
    def _note(text: str) -> None:
        if path := os.environ.get("FAKE_FIRST_RUNS"):
            with open(path, "a", encoding="utf-8") as stream:  # noqa: PTH123
                stream.write(f"{os.getpid()} {text}\n")


def no_gpu(task: Task) -> FakeRunner:
    raise RuntimeError(f"CUDA error: device {task.device} is busy")
