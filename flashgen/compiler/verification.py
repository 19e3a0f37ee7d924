"""Compare a spec's kernels with the fp64 oracle: edges of their tiles, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.options import kernel_kinds
from flashgen.compiler import choose
from flashgen.compiler.arguments import (
    device_argument,
    family_argument,
    schedule_argument,
    shapes_argument,
    spec_argument,
    target_argument,
)
from flashgen.compiler.cases import TMA_STRIDES, Case, cases_of, unreached_by_kernel
from flashgen.compiler.first_run import Elsewhere, Task, machine_here
from flashgen.dtypes import get_dtype
from flashgen.errors import FlashgenError, VerificationError
from flashgen.passes.score_tile import score_tile
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import HOPPER, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target

if TYPE_CHECKING:
    import torch

    from flashgen.reference import Comparison
    from flashgen.runtime.launch import Attention

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CaseResult:
    """One case held against the oracle.

    comparison: errors and bounds (None where the call failed); overwrote: whether something outside
    the output was written; failure: what the call raised.
    """

    case: Case
    comparison: Comparison | None
    overwrote: bool = False
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.comparison is not None and self.comparison.ok and not self.overwrote

    @property
    def share(self) -> float:
        """The larger of the errors as a share of its bound; infinite where all else is wrong."""
        found = self.comparison
        if found is None or self.overwrote or found.misplaced or found.unclean:
            return float("inf")
        shares = [_share(found.max_error, found.bound), _share(found.lse_error, found.lse_bound)]
        return max(shares)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        text = self.failure or str(self.comparison)
        written = ", wrote outside the output" if self.overwrote else ""
        return f"{verdict:5}  {self.case}  [{self.case.schedule}]  {text}{written}"

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        shape, found = self.case.shape, self.comparison
        return {
            "ok": self.ok,
            "schedule": str(self.case.schedule),
            "batch": shape.batch,
            "q_heads": shape.q_heads,
            "kv_heads": shape.kv_heads,
            "q_len": shape.q_len,
            "kv_len": shape.kv_len,
            "strides": self.case.strides,
            "max_error": found and found.max_error,
            "bound": found and found.bound,
            "lse_error": found and found.lse_error,
            "lse_bound": found and found.lse_bound,
            "misplaced": found and found.misplaced,
            "unclean": found and found.unclean,
            "overwrote": self.overwrote,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Verification:
    """What was compared and how it came out.

    device: the GPU's name, or the interpreter; notes: what these cases cannot show.
    """

    name: str
    fingerprint: str
    target: str
    device: str
    results: tuple[CaseResult, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return bool(self.results) and all(result.ok for result in self.results)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(result for result in self.results if not result.ok)

    @property
    def worst(self) -> CaseResult:
        """The case that comes nearest to its bound, or is furthest beyond it."""
        return max(self.results, key=lambda result: result.share)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules that some case ran."""
        return tuple(dict.fromkeys(result.case.schedule for result in self.results))

    @property
    def summary(self) -> str:
        """One line."""
        count = f"{len(self.results)} cases on {self.device}"
        if self.ok:
            return (
                f"{self.name}: verified, {count}, largest error {self.worst.share:.2f} of its bound"
            )
        return f"{self.name}: WRONG in {len(self.failures)} of {count}"

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {result}" for result in self.results)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        return {
            "ok": self.ok,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "target": self.target,
            "device": self.device,
            "schedules": [str(schedule) for schedule in self.schedules],
            "notes": list(self.notes),
            "cases": [result.to_dict() for result in self.results],
        }

    def check(self) -> None:
        """VerificationError with the cases that are wrong, if any is."""
        if not self.ok:
            shown = "\n".join(f"  {result}" for result in self.failures[:8])
            raise VerificationError(f"{self.summary}\n{shown}")


