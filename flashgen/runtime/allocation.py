"""What Triton allocates for a kernel, known before machine code is made, and stopping there.

Shared memory and tensor memory are decided before LLVM and the assembler run. Those take most of
the time, and minutes where a tile is far too large; a kernel that could not be launched is given
up before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, nvidia, passes

from flashgen.errors import CompileError
from flashgen.schedule.model import Rejection
from flashgen.target import Target

TMEM_COLUMNS = 512  # of an SM of sm_100: what a launch checks


@dataclass(frozen=True)
class Allocation:
    """Shared memory in bytes and columns of tensor memory of one program."""

    smem_bytes: int
    tmem_columns: int = 0

    def over_limit(self, target: Target) -> Rejection | None:
        """Why a kernel with these needs cannot be launched on `target`; None if it can."""
        if self.smem_bytes > target.smem_per_block_bytes:
            return Rejection("smem_bytes", self.smem_bytes, target.smem_per_block_bytes)
        if self.tmem_columns > TMEM_COLUMNS:
            return Rejection("tmem_columns", self.tmem_columns, TMEM_COLUMNS)
        return None


class GivenUpError(CompileError):
    """Compiling ended after allocation; `rejection`: what there is too little of, if anything."""

    def __init__(self, allocation: Allocation, rejection: Rejection | None) -> None:
        self.allocation, self.rejection = allocation, rejection
        super().__init__(
            f"no machine code was made: {rejection or 'only allocation was asked for'}"
        )


@contextmanager
def giving_up_early(target: Target, *, always: bool = False) -> Iterator[None]:
    """Within it, compiling for an NVIDIA target ends with GivenUpError where a launch would fail.

    always: also where it would not.
    """

    def check(module: Any, compute_capability: int, ptx_version: int) -> None:
        allocation = allocate(module, compute_capability, ptx_version)
        rejection = allocation.over_limit(target)
        if rejection is not None or always:
            raise GivenUpError(allocation, rejection)

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = _hook(check)
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _hook(check: Callable[[Any, int, int], None]) -> Callable[..., tuple[str, str] | None]:
    """Puts `check` in front of the stage that allocates."""

    def hook(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:  # Triton >= 3.7 asks for key and hash of what the hook changes: nothing
            return "", ""
        from triton.backends.nvidia.compiler import get_ptx_version_from_options

        backend, stages, options, _, capability = arguments
        lower = stages["llir"]

        def checked(module: Any, metadata: Any) -> Any:
            check(module, capability, get_ptx_version_from_options(options, backend.target.arch))
            return lower(module, metadata)

        stages["llir"] = checked
        return None

    return hook


def allocate(module: Any, compute_capability: int, ptx_version: int) -> Allocation:
    """Run the passes up to allocation, as Triton 3.6 to 3.8 order them, on a copy of `module`."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(str(module), encoding="utf-8")
        copy = ir.parse_mlir_module(str(path), module.context)
    copy.context = module.context
    manager = ir.pass_manager(copy.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, compute_capability, ptx_version)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    manager.run(copy, "allocate")
    return Allocation(
        copy.get_int_attr("ttg.shared"), copy.get_int_attr("ttg.tensor_memory_size") or 0
    )
