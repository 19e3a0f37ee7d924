"""The suites by name, and how one is run on the GPU that is here."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from flashgen.bench.clock import CudaClock
from flashgen.bench.contest import DeviceLostError
from flashgen.bench.dispatch_suite import run_dispatch
from flashgen.bench.environment import environment
from flashgen.bench.flex_suite import run_flex
from flashgen.bench.record import Record
from flashgen.bench.run import Run, Say, now
from flashgen.bench.specs_suite import run_specs
from flashgen.compiler.choose import target_of
from flashgen.errors import TargetError

BUDGETS_S = {"specs": 300.0, "flex": 480.0, "dispatch": 180.0}


@dataclass(frozen=True)
class Request:
    """What was asked of a run; `seconds` None: the suite's usual budget."""

    suite: str
    out: Path | None = None
    only: tuple[str, ...] = ()
    seconds: float | None = None
    verify: bool = True


def run_suite(request: Request, say: Say) -> Record:
    """Run a suite on the current GPU and return its record; TargetError where there is none."""
    if not torch.cuda.is_available():
        raise TargetError("bench: no GPU here\n  hint: benchmarks run on the GPU they are about.")
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    record = Record(
        suite=request.suite,
        target=target_of(device).id,
        environment=environment(device),
        command=command_line(request),
        started=now(),
    )
    budget_s = BUDGETS_S[request.suite] if request.seconds is None else request.seconds
    run = Run(record, say, out=request.out, only=request.only, budget_s=budget_s)
    clock = CudaClock()
    try:
        if request.suite == "flex":
            run_flex(run, clock, device, l2_bytes)
        elif request.suite == "specs":
            run_specs(run, clock, device, l2_bytes, verify=request.verify)
        else:
            run_dispatch(run, device)
    except DeviceLostError as error:
        run.leave_out("the rest", str(error))
    else:
        run.finish()
    return run.record


def command_line(request: Request) -> str:
    """The command that asks for this, whatever program was run and wherever it writes."""
    words = ["flashgen", "bench", "--suite", request.suite]
    for text in request.only:
        words += ["--only", text]
    if request.seconds is not None:
        words += ["--seconds", f"{request.seconds:g}"]
    if not request.verify:
        words.append("--no-verify")
    return shlex.join(words)
