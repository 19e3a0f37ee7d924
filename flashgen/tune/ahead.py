"""Schedules compiled ahead, in parallel, while something else is measured.

A helper process imports what compiling needs, without torch and without a GPU, then forks a worker
for each job: it has no threads that hold locks, so that is safe there. Kernels land in Triton's
disk cache, where a launch finds them. What the compiler refuses, dies of or takes too long over is
an outcome.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType, TracebackType

from flashgen.codegen.options import kernel_kinds
from flashgen.errors import ScheduleError
from flashgen.schedule.model import Schedule
from flashgen.tune.candidates import Candidates
from flashgen.tune.processes import Child, ChildEndedError, cores, ending

JOB_LIMIT_S = 45.0  # the slowest seen take 7 s on one core; a few tiles send ptxas astray
GRACE_S = 5.0  # for a compiler that does not let itself be interrupted, beyond the limit
ENDED = "the compiling process ended early"
LATE = "not compiled in time"  # which says nothing of the schedule


@dataclass(frozen=True)
class Job:
    """One schedule of a case's module, for a target that need not be here."""

    candidates: Candidates
    schedule: Schedule
    aligned: bool = True


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of a job, and how long it took; `error` if there is no kernel, `hung`
    if that is because it did not end."""

    seconds: float
    smem_bytes: int | None = None
    regs_per_thread: int | None = None
    spill_bytes: int | None = None
    error: str | None = None
    hung: bool | None = None

    @property
    def facts(self) -> dict[str, object]:
        """Everything known, for a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Compiling:
    """The helper; a context that ends it. Any thread may submit and wait.

    workers: jobs at a time (None: the cores but one, which is left to who measures meanwhile).
    """

    def __init__(
        self,
        *,
        limit_s: float = JOB_LIMIT_S,
        workers: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._numbers: dict[Job, int] = {}
        self._done: dict[int, Compiled] = {}
        self._ended = ""
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._child = Child("flashgen.tune.ahead:serve", environment=environment)
        self._send((workers or max(1, cores() - 1), limit_s))
        self._reader = threading.Thread(target=self._read, name="flashgen-compiled", daemon=True)
        self._reader.start()

    def __enter__(self) -> Compiling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> str:
        """How the helper ended; empty while it works."""
        return self._ended

    def close(self) -> None:
        """End the helper and its workers; whoever waits is told that they ended."""
        self._child.kill()
        self._reader.join()

    def submit(self, jobs: Iterable[Job], *, first: bool = False) -> None:
        """Queue what was not queued before; `first`: before everything that waits."""
        with self._news:
            fresh = [job for job in dict.fromkeys(jobs) if job not in self._numbers]
            for job in fresh:
                self._numbers[job] = len(self._numbers)
            numbered = [(self._numbers[job], job) for job in fresh]
        if numbered:  # not under the lock that the reader needs, or both sides could wait
            self._send((first, numbered))

    def wait_for(self, jobs: Iterable[Job], until: float = float("inf")) -> Mapping[Job, Compiled]:
        """What became of submitted `jobs`; those not done at `until` (of `time.monotonic`) have an
        error."""
        with self._news:
            numbers = {self._numbers[job]: job for job in jobs}
            while not self._ended and not numbers.keys() <= self._done.keys():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(left, threading.TIMEOUT_MAX))
            late = Compiled(0.0, error=self._ended or LATE)
            return {job: self._done.get(number, late) for number, job in numbers.items()}

    def _send(self, message: object) -> None:
        with self._sending, suppress(ChildEndedError):  # `wait_for` says so of every job
            self._child.send(message)

    def _read(self) -> None:
        try:
            while True:
                number, compiled = self._child.receive()
                with self._news:
                    self._done[number] = compiled
                    self._news.notify_all()
        except ChildEndedError as error:
            with self._news:
                self._ended = f"{ENDED}: {error}"
                self._news.notify_all()


# ---- in the helper -------------------------------------------------------------------------------


@dataclass
class _Running:
    """A worker at a job, and when it is to be killed."""

    process: BaseProcess
    result: Connection
    number: int
    begun: float
    dies: float


