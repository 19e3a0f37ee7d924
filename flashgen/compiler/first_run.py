"""Hopper kernels are compiled and run for the first time in a process with a deadline.

A warp-specialised kernel with a wrong barrier never ends, and neither does the process that waits
for it; a compiler may spin for ever too. So a process of its own goes first, and what it found out
is remembered (`tune/verdicts.py`): proven ones start at once from then on, bad ones never again.

`FirstRuns` guards the calls of `compile`, `Trying` is the process, `serve` its main function.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashgen import settings
from flashgen.compiler.cases import Case
from flashgen.errors import FlashgenError, ScheduleError
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.runtime.frozen import refuse_if_frozen
from flashgen.runtime.said import say_once
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune import verdicts
from flashgen.tune.lookup import tables_of
from flashgen.tune.processes import Child, ChildEndedError, SilentError
from flashgen.tune.toolchain import device_here
from flashgen.tune.verdicts import Machine, State, Subject, Verdict, recall, remember

if TYPE_CHECKING:
    import torch

    from flashgen.compiler.verification import CaseResult
    from flashgen.runtime.check import Sizes

GPU_RUNNER = "flashgen.compiler.first_run:GpuRunner"
SMALL_BATCH = 2
LONGEST = 1024  # of a tried call's lengths: what the fp64 oracle answers in a moment


@dataclass(frozen=True)
class Deadlines:
    """Seconds until a process counts as hung.

    start: torch's import and a CUDA context, on a machine that may be busy; compile: the slowest
    kernel seen takes 7 s on one core; run: one call and the oracle, some milliseconds, and at the
    first one another compile and Triton's launcher, which a C compiler makes.
    """

    start: float = 180.0
    compile: float = 60.0
    run: float = 30.0


DEADLINES = Deadlines()


@dataclass(frozen=True)
class Task:
    """What a process is to try: schedules of a plan, on a device."""

    problem: Problem
    plan: Plan
    path: Path
    device: int


class UnusableError(Exception):
    """A schedule that is not to be used, with what was found out of it."""

    def __init__(self, state: State, reason: str) -> None:
        self.state: State = state
        self.reason = reason
        super().__init__(f"{state}: {reason}")


class Trying:
    """A process that compiles and runs schedules of a task; a context that ends it.

    runner: who does that there, "package.module:class" (tests replace it). Started when it is
    needed, and again after each end. Asked from one thread at a time.
    """

    def __init__(
        self, task: Task, runner: str = GPU_RUNNER, deadlines: Deadlines | None = None
    ) -> None:
        self._order = (runner, task)
        self._deadlines = deadlines or DEADLINES
        self._child: Child | None = None

    def __enter__(self) -> Trying:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def compile(self, schedule: Schedule) -> None:
        """UnusableError: hung, crashed, or refused for what the machine code is like."""
        self._ask(("compile", schedule), self._deadlines.compile, f"compiling {schedule}")

    def run(self, case: Case) -> CaseResult:
        """The call's result, right or wrong. UnusableError: hung or crashed."""
        found: CaseResult = self._ask(("run", case), self._deadlines.run, f"running {case}")
        return found

    def stop(self) -> None:
        """End the process and all that it started; the next question starts another one."""
        if self._child is not None:
            self._child.kill()
        self._child = None

    def _ask(self, question: tuple[str, object], deadline_s: float, doing: str) -> Any:
        try:
            child = self._started()
            child.send(question)
            kind, answer = child.receive(deadline_s)
        except SilentError:
            self.stop()
            raise UnusableError("hung", f"no answer within {deadline_s:g} s, {doing}") from None
        except ChildEndedError as error:
            self.stop()
            raise UnusableError("crashed", f"{error}, {doing}") from None
        except BaseException:  # Ctrl-C: its answer would be taken for that to the next question
            self.stop()
            raise
        if kind != "found":
            raise UnusableError(kind, answer)
        return answer

    def _started(self) -> Child:
        """UnusableError "untried": there is no process that could try anything."""
        if self._child is not None:
            return self._child
        self._child = Child("flashgen.compiler.first_run:serve", environment=_environment())
        try:
            self._child.send(self._order)
            kind, answer = self._child.receive(self._deadlines.start)
        except SilentError:
            kind, answer = "untried", f"not ready after {self._deadlines.start:g} s"
        except ChildEndedError as error:
            kind, answer = "untried", str(error)
        if kind != "found":
            self.stop()
            raise UnusableError("untried", f"no process could be had that tries it: {answer}")
        return self._child


