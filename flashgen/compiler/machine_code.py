"""Compile many kernels at once, in a process that does nothing else.

Importing torch takes seconds and so does a kernel. The helper is started first and imports while
the caller plans; then it forks one worker a core, which is safe there: it has no other threads, no
GPU, and no `__main__` of a user that would run again. It leaves what it compiled in Triton's disk
cache too, so that a launch of the same kernel later finds it. Whatever ends the caller ends the
helper, its workers and the assemblers that they started.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from flashgen.codegen.options import kernel_kinds
from flashgen.errors import CompileError, FlashgenError, FlashgenWarning, ScheduleError
from flashgen.runtime.said import say_once
from flashgen.tune.processes import Child, ChildEndedError, SilentError, cores, in_time

if TYPE_CHECKING:
    from flashgen.problem import Problem
    from flashgen.runtime.ahead import CompiledKernel
    from flashgen.runtime.artifact import Plan
    from flashgen.schedule.model import Schedule
    from flashgen.tune.verdicts import State

COMPILE_S = 60.0  # of a Hopper kernel: the slowest seen take 7 s, a few have kept LLVM for ever
_HELPER = "flashgen.compiler.machine_code:serve"


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a schedule of a plan, for aligned rows or for any.

    kind: which of the schedule's kernels; empty: its first.
    """

    schedule: Schedule
    aligned: bool
    kind: str = ""

    @property
    def kernel(self) -> str:
        """The kernel's kind: loop, single_tile, flash1, flash1_split or merge."""
        return self.kind or kernel_kinds(self.schedule)[0]

    def __str__(self) -> str:
        kernel = f", {self.kernel}" if len(kernel_kinds(self.schedule)) > 1 else ""
        return f"{self.schedule}{kernel}{'' if self.aligned else ', rows not aligned'}"


@dataclass(frozen=True)
class Refused:
    """A Hopper schedule that is not to be used: its compiler hung or died, or its machine code
    spills or makes matrix products wait for each other."""

    state: State
    reason: str


@dataclass(frozen=True)
class _Order:
    """What the helper is asked for: data only, the helper imports the module by its path."""

    problem: Problem
    plan: Plan
    path: Path
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class _Done:
    """What the helper sends: a job with what came of it (job None: only something to say)."""

    job: Job | None = None
    found: CompiledKernel | FlashgenError | Refused | None = None
    warnings: tuple[str, ...] = ()


class Compilers:
    """The helper process, as a context: `submit` once, then iterate `results`.

    refused: Hopper schedules that have no usable machine code; the others are in the results.
    """

    def __init__(self) -> None:
        self.refused: dict[Schedule, Refused] = {}
        self._child = Child(_HELPER)
        self._jobs: tuple[Job, ...] = ()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.kill()

    def submit(self, problem: Problem, plan: Plan, path: Path, jobs: Sequence[Job]) -> None:
        """Start to compile `jobs`, the slowest first by their order."""
        self._jobs = tuple(jobs)
        try:
            self._child.send(_Order(problem, plan, path, self._jobs))
        except ChildEndedError:
            raise self._broken() from None

    def results(self) -> Iterator[tuple[Job, CompiledKernel]]:
        """Kernels as they get ready; CompileError for the first one that the back end refuses."""
        left = len(self._jobs)
        while left:
            done = self._received()
            for warning in done.warnings:
                say_once(warning)
            if done.job is None:
                continue
            left -= 1
            if isinstance(done.found, FlashgenError):
                raise done.found
            if isinstance(done.found, Refused):
                self.refused[done.job.schedule] = done.found
            elif done.found is not None:
                yield done.job, done.found

    def _received(self) -> _Done:
        try:
            found: _Done = self._child.receive()
        except ChildEndedError:
            raise self._broken() from None
        return found

    def _broken(self) -> CompileError:
        words = "".join(f"\n  {line}" for line in self._child.last_lines(8))
        return CompileError(f"the compiling process ended early ({self._child.ending}){words}")


# ---- in the helper -------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Main function of the helper: take one order, compile it in parallel, send what is done."""
    # A generated module names torch in its host code only, which does not run here: 2.8 s saved.
    sys.modules.setdefault("torch", ModuleType("torch"))
    # Before there is work, for workers to inherit.
    import triton.compiler.code_generator  # noqa: F401

    import flashgen.runtime.ahead  # noqa: F401
    from flashgen.runtime.load import load_module
    from flashgen.runtime.triton_cache import use_writable_cache
    from flashgen.runtime.triton_key import find_triton_key

    find_triton_key()
    order: _Order = channel.recv()  # EOFError: the caller found something wrong and sent nothing
    warning = use_writable_cache()
    if warning:
        channel.send(_Done(warnings=(warning,)))
    load_module(order.path, interpreted=False)
    workers = max(1, min(cores(), len(order.jobs)))
    # A worker that held the channel would keep the caller waiting for a helper that is gone.
    with ProcessPoolExecutor(
        workers, get_context("fork"), initializer=os.close, initargs=(channel.fileno(),)
    ) as pool:
        for done in pool.map(_compile, [(order, job) for job in order.jobs]):
            channel.send(done)


def _compile(task: tuple[_Order, Job]) -> _Done:
    job = task[1]
    if job.schedule.family == "triton":
        return _compiled(task)
    try:
        done: _Done = in_time(_compiled, task, COMPILE_S)
    except SilentError:
        return _Done(job, Refused("hung", f"compiling took over {COMPILE_S:g} s"))
    except ChildEndedError as error:
        return _Done(job, Refused("crashed", f"compiling: {error}"))
    if isinstance(done.found, ScheduleError) and done.found.rejections:
        reason = "; ".join(map(str, done.found.rejections))
        return replace(done, found=Refused("refused", reason))
    return done


def _compiled(task: tuple[_Order, Job]) -> _Done:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FlashgenWarning)
        found = _found(*task)
    own = [w for w in said if issubclass(w.category, FlashgenWarning)]
    return _Done(task[1], found, tuple(str(w.message) for w in own))


def _found(order: _Order, job: Job) -> CompiledKernel | FlashgenError:
    from flashgen.runtime.ahead import compile_schedule
    from flashgen.runtime.load import load_module

    module = load_module(order.path, interpreted=False)
    try:
        return compile_schedule(
            order.problem, order.plan, module, job.schedule, aligned=job.aligned, kind=job.kernel
        )
    except FlashgenError as error:
        return error
