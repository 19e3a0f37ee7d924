"""Measure schedules on GPUs: compiled ahead on the CPUs, run in processes that may crash."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from flashgen.codegen.options import kernel_kinds
from flashgen.errors import TuningError
from flashgen.problem import Problem
from flashgen.runtime.frozen import refuse_if_frozen
from flashgen.schedule.model import HOPPER, Schedule, bucket_of
from flashgen.schedule.predict import predicted_time_us
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune.ahead import Compiled, Compiling, Job
from flashgen.tune.candidates import Candidates, Case, has_aligned_rows
from flashgen.tune.measurement import Measurement, Measurer, State
from flashgen.tune.processes import cores
from flashgen.tune.toolchain import device_here
from flashgen.tune.verdicts import HUNG, Machine, Subject, recall, remember, subject_of
from flashgen.tune.worker import CUDA_RUNNER, Asked, Order, Worker

DEADLINE_S = 10.0  # check and timing of a kernel that is compiled take about half a second
# On top of it where one launch takes long: about 8 launches, of a schedule that may be 4 times as
# slow as the model says of the untuned one.
SLOW_LAUNCHES = 8 * 4
RACE_SHARE = 1.0  # of the deadline, for each schedule of a race
# Of 288 schedules timed on an H200 (8 specs, benchmarks/nvidia-h200/schedules.json) the 46 that
# spill more take at least 1.39 times as long as the best of their spec; the best spill up to 112.
SPILL_LIMIT_BYTES = 256


def gpu_measurer(
    spec: AttentionSpec,
    shape: Shape,
    target: Target,
    *,
    devices: str | Sequence[int] = (0,),
    deadline_s: float = DEADLINE_S,
    return_lse: bool = False,
) -> Measurer:
    """Who measures schedules of `spec` at `shape` on GPUs of this machine.

    devices: numbers of GPUs, or "all"; each has a measuring process of its own, and as many
    `measure` may run at the same time, from different threads. deadline_s: for the check and the
    timing of a schedule, launches that take long aside; what takes longer hung. Processes start
    now, in the background.
    FrozenError after `freeze()`; TuningError without such a GPU.
    """
    refuse_if_frozen(f"tune {spec.display_name} for {target.id}")
    return IsolatedMeasurer(
        Problem(spec, target),
        shape,
        devices=_numbers(devices),
        deadline_s=deadline_s,
        return_lse=return_lse,
        environment=_environment(),
        machine=lambda: Machine.of(device_here(_numbers(devices)[0])),
    )


class IsolatedMeasurer:
    """A `Measurer` whose compilers and runners are other processes.

    runner: what runs in the measuring processes (tests replace it). machine: where Hopper kernels
    run (None: not known); those that hung there before are not tried, and what comes of others is
    remembered.
    """

    def __init__(
        self,
        problem: Problem,
        shape: Shape,
        *,
        devices: Sequence[int],
        deadline_s: float = DEADLINE_S,
        return_lse: bool = False,
        runner: str = CUDA_RUNNER,
        environment: Mapping[str, str] | None = None,
        machine: Callable[[], Machine] | None = None,
    ) -> None:
        bucket = bucket_of(shape.q_len, shape.kv_len)
        self._default = default_schedule(problem, bucket)
        kinds = [self._default, *enumerate_space(problem, bucket).feasible]
        self._candidates = Candidates.of(problem, kinds, has_lse=return_lse)
        self._aligned = has_aligned_rows(problem, shape.kv_len)
        self._smem_limit = problem.target.smem_per_block_bytes
        launch_s = 1e-6 * predicted_time_us(problem, self._default, shape)
        self._deadline_s = deadline_s + SLOW_LAUNCHES * launch_s
        self._closed = False
        self._machine = machine and cache(machine)
        case = Case(self._candidates, shape)
        self._staff = _STAFF.current()
        self._environment = environment
        self._workers = [
            self._staff.worker(Order(runner, case, device), environment) for device in devices
        ]
        self._staff.join()
        self._staff.compiling(environment)  # its imports begin now
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def prepare(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, str]:
        """Compile ahead; those that do not compile or fit, spill too much, or hung before, with the
        reason.

        The default schedule is measured however much it spills: it is what the others are held
        against.
        """
        hung = {each: HUNG for each in schedules if self._hung_before(each)}
        compiled = self._compile([each for each in schedules if each not in hung])
        self._note_compiled(compiled)
        found = {schedule: self._refusal(said) for schedule, said in compiled.items()}
        refused = {schedule: why[1] for schedule, why in found.items() if why is not None}
        for schedule, said in compiled.items():
            if schedule not in refused and schedule != self._default:
                spilled = said.spill_bytes or 0
                if spilled > SPILL_LIMIT_BYTES:
                    refused[schedule] = f"spills {spilled} bytes a thread, over {SPILL_LIMIT_BYTES}"
        return hung | refused

    def measure(self, schedule: Schedule) -> Measurement:
        """Check and time; TuningError only if no process can be had that measures."""
        if self._hung_before(schedule):
            return Measurement(schedule, "hung", reason=HUNG)
        compiled = self._compile([schedule], first=True)
        self._note_compiled(compiled)
        refusal = self._refusal(compiled[schedule])
        if refusal is not None:
            return Measurement(schedule, refusal[0], reason=refusal[1])
        found = self._ask("measure", [schedule])[schedule]
        self._note(schedule, found)
        return found

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        """All on one GPU, interleaved. Where one of them ends the process, they are tried once
        more, then each alone."""
        wanted = list(dict.fromkeys(schedules))
        self._compile(wanted, first=True)
        for _ in range(2):
            found = self._ask("race", wanted)
            if not any(each.state in {"crashed", "hung"} for each in found.values()):
                return found
        return {schedule: self.measure(schedule) for schedule in wanted}

    def close(self) -> None:
        """End the processes, or leave them to the next measurer inside `kept_workers`."""
        if not self._closed:
            self._closed = True
            self._staff.give_back(self._workers)

    def pids(self) -> tuple[int, ...]:
        """The processes at work."""
        measuring = [worker.pid for worker in self._workers if worker.pid is not None]
        return (self._staff.compiling(self._environment).pid, *measuring)

    # ---- compiling

    def _compile(
        self, schedules: Sequence[Schedule], *, first: bool = False
    ) -> dict[Schedule, Compiled]:
        """TuningError if the helper died twice, which is no schedule's fault."""
        jobs = {Job(self._candidates, each, self._aligned): each for each in schedules}
        for _ in range(2):
            self._check_open()
            compiling = self._staff.compiling(self._environment)
            compiling.submit(jobs, first=first)
            done = compiling.wait_for(jobs)
            if not compiling.ended:
                return {jobs[job]: said for job, said in done.items()}
        self._check_open()
        raise TuningError(
            f"tune: {compiling.ended}\n  hint: is there enough memory for {cores()} compilers?"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise TuningError("tune: the measurer is closed")

    def _refusal(self, said: Compiled) -> tuple[State, str] | None:
        """Why there is no kernel that could be launched."""
        if said.error is not None:
            return "failed", said.error
        if said.smem_bytes is not None and said.smem_bytes > self._smem_limit:
            return (
                "does_not_fit",
                f"needs {said.smem_bytes} B of shared memory as compiled, target has "
                f"{self._smem_limit} B",
            )
        return None

    # ---- what is known of Hopper kernels

    def _subject(self, schedule: Schedule) -> Subject | None:
        if self._machine is None or schedule.family != HOPPER:
            return None
        candidates = self._candidates
        if kernel_kinds(schedule)[0] not in dict(candidates.plan.entries):
            return None  # nothing of it will run
        return subject_of(candidates.plan, candidates.problem.name, schedule, self._machine())

    def _hung_before(self, schedule: Schedule) -> bool:
        subject = self._subject(schedule)
        verdict = recall(subject) if subject else None
        return verdict is not None and verdict.state == "hung"

    def _note_compiled(self, compiled: Mapping[Schedule, Compiled]) -> None:
        """Compilers that did not end; whether one works at all shows when it is measured."""
        for schedule, said in compiled.items():
            if said.hung and (subject := self._subject(schedule)):
                remember(subject, "hung", said.error or "")

    def _note(self, schedule: Schedule, found: Measurement) -> None:
        """Whether it runs to its end; that it is right and fast is said by its trial."""
        subject = self._subject(schedule)
        if subject is None:
            return
        if found.state == "hung":
            remember(subject, "hung", found.reason)
        elif found.measured:
            remember(subject, "proven")

    # ---- measuring

    def _ask(self, what: str, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        self._check_open()
        asked = Asked("race" if what == "race" else "measure", tuple(schedules))
        deadline_s = self._deadline_s * max(1.0, RACE_SHARE * len(schedules))
        worker = self._free.get()
        try:
            return worker.ask(asked, deadline_s)
        finally:
            self._free.put(worker)


# **** processes that serve several cases ****


@dataclass
class _Staff:
    """Processes in use and, while kept, those that wait for the next case."""

    keep: bool = False
    idle: dict[int, Worker] = field(default_factory=dict)
    helper: Compiling | None = None
    users: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def join(self) -> None:
        """One measurer more."""
        with self.lock:
            self.users += 1

    def compiling(self, environment: Mapping[str, str] | None) -> Compiling:
        """The one helper for all measurers of this process, which share the cores."""
        with self.lock:
            if self.helper is not None and self.helper.ended:
                self._let_go()
            if self.helper is None:
                self.helper = Compiling(environment=environment)
            return self.helper

    def worker(self, order: Order, environment: Mapping[str, str] | None) -> Worker:
        with self.lock:
            worker = self.idle.pop(order.device, None)
        if worker is None:
            worker = Worker(order, environment)
        else:
            worker.take(order)
        worker.start()
        return worker

    def give_back(self, workers: Sequence[Worker]) -> None:
        with self.lock:
            self.users -= 1
            for worker in workers:
                if self.keep and worker.device not in self.idle:
                    self.idle[worker.device] = worker
                else:
                    worker.stop()
            if not self.keep and not self.users:
                self._let_go()

    def end(self) -> None:
        """Keep nothing from now on."""
        with self.lock:
            self.keep = False
            for worker in self.idle.values():
                worker.stop()
            self.idle.clear()
            if not self.users:
                self._let_go()

    def _let_go(self) -> None:
        if self.helper is not None:
            self.helper.close()
        self.helper = None


class _Current:
    """The staff of this process; another one after a fork, whose parent's children are not its."""

    def __init__(self) -> None:
        self._staff, self._pid = _Staff(), os.getpid()

    def current(self) -> _Staff:
        if self._pid != os.getpid():
            self._staff, self._pid = _Staff(), os.getpid()
        return self._staff


_STAFF = _Current()


@contextmanager
def kept_workers() -> Iterator[None]:
    """Measurers that are closed inside it leave their processes to the next ones.

    Saves the start of one (torch, a CUDA context) for each further case. On leaving, all end.
    """
    staff = _STAFF.current()
    before, staff.keep = staff.keep, True
    try:
        yield
    finally:
        if not before:
            staff.end()


# **** this machine ****


def _numbers(devices: str | Sequence[int]) -> tuple[int, ...]:
    """Numbers of GPUs that are there."""
    import torch

    count = torch.cuda.device_count()
    there = f"0 to {count - 1}" if count else "none"
    if devices == "all" and count:
        return tuple(range(count))
    numbers = () if isinstance(devices, str) else tuple(devices)
    if not numbers or not all(0 <= number < count for number in numbers):
        raise TuningError(
            f"devices: got {devices!r}, expected all or numbers of GPUs ({there})\n"
            "  hint: `flashgen doctor` says what is installed and which GPU is there."
        )
    return numbers


def _environment() -> Mapping[str, str]:
    """That of this process, with the folder of machine code that all its children share."""
    from triton import knobs

    from flashgen.runtime.said import say_once
    from flashgen.runtime.triton_cache import use_writable_cache

    warning = use_writable_cache()
    if warning:
        say_once(warning)
    return os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir}
