"""Suite `schedules`: what many schedules of a spec take, to hold the model of time against.

Kernels are compiled ahead on all cores while earlier specs are timed. Each schedule's output is
held against fp64 before it is timed; all schedules of a spec take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen import settings
from flashgen.bench.accuracy import Oracle
from flashgen.bench.contest import contest, free_memory
from flashgen.bench.peers import Attend, Contestant
from flashgen.bench.record import WRONG, CaseRecord, Result
from flashgen.bench.run import Run
from flashgen.bench.sampling import sample
from flashgen.bench.specs_suite import case_id
from flashgen.bench.work import case_record, count_work
from flashgen.compiler.choose import target_of, unserved_features
from flashgen.problem import Problem
from flashgen.schedule.families import PORTABLE
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune.ahead import Compiled, Compiling, Job
from flashgen.tune.candidates import Candidates, has_aligned_rows
from flashgen.tune.tensors import argument_bytes, draw, sets_needed
from flashgen.tune.timing import Clock

# Head dims 64 to 256, fp16 and bf16, causal, windowed and full, a softcap, ALiBi, a bias, GQA.
SHAPES: Mapping[str, Shape] = {
    "llama3_8b": Shape(1, 32, 8, 4096, 4096),
    "gpt2": Shape(16, 12, 12, 1024, 1024),
    "gemma2_global": Shape(1, 16, 8, 4096, 4096),
    "siglip_so400m": Shape(16, 16, 16, 729, 729),
    "mistral_7b": Shape(1, 32, 8, 8192, 8192),
    "qwen_27b": Shape(1, 24, 4, 4096, 4096),
    "bloom_7b1": Shape(4, 32, 32, 2048, 2048),
    "t5_encoder": Shape(8, 12, 12, 1024, 1024),
}
COUNT = 36
ROUNDS = 3
MAX_SETS = 2  # tensors to rotate through: graphs of 36 schedules hold on to an output for each


@dataclass(frozen=True)
class Plan:
    """A spec and shape, and the schedules to time on it."""

    spec: AttentionSpec
    shape: Shape
    schedules: tuple[Schedule, ...]

    @property
    def id(self) -> str:
        return case_id(self.spec, self.shape)

    def candidates(self, target: Target) -> Candidates:
        """The one module that all of them share."""
        return Candidates.of(Problem(self.spec, target), self.schedules, has_lse=False)

    def jobs(self, candidates: Candidates) -> list[Job]:
        aligned = has_aligned_rows(candidates.problem, self.shape.kv_len)
        return [Job(candidates, schedule, aligned) for schedule in self.schedules]


def plans(target: Target, *, count: int = COUNT) -> list[Plan]:
    """Every spec of the suite with its sample."""
    return [
        plan_of(load_spec(settings.specs_dir() / f"{name}.yaml"), shape, target, count=count)
        for name, shape in SHAPES.items()
    ]


def plan_of(spec: AttentionSpec, shape: Shape, target: Target, *, count: int = COUNT) -> Plan:
    """The sample of one spec's space."""
    problem, bucket = Problem(spec, target), bucket_of(shape.q_len, shape.kv_len)
    feasible = enumerate_space(problem, bucket, (PORTABLE,)).feasible
    return Plan(spec, shape, sample(feasible, default_schedule(problem, bucket), count))


def run_schedules(run: Run, clock: Clock, device: torch.device, l2_bytes: int) -> None:
    """Every wanted spec, as far as the budget goes."""
    run_plans(plans(target_of(device)), run, clock, device, l2_bytes)


def run_plans(
    planned: Sequence[Plan], run: Run, clock: Clock, device: torch.device, l2_bytes: int
) -> None:
    """The wanted ones of these plans, in this order, as far as the budget goes."""
    target = target_of(device)
    wanted = [plan for plan in planned if run.wants(plan.id)]
    served = []
    for plan in wanted:
        missing = unserved_features(plan.spec)
        if missing:
            run.leave_out(plan.id, f"not served yet: {', '.join(missing)}")
        else:
            served.append(plan)
    if not served:
        return
    with Compiling() as compiling:
        modules = {plan: plan.candidates(target) for plan in served}
        for plan, candidates in modules.items():
            compiling.submit(plan.jobs(candidates))
        for plan, candidates in modules.items():
            if not run.has_time_for(plan.id):
                continue
            left = run.budget_s - run.seconds
            compiled = compiling.wait_for(plan.jobs(candidates), time.monotonic() + left)
            known = {job.schedule: said for job, said in compiled.items()}
            run.say(f"{run.seconds:6.1f} s  {plan.id}: {_compile_line(known)}")
            run.add(measure_plan(plan, candidates, known, clock, device, l2_bytes))


def _compile_line(known: Mapping[Schedule, Compiled]) -> str:
    failed = sum(said.error is not None for said in known.values())
    slowest = max(said.seconds for said in known.values())
    return f"{len(known) - failed} compiled, {failed} not; the slowest took {slowest:.0f} s"


def measure_plan(
    plan: Plan,
    candidates: Candidates,
    known: Mapping[Schedule, Compiled],
    clock: Clock,
    device: torch.device,
    l2_bytes: int,
    *,
    rounds: int = ROUNDS,
) -> CaseRecord:
    """All schedules of a spec that compiled, checked and timed in turns."""
    spec, shape = plan.spec, plan.shape
    number = min(MAX_SETS, sets_needed(argument_bytes(spec, shape), l2_bytes))
    sets = [draw(spec, shape, seed=seed, device=device) for seed in range(number)]
    work = count_work(spec, shape, sets[0].inputs, kv_lens=sets[0].kv_lens, device=device)
    refused = [
        Result(str(schedule), error=said.error)
        for schedule, said in known.items()
        if said.error is not None
    ]
    contestants = [
        Contestant(str(schedule), _builder(candidates, schedule))
        for schedule, said in known.items()
        if said.error is None
    ]
    with torch.no_grad():
        oracle = Oracle(spec, shape, sets[0])
        timed = contest(contestants, sets, oracle, clock, rounds=rounds)
    del sets, oracle
    free_memory(device)
    results = tuple(_short(result) for result in (*timed, *refused))
    facts = {
        "spec": spec.to_yaml(),
        "default": str(plan.schedules[0]),
        "schedules": schedule_facts(plan.schedules, known),
        "tensor sets": number,
        "verified": not any((result.error or "").startswith(WRONG) for result in timed),
    }
    return case_record(plan.id, spec.display_name, spec, shape, work, results, facts)


def schedule_facts(
    schedules: Sequence[Schedule], known: Mapping[Schedule, Compiled]
) -> dict[str, dict[str, Any]]:
    """The fields of each schedule, and what the compiler said of it."""
    return {
        str(schedule): {"fields": schedule.to_dict(), "compiled": known[schedule].facts}
        for schedule in schedules
    }


def _builder(candidates: Candidates, schedule: Schedule) -> Callable[[], Attend]:
    def build() -> Attend:
        attention = candidates.attention(schedule)
        return lambda a: attention(a.q, a.k, a.v, **a.others)

    return build


def _short(result: Result) -> Result:
    """Without the samples: median and percentiles are what is asked of so many."""
    return Result(**{**vars(result), "samples_ms": ()})