def _environment() -> Mapping[str, str]:
    """That of this process, with the folder of machine code: what is compiled there is found
    here."""
    from triton import knobs

    from flashgen.runtime.triton_cache import use_writable_cache

    warning = use_writable_cache()
    if warning:
        say_once(warning)
    return os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir}


# **** calls ****


@cache
def machine_here(index: int) -> Machine:
    """The CUDA device `index` and the toolchain of this process."""
    return Machine.of(device_here(index))


class FirstRuns:
    """The guard of `runtime.launch.Attention`: says of a Hopper schedule whether it may be launched
    here, after it was tried elsewhere where nobody has yet."""

    def __init__(
        self,
        spec: AttentionSpec,
        target_of: Callable[[torch.device], Target],
        runner: str = GPU_RUNNER,
        machine: Callable[[int], Machine] = machine_here,
    ) -> None:
        self._spec, self._target_of, self._runner = spec, target_of, runner
        self._machine = machine

    def __call__(
        self, device: torch.device, plan: Plan, path: Path, schedule: Schedule, sizes: Sizes
    ) -> bool:
        """FrozenError where it would have to be tried and slow work is refused."""
        index = device.index or 0
        subject = verdicts.subject_of(plan, self._spec.display_name, schedule, self._machine(index))
        verdict = recall(subject) or self._vouched(subject, plan, device)
        if verdict is None and not settings.try_first():
            return True
        if verdict is None:
            refuse_if_frozen(f"try {schedule} in a process of its own")
            problem = Problem(self._spec, self._target_of(device))
            task = Task(problem, plan, path, index)
            verdict = tried(task, schedule, subject, sizes, self._runner)
        return verdict.state == "proven"

    def _vouched(self, subject: Subject, plan: Plan, device: torch.device) -> Verdict | None:
        """Proven by a tuned config that was measured with this kernel and toolchain.

        Tuning times kernels that write no lse, each in a module of its own. One that does has a
        store more, which waits for nothing, and a module in which some schedules have heads that
        share tiles a constant more: what is known of the other holds for it.
        """
        target = self._target_of(device)
        entries = [e for e in _entries(self._spec, target) if verdicts.ran_here(e, subject)]
        if not entries:
            return None
        measured = subject
        if plan.has_lse or any(schedule.packed_heads > 1 for _, schedule in plan.choices):
            from flashgen.tune.session import digest_of

            alone = digest_of(Problem(self._spec, target), subject.schedule)
            measured = replace(subject, digest=alone)
        if any(verdicts.vouched(entry, measured) for entry in entries):
            return remember(subject, "proven")
        return None


def _entries(spec: AttentionSpec, target: Target) -> Iterator[Any]:
    from flashgen.tune.table import parse_table

    for source in tables_of(spec, target).sources:
        if not source.unread:
            with suppress(FlashgenError):  # said where the plan was made
                yield from parse_table(source.data, str(source.path)).entries


def tried(
    task: Task, schedule: Schedule, subject: Subject, sizes: Sizes, runner: str = GPU_RUNNER
) -> Verdict:
    """Compile and run `schedule` in a process, unless another one does so meanwhile; the verdict is
    remembered."""
    with _alone(subject):
        known = recall(subject)
        if known is not None:
            return known
        with Trying(task, runner) as trying:
            return remember(subject, *_outcome(trying, task, schedule, sizes))


def _outcome(trying: Trying, task: Task, schedule: Schedule, sizes: Sizes) -> tuple[State, str]:
    try:
        trying.compile(schedule)
        for case in first_cases(task.problem, schedule, sizes):
            result = trying.run(case)
            if result.failure is not None:
                return "crashed", f"{case}: {result.failure}"
            if not result.ok:
                return "wrong", str(result)
    except UnusableError as error:
        return error.state, error.reason
    return "proven", ""


