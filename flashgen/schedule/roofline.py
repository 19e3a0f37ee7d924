"""The least time a GPU could take: FLOPs at its matmul rate or bytes at its memory bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashgen.errors import TargetError
from flashgen.target import Target


@dataclass(frozen=True)
class Roofline:
    """The time floor of one launch in microseconds, and which of the two limits sets it.

    `intensity` is FLOPs per byte of device memory; below `critical_intensity` memory is the limit.
    """

    compute_us: float
    memory_us: float
    intensity: float
    critical_intensity: float

    @property
    def time_us(self) -> float:
        return max(self.compute_us, self.memory_us)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_us >= self.memory_us else "memory"


def roofline(flops: float, dram_bytes: float, target: Target, dtype: str) -> Roofline:
    """The floor for `flops` of matmuls in `dtype` and `dram_bytes` moved, at the catalogue's rates.

    No work at all takes no time. TargetError if the target has no unit for `dtype`.
    """
    rate = matmul_rate(target, dtype)
    return Roofline(
        compute_us=1e6 * flops / rate,
        memory_us=1e6 * dram_bytes / target.dram_bytes_per_s,
        intensity=flops / dram_bytes if dram_bytes else float("inf") if flops else 0.0,
        critical_intensity=rate / target.dram_bytes_per_s,
    )


def matmul_rate(target: Target, dtype: str) -> float:
    """FLOP/s of dense matmuls in `dtype`; TargetError names what the target can multiply."""
    try:
        return target.matmul_flops_per_s[dtype]
    except KeyError:
        known = ", ".join(target.matmul_flops_per_s)
        raise TargetError(f"{target.id}: has no {dtype} matmul unit (it has {known})") from None
