"""Schedules compiled ahead: outcomes of all, also of those that the compiler refuses or dies of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from test_worker import group_members, wait_until

from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target
from flashgen.tune import ahead
from flashgen.tune.ahead import Compiled, Compiling, Job
from flashgen.tune.candidates import Candidates, has_aligned_rows

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="ahead", head_dim=16, dtype="fp16", mask=["causal"])
TILE = Schedule(block_m=16, block_n=32, num_warps=4, num_stages=2)
OTHER_KIND = Schedule(kernel="single_tile", block_m=16, block_n=32, num_warps=4, num_stages=1)
NO_TILE = replace(TILE, block_n=24)
LONG_S = 240.0


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "flashgen"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def candidates() -> Candidates:
    return Candidates.of(Problem(SPEC, TARGET), [TILE], has_lse=False)


def soon() -> float:
    return time.monotonic() + LONG_S


def test_what_compiles_is_in_the_caches_and_what_does_not_says_why(own_caches: Path) -> None:
    module = candidates()
    jobs = [Job(module, TILE), Job(module, NO_TILE), Job(module, OTHER_KIND)]
    with Compiling() as compiling:
        compiling.submit(jobs)
        compiling.submit(jobs)  # the same ones, so nothing new
        found = compiling.wait_for(jobs, soon())
        pid = compiling.pid
    good, bad, other = (found[job] for job in jobs)
    assert good.error is None
    assert good.smem_bytes is not None and good.smem_bytes > 0
    assert good.regs_per_thread is not None and good.regs_per_thread > 16
    assert good.facts["spill_bytes"] == 0
    assert "error" not in good.facts
    assert bad.error is not None
    assert bad.error.startswith("CompileError")
    assert other.error is not None
    assert other.error.startswith("ScheduleError")
    assert list((own_caches / "triton").iterdir())
    assert len(list((own_caches / "flashgen" / "kernels").iterdir())) == 1
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("own_caches")
def test_waiting_ends_at_its_time() -> None:
    job = Job(candidates(), TILE)
    with Compiling() as compiling:
        compiling.submit([job, job])
        found = compiling.wait_for([job], time.monotonic())
    assert found == {job: Compiled(0.0, error="not compiled in time")}


@pytest.mark.usefixtures("own_caches")
def test_a_job_that_takes_too_long_is_an_outcome() -> None:
    job = Job(candidates(), TILE)
    with Compiling(limit_s=0.001) as compiling:
        compiling.submit([job])
        (found,) = compiling.wait_for([job], soon()).values()
    assert found.error == "compiling took over 0.001 s"


GONE = """
import os, sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
from test_compiled_ahead import TILE, candidates
from flashgen.tune.ahead import Compiling, Job
module = candidates()
compiling = Compiling()
compiling.submit(
    Job(module, replace(TILE, block_m=m, block_n=n)) for m in (16, 32) for n in (16, 32, 64)
)
print(compiling.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.usefixtures("own_caches")
def test_helper_and_workers_end_when_whoever_asked_is_killed() -> None:
    program = GONE.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not group_members(int(done.stdout)))


@pytest.mark.usefixtures("own_caches")
def test_a_helper_that_is_killed_leaves_its_jobs_without_a_kernel() -> None:
    job = Job(candidates(), TILE)
    with Compiling() as compiling:
        os.kill(compiling.pid, signal.SIGKILL)
        compiling.submit([job])
        (found,) = compiling.wait_for([job], soon()).values()
        assert found.error == "the compiling process ended early: the process ended by SIGKILL"
        assert compiling.ended == found.error


# ---- the worker's part, in this process


def _crash(job: Job, limit_s: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _deaf(job: Job, limit_s: float) -> NoReturn:
    """As a compiler that never returns to Python."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    while True:
        time.sleep(1000)


def test_a_compiler_that_crashes_is_an_outcome_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "compile_job", _crash)
    worker = ahead._start(7, Job(candidates(), TILE), LONG_S)
    assert worker.result.poll(LONG_S)
    assert ahead._is_over(worker, has_news=True)
    assert ahead._outcome(worker, LONG_S).error == "the compiler ended by SIGKILL"


def test_a_compiler_that_hears_no_alarm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compile_job", _deaf)
    monkeypatch.setattr(ahead, "GRACE_S", 0.1)
    worker = ahead._start(7, Job(candidates(), TILE), 0.1)
    assert not ahead._is_over(worker, has_news=False)
    time.sleep(0.25)
    assert ahead._is_over(worker, has_news=False)
    assert ahead._outcome(worker, 0.1).error == "compiling took over 0.1 s"
    assert not worker.process.is_alive()


# ---- which kernel a launch will look for


@pytest.mark.parametrize(
    ("changes", "kv_len", "aligned"),
    [
        ({}, 731, True),
        ({"head_dim": 20}, 728, False),
        ({"head_dim": {"qk": 24, "v": 20}}, 728, False),
        ({"score": [{"bias": {"tensor": "rel"}}]}, 728, True),
        ({"score": [{"bias": {"tensor": "rel"}}]}, 731, False),
    ],
)
def test_rows_are_aligned_by_head_dims_and_dense_inputs(
    changes: dict[str, object], kv_len: int, aligned: bool
) -> None:
    inputs = {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "fp16"}}
    spec = SPEC.replace(**changes, **({"inputs": inputs} if "score" in changes else {}))
    assert has_aligned_rows(Problem(spec, TARGET), kv_len) is aligned
