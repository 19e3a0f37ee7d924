"""Many schedules compiled ahead: outcomes of all, also of those that the compiler refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashgen.bench import compiling
from flashgen.bench.compiling import Compiled, Compiling, Job
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="ahead", head_dim=16, dtype="fp16", mask=["causal"])
TILE = Schedule(block_m=16, block_n=32, num_warps=4, num_stages=2)
TOO_LARGE = Schedule(block_m=256, block_n=256, num_warps=4, num_stages=4)


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "flashgen"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def test_what_compiles_is_in_the_caches_and_what_does_not_says_why(own_caches: Path) -> None:
    jobs = [Job(SPEC, TARGET, TILE), Job(SPEC, TARGET, TOO_LARGE)]
    with Compiling(jobs) as compiling_:
        found = compiling_.wait_for(jobs, time.monotonic() + 120)
    good, bad = (found[job] for job in jobs)
    assert good.error is None
    assert good.smem_bytes is not None and good.smem_bytes > 0
    assert good.regs_per_thread is not None and good.regs_per_thread > 16
    assert good.facts["spill_bytes"] == 0
    assert "error" not in good.facts
    assert bad.error is not None
    assert "ScheduleError" in bad.error
    assert list((own_caches / "triton").iterdir())
    assert len(list((own_caches / "flashgen" / "kernels").iterdir())) == 1


@pytest.mark.usefixtures("own_caches")
def test_waiting_ends_at_its_time_and_asking_twice_is_one_job() -> None:
    job = Job(SPEC, TARGET, TILE)
    with Compiling([job, job]) as compiling_:
        assert compiling_.jobs == (job,)
        assert compiling_.wait_for([job], time.monotonic()) == {
            job: Compiled(0.0, error="not compiled in time")
        }


@pytest.mark.usefixtures("own_caches")
def test_a_job_that_takes_too_long_is_an_outcome() -> None:
    job = Job(SPEC, TARGET, TILE)
    with Compiling([job], limit_s=0.001) as compiling_:
        (found,) = compiling_.wait_for([job], time.monotonic() + 120).values()
    assert found.error == "compiling took over 0.001 s"


GONE = """
import os, sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
from test_compiling import SPEC, TARGET, TILE
from flashgen.bench.compiling import Compiling, Job
tiles = [replace(TILE, block_m=m, block_n=n) for m in (16, 32) for n in (16, 32, 64)]
print(Compiling([Job(SPEC, TARGET, tile) for tile in tiles])._process.pid, flush=True)
os._exit(0)
"""


@pytest.mark.usefixtures("own_caches")
def test_the_helper_ends_when_whoever_asked_is_gone() -> None:
    program = GONE.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    until = time.monotonic() + 120
    while _lives(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not _lives(int(done.stdout))


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be counted as ended does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_helper_that_ends_early_leaves_its_jobs_without_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_PROGRAM", "raise SystemExit(3)")
    job = Job(SPEC, TARGET, TILE)
    with Compiling([job]) as compiling_:
        (found,) = compiling_.wait_for([job], time.monotonic() + 60).values()
    assert found.error == "the compiling process ended early"
