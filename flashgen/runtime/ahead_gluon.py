"""Gluon kernels without their GPU: the types of their tensor maps, and what ptxas says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import triton

from flashgen.errors import ScheduleError
from flashgen.schedule.model import Rejection, Schedule

if TYPE_CHECKING:
    from flashgen.runtime.ahead import CompiledKernel

# ptxas's advice on WGMMA that it makes wait for each other, by number: C7510 to C7517.
_SERIALISED = re.compile(r"\bC751[0-7]\b")


def source_of(kernel: Any, signature: Mapping[str, str], constants: Any, attributes: Any) -> Any:
    """What `triton.compile` takes."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(kernel, signature, constants, attributes)


def descriptor_types(
    module: ModuleType, kernel: Any, pointers: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, str]:
    """Triton's type of each tensor map of a kernel, as the module's host code makes them."""
    from triton.experimental.gluon import language as gl

    qk, v = module.HEAD_DIM_QK_PADDED.value, module.HEAD_DIM_V_PADDED.value
    heads = options.get("PACKED_HEADS", 1)
    of_rows = (64,) if heads == 1 else (heads, 64 // heads)
    tiles: dict[str, tuple[int, ...]] = {
        "q": (*of_rows, qk),
        "k": (options["BLOCK_N"], qk),
        "v": (options["BLOCK_N"], v),
        "out": (*of_rows, v),
    }
    found = {}
    for name in (n.removesuffix("_desc") for n in kernel.arg_names if n.endswith("_desc")):
        tile = tiles.get(name, (64, options["BLOCK_N"]))  # others: an input of the score
        element = pointers[f"{name}_ptr"].removeprefix("*")
        size = 4 if element.endswith("32") else 2
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=min(128, size * tile[-1]),
            element_bitwidth=8 * size,
            rank=2 + len(tile),
        )
        extents = ", ".join(map(str, (1, 1, *tile)))
        found[f"{name}_desc"] = f"tensordesc<{element}[{extents}],{layout!r}>"
    return found


def serialised_wgmma(ptx: str) -> tuple[str, ...]:
    """The numbers of ptxas's complaints that matrix instructions wait for each other."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{source}.cubin"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(sorted(set(_SERIALISED.findall(run.stdout + run.stderr))))


def check_compiled(schedule: Schedule, compiled: CompiledKernel) -> None:
    """ScheduleError for machine code that is right but slow, with what makes it so."""
    rejections = []
    if compiled.serialised_wgmma:
        codes = ", ".join(compiled.serialised_wgmma)
        reason = f"serialised wgmma (ptxas {codes})"
        rejections.append(Rejection(reason, len(compiled.serialised_wgmma), 0))
    if compiled.spill_bytes:
        rejections.append(Rejection("spill_bytes", compiled.spill_bytes, 0))
    if rejections:
        raise ScheduleError(
            f"{compiled.entry}, schedule {schedule}: {'; '.join(map(str, rejections))}\n"
            "  hint: pass a schedule with fewer keys a tile or fewer consumers, or one of family "
            "triton.",
            rejections,
        )
