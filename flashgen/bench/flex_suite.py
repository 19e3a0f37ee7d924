"""Suite `flex`: flashgen against FlexAttention and, for plain attention, torch's own kernels."""

from __future__ import annotations

import gc
from dataclasses import asdict

import torch

from flashgen.bench.accuracy import Oracle
from flashgen.bench.cases import PLAIN, FlexCase, flex_cases
from flashgen.bench.ceilings import measure_ceilings
from flashgen.bench.contest import contest
from flashgen.bench.peers import forget_compiled, plain_contestants, variant_contestants
from flashgen.bench.record import CaseRecord
from flashgen.bench.run import Run
from flashgen.bench.tensors import (
    Arguments,
    argument_bytes,
    document_ids,
    draw,
    sets_needed,
    slopes,
)
from flashgen.bench.timing import Clock
from flashgen.bench.work import count_work


def run_flex(run: Run, clock: Clock, device: torch.device, l2_bytes: int) -> None:
    """Every wanted case of the grid, as far as the budget goes."""
    cases = [case for case in flex_cases() if run.wants(case.id)]
    if cases:
        run.add_ceilings(measure_ceilings(["bf16"], clock, device))
    for case in cases:
        if run.has_time_for(case.id):
            run.add(measure_case(case, clock, device, l2_bytes))
    if cases:
        run.add_ceilings(measure_ceilings(["bf16"], clock, device))


def measure_case(
    case: FlexCase, clock: Clock, device: torch.device, l2_bytes: int, *, rounds: int | None = None
) -> CaseRecord:
    """All contestants on one case, compiled before any is timed."""
    forget_compiled()
    spec, shape = case.spec, case.shape
    number = sets_needed(argument_bytes(spec, shape), l2_bytes)
    sets = draw_sets(case, number, device)
    work = count_work(spec, shape, sets[0].inputs, device=device)
    with torch.no_grad():
        oracle = Oracle(spec, shape, sets[0])
        make = plain_contestants if case.group == PLAIN else variant_contestants
        results = contest(make(case, sets[0]), sets, oracle, clock, rounds=rounds)
    record = CaseRecord(
        id=case.id,
        group=case.group,
        spec=spec.display_name,
        shape=asdict(shape),
        dtype=spec.dtype.q,
        visible_pairs=work.visible_pairs,
        matmul_flops=work.matmul_flops,
        dram_bytes=work.dram_bytes,
        results=results,
        facts={"tensor sets": number},
    )
    del sets, oracle
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return record


def draw_sets(case: FlexCase, number: int, device: torch.device) -> list[Arguments]:
    """`number` sets of random q, k, v; what the mask and the score depend on is the same in all."""
    given = {
        "prefix": torch.tensor(case.prefix, dtype=torch.int32),
        "doc": document_ids(case.documents)[None],
        "slopes": slopes(case.shape.q_heads),
    }
    shared = {declared.name: given[declared.name].to(device) for declared in case.spec.inputs}
    return [
        draw(case.spec, case.shape, seed=seed, device=device, given=shared)
        for seed in range(number)
    ]
