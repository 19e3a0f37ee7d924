"""Suite `fa-paper`: Hopper schedules against the fastest peers, as far as a budget of time goes.

First, in parallel: every schedule is compiled, then run in a process with a deadline, and
FlexAttention is compiled. Then each GPU that is visible takes one case after the other; nothing
else runs on it. A process that does not answer is ended, and its case begun anew without the
contestant that it was busy with.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flashgen.bench.fa_cases import VARIANT, FaCase, fa_cases
from flashgen.bench.fa_peers import scaled_rates
from flashgen.bench.fa_plot import draw
from flashgen.bench.fa_report import best_of, is_ours, is_peer
from flashgen.bench.fa_schedules import baselines_for, schedules_for
from flashgen.bench.fa_worker import (
    CeilingsTask,
    CheckTask,
    Entrant,
    FlexTask,
    SettleTask,
    TimeTask,
)
from flashgen.bench.record import CaseRecord, Result
from flashgen.bench.run import Run
from flashgen.compiler.chosen import chosen_for, portable
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import check
from flashgen.target import Target
from flashgen.tune.ahead import Compiled, Compiling, Job
from flashgen.tune.candidates import Candidates, has_aligned_rows
from flashgen.tune.processes import Child, ChildEndedError, SilentError, cores

OURS, PLAIN = "flashgen", "plain"
MAIN = "flashgen.bench.fa_worker:serve"
PREPARATION_SHARE = 0.35  # of the budget, at most
START_S = 120.0  # torch's import and a CUDA context, on a machine that may be busy
CASE_S = 12.0  # of a case with all contestants: less left means that none is begun
TUNED_S = 40.0  # ahead of a case: less left, and FlexAttention is not tuned in it
SETTLE_S = 12.0  # for each case that is still to come, or nothing is timed under lasting load
TRIES = 4  # of a case whose process ends


# **** what takes part ****


@dataclass(frozen=True)
class Group:
    """Cases of one spec, and what of ours takes part in each: by case id."""

    cases: tuple[FaCase, ...]
    entrants: Mapping[str, tuple[Entrant, ...]] = field(hash=False)
    facts: Mapping[str, Mapping[str, Any]] = field(hash=False)

    @property
    def name(self) -> str:
        return self.cases[0].spec.display_name

    @property
    def all(self) -> tuple[Entrant, ...]:
        """Everybody of the spec itself, each once."""
        found = (each for of_case in self.entrants.values() for each in of_case)
        return tuple({each.name: each for each in found if is_ours(each.name)}.values())

    def jobs(self) -> dict[str, Job]:
        """What is to be compiled, by name."""
        length = self.cases[0].length
        return {
            each.name: Job(
                each.candidates,
                each.schedule,
                has_aligned_rows(each.candidates.problem, length),
            )
            for of_case in self.entrants.values()
            for each in of_case
        }


def groups_of(cases: Iterable[FaCase], target: Target) -> list[Group]:
    """Cases of one spec together, in the order in which they are to be timed."""
    by_spec: dict[str, list[FaCase]] = {}
    for case in cases:
        by_spec.setdefault(case.spec.display_name, []).append(case)
    return [_group(tuple(each), target) for each in by_spec.values()]


def _group(cases: tuple[FaCase, ...], target: Target) -> Group:
    schedules: dict[str, list[Schedule]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    problem = Problem(cases[0].spec, target)
    for case in cases:
        schedules[case.id], facts[case.id] = _schedules_of(case, problem)
    beside = _baselines(cases[0], target)
    union = list(dict.fromkeys(each for found in schedules.values() for each in found))
    candidates = Candidates.of(problem, union, has_lse=False)
    entrants = {
        case.id: (
            *(Entrant(f"{OURS} {each}", candidates, each) for each in schedules[case.id]),
            *beside,
        )
        for case in cases
    }
    return Group(cases, entrants, facts)


def _schedules_of(case: FaCase, problem: Problem) -> tuple[list[Schedule], dict[str, Any]]:
    """The table's that can be used, the default's and the portable family's."""
    bucket = bucket_of(case.length, case.length)
    default, simple = chosen_for(problem, bucket).schedule, portable(problem, bucket)
    usable, rejected = [], {}
    for each in schedules_for(case):
        rejection = check(each, problem)
        if rejection is None:
            usable.append(each)
        else:
            rejected[f"{OURS} {each}"] = str(rejection)
    found = list(dict.fromkeys((*usable, default, simple)))
    return found, {
        "default": f"{OURS} {default}",
        "portable": f"{OURS} {simple}",
        "rejected": rejected,
    }


