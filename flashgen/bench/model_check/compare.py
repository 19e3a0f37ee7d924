"""Model against compiler, case by case: flat rows, which a record keeps, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flashgen.bench.model_check.compiled import Compiled
from flashgen.bench.model_check.sample import Case
from flashgen.schedule.budget import budget_for
from flashgen.schedule.on_chip import TritonVersion
from flashgen.schedule.space import check

# Shared bytes are exact on one; elsewhere they may be off by so much, as a share of the compiler's.
EXACT = "sm_90"
LOW, HIGH = -0.02, 0.10


@dataclass(frozen=True)
class Row:
    """One case: what the model says, and what the compiler did.

    Model: smem_bytes, least_smem_bytes and least_regs (per thread: lower bounds), rejection (empty:
    admitted) and its reason. Compiler: allocated_bytes (shared), tmem_columns, launchable (there is
    enough of both), regs and spill_bytes (None: no machine code was made), error (empty: none).
    """

    id: str
    arch: str
    dtype: str
    aligned: bool
    smem_bytes: int
    least_smem_bytes: int
    least_regs: int
    reason: str
    rejection: str
    allocated_bytes: int | None
    tmem_columns: int
    launchable: bool
    regs: int | None
    spill_bytes: int | None
    error: str

    @property
    def off(self) -> float | None:
        """How far the model's bytes are above the compiler's, as a share of those, if known."""
        found = self.allocated_bytes
        return (self.smem_bytes - found) / found if found else None

    @property
    def is_close(self) -> bool:
        """Exact on sm_90; elsewhere between LOW and HIGH."""
        if self.off is None:
            return True
        return self.off == 0 if self.arch == EXACT else LOW <= self.off <= HIGH

    @property
    def breaks_a_bound(self) -> bool:
        """Less shared memory than the least, of aligned rows, or fewer registers unspilled."""
        if self.allocated_bytes is None:
            return False
        too_few_bytes = self.aligned and self.allocated_bytes < self.least_smem_bytes
        too_few_regs = (
            self.regs is not None and not self.spill_bytes and self.regs < self.least_regs
        )
        return too_few_bytes or too_few_regs

    @property
    def is_judged(self) -> bool:
        """Whether it is known if the kernel fits: registers are, once there is machine code."""
        return not (self.reason and self.launchable and self.regs is None and not self.error)

    @property
    def wrongly_rejected(self) -> bool:
        """Rejected, though it compiles, a launch would find enough, and nothing is spilled."""
        fits = self.launchable and not self.spill_bytes and not self.error
        return bool(self.reason) and fits and self.is_judged and self.aligned

    @property
    def wrongly_admitted(self) -> bool:
        """Admitted, and discarded when compiled, because a launch would fail."""
        return not self.reason and not self.launchable


def compare(case: Case, compiled: Compiled, triton: TritonVersion) -> Row:
    """The model's word on `case` beside the compiler's, which is of that version."""
    schedule, problem = case.schedule, case.problem
    needs = budget_for(problem, schedule)
    rejection = check(schedule, problem)
    return Row(
        id=case.id,
        arch=case.arch,
        dtype=case.dtype,
        aligned=case.aligned,
        smem_bytes=needs.smem_bytes_of(schedule, triton, aligned=case.aligned),
        least_smem_bytes=needs.least_smem_bytes_of(schedule),
        least_regs=needs.least_regs_per_thread_of(schedule),
        reason=rejection.reason if rejection else "",
        rejection=str(rejection or ""),
        allocated_bytes=compiled.smem_bytes,
        tmem_columns=compiled.tmem_columns,
        launchable=compiled.fits,
        regs=compiled.regs_per_thread,
        spill_bytes=compiled.spill_bytes,
        error=compiled.error,
    )


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> Mapping[str, tuple[Row, ...]]:
    """Rows by `key`, in order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: tuple(found) for name, found in groups.items()}