def first_cases(problem: Problem, schedule: Schedule, sizes: Sizes) -> Sequence[Case]:
    """What is run before the first call: few tiles, several tiles for each SM (a persistent program
    goes round its barriers), and lengths like the call's own.

    In the second, values that only some rows see are NaN (`draw.NAN_EVERY`): rows are walked again.
    """
    group = problem.spec.heads.group or max(2, schedule.packed_heads)
    q_len, kv_len = schedule.positions + 1, 2 * schedule.block_n + 3
    tiles_a_batch = -(-q_len // schedule.positions) * schedule.tile_heads(2 * group, 2)
    many = -(-5 * problem.target.sm_count // (2 * tiles_a_batch))
    return (
        Case(schedule, Shape(SMALL_BATCH, 2 * group, 2, q_len, kv_len), "plain", 0),
        Case(schedule, Shape(many, 2 * group, 2, q_len, kv_len), "transposed", 4),
        Case(
            schedule,
            Shape(1, group, 1, min(sizes.q_len, LONGEST), min(sizes.kv_len, LONGEST)),
            "plain",
            6,
        ),
    )


@contextmanager
def _alone(subject: Subject) -> Iterator[None]:
    """Of several processes with the same question one tries, the others wait for its verdict; no
    longer than that can take, and not at all where there is no folder for a lock."""
    path = verdicts.folder() / f"{subject.key}.lock"
    until = time.monotonic() + DEADLINES.start + DEADLINES.compile + 3 * DEADLINES.run
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = path.open("w")
    except OSError:
        yield
        return
    with stream:
        while not _locked(stream.fileno()) and time.monotonic() < until:
            time.sleep(0.05)
        yield
        path.unlink(missing_ok=True)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


# **** verification ****


class Elsewhere:
    """Runs cases of Hopper schedules in a process with deadlines, as a context.

    What hung, crashed or was refused is remembered, and so is what came through all its cases.
    """

    def __init__(self, task: Task, machine: Machine, runner: str = GPU_RUNNER) -> None:
        self._task, self._machine = task, machine
        self._trying = Trying(task, runner)
        self._compiled: dict[Schedule, bool] = {}  # and whether all its cases were right
        self._bad: dict[Schedule, str] = {}

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._trying.stop()
        for schedule, right in self._compiled.items():
            if kind is None and right and schedule not in self._bad:
                remember(self._subject(schedule), "proven")

    def run(self, case: Case) -> CaseResult:
        """What came of it; once a schedule hung or crashed its other cases are not run."""
        from flashgen.compiler.verification import CaseResult

        schedule = case.schedule
        if schedule not in self._bad:
            try:
                if schedule not in self._compiled:
                    self._trying.compile(schedule)
                    self._compiled[schedule] = True
                result = self._trying.run(case)
            except UnusableError as error:
                remember(self._subject(schedule), error.state, error.reason)
                self._bad[schedule] = str(error)
            else:
                self._compiled[schedule] &= result.ok
                return result
        return CaseResult(case, None, failure=self._bad[schedule])

    def _subject(self, schedule: Schedule) -> Subject:
        return verdicts.subject_of(
            self._task.plan, self._task.problem.spec.display_name, schedule, self._machine
        )


# ---- in the process ------------------------------------------------------------------------------


class Runner(Protocol):
    """Who compiles and runs; made of a task."""

    def compile(self, schedule: Schedule) -> None: ...

    def run(self, case: Case) -> CaseResult: ...


class GpuRunner:
    """Schedules of a task on its CUDA device."""

    def __init__(self, task: Task) -> None:
        import torch

        from flashgen.runtime.load import load_module

        self._task = task
        self._device = torch.device("cuda", task.device)
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # whether there is a context to be had
        self._module = load_module(task.path, interpreted=False)

    def compile(self, schedule: Schedule) -> None:
        """ScheduleError for machine code that spills or whose products wait for each other."""
        from flashgen.codegen.options import kernel_kinds
        from flashgen.runtime.ahead import compile_schedule

        task = self._task
        kernel = getattr(self._module, dict(task.plan.entries)[kernel_kinds(schedule)[0]])
        for aligned in (True, False) if "ALIGN" in kernel.arg_names else (True,):
            compile_schedule(task.problem, task.plan, self._module, schedule, aligned=aligned)

    def run(self, case: Case) -> CaseResult:
        import torch

        from flashgen.compiler.verification import attention_of, run_case

        task = self._task
        plan = task.plan if case.is_chosen(task.plan) else task.plan.only(case.schedule)
        with torch.no_grad():
            return run_case(attention_of(task.problem.spec, plan, task.path), case, self._device)


def serve(channel: Connection) -> None:
    """Main function of the process: be ready for a task, then answer until the parent is gone."""
    name, task = channel.recv()
    module, _, made_by = name.partition(":")
    try:
        runner: Runner = getattr(importlib.import_module(module), made_by)(task)
    except Exception as error:  # whatever the reason, the parent says it
        channel.send(("untried", _text(error)))
        return
    channel.send(("found", None))
    while True:
        what, given = channel.recv()
        channel.send(_answer(runner, what, given))


def _answer(runner: Runner, what: str, given: Any) -> tuple[str, object]:
    try:
        if what == "run":
            return "found", runner.run(given)
        runner.compile(given)
    except ScheduleError as error:
        return "refused", "; ".join(map(str, error.rejections)) or _text(error)
    except Exception as error:  # of the compiler or of Triton: this schedule's
        return "crashed", _text(error)
    return "found", None


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
