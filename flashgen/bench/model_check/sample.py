"""Which kernels are compiled: drawn once for all, without asking the model to be checked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from flashgen.problem import Problem, padded_dim
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

TARGETS: Mapping[str, str] = {
    "sm_80": "nvidia-a100-80gb",
    "sm_86": "nvidia-a10",
    "sm_89": "nvidia-l4",
    "sm_90": "nvidia-h200",
    "sm_100": "nvidia-b200",
}
DTYPES = ("bf16", "fp16", "tf32", "fp32")
HEAD_DIMS: tuple[tuple[int, int], ...] = (
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
)
_INT32_IDS = {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}}
_TABLE = {"table": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "causal": {"mask": ["causal"]},
    "window": {"mask": ["causal", {"window": {"left": 511}}]},
    "documents": {"mask": ["causal", {"same": "doc"}], "inputs": _INT32_IDS},
    "table": {"mask": [{"expr": "table[b,0,row,k]"}], "inputs": _TABLE},
    "bias": {"score": [{"bias": {"tensor": "rel"}}]},
    "softcap": {"mask": ["causal"], "score": [{"softcap": 50.0}]},
}
BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (16, 32, 64, 128, 256)
SINGLE_TILE_SHARE = 0.2
UNALIGNED_SHARE = 0.05

# How often a drawn schedule is kept, by the bytes of its matmuls' operands, each stage counted, as
# a share of the target's limit: most of the sample is near the limit, on either side of it.
_SMEM_BANDS = ((0.3, 0.15), (0.7, 0.4), (1.0, 1.0), (1.4, 1.0), (2.5, 0.3), (1e9, 0.0))
# And by registers per thread of accumulator and scores. A thread has 255; what needs far more takes
# the assembler minutes to spill.
_REG_BANDS = ((160, 1.0), (256, 0.7), (330, 0.2), (1e9, 0.0))


@dataclass(frozen=True)
class Case:
    """One kernel to compile: a spec, by dtype, head dims and form, a target, a schedule.

    aligned: rows are known to start at multiples of 16 bytes.
    """

    arch: str
    dtype: str
    head_dim: tuple[int, int]
    form: str
    schedule: Schedule
    aligned: bool = True

    @property
    def id(self) -> str:
        """`sm_90 bf16 d128 causal loop flash2 128x64 8 warps 3 stages`."""
        rows = "" if self.aligned else " unaligned"
        return f"{self.arch} {self.spec_name} {self.schedule}{rows}"

    @property
    def spec_name(self) -> str:
        qk, v = self.head_dim
        return f"{self.dtype} d{qk if qk == v else f'{qk}/{v}'} {self.form}"

    @cached_property
    def problem(self) -> Problem:
        return problem_of(self.arch, self.dtype, self.head_dim, self.form)


@cache
def problem_of(arch: str, dtype: str, head_dim: tuple[int, int], form: str) -> Problem:
    return Problem(_spec(dtype, head_dim, form), get_target(TARGETS[arch]))


@cache
def _spec(dtype: str, head_dim: tuple[int, int], form: str) -> AttentionSpec:
    fields = dict(FORMS[form])
    if form == "bias":
        shape = ["batch", "q_heads", "q_len", "kv_len"]
        fields["inputs"] = {"rel": {"shape": shape, "dtype": "fp32" if dtype == "tf32" else dtype}}
    return AttentionSpec(head_dim={"qk": head_dim[0], "v": head_dim[1]}, dtype=dtype, **fields)


def sample(size: int, seed: int = 0) -> tuple[Case, ...]:
    """`size` distinct cases, the same in every process: targets and dtypes take turns."""
    draw = random.Random(seed)
    found: dict[Case, None] = {}
    turns = [(arch, dtype) for dtype in DTYPES for arch in TARGETS]
    while len(found) < size:
        arch, dtype = turns[len(found) % len(turns)]
        found.setdefault(next(case for case in _draws(draw, arch, dtype) if case not in found))
    return tuple(found)


def _draws(draw: random.Random, arch: str, dtype: str) -> Iterator[Case]:
    """Cases of one target and dtype, without end."""
    while True:
        single = draw.random() < SINGLE_TILE_SHARE
        case = Case(
            arch,
            dtype,
            draw.choice(HEAD_DIMS),
            draw.choice(tuple(FORMS)),
            Schedule(
                kernel="single_tile" if single else "loop",
                block_m=draw.choice(BLOCKS_M),
                block_n=draw.choice(BLOCKS_N[:4] if single else BLOCKS_N),
                num_warps=draw.choice((4, 8)),
                num_stages=1 if single else draw.choice((1, 2, 2, 3, 3, 4)),
            ),
            aligned=draw.random() >= UNALIGNED_SHARE,
        )
        if draw.random() < _weight(case):
            yield case


def _weight(case: Case) -> float:
    schedule, problem = case.schedule, case.problem
    qk, v = (padded_dim(extent) for extent in case.head_dim)
    copies = schedule.num_stages - (problem.target.compute_capability < 90)
    operands = problem.elem_bytes * (
        schedule.block_m * qk + max(1, copies) * schedule.block_n * (qk + v)
    )
    results = schedule.block_m * (schedule.block_n + v) / (32 * schedule.num_warps)
    if case.dtype == "fp32":  # operands of multiplications outside the tensor cores
        results *= 4
    share = operands / problem.target.smem_per_block_bytes
    return _band(_SMEM_BANDS, share) * (1.0 if share > 1.4 else _band(_REG_BANDS, results))


def _band(bands: tuple[tuple[float, float], ...], value: float) -> float:
    return next(weight for limit, weight in bands if value < limit)
