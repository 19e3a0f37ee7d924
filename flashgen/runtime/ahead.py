"""Compile a generated kernel without its GPU, and read what the compiler reports."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashgen.codegen.options import kernel_kinds, kernel_options
from flashgen.dtypes import get_dtype
from flashgen.errors import CompileError, TargetError
from flashgen.problem import Problem
from flashgen.runtime.ahead_gluon import (
    check_compiled,
    descriptor_types,
    serialised_wgmma,
    source_of,
)
from flashgen.runtime.allocation import GivenUpError
from flashgen.runtime.artifact import Plan
from flashgen.runtime.triton_cache import whole_entries
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import Target

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# What Triton's launcher types are called in a signature.
_ANNOTATED = {"int32": "i32", "int64": "i64", "float32": "fp32"}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as the back end left it.

    smem_bytes: shared memory of one program; tmem_columns: of sm_100's tensor memory (else 0);
    regs_per_thread, spill_bytes: of the machine code (None: the back end does not say);
    binary_kind: cubin or hsaco; assembly_kind: ptx or amdgcn; serialised_wgmma: ptxas's complaints
    of that kind, for the family gluon_sm90.
    """

    entry: str
    smem_bytes: int
    tmem_columns: int
    regs_per_thread: int | None
    spill_bytes: int | None
    assembly_kind: str
    assembly: str
    binary_kind: str
    binary: bytes
    serialised_wgmma: tuple[str, ...] = ()


def compile_ahead(
    module: ModuleType,
    entry: str,
    pointers: Mapping[str, str],
    options: Mapping[str, int | str],
    align: int,
    target: Target,
) -> CompiledKernel:
    """Compile `entry` of a generated module for `target`, which need not be here.

    pointers: Triton's pointer type of each `*_ptr` parameter (`*bf16`); options: tile and warps.
    """
    kernel = getattr(module, entry)
    is_gluon = kernel.is_gluon()
    given = {n: v for n, v in options.items() if n.isupper()}
    constants = {"PACKED_HEADS": 1} | given | {"ALIGN": align}
    launch = {n: v for n, v in options.items() if not n.isupper()}
    types = {
        **pointers,
        **(descriptor_types(module, kernel, pointers, options) if is_gluon else {}),
    }
    signature = {p.name: parameter_type(p, types) for p in kernel.params}
    constexprs: dict[tuple[int, ...], int | str] = {
        (kernel.arg_names.index(name),): value
        for name, value in constants.items()
        if name in kernel.arg_names
    }
    attributes = _attributes(constexprs)
    source = (source_of if is_gluon else ASTSource)(kernel, signature, constexprs, attributes)

    def compiled(*, anew: bool = False) -> CompiledKernel:
        with whole_entries(anew=anew):
            found = triton.compile(source, target=_gpu_target(target), options=launch)
        return _report(entry, found)

    try:
        found = compiled()
        if _tells_nothing(found):
            found = compiled(anew=True)
    except GivenUpError:
        raise
    except Exception as error:  # Triton raises many kinds, from Python and from LLVM
        raise CompileError(
            f"{entry} for {target.id}: {type(error).__name__}: {error}\n"
            f"  hint: the source is {module.__file__}"
        ) from error
    if not is_gluon:
        return found
    return replace(found, serialised_wgmma=serialised_wgmma(found.assembly))


def _attributes(
    constexprs: Mapping[tuple[int, ...], int | str],
) -> dict[tuple[int, ...], list[object]]:
    """The attributes that a launch would give: then it finds this kernel in Triton's disk cache.

    From triton 3.7 on a launch gives every constant an empty list; earlier it gives none.
    """
    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return {place: [] for place in constexprs} if (major, minor) >= (3, 7) else {}


def parameter_type(parameter: Any, pointers: Mapping[str, str]) -> str:
    """What Triton calls the type of a kernel's parameter in a signature."""
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name in pointers:
        return pointers[parameter.name]
    return (
        _ANNOTATED[parameter.annotation.split(".")[-1]]
        if "." in parameter.annotation
        else parameter.annotation_type
    )


def _gpu_target(target: Target) -> GPUTarget:
    if target.vendor == "nvidia":
        return GPUTarget("cuda", target.compute_capability, 32)
    if target.vendor == "amd":
        return GPUTarget("hip", target.arch, 64)
    raise TargetError(f"{target.id}: Triton has no back end for {target.vendor}")


def _tells_nothing(found: CompiledKernel) -> bool:
    """Whether NVIDIA's own tool cannot read a binary, which its form alone does not show."""
    return found.binary_kind == "cubin" and found.regs_per_thread is None and _CUOBJDUMP.exists()


def _report(entry: str, compiled: Any) -> CompiledKernel:
    kinds = {"cubin": "ptx", "hsaco": "amdgcn"}
    binary_kind = next(kind for kind in kinds if kind in compiled.asm)
    assembly_kind = kinds[binary_kind]
    assembly, binary = compiled.asm[assembly_kind], compiled.asm[binary_kind]
    usage = _nvidia_usage(binary) if binary_kind == "cubin" else _amd_usage(assembly)
    return CompiledKernel(
        entry=entry,
        smem_bytes=compiled.metadata.shared,
        tmem_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        regs_per_thread=usage[0],
        spill_bytes=usage[1],
        assembly_kind=assembly_kind,
        assembly=assembly,
        binary_kind=binary_kind,
        binary=binary,
    )


def _nvidia_usage(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, stack bytes) by the cuobjdump that Triton brings; the stack holds the spills."""
    if not _CUOBJDUMP.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(_CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    return (int(registers[1]) if registers else None), (int(stack[1]) if stack else None)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    return (int(registers[1]) if registers else None), (4 * int(spills[1]) if spills else None)


def compile_schedule(
    problem: Problem,
    plan: Plan,
    module: ModuleType,
    schedule: Schedule,
    *,
    aligned: bool,
    kind: str | None = None,
) -> CompiledKernel:
    """Machine code of one schedule of a loaded plan: of its first kernel, or of that `kind`.

    ScheduleError where the family gluon_sm90 finds it unusable.
    """
    align = 16 // min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes)
    kind = kind or kernel_kinds(schedule)[0]
    found = compile_ahead(
        module,
        dict(plan.entries)[kind],
        pointer_types(problem),
        kernel_options(schedule, kind),
        align if aligned else 1,
        problem.target,
    )
    if schedule.family == "gluon_sm90":
        check_compiled(schedule, found)
    return found


def pointer_types(problem: Problem) -> Mapping[str, str]:
    """Triton's type of each pointer parameter, for compiling without tensors."""
    return pointer_types_of(problem.spec)


def pointer_types_of(spec: AttentionSpec) -> Mapping[str, str]:
    """`pointer_types` of any problem with this spec: the target has no part in them."""
    kinds = {"q": spec.dtype.q, "k": spec.dtype.kv, "v": spec.dtype.kv, "out": spec.dtype.out}
    kinds |= {"lse": "fp32", "sink": "fp32", "kv_lens": "int32"}
    kinds |= {declared.name: declared.dtype for declared in spec.inputs if declared.shape}
    types = {f"{name}_ptr": kind for name, kind in kinds.items()}
    types |= {f"{name}_workspace": "fp32" for name in ("acc", "m", "l")}
    types |= {"bounds_workspace": "int32", "next_tile_ptr": "int32", "keys_ptr": "int32"}
    return {name: f"*{_TRITON_TYPES[get_dtype(kind).triton_name]}" for name, kind in types.items()}


_TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
    "int1": "i1",
}
