"""Compile many kernels in processes of their own, each with a deadline.

A worker that is late or dies is replaced, and its job has that as its outcome. The assembler is a
process of the worker's: both end together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType

from flashgen.bench.model_check.compiled import OVER_TIME, Compiled
from flashgen.errors import CompileError
from flashgen.target import Target

_CONTEXT = get_context("fork")


@dataclass(frozen=True)
class Job:
    """A kernel of a generated module, and how to compile it."""

    key: str
    path: Path
    entry: str
    pointers: Mapping[str, str]
    options: Mapping[str, int | str]
    align: int
    target: Target
    machine_code: bool = False


def compile_all(
    jobs: Sequence[Job], *, workers: int, deadline_s: float, cache: Path, until: float
) -> Iterator[tuple[Job, Compiled]]:
    """Outcomes as they come; no job begins after `until` (of `time.monotonic`).

    cache: an empty folder for Triton's own cache, which the user's is spared.
    """
    waiting = list(reversed(jobs))
    running = [_Worker(cache) for _ in range(max(1, min(workers, len(jobs))))]
    try:
        while True:
            for number, worker in enumerate(running):
                if worker.job is None and waiting and time.monotonic() < until:
                    running[number] = worker.begin(waiting.pop(), cache)
            busy = [worker for worker in running if worker.job is not None]
            if not busy:
                return
            wait([worker.pipe for worker in busy], timeout=0.2)
            for worker in busy:
                outcome = worker.outcome(deadline_s)
                if outcome is not None:
                    yield outcome
    finally:
        for worker in running:
            worker.end()


@dataclass
class _Worker:
    """A process that compiles one job after the other."""

    cache: Path
    job: Job | None = None
    pipe: Connection = field(init=False)
    process: ForkProcess = field(init=False)
    _began: float = 0.0
    _ended: bool = False

    def __post_init__(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_work, args=(theirs, self.cache), daemon=False)
        self.process.start()
        theirs.close()

    def begin(self, job: Job, cache: Path) -> _Worker:
        """Hand a job to this worker, or to another one if it has ended."""
        worker = _Worker(cache) if self._ended else self
        worker.job, worker._began = job, time.monotonic()
        worker.pipe.send(job)
        return worker

    def outcome(self, deadline_s: float) -> tuple[Job, Compiled] | None:
        """The job's outcome, if it has one by now."""
        assert self.job is not None
        seconds = round(time.monotonic() - self._began, 1)
        if self.pipe.poll():
            try:
                found: Compiled = self.pipe.recv()
            except EOFError:
                self.end()
                found = Compiled(error=f"the compiler died ({self.process.exitcode})")
        elif seconds > deadline_s:
            self.end()
            found = Compiled(error=f"{OVER_TIME}: {deadline_s:g} s", seconds=seconds)
        else:
            return None
        job, self.job = self.job, None
        return job, found

    def end(self) -> None:
        """End the process and what it started."""
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self._ended = True


def _work(pipe: Connection, cache: Path) -> None:
    """In the worker: jobs come in, outcomes go out, until the pipe closes."""
    os.setsid()  # a group of its own, which includes the assembler
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)  # LLVM and the assembler complain at length
    # A generated module names torch in its host code only, which does not run here.
    sys.modules.setdefault("torch", ModuleType("torch"))
    with suppress(EOFError):
        while True:
            pipe.send(compile_job(pipe.recv()))


def compile_job(job: Job) -> Compiled:
    """What became of a job; machine code is made only where asked for, of what can be launched."""
    from flashgen.runtime.ahead import compile_ahead
    from flashgen.runtime.allocation import GivenUpError, giving_up_early
    from flashgen.runtime.load import load_module

    start = time.monotonic()
    try:
        module = load_module(job.path, interpreted=False)
        with giving_up_early(job.target, always=not job.machine_code):
            found = compile_ahead(
                module, job.entry, job.pointers, dict(job.options), job.align, job.target
            )
    except GivenUpError as error:
        return Compiled(
            error.allocation.smem_bytes,
            error.allocation.tmem_columns,
            fits=error.rejection is None,
            seconds=_since(start),
        )
    except CompileError as error:
        what, _, _ = str(error).partition("\n  hint:")  # which names a file of this machine
        return Compiled(error=" ".join(what.split())[:300], seconds=_since(start))
    return Compiled(
        found.smem_bytes,
        found.tmem_columns,
        True,
        found.regs_per_thread,
        found.spill_bytes,
        seconds=_since(start),
    )


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)
