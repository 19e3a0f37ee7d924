"""One generated module for all schedules of a case: they share its kernels.

Tile sizes and warps are constants of a launch, so a schedule needs no module of its own, and
nothing is rendered while the search runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen import pipeline
from flashgen.codegen.digest import generator_digest
from flashgen.codegen.options import kernel_kinds
from flashgen.dtypes import get_dtype
from flashgen.errors import ScheduleError
from flashgen.fingerprint import fingerprint
from flashgen.problem import Problem
from flashgen.runtime import artifact
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import Schedule, all_buckets
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

if TYPE_CHECKING:
    from flashgen.runtime.launch import Attention


@dataclass(frozen=True)
class Candidates:
    """A module with every kernel that the schedules of a case need, and where it is."""

    problem: Problem
    plan: Plan
    path: Path

    @classmethod
    def of(cls, problem: Problem, schedules: Sequence[Schedule], *, has_lse: bool) -> Candidates:
        """The module for `schedules` and others of their kinds, from the disk cache or made now."""
        of_kind = {kernel_kinds(schedule): schedule for schedule in sorted(schedules, reverse=True)}
        key = fingerprint(
            {
                "candidates": [list(kinds) for kinds in sorted(of_kind)],
                "spec": problem.spec.fingerprint,
                "name": problem.name,
                "target": problem.target.id,
                "has_lse": has_lse,
                "generator": generator_digest(),
            }
        )
        # The buckets mean nothing here: `plan_of` gives every one of them to a single schedule.
        choices = [
            (bucket, of_kind[kinds])
            for bucket, kinds in zip(all_buckets(), sorted(of_kind), strict=False)
        ]
        plan, path = artifact.fetch(
            problem.name,
            key,
            lambda: pipeline.generate(problem, choices, has_lse=has_lse, origin="candidates"),
        )
        return cls(problem, plan, path)

    def plan_of(self, schedule: Schedule) -> Plan:
        """The plan in which `schedule` serves all lengths; ScheduleError for another kind."""
        entries = dict(self.plan.entries)
        missing = [kind for kind in kernel_kinds(schedule) if kind not in entries]
        if missing:
            raise ScheduleError(
                f"{schedule}: the module of candidates has no kernel {', '.join(missing)}"
            )
        return self.plan.only(schedule)

    def attention(self, schedule: Schedule) -> Attention:
        """The callable of one schedule."""
        from flashgen.runtime.launch import Attention

        plan = self.plan_of(schedule)
        return Attention(
            self.problem.spec, lambda _: (plan, self.path), return_lse=self.plan.has_lse
        )


@dataclass(frozen=True)
class Case:
    """What a worker measures: candidates at a shape. Travels to it."""

    candidates: Candidates
    shape: Shape

    @property
    def spec(self) -> AttentionSpec:
        return self.candidates.problem.spec


def key_unit(problem: Problem) -> int:
    """The number of keys of which kv_len must be a multiple, for contiguous inputs with a row of
    keys for each query to have aligned rows; 1 where there are none."""
    dense = [i for i in problem.spec.inputs if "q_len" in i.shape and i.shape[-1] == "kv_len"]
    return max((16 // get_dtype(declared.dtype).bytes for declared in dense), default=1)


def has_aligned_rows(problem: Problem, kv_len: int) -> bool:
    """Whether a call with contiguous tensors runs the kernel for aligned rows (`ALIGN` > 1)."""
    unit = 16 // min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes)
    dims = (problem.head_dim_qk, problem.head_dim_v)
    return all(dim % unit == 0 for dim in dims) and kv_len % key_unit(problem) == 0
