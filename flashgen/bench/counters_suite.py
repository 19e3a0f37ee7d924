"""Suite `counters`: the bytes that a model says are moved, against the GPU's own counters.

Kernels are compiled ahead. Then one process for each loop order runs them under Nsight Compute,
twice: with all counters, caches emptied before each replay; and with those of memory alone, in one
pass, followed by a read of other data that drives out what the kernels left in L2. A write that
ends in L2 is in no memory counter of the kernel itself.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashgen.bench import ncu
from flashgen.bench.counter_cases import CounterCase, counter_cases
from flashgen.bench.record import CaseRecord
from flashgen.bench.run import Run
from flashgen.compiler.choose import target_of, unserved_features
from flashgen.schedule.model import Schedule
from flashgen.target import Target
from flashgen.tune.ahead import Compiled, Compiling, Job

PROGRAM = "flashgen.bench.counters_program"
START_S = 15.0  # python, torch and CUDA under Nsight Compute, before the first case


@dataclass(frozen=True)
class Chosen:
    """A case with its schedule on the target."""

    case: CounterCase
    schedule: Schedule

    def job(self, target: Target) -> Job:
        return Job(self.case.candidates(target, self.schedule), self.schedule)


def run_counters(run: Run, device: torch.device) -> None:
    """Every wanted case, as far as the budget goes; CounterError without Nsight Compute."""
    tool = ncu.find_ncu()
    target = target_of(device)
    chosen = _served(run, target)
    if not chosen:
        return
    with Compiling() as compiling:
        compiling.submit(each.job(target) for each in chosen)
        metrics = ncu.available(tool, ncu.METRICS)
        _say_missing(run, metrics)
        until = time.monotonic() + (run.budget_s - run.seconds) / 2
        known = compiling.wait_for([each.job(target) for each in chosen], until)
    run.say(f"{run.seconds:6.1f} s  compiled {len(known)} kernels")
    ready = []
    for each in chosen:
        error = known[each.job(target)].error
        if error is None:
            ready.append(each)
        else:
            run.leave_out(each.case.id, error)
    while ready:
        order = ready[0].case.loop_order
        part = [each for each in ready if each.case.loop_order == order]
        share = len(part) / len(ready)  # of the time left, by what was asked for
        ready = [each for each in ready if each.case.loop_order != order]
        if run.has_time_for(f"{order}, {len(part)} cases"):
            left = (run.budget_s - run.seconds) * share
            compiled = {each.case.id: known[each.job(target)] for each in part}
            _count(run, tool, metrics, part, compiled, left)


def _served(run: Run, target: Target) -> list[Chosen]:
    """The wanted cases that can be run; the others are left out, with the reason."""
    found = []
    for case in counter_cases():
        if not run.wants(case.id):
            continue
        missing = unserved_features(case.spec)
        schedule = case.schedule(target)
        if missing:
            run.leave_out(case.id, f"not served yet: {', '.join(missing)}")
        elif schedule is None:
            run.leave_out(case.id, f"the tile does not fit {target.id}")
        else:
            found.append(Chosen(case, schedule))
    return found


def _say_missing(run: Run, metrics: Sequence[str]) -> None:
    missing = [name for name in ncu.METRICS if name not in metrics]
    needed = [name for name in ncu.NEEDED if name in missing]
    if needed:
        raise ncu.CounterError(
            f"bench: this GPU has no counter {', '.join(needed)}\n"
            "  hint: suite counters was written for Nsight Compute 2025.3 on sm_90."
        )
    if missing:
        run.say(f"{run.seconds:6.1f} s  counters that are not here: {', '.join(missing)}")


def _count(
    run: Run,
    tool: str,
    metrics: Sequence[str],
    part: Sequence[Chosen],
    compiled: Mapping[str, Compiled],
    left_s: float,
) -> None:
    """Both profiles of one loop order's cases, and their records.

    What Nsight Compute printed is kept where cases are missing in it.
    """
    ids = [each.case.id for each in part]
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as folder:
        logs = [Path(folder) / f"ncu-{part[0].case.loop_order}-{n}.csv" for n in (1, 2)]
        try:
            cold = _profile(tool, metrics, ids, logs[0], write_back=False, limit_s=left_s / 2)
            _say_profile(run, cold)
            alone = _profile(
                tool, ncu.DRAM_METRICS, ids, logs[1], write_back=True, limit_s=left_s / 2
            )
            _say_profile(run, alone)
        except ncu.CounterError as error:
            for case_id in ids:
                run.leave_out(case_id, str(error).splitlines()[0])
            _keep(run, logs)
            if not run.record.cases:
                raise
            return
        before = len(run.record.not_run)
        _add_records(run, part, compiled, cold, alone)
        if len(run.record.not_run) > before:
            _keep(run, logs)


def _say_profile(run: Run, found: ncu.Profile) -> None:
    run.say(f"{run.seconds:6.1f} s  {len(found.kernels)} kernels, {found.passes} passes each")
    for line in found.complaints:
        run.say(f"  {line}")


def _keep(run: Run, logs: Sequence[Path]) -> None:
    """Beside the record: what was printed may be of use although it could not be read."""
    if run.out is None:
        return
    for log in logs:
        if log.is_file():
            kept = run.out / run.record.target / log.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, kept)
            run.say(f"{run.seconds:6.1f} s  what ncu printed is in {kept}")


def _add_records(
    run: Run,
    part: Sequence[Chosen],
    compiled: Mapping[str, Compiled],
    cold: ncu.Profile,
    alone: ncu.Profile,
) -> None:
    """A record for each case that has counters in both profiles."""
    for number, each in enumerate(part):
        found = [
            cold.labelled(ncu.LABEL, number),
            alone.labelled(ncu.LABEL, number),
            alone.labelled(ncu.AFTER, number),
        ]
        if not all(found):
            run.leave_out(each.case.id, "no counters: not reached, or it failed")
            continue
        run.add(
            case_record(each, compiled[each.case.id], found, passes=(cold.passes, alone.passes))
        )


def _profile(
    tool: str,
    metrics: Sequence[str],
    ids: Sequence[str],
    log: Path,
    *,
    write_back: bool,
    limit_s: float,
) -> ncu.Profile:
    """One process under Nsight Compute, which begins no case when most of its time is over."""
    asked = {
        "cases": list(ids),
        "write_back": write_back,
        "seconds": max(0.0, 0.8 * (limit_s - START_S)),
    }
    program = [sys.executable, "-m", PROGRAM, json.dumps(asked)]
    return ncu.profile(tool, program, metrics, log, flush=not write_back, limit_s=limit_s)


def case_record(
    chosen: Chosen,
    compiled: Compiled,
    found: Sequence[Sequence[ncu.KernelCounters]],
    *,
    passes: tuple[int | None, int | None],
) -> CaseRecord:
    """Everything that was counted, as it was counted: the models are applied when it is read."""
    case, spec = chosen.case, chosen.case.spec
    cold, alone, after = ([_kernel_facts(kernel) for kernel in kernels] for kernels in found)
    return CaseRecord(
        id=case.id,
        group=case.loop_order,
        spec=spec.display_name,
        shape=asdict(case.shape),
        dtype=spec.dtype.q,
        facts={
            "spec": spec.to_yaml(),
            "schedule": chosen.schedule.to_dict(),
            "compiled": compiled.facts,
            "passes": list(passes),
            "cold": cold,
            "alone": alone,
            "after": after,
        },
    )


def _kernel_facts(kernel: ncu.KernelCounters) -> dict[str, Any]:
    return {"kernel": kernel.name, "grid": kernel.grid, "counters": dict(kernel.metrics)}