def verify(
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    schedule: Schedule | None = None,
    family: str | None = None,
    device: str | None = None,
    shapes: Sequence[Shape] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare the kernels of `spec` with the fp64 oracle; the result says, and does not raise.

    target: whose schedules (None: those of the device's GPU); schedule, family: as for `build`;
    device: where to run (None: a GPU if there is one; "cpu": Triton's interpreter, and an emulator
    for Hopper kernels, a few small cases); shapes: these sizes instead of the edges of the
    schedules' tiles. Raises NotServedError, ScheduleError, TargetError.
    """
    choose.check_served(spec_argument("verify", spec))
    given, schedule = target_argument(target), schedule_argument(schedule)
    only = family_argument(family)
    shapes = shapes_argument(shapes)
    where = device_argument(device)
    chosen = given or choose.target_of(where)
    machine = partial(machine_here, where.index or 0) if where.type == "cuda" else None
    plan, path = choose.plan(
        spec, chosen, schedule=schedule, family=only, has_lse=True, machine=machine
    )
    return verify_plan(spec, chosen, plan, path, device=where, shapes=shapes, progress=progress)


def verify_plan(
    spec: AttentionSpec,
    target: Target,
    plan: Plan,
    path: Path,
    *,
    device: torch.device,
    shapes: Sequence[Shape] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """`verify` for a plan that exists already; Hopper schedules run in a process of their own."""
    say = progress or (lambda step: None)
    interpreted = device.type == "cpu"
    cases = cases_of(spec, plan, interpreted=interpreted, shapes=shapes)
    if not interpreted:
        _compile_first(Problem(spec, target), plan, path, cases, say)
    results = []
    with _Runs(Problem(spec, target), plan, path, device) as runs:
        for number, case in enumerate(cases, 1):
            say(f"verifying {spec.display_name}: case {number} of {len(cases)}, {case}")
            results.append(runs.run(case))
    return Verification(
        name=spec.display_name,
        fingerprint=spec.fingerprint,
        target=target.id,
        device=_device_name(device),
        results=tuple(results),
        notes=_notes(spec, plan, cases, interpreted=interpreted),
    )


class _Runs:
    """Where each case of a plan runs: here, or on a GPU those of Hopper schedules elsewhere."""

    def __init__(self, problem: Problem, plan: Plan, path: Path, device: torch.device) -> None:
        self._spec, self._plan, self._path, self._device = problem.spec, plan, path, device
        self._attentions: dict[tuple[Schedule | None, bool], Attention] = {}
        self._elsewhere: Elsewhere | None = None
        if device.type == "cuda":
            index = device.index or 0
            self._elsewhere = Elsewhere(Task(problem, plan, path, index), machine_here(index))

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._elsewhere is not None:
            self._elsewhere.__exit__(*error)

    def run(self, case: Case) -> CaseResult:
        if self._elsewhere is not None and case.schedule.family == HOPPER:
            return self._elsewhere.run(case)
        told = None if case.is_chosen(self._plan) else case.schedule
        emulated = self._elsewhere is None and is_emulated(self._spec, case)
        attention = self._attentions.get((told, emulated))
        if attention is None:
            plan = self._plan if told is None else self._plan.only(told)
            attention = attention_of(self._spec, plan, self._path, emulated=emulated)
            self._attentions[told, emulated] = attention
        return run_case(attention, case, self._device, emulated=emulated)


def is_emulated(spec: AttentionSpec, case: Case) -> bool:
    """Whether the Hopper kernel runs a case on a CPU: not where TMA could not take its tensors."""
    if case.schedule.family != HOPPER:
        return False
    tile = score_tile(spec)
    if tile is None:
        return case.strides in TMA_STRIDES
    row_bytes = case.shape.kv_len * get_dtype(tile.tensor.dtype).bytes
    return case.strides == "plain" and row_bytes % 16 == 0


def attention_of(
    spec: AttentionSpec, plan: Plan, path: Path, *, emulated: bool = False
) -> Attention:
    """The callable of a plan, which launches whatever the plan says."""
    from flashgen.runtime.launch import Attention

    return Attention(spec, lambda _: (plan, path), return_lse=plan.has_lse, emulated=emulated)


def run_case(
    attention: Attention, case: Case, device: torch.device, *, emulated: bool = False
) -> CaseResult:
    """One call on poisoned buffers, compared; what the call raises is part of the result.

    emulated: on a CPU, in the spec's own dtype, which Triton's interpreter cannot multiply.
    """
    import torch

    from flashgen import reference
    from flashgen.runtime.draw import draw

    spec = attention.spec
    interpreted = device.type == "cpu"
    call = draw(spec, case, device, wide=interpreted and not emulated)
    run = attention.interpret if interpreted else attention.launch
    try:
        run(call.sizes, call.q, call.k, call.v, call.others, call.out.view, call.lse.view)
        if not interpreted:
            torch.cuda.synchronize(device)
    except FlashgenError:
        raise
    except Exception as error:  # Triton raises many kinds; a kernel that fails is a result here
        return CaseResult(case, None, failure=f"{type(error).__name__}: {error}")
    exact, usual = (
        compute(
            spec, call.q, call.k, call.v, inputs=call.inputs, sink=call.sink, kv_lens=call.kv_lens
        )
        for compute in (reference.attention, reference.eager)
    )
    comparison = reference.compare(
        call.out.view.to(reference.torch_dtype(spec.dtype.out)),
        call.lse.view if attention.return_lse else None,
        *exact,
        usual[0],
        eager_lse=usual[1],
        out_dtype=reference.torch_dtype(spec.dtype.out),
        sink=call.sink,
        layout=spec.layout,
    )
    intact = call.out.intact_around() and call.lse.intact_around()
    return CaseResult(case, comparison, overwrote=not intact)


def _compile_first(
    problem: Problem, plan: Plan, path: Path, cases: Sequence[Case], say: Progress
) -> None:
    """Fill Triton's cache with the kernels of `cases`, on all cores, for launches to find."""
    from flashgen.compiler.machine_code import Compilers, Job

    jobs = dict.fromkeys(
        Job(case.schedule, case.strides not in ("unaligned", "strided"), kind)
        for case in cases
        if case.schedule.family != HOPPER  # in the process in which they run
        for kind in kernel_kinds(case.schedule)
    )
    if not jobs:
        return
    with Compilers() as compilers:
        compilers.submit(problem, plan, path, tuple(jobs))
        for number, (job, _) in enumerate(compilers.results(), 1):
            say(f"compiling {problem.name}: {number} of {len(jobs)}, {job}")


def _notes(
    spec: AttentionSpec, plan: Plan, cases: Sequence[Case], *, interpreted: bool
) -> tuple[str, ...]:
    notes = []
    schedules = dict.fromkeys(schedule for _, schedule in plan.choices)
    ran = dict.fromkeys(case.schedule for case in cases)
    if len(ran) < len(schedules):
        notes.append(
            f"{len(ran)} of {len(schedules)} schedules ran; the others are the same kernels with "
            "other tiles and warps"
        )
    if interpreted:
        notes.append(
            "Triton's interpreter runs the generated code on the CPU: it shows what the kernel "
            "computes, not what a GPU's compiler makes of it"
            + (", and computes bf16 in fp32" if "bf16" in (spec.dtype.q, spec.dtype.kv) else "")
        )
    if interpreted and any(schedule.family == HOPPER for schedule in schedules):
        emulated = sum(is_emulated(spec, case) for case in cases)
        notes.append(
            f"kernels of the family gluon_sm90 ran in flashgen's emulator, in {emulated} cases: it "
            "shows what their roles hand over and compute, not what a GPU's compiler makes of them"
            if emulated
            else "no kernel of the family gluon_sm90 ran: TMA takes the tensors of none of them"
        )
    by_kernel = unreached_by_kernel(spec, cases)
    for kinds, beyond in by_kernel.items():
        if beyond:
            of = f" of kernel {kinds[0]}" if len(by_kernel) > 1 else ""
            notes.append(
                f"no case{of} is long enough to reach the mask's {', '.join(map(str, beyond))}: a "
                "kernel without it would pass"
            )
    return tuple(notes)


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return "the CPU, interpreted"
    return torch.cuda.get_device_name(device)


def _share(error: float, bound: float) -> float:
    return error / bound if bound else float(error > 0)