def _baselines(case: FaCase, target: Target) -> list[Entrant]:
    if case.is_plain:
        return []
    problem = Problem(case.baseline.spec, target)
    fitting = [each for each in baselines_for(case) if check(each, problem) is None]
    if not fitting:
        fitting = [portable(problem, bucket_of(case.length, case.length))]
    candidates = Candidates.of(problem, fitting, has_lse=False)
    return [Entrant(f"{PLAIN} {each}", candidates, each) for each in fitting]


# **** processes ****


class LostError(Exception):
    """The process is gone, or had to be ended; `step`: what it was doing."""

    def __init__(self, step: str, reason: str) -> None:
        self.step = step
        super().__init__(reason)


class Asked(Protocol):
    """Who answers tasks: a process, or in tests something that plays one."""

    def ask(self, task: object, until: float) -> Any:
        """The answer. LostError, also where there is none at `until` (of `time.monotonic`)."""

    def close(self) -> None:
        """End it; may be called twice."""


class Worker:
    """A process on one GPU. It imports as soon as it is made and waits for its first task."""

    def __init__(self, gpu: str, more: Mapping[str, str] | None = None) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **(more or {})}
        self._child = Child(MAIN, environment=environment)

    def ask(self, task: object, until: float) -> Any:
        step, limit_s = "starting", START_S
        try:
            self._child.send(task)
            while True:
                left = until - time.monotonic()
                message = self._child.receive(min(limit_s, left))
                if message[0] == "found":
                    return message[1]
                if message[0] == "lost":
                    raise LostError(message[1], message[2])
                _, step, limit_s = message
        except SilentError:
            late = time.monotonic() >= until
            reason = "the time was over" if late else f"ended: nothing for {limit_s:.0f} s"
            raise LostError("" if late else step, f"{reason} while {step}") from None
        except ChildEndedError as error:
            raise LostError(step, f"{error}, while {step}") from None

    def close(self) -> None:
        self._child.kill()


Start = Callable[[str, Mapping[str, str]], Asked]


