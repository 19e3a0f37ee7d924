"""What runs under Nsight Compute: `python -m flashgen.bench.counters_program JSON`.

JSON: {"cases": [id, …], "write_back": bool, "seconds": float}. Each case's kernels run once,
unseen, so that everything is compiled and loaded, and once between cudaProfilerStart and Stop in
an NVTX range with the case's number. write_back: L2 is read full of other data before, and again
after them, which is profiled too: what the kernels left in L2 is then written to memory. No case
begins after `seconds`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from flashgen.bench.counter_cases import CounterCase, case_of
from flashgen.bench.ncu import AFTER, LABEL
from flashgen.compiler.choose import target_of
from flashgen.tune.tensors import draw
from flashgen.tune.timing import Call

FILLER_BYTES = 2**28  # five times the largest L2 that has been met


def main(wanted: dict[str, Any]) -> None:
    """Run the wanted cases, in their order, until the time is over; the first one in any case."""
    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    filler = torch.ones(FILLER_BYTES // 4, device=device) if wanted["write_back"] else None
    for number, case_id in enumerate(wanted["cases"]):
        if number and time.monotonic() - start > wanted["seconds"]:
            print(f"out of time before {case_id}", file=sys.stderr)
            return
        try:
            run_case(case_of(case_id), number, device, filler)
        except Exception as error:  # the others may run; this one has no counters
            print(f"{case_id}: {type(error).__name__}: {error}", file=sys.stderr)


def run_case(
    case: CounterCase, number: int, device: torch.device, filler: torch.Tensor | None
) -> None:
    """One case, profiled."""
    spec = case.spec
    target = target_of(device)
    schedule = case.schedule(target)
    assert schedule is not None, f"{case.id}: no schedule fits"  # the suite leaves it out
    attention = case.candidates(target, schedule).attention(schedule)
    arguments = draw(spec, case.shape, seed=number, device=device)
    operands = (arguments.q, arguments.k, arguments.v)
    attention(*operands)
    if filler is not None:
        filler.sum()
    profiled: dict[str, Call] = {LABEL: lambda: attention(*operands)}
    if filler is not None:
        profiled[AFTER] = filler.sum
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for label, call in profiled.items():
        torch.cuda.nvtx.range_push(f"{label} {number}")
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
