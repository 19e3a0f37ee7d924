"""Compile many kernels at once, in a process that does nothing else.

Importing torch takes seconds and so does a kernel. The helper is started first and imports while
the caller plans; then it forks one worker a core, which is safe there: it has no other threads, no
GPU, and no `__main__` of a user that would run again. It leaves what it compiled in Triton's disk
cache too, so that a launch of the same kernel later finds it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, TYPE_CHECKING

from flashgen.codegen.options import kernel_kinds
from flashgen.errors import CompileError, FlashgenError, ScheduleError
from flashgen.runtime.said import say_once
from flashgen.tune.processes import ChildEndedError, SilentError, cores, in_time

if TYPE_CHECKING:
    from flashgen.problem import Problem
    from flashgen.runtime.ahead import CompiledKernel
    from flashgen.runtime.artifact import Plan
    from flashgen.schedule.model import Schedule
    from flashgen.tune.verdicts import State

COMPILE_S = 60.0  # of a Hopper kernel: the slowest seen take 7 s, a few have kept LLVM for ever

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from flashgen.compiler.machine_code import serve; serve()"
)


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


class Compilers:
    """The helper process, as a context: `submit` once, then iterate `results`.

    refused: Hopper schedules that have no usable machine code; the others are in the results.
    """

    def __init__(self) -> None:
        self.refused: dict[Schedule, Refused] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="flashgen-")
        self._complaints = (Path(self._folder.name) / "stderr").open("w+b")
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
        )
        self._jobs: tuple[Job, ...] = ()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream and not stream.closed:
                stream.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._complaints.close()
        self._folder.cleanup()

    def submit(self, problem: Problem, plan: Plan, path: Path, jobs: Sequence[Job]) -> None:
        """Start to compile `jobs`, the slowest first by their order."""
        self._jobs = tuple(jobs)
        assert self._process.stdin is not None
        try:
            pickle.dump(_Order(problem, plan, path, self._jobs), self._process.stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            raise self._broken() from None

    def results(self) -> Iterator[tuple[Job, CompiledKernel]]:
        """Kernels as they get ready; CompileError for the first one that the back end refuses."""
        assert self._process.stdout is not None
        left = len(self._jobs)
        for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "warn":
                say_once(json.loads(rest))
                continue
            found = pickle.loads((Path(self._folder.name) / rest).read_bytes())
            if isinstance(found, FlashgenError):
                raise found
            left -= 1
            job = self._jobs[int(rest)]
            if isinstance(found, Refused):
                self.refused[job.schedule] = found
            else:
                yield job, found
        if left:
            raise self._broken()

    def _broken(self) -> CompileError:
        self._complaints.seek(0)
        text = self._complaints.read().decode(errors="replace").strip()
        last = "\n  ".join(text.splitlines()[-8:])
        return CompileError(
            f"the compiling process ended early (exit status {self._process.wait()})\n  {last}"
        )


# ---- in the helper -------------------------------------------------------------------------------


def serve() -> None:
    """Main function of the helper: read one order, compile it in parallel, report line by line."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not end up between the lines
    folder = Path(sys.argv[2])

    # A generated module names torch in its host code only, which does not run here: 2.8 s saved.
    sys.modules.setdefault("torch", ModuleType("torch"))
    # Before there is work, for workers to inherit.
    import triton.compiler.code_generator  # noqa: F401

    import flashgen.runtime.ahead  # noqa: F401
    from flashgen.runtime.load import load_module
    from flashgen.runtime.triton_cache import use_writable_cache
    from flashgen.runtime.triton_key import find_triton_key

    find_triton_key()
    try:
        order = pickle.load(sys.stdin.buffer)
    except EOFError:  # the caller found something wrong and sent nothing
        return
    warning = use_writable_cache()
    if warning:
        _say(lines, "warn", json.dumps(warning))
    load_module(order.path, interpreted=False)
    workers = max(1, min(cores(), len(order.jobs)))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for number, result in enumerate(pool.map(_compile, [(order, job) for job in order.jobs])):
            (folder / str(number)).write_bytes(pickle.dumps(result))
            _say(lines, "done", str(number))


def _say(lines: IO[str], word: str, rest: str) -> None:
    lines.write(f"{word} {rest}\n")
    lines.flush()


def _compile(task: tuple[_Order, Job]) -> CompiledKernel | FlashgenError | Refused:
    if task[1].schedule.family == "triton":
        return _compiled(task)
    try:
        found: CompiledKernel | FlashgenError = in_time(_compiled, task, COMPILE_S)
    except SilentError:
        return Refused("hung", f"compiling took over {COMPILE_S:g} s")
    except ChildEndedError as error:
        return Refused("crashed", f"compiling: {error}")
    if isinstance(found, ScheduleError) and found.rejections:
        return Refused("refused", "; ".join(map(str, found.rejections)))
    return found


def _compiled(task: tuple[_Order, Job]) -> CompiledKernel | FlashgenError:
    from flashgen.runtime.ahead import compile_schedule
    from flashgen.runtime.load import load_module

    order, job = task
    module = load_module(order.path, interpreted=False)
    try:
        return compile_schedule(
            order.problem, order.plan, module, job.schedule, aligned=job.aligned, kind=job.kernel
        )
    except FlashgenError as error:
        return error
