"""Many schedules compiled ahead, on all cores but one, while something else goes on.

A helper process imports what compiling needs, then forks a worker a core: it has no GPU and no
threads, so that is safe there. Kernels land in the disk caches of flashgen and Triton, where a
launch finds them. A kernel that the compiler refuses, or takes too long over, is an outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from types import FrameType, ModuleType, TracebackType

from flashgen.compiler.machine_code import cores
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import Target

JOB_LIMIT_S = 45.0  # the slowest seen take 7 s on one core; a few tiles send ptxas astray

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from flashgen.bench.compiling import serve; serve()"
)


@dataclass(frozen=True)
class Job:
    """One schedule of a spec, for a target that need not be here."""

    spec: AttentionSpec
    target: Target
    schedule: Schedule


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of a job, and how long it took; `error` if there is no kernel."""

    seconds: float
    smem_bytes: int | None = None
    regs_per_thread: int | None = None
    spill_bytes: int | None = None
    error: str | None = None

    @property
    def facts(self) -> dict[str, object]:
        """Everything known, for a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Compiling:
    """The helper at work on `jobs`, the first ones first; a context that ends it.

    `wait_for` returns when the asked jobs are done, or at a time at which waiting ends.
    """

    def __init__(self, jobs: Sequence[Job], *, limit_s: float = JOB_LIMIT_S) -> None:
        self.jobs = tuple(dict.fromkeys(jobs))
        self._numbers = {job: number for number, job in enumerate(self.jobs)}
        self._done: dict[int, Compiled] = {}
        self._ended = False
        self._news = threading.Condition()
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that its workers end with it
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended at once: `wait_for` says so of every job
            pickle.dump((self.jobs, limit_s), self._process.stdin)
            self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Compiling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def wait_for(self, jobs: Iterable[Job], until: float) -> Mapping[Job, Compiled]:
        """What became of `jobs`; those not done at `until` (of `time.monotonic`) have an error."""
        numbers = {self._numbers[job]: job for job in jobs}
        with self._news:
            while not self._ended and not numbers.keys() <= self._done.keys():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
            late = Compiled(0.0, error="the compiling process ended early")
            if not self._ended:
                late = Compiled(0.0, error="not compiled in time")
            return {job: self._done.get(number, late) for number, job in numbers.items()}

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                number, said = json.loads(line)
                with self._news:
                    self._done[number] = Compiled(**said)
                    self._news.notify_all()
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()


# ---- in the helper -------------------------------------------------------------------------------


def serve() -> None:
    """Main function of the helper: read the jobs, compile them in parallel, a line for each."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not end up between the lines
    # A generated module names torch in its host code only, which does not run here: 2.8 s saved.
    sys.modules.setdefault("torch", ModuleType("torch"))
    import flashgen.runtime.ahead  # noqa: F401 -- with triton, once: workers inherit it

    jobs, limit_s = pickle.load(sys.stdin.buffer)
    workers = max(1, min(cores() - 1, len(jobs)))  # a core is left to who times meanwhile
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        numbers = {pool.submit(_compile, job, limit_s): n for n, job in enumerate(jobs)}
        for future in as_completed(numbers):
            try:
                lines.write(json.dumps([numbers[future], asdict(future.result())]) + "\n")
                lines.flush()
            except BrokenPipeError:  # whoever asked is gone, perhaps killed
                os.killpg(os.getpgrp(), signal.SIGKILL)


class _TooLongError(BaseException):
    """A job's time is over; not to be caught on the way by whoever catches every Exception."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


def _compile(job: Job, limit_s: float) -> Compiled:
    """In a worker: the kernel of a schedule, as a launch on aligned rows will look for it."""
    from flashgen.compiler.choose import plan
    from flashgen.problem import Problem
    from flashgen.runtime.ahead import compile_schedule
    from flashgen.runtime.load import load_module

    start = time.monotonic()
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        found, path = plan(job.spec, job.target, schedule=job.schedule, has_lse=False)
        kernel = compile_schedule(
            Problem(job.spec, job.target),
            found,
            load_module(path, interpreted=False),
            job.schedule,
            aligned=True,
        )
    except _TooLongError:
        return Compiled(_since(start), error=f"compiling took over {limit_s:g} s")
    except Exception as error:  # one job's failure is its outcome
        text = " ".join(str(error).split())[:200]
        return Compiled(_since(start), error=f"{type(error).__name__}: {text}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Compiled(_since(start), kernel.smem_bytes, kernel.regs_per_thread, kernel.spill_bytes)


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)
