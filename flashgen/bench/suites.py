"""The suites by name, and how some of them are one run on the GPU that is here."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from triton import knobs

from flashgen.bench.ceilings import measure_ceilings
from flashgen.bench.contest import DeviceLostError
from flashgen.bench.counters_suite import run_counters
from flashgen.bench.dispatch_suite import run_dispatch
from flashgen.bench.environment import environment
from flashgen.bench.fa_outside import ContestantError, Outside
from flashgen.bench.fa_process import visible_gpus
from flashgen.bench.fa_suite import run_fa
from flashgen.bench.flex_suite import flex_tasks, run_flex, wanted_cases
from flashgen.bench.orders_suite import order_plans
from flashgen.bench.preparation import Outcome, Task, prepare
from flashgen.bench.record import Record
from flashgen.bench.resume import resumed
from flashgen.bench.run import Run, Say, now
from flashgen.bench.schedules_suite import run_plans, run_schedules
from flashgen.bench.specs_suite import run_specs, spec_tasks
from flashgen.bench.tuner_suite import run_tuner
from flashgen.compiler.choose import target_of
from flashgen.compiler.folder import Folder
from flashgen.errors import TargetError
from flashgen.tune.clock import CudaClock
from flashgen.tune.timing import Clock

BUDGETS_S = {
    "specs": 240.0,
    "flex": 420.0,
    "dispatch": 180.0,
    "schedules": 240.0,
    "counters": 240.0,
    "loop-orders": 180.0,
    "tuner": 240.0,
    "fa-paper": 720.0,
}
RESUMED = ("fa-paper",)  # suites that take longer than a command may
CEILINGS = {"specs": ("bf16", "fp16"), "flex": ("bf16",)}
PREPARATION_SHARE = 0.45  # of the budget


@dataclass(frozen=True)
class Request:
    """What was asked of a run; `seconds` None: the suites' usual budgets together; contestants: of
    suite fa-paper, from outside."""

    suites: tuple[str, ...]
    out: Path | None = None
    only: tuple[str, ...] = ()
    seconds: float | None = None
    verify: bool = True
    contestants: tuple[Outside, ...] = ()

    @property
    def budget_s(self) -> float:
        usual = sum(BUDGETS_S[suite] for suite in self.suites)
        return usual if self.seconds is None else self.seconds


def run_suites(request: Request, say: Say) -> tuple[Record, ...]:
    """Run suites on the current GPU, one record each; TargetError where there is no GPU,
    ContestantError and RecordError for what cannot take part or go on."""
    if request.contestants and "fa-paper" not in request.suites:
        option = request.contestants[0].option
        raise ContestantError(option, "is for suite fa-paper", "add --suite fa-paper.")
    if not torch.cuda.is_available():
        raise TargetError("bench: no GPU here\n  hint: benchmarks run on the GPU they are about.")
    # Inductor would choose another folder in its own processes and, from then on, in this one.
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    runs = new_runs(request, say, target_of(device).id, environment(device))
    try:
        run_all(runs, request, CudaClock(), device, l2_bytes)
    except DeviceLostError as error:
        for run in runs.values():
            if not run.record.complete:
                run.leave_out("the rest", str(error))
    return tuple(run.record for run in runs.values())


def new_runs(request: Request, say: Say, target: str, known: Mapping[str, str]) -> dict[str, Run]:
    """A run for each suite: the same command, start, id and budget, and a record of its own, which
    for `RESUMED` suites goes on with the one that is there; RecordError where it cannot,
    FlashgenError for a folder that cannot be written, before anything is measured."""
    if request.out is not None:
        Folder(request.out / target).check_writable()
    started, began, run_id = now(), time.monotonic(), uuid.uuid4().hex[:8]

    def record_of(suite: str) -> Record:
        versions = {f"contestant {each.title}": each.version for each in request.contestants}
        new = Record(
            suite=suite,
            target=target,
            environment={**known, **versions} if suite in RESUMED else known,
            command=command_line(request),
            started=started,
            run=run_id,
            suites=request.suites,
        )
        if suite not in RESUMED or request.out is None:
            return new
        return resumed(new, request.out / target / f"{suite}.json")

    return {
        suite: Run(
            record_of(suite),
            say,
            out=request.out,
            only=request.only,
            budget_s=request.budget_s,
            began=began,
        )
        for suite in request.suites
    }


def run_all(
    runs: Mapping[str, Run],
    request: Request,
    clock: Clock,
    device: torch.device,
    l2_bytes: int,
) -> None:
    """Prepare, then the suites one after the other between two readings of the ceilings."""
    prepared = prepare_all(runs, request)
    read_ceilings(runs, clock, device)
    for suite, run in runs.items():
        if suite == "flex":
            run_flex(run, clock, device, l2_bytes, prepared)
        elif suite == "specs":
            run_specs(run, clock, device, l2_bytes, verify=request.verify, prepared=prepared)
        elif suite == "schedules":
            run_schedules(run, clock, device, l2_bytes)
        elif suite == "loop-orders":
            run_plans(order_plans(target_of(device)), run, clock, device, l2_bytes)
        elif suite == "counters":
            run_counters(run, device)
        elif suite == "tuner":
            run_tuner(run, device)
        elif suite == "fa-paper":
            gpus = visible_gpus(torch.cuda.device_count())
            run_fa(run, target_of(device), gpus, outside=request.contestants)
        else:
            run_dispatch(run, device)
        run.save()
    read_ceilings(runs, clock, device)
    for run in runs.values():
        run.finish()


def prepare_all(runs: Mapping[str, Run], request: Request) -> tuple[Outcome, ...]:
    """Have everything built, verified and compiled that the suites will time."""
    tasks = tasks_of(runs, verify=request.verify)
    if not tasks:
        return ()
    start = time.monotonic()
    first = next(iter(runs.values()))
    limit_s = PREPARATION_SHARE * request.budget_s
    outcomes = prepare(
        tasks, lambda text: first.say(f"{first.seconds:6.1f} s  {text}"), limit_s=limit_s
    )
    ended = sum(each.error is None for each in outcomes)
    text = (
        f"{ended} of {len(outcomes)} specs, kernels and masks built, verified or compiled in "
        f"parallel, in {time.monotonic() - start:.0f} s"
    )
    for run in runs.values():
        run.record = replace(run.record, preparation=text)
    return outcomes


def tasks_of(runs: Mapping[str, Run], *, verify: bool) -> list[Task]:
    """What workers are to do for the suites, the slowest first."""
    flex = flex_tasks(wanted_cases(runs["flex"])) if "flex" in runs else []
    masks = [task for task in flex if task.kind == "mask"]
    kernels = [task for task in flex if task.kind != "mask"]
    specs: Sequence[Task] = spec_tasks(runs["specs"]) if "specs" in runs and verify else ()
    return [*masks, *specs, *kernels]


def read_ceilings(runs: Mapping[str, Run], clock: Clock, device: torch.device) -> None:
    """Measure each ceiling once, for all suites."""
    dtypes = dict.fromkeys(dtype for suite in runs for dtype in CEILINGS.get(suite, ()))
    if not dtypes:
        return
    found = measure_ceilings(dtypes, clock, device)
    for suite, run in runs.items():
        if suite in CEILINGS:
            run.add_ceilings(found)


def command_line(request: Request) -> str:
    """The command that asks for this, whatever program was run and wherever it writes."""
    words = ["flashgen", "bench"]
    for suite in request.suites:
        words += ["--suite", suite]
    for text in request.only:
        words += ["--only", text]
    if request.seconds is not None:
        words += ["--seconds", f"{request.seconds:g}"]
    for contestant in request.contestants:
        words += ["--contestant", contestant.option]
    if not request.verify:
        words.append("--no-verify")
    return shlex.join(words)
