"""Before suite `fa-paper` times: everything is compiled, and each schedule runs once, on all cores.

A schedule runs in a process with a deadline. What is not done at a limit of time is ended, and
compiled when its turn comes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashgen.bench.fa_cases import VARIANT
from flashgen.bench.fa_entrants import Group
from flashgen.bench.fa_figures import is_ours
from flashgen.bench.fa_outside import Outside
from flashgen.bench.fa_process import LostError, Start
from flashgen.bench.fa_tasks import CheckTask, CompileTask, Entrant
from flashgen.bench.run import Run
from flashgen.tune.ahead import Compiled, Compiling
from flashgen.tune.processes import cores


class Preparation:
    """What the threads that prepare share, and what they found out.

    bad: spec and name -> why it is not timed; facts: what the compiler said, by `SPEC: NAME`.
    """

    def __init__(
        self,
        run: Run,
        gpus: Sequence[str],
        start: Start,
        bad: Mapping[tuple[str, str], str],
        outside: Sequence[Outside] = (),
    ) -> None:
        self.bad = dict(bad)
        self.facts: dict[str, Mapping[str, object]] = {}
        self._run, self._gpus, self._start = run, list(gpus), start
        self._outside = tuple(outside)
        self._lock = threading.Lock()
        self._own = self._proven = 0  # schedules, and those that were right in a first run

    def prepare(
        self,
        groups: Sequence[Group],
        resting: Mapping[str, set[str]],
        helper: Compiling,
        limit: float,
    ) -> None:
        """Compile everything of these groups, and run each schedule once; what is not done at
        `limit` is ended. resting: who takes no part, by case id."""
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
                flexes.append(pool.submit(self._compile_others, group, resting, gpu, limit, place))
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
        left = [each for each in group.all if (group.name, each.name) not in self.bad]
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
            self.facts[f"{group.name}: {name}"] = said.facts
            self._own += is_ours(name)
        if said.error is not None:
            self._refuse(group, name, said.error)

    def _refuse(self, group: Group, name: str, reason: str) -> None:
        with self._lock:
            if (group.name, name) not in self.bad:
                self.bad[group.name, name] = reason
                self._run.say(f"{self._run.seconds:6.1f} s  {group.name}, {name}: {reason}")

    def _compile_others(
        self,
        group: Group,
        resting: Mapping[str, set[str]],
        gpu: str,
        limit: float,
        folder: Path,
    ) -> bool:
        """FlexAttention's machine code stays in Triton's cache. What tuning measured here, where
        other processes use the GPU, does not: it is measured again when the case is timed."""
        more = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        if group.cases[0].group == VARIANT:
            more["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        worker = self._start(gpu, more)
        try:
            skip = {case.id: tuple(sorted(resting[case.id])) for case in group.cases}
            worker.ask(CompileTask(group.cases, skip, self._outside), limit)
        except LostError as error:
            self._run.say(f"{self._run.seconds:6.1f} s  FlexAttention of {group.name}: {error}")
            return False
        finally:
            worker.close()
        return True


def _named(step: str, entrants: Sequence[Entrant]) -> str | None:
    name = step.removeprefix("checking ")
    return name if any(each.name == name for each in entrants) else None
