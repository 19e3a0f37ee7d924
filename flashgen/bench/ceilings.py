"""What this machine can do, measured in the same run: a large matmul and a large copy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from flashgen.bench.record import COPY, Ceiling, matmul_name
from flashgen.errors import FlashgenError
from flashgen.reference import torch_dtype
from flashgen.tune.summary import rounded, summarise
from flashgen.tune.timing import Call, Clock, Failure, alternate, plan_burst

MATMUL_SIZE = 8192
COPY_BYTES = 2**31  # far more than any L2
ROUNDS = 4
SETTLED_CALLS = 40


class CeilingError(FlashgenError):
    """The device did not finish a matmul or a copy."""


def measure_ceilings(
    dtypes: Iterable[str], clock: Clock, device: torch.device
) -> tuple[Ceiling, ...]:
    """TFLOP/s of an 8192^3 matmul in each dtype, TB/s of a copy (read + written); random data."""
    found: list[Ceiling] = []
    for dtype in dtypes:
        left, right = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).to(torch_dtype(dtype))
            for _ in range(2)
        )
        out = torch.empty_like(left)
        ms = _median_ms(partial(torch.matmul, left, right, out=out), clock)
        found.append(Ceiling(matmul_name(dtype), "TFLOP/s", (rounded(2e-9 * MATMUL_SIZE**3 / ms),)))
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    ms = _median_ms(lambda: target.copy_(source), clock)
    found.append(Ceiling(COPY, "TB/s", (rounded(2e-9 * COPY_BYTES / ms),)))
    return tuple(found)


def measure_settled(dtype: str, clock: Clock, device: torch.device, *, load_s: float) -> Ceiling:
    """TFLOP/s of the same matmul after `load_s` of it, when the clock has come down."""
    left, right = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).to(torch_dtype(dtype))
        for _ in range(2)
    )
    call = partial(torch.matmul, left, right, out=torch.empty_like(left))
    estimate = max(clock.times_ms(call, 3)[-1], 1e-3)
    clock.times_ms(call, 1 + int(1e3 * load_s / estimate))
    ms = summarise(clock.times_ms(call, SETTLED_CALLS)).median
    name = f"{matmul_name(dtype)} settled"
    return Ceiling(name, "TFLOP/s", (rounded(2e-9 * MATMUL_SIZE**3 / ms),))


def _median_ms(call: Call, clock: Clock) -> float:
    samples = alternate({"it": plan_burst([call], clock, graph=False)}, clock, rounds=ROUNDS)["it"]
    if isinstance(samples, Failure):
        raise CeilingError(f"a ceiling could not be measured: {samples.reason}")
    return summarise(samples).median
