"""A runner whose kernel waits on a barrier at which nobody arrives, and so never ends."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashgen.compiler.cases import Case
from flashgen.compiler.first_run import Task
from flashgen.compiler.verification import CaseResult
from flashgen.schedule.model import Schedule


@gluon.jit
def waits_for_ever(out_ptr):  # type: ignore[no-untyped-def]
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.wait(barrier, 0)
    gl.store(out_ptr, 1)


class Hanging:
    """Compiles like any other kernel; its first run does not end."""

    def __init__(self, task: Task) -> None:
        torch.cuda.set_device(task.device)
        self._out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def compile(self, schedule: Schedule) -> None:
        kernel: Any = waits_for_ever
        kernel.warmup(self._out, grid=(1,), num_warps=4)

    def run(self, case: Case) -> CaseResult:
        waits_for_ever[(1,)](self._out, num_warps=4)
        torch.cuda.synchronize()
        return CaseResult(case, None, failure="it ended, which it should not")
