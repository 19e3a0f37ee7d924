"""The helper that compiles: whatever ends the command that started it, no process stays."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.compiler import BuildResult
from flashgen.compiler.machine_code import Job
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule, Sm90
from flashgen.tune.processes import cores

PORTABLE = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
HOPPER = Schedule(
    family="gluon_sm90", block_m=128, block_n=64, num_warps=12, num_stages=2, sm90=Sm90()
)

# A module whose kernels never compile, as with an assembler that hangs: one a worker.
KERNELS = """
import subprocess, sys, time
from pathlib import Path
from flashgen.errors import CompileError

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "fails":
        while len(list(Path(__file__).parent.glob("*.begun"))) < WORKERS - 1:
            time.sleep(0.02)
        raise CompileError("the kernel does not compile")
    (Path(__file__).parent / f"{name}.begun").touch()
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])
"""

COMMAND = """
import pickle, sys
from flashgen.compiler.machine_code import Compilers
with Compilers() as compilers:
    with open(sys.argv[1], "rb") as stream:
        compilers.submit(*pickle.load(stream))
    list(compilers.results())
"""


def marked(mark: str) -> list[int]:
    """Processes with `mark` in their environment that run; what they started has it too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                has = mark.encode() in (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if has and state != "Z":
                found.append(int(entry.name))
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()


ENDINGS = {
    "ctrl-c": lambda pid: os.killpg(pid, signal.SIGINT),  # as a terminal sends it
    "terminated": lambda pid: os.kill(pid, signal.SIGTERM),
    "killed": lambda pid: os.kill(pid, signal.SIGKILL),
    "helper-killed": lambda pid: [os.kill(child, signal.SIGKILL) for child in children(pid)],
    "a-kernel-fails": None,
}
SAID = {
    "helper-killed": b"the compiling process ended early (by SIGKILL)",
    "a-kernel-fails": b"the kernel does not compile",
}


@pytest.mark.skipif(cores() < 2, reason="needs two workers")
@pytest.mark.parametrize("how", ENDINGS)
def test_no_process_stays(how: str, built: BuildResult, tmp_path: Path) -> None:
    end = ENDINGS[how]
    kinds = ["loop", "sm90"] if end else ["single_tile", "loop"]
    path = tmp_path / "kernel.py"
    path.write_text(KERNELS.replace("WORKERS", "2"))
    plan = replace(
        built.plan, entries=(("loop", "loop"), ("single_tile", "fails"), ("sm90", "sm90"))
    )
    jobs = [Job(HOPPER if kind == "sm90" else PORTABLE, True, kind) for kind in kinds]
    order = tmp_path / "order"
    order.write_bytes(pickle.dumps((Problem(built.spec, built.target), plan, path, jobs)))
    mark = f"FLASHGEN_TEST_MARK={tmp_path}"
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(order)],
        env={**os.environ, name: value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        stderr=subprocess.PIPE,
    ) as process:
        if end is not None:
            wait_until(lambda: len(list(tmp_path.glob("*.begun"))) == len(kinds))
            end(process.pid)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert SAID.get(how, b"") in said
    wait_until(lambda: not marked(mark))
