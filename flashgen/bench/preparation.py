"""Before anything is timed: worker processes build, verify and compile what the suites will run.

A worker leaves what it compiled in the disk caches of flashgen, Triton and Inductor, where the
timing process finds it. Nothing is timed while a worker runs, and none is left when timing begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from flashgen.bench.run import Say
from flashgen.tune.processes import cores

Kind = Literal["spec", "kernels", "mask"]  # what `worker.py` does for each is said there

POLL_S = 0.1
MODULE = "flashgen.bench.worker"


@dataclass(frozen=True)
class Task:
    """Names that one worker process works through; `threads`: of Inductor's compiles in it."""

    kind: Kind
    names: tuple[str, ...]
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.names[0]}{' …' if len(self.names) > 1 else ''}"


@dataclass(frozen=True)
class Outcome:
    """What became of one name: facts for its record, or why there are none."""

    kind: Kind
    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def usual_slots() -> int:
    """Workers at a time: a compile keeps one core busy, and some of them start helpers."""
    return max(1, 3 * cores() // 4)


def prepare(
    tasks: Sequence[Task], say: Say, *, limit_s: float, slots: int | None = None
) -> tuple[Outcome, ...]:
    """Work through `tasks`, the slowest first by their order; after `limit_s` the rest is ended.

    Every name of every task has an outcome. A worker that fails, or is ended, costs time later, not
    results: what it did not compile is compiled where it is needed.
    """
    waiting, running, outcomes = list(tasks), list[_Worker](), list[Outcome]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as folder:
        bytecode = Path(folder) / "bytecode"
        try:
            while (waiting or running) and time.monotonic() - start < limit_s:
                while waiting and len(running) < (slots or usual_slots()):
                    number = len(tasks) - len(waiting)
                    place = Path(folder) / str(number)
                    running.append(_Worker(waiting.pop(0), place, bytecode))
                for worker in [each for each in running if each.ended]:
                    running.remove(worker)
                    outcomes += _said(worker, say, start)
                time.sleep(POLL_S)
        finally:
            for worker in running:
                worker.kill()
        for worker in running:
            outcomes += _said(worker, say, start)
    unused = f"not begun within {limit_s:g} s"
    outcomes += [Outcome(t.kind, name, error=unused) for t in waiting for name in t.names]
    return tuple(outcomes)


def _said(worker: _Worker, say: Say, start: float) -> list[Outcome]:
    found = worker.outcomes()
    failed = next((each.error for each in found if each.error), None)
    note = f": {failed}" if failed else ""
    say(f"prepared {worker.task}, {time.monotonic() - start:.0f} s{note}")
    return found


class _Worker:
    """A process on one task; it writes a line of JSON for each name that it is done with."""

    def __init__(self, task: Task, place: Path, bytecode: Path) -> None:
        self.task = task
        self._lines = place.with_suffix(".out")
        self._complaints = place.with_suffix(".err")
        with self._lines.open("wb") as out, self._complaints.open("wb") as err:
            self._process = _start(task, bytecode, out, err)
        self._killed = False

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process and the helpers that it started."""
        self._killed = True
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def outcomes(self) -> list[Outcome]:
        """One for each name of the task."""
        found: dict[str, Outcome] = {}
        for line in self._lines.read_text("utf-8", errors="replace").splitlines():
            try:
                data = json.loads(line)
                found[data["name"]] = Outcome(self.task.kind, **data)
            except (ValueError, KeyError, TypeError):
                continue  # something else that was printed, or half a line
        reason = self._reason()
        return [
            found.get(name) or Outcome(self.task.kind, name, error=reason)
            for name in self.task.names
        ]

    def _reason(self) -> str:
        if self._killed:
            return "ended, the time for preparing was over"
        lines = self._complaints.read_text("utf-8", errors="replace").strip().splitlines()
        return f"the worker ended with {self._process.returncode}: {lines[-1] if lines else ''}"


def _start(task: Task, bytecode: Path, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    """A session of its own: it can be ended together with the helpers that it starts.

    Bytecode is kept for the other workers: torch's import takes 4.7 s without it, 1.5 s with it.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "TORCHINDUCTOR_COMPILE_THREADS": str(task.threads),
    }
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, task.kind, *task.names],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=environment,
        start_new_session=True,
    )


def work_through(names: Sequence[str], work: Callable[[str], dict[str, Any]], out: IO[str]) -> None:
    """In a worker: do `work` for each name and write its outcome; an error is one too."""
    for name in names:
        try:
            line: dict[str, Any] = {"name": name, "facts": work(name)}
        except Exception as error:  # the timing process will meet it again, and record it
            line = {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        out.write(json.dumps(line) + "\n")
        out.flush()