def serve(channel: Connection) -> None:
    """Main function of the helper: compile what comes, in parallel, until the parent is gone."""
    # A generated module names torch in its host code only, which does not run here: 2.8 s saved.
    sys.modules.setdefault("torch", ModuleType("torch"))
    import flashgen.runtime.ahead  # noqa: F401 -- with triton, once: workers inherit it

    slots, limit_s = channel.recv()
    waiting: deque[tuple[int, Job]] = deque()
    running: list[_Running] = []
    while True:
        while waiting and len(running) < slots:
            running.append(_start(*waiting.popleft(), limit_s))
        nearest = min((each.dies for each in running), default=None)
        timeout = None if nearest is None else max(0.0, nearest - time.monotonic())
        ready = wait([channel, *(each.result for each in running)], timeout)
        if channel in ready:
            first, jobs = channel.recv()
            (waiting.extendleft if first else waiting.extend)(reversed(jobs) if first else jobs)
        for each in [each for each in running if _is_over(each, each.result in ready)]:
            running.remove(each)
            channel.send((each.number, _outcome(each, limit_s)))


def _start(number: int, job: Job, limit_s: float) -> _Running:
    result, theirs = Pipe(duplex=False)
    process = get_context("fork").Process(target=_work, args=(job, limit_s, theirs))
    process.start()
    theirs.close()
    now = time.monotonic()
    return _Running(process, result, number, now, now + limit_s + GRACE_S)


def _is_over(worker: _Running, has_news: bool) -> bool:
    return has_news or time.monotonic() >= worker.dies


def _outcome(worker: _Running, limit_s: float) -> Compiled:
    """What the worker said; where it said nothing, how it ended."""
    try:
        if worker.result.poll():
            found: Compiled = worker.result.recv()
            worker.process.join(GRACE_S)
            return found
    except EOFError:
        worker.process.join(GRACE_S)
        error = f"the compiler ended {ending(worker.process.exitcode)}"
        return Compiled(_since(worker.begun), error=error)
    finally:
        worker.process.kill()
        worker.process.join()
        worker.result.close()
    return Compiled(_since(worker.begun), error=_too_long(limit_s), hung=True)


class _TooLongError(BaseException):
    """A job's time is over; not to be caught on the way by whoever catches every Exception."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


def _work(job: Job, limit_s: float, result: Connection) -> None:
    """In a worker."""
    os.nice(5)  # who measures meanwhile comes first
    result.send(compile_job(job, limit_s))


def compile_job(job: Job, limit_s: float) -> Compiled:
    """The kernels of a schedule, as a launch on such rows will look for it.

    The alarm ends ptxas too: Python waits for it, and kills it on the way out.
    """
    from flashgen.runtime.ahead import compile_schedule
    from flashgen.runtime.load import load_module

    start = time.monotonic()
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        candidates = job.candidates
        plan = candidates.plan_of(job.schedule)
        module = load_module(candidates.path, interpreted=False)
        kernels = [
            compile_schedule(
                candidates.problem, plan, module, job.schedule, aligned=job.aligned, kind=kind
            )
            for kind in kernel_kinds(job.schedule)
        ]
    except _TooLongError:
        return Compiled(_since(start), error=_too_long(limit_s), hung=True)
    except Exception as error:  # one job's failure is its outcome
        return Compiled(_since(start), error=_in_words(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Compiled(
        _since(start),
        max(kernel.smem_bytes for kernel in kernels),
        _largest(kernel.regs_per_thread for kernel in kernels),
        _largest(kernel.spill_bytes for kernel in kernels),
    )


def _in_words(error: Exception) -> str:
    """Why there is no kernel: of a schedule that is refused the reasons alone."""
    if isinstance(error, ScheduleError) and error.rejections:
        return "; ".join(map(str, error.rejections))
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


def _largest(numbers: Iterable[int | None]) -> int | None:
    """None where the back end says nothing."""
    return max((number for number in numbers if number is not None), default=None)


def _too_long(limit_s: float) -> str:
    return f"compiling took over {limit_s:g} s"


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)
