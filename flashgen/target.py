"""The GPU catalogue: what a kernel may use (shared memory, registers) and the rates it can reach.

Nothing here asks a driver: a target is data, so a kernel can be planned and compiled for a GPU that
is not present. Every figure names its source in `Target.sources`. Rates are dense (no structured
sparsity) with fp32 accumulation, because that is what attention needs; where a vendor prints the
sparse rate only, half of it is given and the source says so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from flashgen.errors import TargetError

Vendor = Literal["nvidia", "amd"]

KIB = 1024
MIB = 1024 * KIB
GB = 10**9
TERA = 1e12


@dataclass(frozen=True)
class Target:
    """One GPU model.

    Sizes are in bytes, rates per second, `clock_hz` is the boost clock the rates were stated for.
    `matmul_flops_per_s` maps a dtype name to dense FLOP/s with fp32 accumulation; "fp32" is the
    rate outside the tensor cores, "tf32" inside. A dtype that is missing has no such unit.
    `max_threads_per_block` is 1024 for every GPU listed here.
    """

    id: str
    vendor: Vendor
    name: str
    arch: str  # "sm_90", "gfx942": what the compiler is told
    compute_capability: int  # 90 for sm_90; 94 for gfx942
    sm_count: int  # streaming multiprocessors, or AMD compute units
    smem_per_block_bytes: int  # the opt-in limit of one program
    smem_per_sm_bytes: int
    regs_per_sm: int  # 32-bit registers
    max_regs_per_thread: int
    max_threads_per_sm: int
    warp_size: int
    l2_bytes: int
    dram_bytes: int
    dram_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float] = field(hash=False)
    clock_hz: float
    sources: tuple[str, ...]
    device_names: tuple[str, ...] = ()  # patterns (re.fullmatch, any case) of names drivers report
    max_threads_per_block: int = 1024

    def __str__(self) -> str:
        return self.id

    def __hash__(self) -> int:
        """Of the id: every lookup of a cached formula hashes a target."""
        return hash(self.id)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """A catalogued target travels as its id, any other one (a test's) as its fields."""
        if TARGETS.get(self.id) is self:
            return (get_target, (self.id,))
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return (_from_fields, ({**values, "matmul_flops_per_s": dict(self.matmul_flops_per_s)},))


def get_target(target_id: str) -> Target:
    """The entry for `target_id`; TargetError lists the known ids and the nearest one."""
    if isinstance(target_id, str) and target_id in TARGETS:
        return TARGETS[target_id]
    wanted = str(target_id).strip().lower().replace("_", "-").replace(" ", "-")
    near = difflib.get_close_matches(wanted, TARGETS, n=1, cutoff=0.5) or [
        known for known in TARGETS if wanted and wanted in known
    ]
    by_name = target_from_device_name(str(target_id))
    if by_name is not None:
        near = [by_name.id]
    meant = f"did you mean '{near[0]}'? " if near else ""
    if wanted == "all":
        meant = "only `flashgen explain` takes all targets; "
    raise TargetError(
        f"target: unknown GPU {target_id!r}\n  hint: {meant}known targets: {', '.join(TARGETS)}"
    )


def target_from_device_name(name: str) -> Target | None:
    """The target for a name that a driver reports ("NVIDIA H200"), or None when not catalogued."""
    plain = " ".join(name.split())
    for target in TARGETS.values():
        if any(re.fullmatch(pattern, plain, re.IGNORECASE) for pattern in target.device_names):
            return target
    return None


def _from_fields(values: dict[str, Any]) -> Target:
    return Target(**values)


@dataclass(frozen=True)
class _Chip:
    """Limits that all GPUs of one compute capability share."""

    arch: str
    compute_capability: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    max_threads_per_sm: int
    source: str
    vendor: Vendor = "nvidia"
    regs_per_sm: int = 65536
    max_regs_per_thread: int = 255
    warp_size: int = 32


_CUDA_TABLE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_SM_80 = _Chip("sm_80", 80, 163 * KIB, 164 * KIB, 2048, f"limits: {_CUDA_TABLE} 8.0")
_SM_86 = _Chip("sm_86", 86, 99 * KIB, 100 * KIB, 1536, f"limits: {_CUDA_TABLE} 8.6")
_SM_89 = _Chip("sm_89", 89, 99 * KIB, 100 * KIB, 1536, f"limits: {_CUDA_TABLE} 8.9")
_SM_90 = _Chip("sm_90", 90, 227 * KIB, 228 * KIB, 2048, f"limits: {_CUDA_TABLE} 9.0")
_SM_100 = _Chip("sm_100", 100, 227 * KIB, 228 * KIB, 2048, f"limits: {_CUDA_TABLE} 10.0")
_SM_120 = _Chip("sm_120", 120, 99 * KIB, 100 * KIB, 1536, f"limits: {_CUDA_TABLE} 12.0")
_GFX942 = _Chip(
    "gfx942",
    94,
    64 * KIB,
    64 * KIB,
    2048,
    "limits: AMD CDNA 3 instruction set architecture guide (LDS 64 KiB per compute unit; 512 "
    "vector registers per lane, accumulation registers included; 4 SIMD units of 64 lanes)",
    vendor="amd",
    regs_per_sm=4 * 512 * 64,
    max_regs_per_thread=512,
    warp_size=64,
)


def _target(
    target_id: str,
    name: str,
    chip: _Chip,
    *,
    sm_count: int,
    l2_bytes: int,
    dram_gb: int,
    dram_gb_per_s: float,
    tflops: Mapping[str, float],
    clock_mhz: float,
    sources: tuple[str, ...],
    device_names: tuple[str, ...],
) -> Target:
    """A catalogue entry from datasheet units: GB (10^9 bytes), GB/s, TFLOP/s, MHz."""
    return Target(
        id=target_id,
        vendor=chip.vendor,
        name=name,
        arch=chip.arch,
        compute_capability=chip.compute_capability,
        sm_count=sm_count,
        smem_per_block_bytes=chip.smem_per_block_bytes,
        smem_per_sm_bytes=chip.smem_per_sm_bytes,
        regs_per_sm=chip.regs_per_sm,
        max_regs_per_thread=chip.max_regs_per_thread,
        max_threads_per_sm=chip.max_threads_per_sm,
        warp_size=chip.warp_size,
        l2_bytes=l2_bytes,
        dram_bytes=dram_gb * GB,
        dram_bytes_per_s=dram_gb_per_s * 1e9,
        matmul_flops_per_s=MappingProxyType({k: v * TERA for k, v in tflops.items()}),
        clock_hz=clock_mhz * 1e6,
        sources=(*sources, chip.source),
        device_names=device_names,
    )


_A100_TFLOPS = {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5}
_A100_SOURCES = (
    "rates, bandwidth, memory: NVIDIA A100 datasheet (dense columns)",
    "SMs, L2, boost clock: NVIDIA A100 Tensor Core GPU Architecture whitepaper",
)
_HOPPER_SXM_TFLOPS = {
    "fp16": 989.4,
    "bf16": 989.4,
    "tf32": 494.7,
    "fp32": 66.9,
    "fp8_e4m3": 1978.9,
}
_HOPPER_PAPER = "SMs, L2, boost clock: NVIDIA H100 Tensor Core GPU Architecture whitepaper"

_ENTRIES: tuple[Target, ...] = (
    _target(
        "nvidia-a100-40gb",
        "NVIDIA A100 40GB",
        _SM_80,
        sm_count=108,
        l2_bytes=40 * MIB,
        dram_gb=40,
        dram_gb_per_s=1555,
        tflops=_A100_TFLOPS,
        clock_mhz=1410,
        sources=_A100_SOURCES,
        device_names=(r"(NVIDIA )?(GRID )?A100-(SXM4|PCIE)-40GB", r"A100-SXM-40GB"),
    ),
    _target(
        "nvidia-a100-80gb",
        "NVIDIA A100 80GB",
        _SM_80,
        sm_count=108,
        l2_bytes=40 * MIB,
        dram_gb=80,
        dram_gb_per_s=2039,
        tflops=_A100_TFLOPS,
        clock_mhz=1410,
        sources=(*_A100_SOURCES, "bandwidth is the SXM4 module's; the PCIe card has 1,935 GB/s"),
        device_names=(r"(NVIDIA )?A100-SXM(4|-64GB)?-80GB", r"(NVIDIA )?A100 80GB PCIe"),
    ),
    _target(
        "nvidia-a10",
        "NVIDIA A10",
        _SM_86,
        sm_count=72,
        l2_bytes=6 * MIB,
        dram_gb=24,
        dram_gb_per_s=600,
        tflops={"fp16": 125.0, "bf16": 125.0, "tf32": 62.5, "fp32": 31.2},
        clock_mhz=1695,
        sources=(
            "rates, bandwidth, memory: NVIDIA A10 datasheet (dense columns)",
            "SMs, L2: NVIDIA GA102 GPU Architecture whitepaper (72 of 84 SMs)",
        ),
        device_names=(r"(NVIDIA )?A10",),
    ),
    _target(
        "nvidia-l4",
        "NVIDIA L4",
        _SM_89,
        sm_count=58,
        l2_bytes=48 * MIB,
        dram_gb=24,
        dram_gb_per_s=300,
        tflops={"fp16": 121.0, "bf16": 121.0, "tf32": 60.0, "fp32": 30.3, "fp8_e4m3": 242.5},
        clock_mhz=2040,
        sources=(
            "rates, bandwidth, memory: NVIDIA L4 datasheet (sparse tensor rates there, halved)",
            "SMs, L2: NVIDIA Ada GPU Architecture whitepaper (AD104)",
        ),
        device_names=(r"(NVIDIA )?L4",),
    ),
    _target(
        "nvidia-l40s",
        "NVIDIA L40S",
        _SM_89,
        sm_count=142,
        l2_bytes=96 * MIB,
        dram_gb=48,
        dram_gb_per_s=864,
        tflops={"fp16": 362.05, "bf16": 362.05, "tf32": 183.0, "fp32": 91.6, "fp8_e4m3": 733.0},
        clock_mhz=2520,
        sources=(
            "rates, bandwidth, memory: NVIDIA L40S datasheet (dense columns)",
            "SMs, L2: NVIDIA Ada GPU Architecture whitepaper (AD102, 142 of 144 SMs)",
        ),
        device_names=(r"(NVIDIA )?L40S",),
    ),
    _target(
        "nvidia-rtx-3090",
        "NVIDIA GeForce RTX 3090",
        _SM_86,
        sm_count=82,
        l2_bytes=6 * MIB,
        dram_gb=24,
        dram_gb_per_s=936,
        tflops={"fp16": 71.0, "bf16": 71.0, "tf32": 35.6, "fp32": 35.6},
        clock_mhz=1695,
        sources=(
            "all figures: NVIDIA GA102 GPU Architecture whitepaper, RTX 3090 column "
            "(fp16 with fp32 accumulation: half the rate of fp16 accumulation)",
        ),
        device_names=(r"(NVIDIA )?(GeForce )?RTX 3090",),
    ),
    _target(
        "nvidia-rtx-4090",
        "NVIDIA GeForce RTX 4090",
        _SM_89,
        sm_count=128,
        l2_bytes=72 * MIB,
        dram_gb=24,
        dram_gb_per_s=1008,
        tflops={"fp16": 165.2, "bf16": 165.2, "tf32": 82.6, "fp32": 82.6, "fp8_e4m3": 330.3},
        clock_mhz=2520,
        sources=(
            "all figures: NVIDIA Ada GPU Architecture whitepaper, RTX 4090 column "
            "(fp16 and fp8 with fp32 accumulation)",
        ),
        device_names=(r"(NVIDIA )?(GeForce )?RTX 4090",),
    ),
    _target(
        "nvidia-rtx-5090",
        "NVIDIA GeForce RTX 5090",
        _SM_120,
        sm_count=170,
        l2_bytes=96 * MIB,
        dram_gb=32,
        dram_gb_per_s=1792,
        tflops={"fp16": 209.5, "bf16": 209.5, "tf32": 104.8, "fp32": 104.8, "fp8_e4m3": 419.0},
        clock_mhz=2407,
        sources=(
            "all figures: NVIDIA RTX Blackwell GPU Architecture whitepaper, RTX 5090 column "
            "(fp16 and fp8 with fp32 accumulation)",
        ),
        device_names=(r"(NVIDIA )?(GeForce )?RTX 5090",),
    ),
    _target(
        "nvidia-h100-sxm",
        "NVIDIA H100 SXM5 80GB",
        _SM_90,
        sm_count=132,
        l2_bytes=50 * MIB,
        dram_gb=80,
        dram_gb_per_s=3350,
        tflops=_HOPPER_SXM_TFLOPS,
        clock_mhz=1830,
        sources=(
            "rates, bandwidth, memory: NVIDIA H100 datasheet (sparse tensor rates there, halved)",
            _HOPPER_PAPER,
        ),
        device_names=(r"(NVIDIA )?H100( SXM5?)?( 80GB)? HBM3", r"(NVIDIA )?H100-SXM5-80GB"),
    ),
    _target(
        "nvidia-h100-pcie",
        "NVIDIA H100 PCIe 80GB",
        _SM_90,
        sm_count=114,
        l2_bytes=50 * MIB,
        dram_gb=80,
        dram_gb_per_s=2000,
        tflops={"fp16": 756.4, "bf16": 756.4, "tf32": 378.2, "fp32": 51.2, "fp8_e4m3": 1513.0},
        clock_mhz=1620,
        sources=(
            "rates, bandwidth, memory: NVIDIA H100 datasheet (sparse tensor rates there, halved)",
            _HOPPER_PAPER,
        ),
        device_names=(r"(NVIDIA )?H100( 80GB)?[ -]PCIe(-80GB)?",),
    ),
    _target(
        "nvidia-h200",
        "NVIDIA H200 SXM",
        _SM_90,
        sm_count=132,
        l2_bytes=50 * MIB,
        dram_gb=141,
        dram_gb_per_s=4800,
        tflops=_HOPPER_SXM_TFLOPS,
        clock_mhz=1830,
        sources=(
            "rates, bandwidth, memory: NVIDIA H200 datasheet (sparse tensor rates there, halved)",
            _HOPPER_PAPER,
            "measured, for comparison: bf16 matmul 8192^3 at 709 to 803 TFLOP/s depending on power "
            "and clocks (boost 1,980 MHz), device copy at 4.29 TB/s read + written",
        ),
        device_names=(r"(NVIDIA )?H200( SXM| 141GB( HBM3e)?)?",),
    ),
    _target(
        "nvidia-b200",
        "NVIDIA B200",
        _SM_100,
        sm_count=148,
        l2_bytes=126 * MIB,
        dram_gb=180,
        dram_gb_per_s=8000,
        tflops={"fp16": 2250.0, "bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp8_e4m3": 4500.0},
        clock_mhz=1965,
        sources=(
            "rates, bandwidth, memory: NVIDIA DGX B200 datasheet, an eighth of its figures "
            "(sparse tensor rates there, halved)",
            "SMs, boost clock: as drivers report them; L2: NVIDIA Blackwell Tuning Guide",
        ),
        device_names=(r"(NVIDIA )?B200( SXM)?( 18\dGB.*| 192GB.*)?",),
    ),
    _target(
        "amd-mi300x",
        "AMD Instinct MI300X",
        _GFX942,
        sm_count=304,
        l2_bytes=32 * MIB,
        dram_gb=192,
        dram_gb_per_s=5300,
        tflops={"fp16": 1307.4, "bf16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp8_e4m3": 2614.9},
        clock_mhz=2100,
        sources=(
            "rates, bandwidth, memory, compute units, clock: AMD Instinct MI300X datasheet",
            "L2: AMD CDNA 3 architecture whitepaper (4 MiB in each of 8 dies; the 256 MiB Infinity "
            "Cache behind it is not counted)",
        ),
        device_names=(r"(AMD )?(Instinct )?MI300X( OAM)?( VF)?",),
    ),
)

TARGETS: Mapping[str, Target] = MappingProxyType({target.id: target for target in _ENTRIES})
