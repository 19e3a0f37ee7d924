"""Suite `flex`: flashgen against FlexAttention and, for plain attention, torch's own kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from flashgen.bench.accuracy import Oracle
from flashgen.bench.cases import PLAIN, FlexCase, flex_cases
from flashgen.bench.contest import contest, free_memory
from flashgen.bench.peers import (
    Contestant,
    forget_compiled,
    plain_contestants,
    variant_contestants,
)
from flashgen.bench.preparation import Outcome, Task
from flashgen.bench.record import CaseRecord
from flashgen.bench.run import Run
from flashgen.bench.work import case_record, count_work
from flashgen.tune.tensors import (
    Arguments,
    argument_bytes,
    document_ids,
    draw,
    sets_needed,
    slopes,
)
from flashgen.tune.timing import Clock

MASK_THREADS = 4  # a block mask has as many slow kernels


def run_flex(
    run: Run,
    clock: Clock,
    device: torch.device,
    l2_bytes: int,
    prepared: Iterable[Outcome] = (),
) -> None:
    """Every wanted case of the grid, as far as the budget goes; last those that still compile."""
    cases = wanted_cases(run)
    late = unprepared(cases, prepared)
    for case in sorted(cases, key=lambda case: case.id in late):
        if run.has_time_for(case.id):
            run.add(measure_case(case, clock, device, l2_bytes))


def wanted_cases(run: Run) -> list[FlexCase]:
    return [case for case in flex_cases() if run.wants(case.id)]


def flex_tasks(cases: Sequence[FlexCase]) -> list[Task]:
    """What to compile before `cases` are timed, the slowest first.

    A compiled `create_block_mask` sorts its blocks, and Triton needs minutes for the longest sort,
    once for each length: the first case of a length makes its mask, the others find the sort.
    """
    masks = {_mask_sizes(case): case for case in reversed(cases) if case.group != PLAIN}
    longest = sorted(masks.values(), key=lambda case: -case.length)
    kernels: dict[object, list[str]] = {}
    for case in cases:
        kind = (case.group, case.head_dim, case.causal) if case.group == PLAIN else case.group
        kernels.setdefault(kind, []).append(case.id)
    return [
        *(Task("mask", (case.id,), threads=MASK_THREADS) for case in longest),
        *(Task("kernels", tuple(ids)) for ids in kernels.values()),
    ]


def unprepared(cases: Sequence[FlexCase], prepared: Iterable[Outcome]) -> set[str]:
    """Ids of the cases whose block mask no worker has made in time."""
    failed = {each.name for each in prepared if each.kind == "mask" and each.error is not None}
    sizes = {_mask_sizes(case) for case in cases if case.id in failed}
    return {case.id for case in cases if case.group != PLAIN and _mask_sizes(case) in sizes}


def _mask_sizes(case: FlexCase) -> tuple[int | None, int]:
    """What decides which kernels make the block mask: its batch, if it has one, and its length."""
    return case.shape.batch if case.prefix else None, case.length


def contestants_of(case: FlexCase, arguments: Arguments) -> list[Contestant]:
    make = plain_contestants if case.group == PLAIN else variant_contestants
    return make(case, arguments)


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
        results = contest(contestants_of(case, sets[0]), sets, oracle, clock, rounds=rounds)
    del sets, oracle
    free_memory(device)
    return case_record(case.id, case.group, spec, shape, work, results, {"tensor sets": number})


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
