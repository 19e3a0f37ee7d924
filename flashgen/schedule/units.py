"""Which unit multiplies the tiles of a schedule: it decides how Triton uses the chip's memories."""

from __future__ import annotations

from typing import Literal

from flashgen.target import Target

MatmulUnit = Literal["wgmma", "tcgen05", "mma", "fma", "mfma"]


def matmul_unit(target: Target, dtype: str, block_m: int, num_warps: int) -> MatmulUnit:
    """What multiplies the tiles of such a schedule; it decides how Triton uses shared memory.

    wgmma (sm_90) and tcgen05 (sm_100) need 64 rows and whole groups of 4 warps; fp32 is multiplied
    outside the tensor cores on NVIDIA, everything else by warp-level mma.
    """
    if target.vendor == "amd":
        return "mfma"
    if dtype == "fp32":
        return "fma"
    wide = block_m >= 64 and num_warps % 4 == 0
    if wide and target.arch == "sm_90":
        return "wgmma"
    if wide and target.arch == "sm_100":
        return "tcgen05"
    return "mma"