def visible_gpus(count: int) -> list[str]:
    """What a process is to be given as CUDA_VISIBLE_DEVICES to see one of this process's GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [each.strip() for each in named.split(",")] if named else []
    return names[:count] if names else [str(index) for index in range(count)]


# **** the run ****


def run_fa(
    run: Run,
    target: Target,
    gpus: Sequence[str],
    *,
    start: Start = Worker,
    compiling: Callable[[], Compiling] = Compiling,
) -> None:
    """Every wanted case, as far as the budget goes."""
    wanted = [case for case in fa_cases() if run.wants(case.id)]
    groups = groups_of(wanted, target)
    suite = _Suite(run, gpus, start)
    limit = run.began + run.seconds + PREPARATION_SHARE * (run.budget_s - run.seconds)
    with compiling() as helper:
        suite.prepare(groups, helper, limit)
    suite.time(groups)
    if run.out is not None and importlib.util.find_spec("matplotlib") is not None:
        draw(run.record, run.out / run.record.target / "fa-paper.png")


class _Suite:
    """What the threads of a run share."""

    def __init__(self, run: Run, gpus: Sequence[str], start: Start) -> None:
        self._run, self._gpus, self._start = run, list(gpus), start
        self._lock = threading.Lock()
        self._bad: dict[tuple[str, str], str] = {}  # spec and name -> why it is not timed
        self._facts: dict[str, dict[str, object]] = {}
        self._own = self._proven = 0  # schedules, and those that were right in a first run
        self._left = 0  # cases that are still to be timed
        self._end = run.began + run.budget_s

    # ---- before timing

    def prepare(self, groups: Sequence[Group], helper: Compiling, limit: float) -> None:
        """Compile everything, and run each schedule once; what is not done at `limit` is ended."""
        begun = self._run.seconds
        for group in groups:
            helper.submit(group.jobs().values())
        self._run.say(f"{begun:6.1f} s  compiling {sum(len(g.jobs()) for g in groups)} kernels")
        slots = max(2, cores() // 3)
        flexes: list[Future[bool]] = []
        with (
            tempfile.TemporaryDirectory(prefix="flashgen-fa-") as folder,
            ThreadPoolExecutor(slots) as checks,
            ThreadPoolExecutor(slots) as pool,
        ):
            for number, group in enumerate(groups):
                gpu = self._gpus[number % len(self._gpus)]
                checks.submit(self._guarded, self._check, group, helper, gpu, limit)
                place = Path(folder) / str(number)
                flexes.append(pool.submit(self._compile_flex, group, gpu, limit, place))
        compiled = sum(each.result() for each in flexes)
        text = (
            f"of {self._own} schedules {self._proven} compiled and were right in a first "
            f"run, in processes of their own; FlexAttention of {compiled} of {len(groups)} specs "
            f"was compiled; in {self._run.seconds - begun:.0f} s"
        )
        self._run.record = replace(self._run.record, preparation=text)
        self._run.say(f"{self._run.seconds:6.1f} s  {text}")

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # one spec's failure must not end the others
            group: Group = arguments[0]
            text = f"{type(error).__name__}: {error}"
            with self._lock:
                self._run.leave_out(group.name, text)

    def _check(self, group: Group, helper: Compiling, gpu: str, limit: float) -> None:
        jobs = group.jobs()
        compiled = helper.wait_for(jobs.values(), limit)
        for name, job in jobs.items():
            self._note(group, name, compiled[job])
        left = [each for each in group.all if (group.name, each.name) not in self._bad]
        ends = sorted(group.cases, key=lambda case: case.length)
        cases = tuple(dict.fromkeys((ends[0], ends[-1])))
        while left:
            worker = self._start(gpu, {})
            try:
                found = worker.ask(CheckTask(cases, tuple(left)), limit)
            except LostError as error:
                self._run.say(f"{self._run.seconds:6.1f} s  {group.name}, first runs: {error}")
                blamed = _named(error.step, left)
                if blamed is None:  # out of time, or nobody's fault: timing has its own deadlines
                    return
                found = {blamed: str(error)}
                left = [each for each in left if each.name != blamed]
            else:
                with self._lock:
                    self._proven += len(left) - len(found)
                left = []
            finally:
                worker.close()
            for name, reason in found.items():
                self._refuse(group, name, reason)

    def _note(self, group: Group, name: str, said: Compiled) -> None:
        with self._lock:
            self._facts[f"{group.name}: {name}"] = said.facts
            self._own += is_ours(name)
        if said.error is not None:
            self._refuse(group, name, said.error)

    def _refuse(self, group: Group, name: str, reason: str) -> None:
        with self._lock:
            if (group.name, name) not in self._bad:
                self._bad[group.name, name] = reason
                self._run.say(f"{self._run.seconds:6.1f} s  {group.name}, {name}: {reason}")

    def _compile_flex(self, group: Group, gpu: str, limit: float, folder: Path) -> bool:
        """Its machine code stays in Triton's cache. What tuning measured here, where other
        processes use the GPU, does not: it is measured again when the case is timed."""
        more = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        if group.cases[0].group == VARIANT:
            more["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        worker = self._start(gpu, more)
        try:
            worker.ask(FlexTask(group.cases), limit)
        except LostError as error:
            self._run.say(f"{self._run.seconds:6.1f} s  FlexAttention of {group.name}: {error}")
            return False
        finally:
            worker.close()
        return True

    # ---- timing

    def time(self, groups: Sequence[Group]) -> None:
        """A thread for each GPU; each takes the next spec when it is done with one."""
        waiting = list(groups)
        self._left = sum(len(group.cases) for group in groups)
        lanes = [
            threading.Thread(target=self._lane, args=(gpu, waiting), name=f"gpu {gpu}")
            for gpu in self._gpus
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def _lane(self, gpu: str, waiting: list[Group]) -> None:
        lane = _Lane(gpu, self._start)
        try:
            self._read_ceilings(lane)
            while True:
                with self._lock:
                    if not waiting:
                        break
                    group = waiting.pop(0)
                for case in group.cases:
                    self._case(lane, group, case)
                lane.next()
            self._read_ceilings(lane)
        finally:
            lane.close()

    def _read_ceilings(self, lane: _Lane) -> None:
        try:
            found = lane.ask(CeilingsTask(), self._end + CASE_S)
        except LostError as error:
            self._run.say(f"{self._run.seconds:6.1f} s  ceilings: {error}")
            return
        with self._lock:
            self._run.add_ceilings(found)

    def _case(self, lane: _Lane, group: Group, case: FaCase) -> None:
        """Time a case, again without whoever ended the process; then under lasting load."""
        with self._lock:
            self._left -= 1
            waiting = self._left
        bad = {name: why for (spec, name), why in self._bad.items() if spec == group.name}
        reason = ""
        for _ in range(TRIES):
            left = self._end - time.monotonic()
            if left < CASE_S:
                reason = reason or f"the budget of {self._run.budget_s:g} s was spent"
                break
            task = TimeTask(
                case,
                tuple(each for each in group.entrants[case.id] if each.name not in bad),
                skip=tuple(bad),
                tuned_flex=left > TUNED_S,
            )
            try:
                record = lane.ask(task, self._end + CASE_S)
            except LostError as error:
                reason = str(error)
                name = error.step.removeprefix("checking ")
                if not error.step.startswith("checking ") or name in bad:
                    lane.next()
                    break
                bad[name] = reason
                self._run.say(f"{self._run.seconds:6.1f} s  {case.id}: {reason}")
                lane.next()
                continue
            except Exception as error:  # an answer that cannot be had is this case's alone
                reason = f"{type(error).__name__}: {error}"
                lane.next()
                break
            self._keep(lane, group, case, record, bad, waiting)
            return
        with self._lock:
            self._run.leave_out(case.id, reason)

    def _keep(
        self,
        lane: _Lane,
        group: Group,
        case: FaCase,
        record: CaseRecord,
        bad: Mapping[str, str],
        waiting: int,
    ) -> None:
        settled: Mapping[str, float] = {}
        left = self._end - time.monotonic()
        if left > SETTLE_S * (1 + waiting / len(self._gpus)):
            found = (best_of(record, which) for which in (is_ours, is_peer))
            names = tuple(name for name in found if name is not None)
            try:
                settled = lane.ask(SettleTask(names), self._end + CASE_S)
            except LostError as error:
                self._run.say(f"{self._run.seconds:6.1f} s  {case.id}: {error}")
                lane.next()
        known = {each.name for each in record.results}
        ours = [each.name for each in group.entrants[case.id]]
        refused = tuple(Result(name, error=why) for name, why in bad.items() if name not in known)
        facts = {
            **record.facts,
            **group.facts[case.id],
            "settled ms": settled,
            "gpu": lane.gpu,
            "compiled": {name: self._facts.get(f"{group.name}: {name}", {}) for name in ours},
        }
        complete = replace(record, results=(*record.results, *refused), facts=facts)
        fa3, plain = complete.tflops("fa3"), _plain_rate(complete, "fa3 plain causal")
        facts["scaled"] = scaled_rates(case, fa3, plain)
        with self._lock:
            self._run.add(complete)


def _plain_rate(record: CaseRecord, name: str) -> float | None:
    """TFLOP/s on the pairs of the plain case."""
    median = record.median_ms(name)
    return record.facts["plain flops"] / median / 1e9 if median else None


def _named(step: str, entrants: Sequence[Entrant]) -> str | None:
    name = step.removeprefix("checking ")
    return name if any(each.name == name for each in entrants) else None


class _Lane:
    """A GPU's process, and the next one, which imports meanwhile."""

    def __init__(self, gpu: str, start: Start) -> None:
        self.gpu = gpu
        self._new = lambda: start(gpu, {"TORCHINDUCTOR_COMPILE_THREADS": "4"})
        self._worker, self._spare = self._new(), self._new()

    def ask(self, task: object, until: float) -> Any:
        return self._worker.ask(task, until)

    def next(self) -> None:
        """End the process and take the next one."""
        self._worker.close()
        self._worker, self._spare = self._spare, self._new()

    def close(self) -> None:
        self._worker.close()
        self._spare.close()
