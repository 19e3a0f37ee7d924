"""Compile the sample, keeping every result, and pair each case with what the compiler said."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import triton

from flashgen import settings
from flashgen.bench.model_check.compiled import Compiled, Kept, key_of
from flashgen.bench.model_check.pool import Job, compile_all
from flashgen.bench.model_check.sample import Case
from flashgen.codegen.options import options
from flashgen.pipeline import generate
from flashgen.runtime.ahead import pointer_types
from flashgen.schedule.model import Bucket
from flashgen.tune.processes import cores

Say = Callable[[str], None]
DEADLINE_S = 120.0


def kept_path() -> Path:
    """Where results are kept between runs."""
    return settings.cache_dir() / "compiled" / f"triton-{triton.__version__}.jsonl"


def compile_cases(
    cases: Sequence[Case],
    assembled: Sequence[Case],
    say: Say,
    *,
    kept: Path | None = None,
    workers: int | None = None,
    deadline_s: float = DEADLINE_S,
    seconds: float = float("inf"),
) -> dict[Case, Compiled]:
    """What the compiler says of each case; those that time did not allow are missing.

    assembled: those of which machine code is made too, if they can be launched. kept: the file of
    earlier results, which are not compiled again (default: `kept_path`).
    """
    until = time.monotonic() + seconds
    known = Kept(kept or kept_path())
    with tempfile.TemporaryDirectory(prefix="flashgen-compile-") as name:
        folder = Path(name)
        jobs = {case: _job(case, folder) for case in cases}

        def compile_(wanted: Sequence[Job], what: str) -> None:
            say(f"{what}: {len(wanted)} to compile")
            outcomes = compile_all(
                wanted,
                workers=workers or cores(),
                deadline_s=deadline_s,
                cache=folder / "triton",
                until=until,
            )
            for count, (job, compiled) in enumerate(outcomes, 1):
                known.add(job.key, compiled)
                say(f"{count}/{len(wanted)} {job.key}: {known.found[job.key]}")

        compile_([j for j in jobs.values() if j.key not in known.found], "allocation")
        fitting = [jobs[c] for c in assembled if (found := known.get(jobs[c].key)) and found.fits]
        left = [job for job in fitting if not known.found[job.key].is_assembled]
        compile_([replace(job, machine_code=True) for job in left], "machine code")
    return {case: known.found[job.key] for case, job in jobs.items() if job.key in known.found}


def _job(case: Case, folder: Path) -> Job:
    """Generate the module of a case and say how to compile its kernel."""
    problem, schedule = case.problem, case.schedule
    plan = generate(problem, [(Bucket(None, None), schedule)], has_lse=True, origin="sample")
    entry = dict(plan.entries)[schedule.kernel]
    path = folder / hashlib.sha256(plan.text.encode()).hexdigest()[:24] / "kernel.py"
    if not path.exists():
        path.parent.mkdir()
        path.write_text(plan.text, encoding="utf-8")
    smallest = min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes)
    return Job(
        key=key_of(case, plan.text, entry, triton.__version__),
        path=path,
        entry=entry,
        pointers=dict(pointer_types(problem)),
        options={name: n for name, n in options(schedule).items() if n is not None},
        align=16 // smallest if case.aligned else 1,
        target=problem.target,
    )
