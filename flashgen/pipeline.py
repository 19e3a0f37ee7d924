"""(Problem, schedules) -> Plan -> module -> machine code: the whole compiler on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from flashgen.codegen.options import options
from flashgen.codegen.render import render
from flashgen.dtypes import get_dtype
from flashgen.ir.verify import verify
from flashgen.passes.lower import lower
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import Bucket, Schedule

if TYPE_CHECKING:
    from flashgen.runtime.ahead import CompiledKernel

Choices = Sequence[tuple[Bucket, Schedule]]


def generate(problem: Problem, choices: Choices, *, has_lse: bool, origin: str) -> Plan:
    """Write the module for `choices`; `origin` says who chose them."""
    verify(lower(problem))  # Problem -> TileGraph, checked
    source = render(problem, choices, has_lse=has_lse)  # Problem, choices -> KernelSource
    return Plan(
        name=source.name,
        text=source.text,
        entries=source.entries,
        arguments=source.arguments,
        has_lse=has_lse,
        choices=tuple(choices),
        origin=origin,
    )


def compile_schedule(
    problem: Problem, plan: Plan, module: ModuleType, schedule: Schedule, *, aligned: bool
) -> CompiledKernel:
    """Machine code of one schedule of a loaded plan."""
    from flashgen.runtime.ahead import compile_ahead

    align = 16 // min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes)
    return compile_ahead(
        module,
        dict(plan.entries)[schedule.kernel],
        pointer_types(problem),
        options(schedule),
        align if aligned else 1,
        problem.target,
    )


def pointer_types(problem: Problem) -> Mapping[str, str]:
    """Triton's type of each pointer parameter, for compiling without tensors."""
    spec = problem.spec
    kinds = {"q": spec.dtype.q, "k": spec.dtype.kv, "v": spec.dtype.kv, "out": spec.dtype.out}
    kinds |= {"lse": "fp32", "sink": "fp32", "kv_lens": "int32"}
    kinds |= {declared.name: declared.dtype for declared in spec.inputs if declared.shape}
    return {
        f"{name}_ptr": f"*{_TRITON_TYPES[get_dtype(kind).triton_name]}"
        for name, kind in kinds.items()
    }


_TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
    "int1": "i1",
}
