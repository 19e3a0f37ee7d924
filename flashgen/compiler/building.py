"""A spec becomes a folder: standalone module, machine code, manifest.json and report.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from flashgen.codegen.digest import generator_digest
from flashgen.codegen.options import kernel_kinds
from flashgen.compiler import choose
from flashgen.compiler.arguments import (
    family_argument,
    schedule_argument,
    spec_argument,
    target_argument,
)
from flashgen.compiler.chosen import entries_of, measured
from flashgen.compiler.first_run import machine_here
from flashgen.compiler.folder import MANIFEST, REPORT, Folder, digests
from flashgen.compiler.machine_code import Compilers, Job
from flashgen.compiler.verification import Progress, Verification, verify_plan
from flashgen.errors import FlashgenError, ScheduleError, VerificationError
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import (
    HOPPER,
    SINGLE_TILE_MAX,
    Bucket,
    Family,
    Rejection,
    Schedule,
    bucket_of,
)
from flashgen.spec.model import AttentionSpec
from flashgen.target import Target
from flashgen.tune.table import Entry
from flashgen.tune.toolchain import Device
from flashgen.tune.verdicts import Machine, remember, subject_of

if TYPE_CHECKING:
    import torch

    from flashgen.runtime.ahead import CompiledKernel
    from flashgen.schedule.budget import Budget

MANIFEST_SCHEMA = 1
Kernels = Literal["needed", "all"]

# A module of such a name would be imported by the generated module in place of the real one.
_TAKEN = frozenset({*sys.stdlib_module_names, "torch", "triton", "numpy"})


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that was compiled ahead: what the budget said, and what the compiler reports.

    files: names of its assembly and binary in the folder; rows: whether rows of 16-byte alignment
    are asked for ("aligned") or not ("any"); kernel: which of the schedule's, by its kind.
    """

    schedule: Schedule
    kernel: str
    rows: Literal["aligned", "any"]
    files: tuple[str, str]
    budget_smem_bytes: int
    smem_bytes: int
    budget_regs_per_thread: int
    regs_per_thread: int | None
    spill_bytes: int | None

    @property
    def smem_difference_bytes(self) -> int:
        """Compiler minus budget."""
        return self.smem_bytes - self.budget_smem_bytes

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        return {
            "schedule": self.schedule.to_dict(),
            "kernel": self.kernel,
            "rows": self.rows,
            "files": list(self.files),
            "budget_smem_bytes": self.budget_smem_bytes,
            "smem_bytes": self.smem_bytes,
            "smem_difference_bytes": self.smem_difference_bytes,
            "budget_regs_per_thread": self.budget_regs_per_thread,
            "regs_per_thread": self.regs_per_thread,
            "spill_bytes": self.spill_bytes,
        }


@dataclass(frozen=True)
class BuildResult:
    """What a build wrote, and all that its manifest and report say.

    entries: those of tables behind the plan's choices, in step; None where none is.
    """

    spec: AttentionSpec
    target: Target
    plan: Plan
    entries: tuple[Entry | None, ...]
    out: Path
    kernels: tuple[BuiltKernel, ...]
    verification: Verification | None
    warnings: tuple[str, ...]
    not_served: tuple[str, ...]
    versions: Mapping[str, str] = field(hash=False)
    files: Mapping[str, str] = field(hash=False, default_factory=dict)

    @property
    def module(self) -> Path:
        """The standalone Python module."""
        return self.out / f"{module_name(self.plan)}.py"

    @property
    def manifest(self) -> Path:
        return self.out / MANIFEST

    @property
    def report(self) -> Path:
        return self.out / REPORT

    @property
    def verified(self) -> bool:
        return self.verification is not None and self.verification.ok

    def to_dict(self) -> dict[str, object]:
        """The manifest."""
        spec, target = self.spec, self.target
        return {
            "schema": MANIFEST_SCHEMA,
            "name": spec.display_name,
            "fingerprint": spec.fingerprint,
            "spec": spec.canonical(),
            "target": {"id": target.id, "name": target.name, "arch": target.arch},
            "verified": self.verified,
            "verification": self.verification and self.verification.to_dict(),
            "callable": self.plan.name,
            "arguments": ["q", "k", "v", *self.plan.arguments],
            "returns": ["out", "lse"] if self.plan.has_lse else ["out"],
            "schedules_chosen_by": self.plan.origin,
            "schedules": [
                {
                    "bucket": bucket.to_dict(),
                    "schedule": schedule.to_dict(),
                    "chosen_by": origin,
                    "measured": measured(entry),
                }
                for (bucket, schedule), origin, entry in zip(
                    self.plan.choices, self.plan.origins, self.entries, strict=True
                )
            ],
            "smem_limit_bytes": target.smem_per_block_bytes,
            "shapes": shape_figures(Problem(spec, target), self.plan),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "not_served": list(self.not_served),
            "warnings": list(self.warnings),
            "versions": dict(self.versions),
            "generator_digest": generator_digest(),
            "files": dict(self.files),
        }

    def __str__(self) -> str:
        from flashgen.compiler.report import summary

        return summary(self)


def build(
    spec: AttentionSpec,
    out: str | Path,
    *,
    target: str | Target | None = None,
    schedule: Schedule | None = None,
    family: str | None = None,
    verify: bool = True,
    kernels: Kernels = "needed",
    return_lse: bool = True,
    progress: Progress | None = None,
) -> BuildResult:
    """Write `spec`'s module, machine code, manifest.json and report.md into the folder `out`.

    target: a GPU id (None: the GPU here, else the default of the catalogue); it need not be here.
    schedule: one for all lengths; family: "triton" or "gluon_sm90", the only one whose schedules
    are chosen where it has some for a bucket: tuned ones, else its best guess. kernels: which
    machine code is written ahead, that of the spec's shapes and of the general schedule ("needed"),
    or that of every schedule, for aligned rows and for any ("all"); the module holds all schedules
    either way. return_lse: whether the module's callable returns (out, lse). Verification runs on
    the target if it is here, else in Triton's interpreter.

    An earlier build there of a spec of the same name, edited since or not, is replaced; the files
    that its manifest lists are removed.
    Raises NotServedError, ScheduleError and TargetError before anything is written, FlashgenError
    for a folder that cannot be written or has files of somebody else's with the same names, or the
    build of a spec of another name; VerificationError after all is written, the manifest saying so.
    """
    choose.check_served(spec_argument("build", spec))
    schedule, only = schedule_argument(schedule), family_argument(family)
    if kernels not in get_args(Kernels):
        raise FlashgenError(f"kernels: got {kernels!r}, expected one of {get_args(Kernels)}")
    say = progress or (lambda step: None)
    given = target_argument(target)
    folder = Folder.opened(out)
    with ExitStack() as stack:
        compilers = stack.enter_context(Compilers())  # imports torch while this process plans
        say("loading torch and triton")
        device, chosen = _device_and_target(given)
        problem, machine = Problem(spec, chosen), partial(_machine, device, chosen)
        while True:
            say(f"planning {spec.display_name} for {chosen.id}")
            plan, path = choose.plan(
                spec,
                chosen,
                schedule=schedule,
                family=only,
                has_lse=return_lse,
                machine=machine,
            )
            jobs = _jobs(spec, plan, kernels)
            folder.check(spec.display_name, f"{module_name(plan)}.py")
            folder.check_writable()
            compilers.submit(problem, plan, path, jobs)
            verification = None
            if verify:
                verification = verify_plan(spec, chosen, plan, path, device=device, progress=say)
            compiled = {}
            for number, (job, found) in enumerate(compilers.results(), 1):
                say(f"compiling {spec.display_name}: {number} of {len(jobs)}, {job}")
                compiled[job] = found
            for refused, why in compilers.refused.items():
                subject = subject_of(plan, spec.display_name, refused, machine())
                remember(subject, why.state, why.reason)
            if not _has_family(plan, HOPPER) or not choose.refusals(plan, spec, machine()):
                break
            compilers = stack.enter_context(Compilers())  # the portable family takes their place
    say(f"writing {folder.path}")
    result = _written(problem, plan, folder, compiled, verification)
    if verification is not None and not verification.ok:
        try:
            verification.check()
        except VerificationError as error:
            raise VerificationError(f"{error}\n  hint: {result.report} has every case.") from None
    return result


def _has_family(plan: Plan, family: Family) -> bool:
    return any(schedule.family == family for _, schedule in plan.choices)


def _machine(device: torch.device, target: Target) -> Machine:
    """What verdicts of Hopper kernels hold for: the GPU here, or one that is not."""
    if device.type == "cuda":
        return machine_here(device.index or 0)
    return Machine.of(Device.of_target(target))


def module_name(plan: Plan) -> str:
    """Name of the standalone module: the callable's, unless another module has it."""
    return f"attention_{plan.name}" if plan.name in _TAKEN else plan.name


def kernel_file(plan: Plan, job: Job) -> str:
    """Name, without suffix, of a kernel's files: `llama3_8b.loop_128x64_w8_s3`."""
    s = job.schedule
    cap = "" if s.maxnreg is None else f"_r{s.maxnreg}"
    rows = "" if job.aligned else "_any_rows"
    own = ""
    if s.sm90 is not None:
        out = "_out" if s.sm90.separate_out else "_direct" if s.sm90.direct_out else ""
        own = f"_{s.sm90.scheduler}_q{s.sm90.q_buffers}{out}_g{s.sm90.group_mb}"
        own += "" if s.sm90.overlapped else "_turn"
        own += "" if s.sm90.programs_per_sm == 1 else f"_p{s.sm90.programs_per_sm}"
        own += "" if s.packed_heads == 1 else f"_h{s.packed_heads}"
    return (
        f"{module_name(plan)}.{job.kernel}_{s.block_m}x{s.block_n}_w{s.num_warps}_s{s.num_stages}"
        f"{cap}{own}{rows}"
    )


def shape_figures(problem: Problem, plan: Plan) -> list[dict[str, object]]:
    """For each of the spec's shapes: its schedule, and by the budget what one launch does.

    time_floor_us is the roofline's; inputs are not known here: what they hide counts as visible.
    """
    from flashgen.passes.count import visible_pairs, visits
    from flashgen.schedule.budget import budget_for
    from flashgen.schedule.dram import for_shape
    from flashgen.schedule.roofline import roofline

    chosen = dict(plan.choices)
    found: list[dict[str, object]] = []
    for shape in problem.spec.shapes:
        schedule = for_shape(problem, chosen[bucket_of(shape.q_len, shape.kv_len)], shape)
        tile, splits = (schedule.positions, schedule.block_n), schedule.splits_for(shape.kv_len)
        seen = visits(problem.spec, shape, *tile, num_kv_splits=splits, kernel=schedule.kernel)
        figures = budget_for(problem, schedule).figures(
            schedule,
            shape,
            visited_tiles=seen.tiles,
            visible_pairs=visible_pairs(problem.spec, shape),
            first_visits=seen.first_visits,
            visited_keys=seen.keys,
            key_tiles=seen.key_tiles,
        )
        floor = roofline(
            figures.matmul_flops, figures.dram_bytes, problem.target, problem.spec.dtype.q
        )
        found.append(
            {
                **asdict(shape),
                "schedule": str(schedule),
                **asdict(figures),
                "time_floor_us": floor.time_us,
                "bound": floor.bound,
            }
        )
    return found


def _device_and_target(given: Target | None) -> tuple[torch.device, Target]:
    """Where to verify, and what to build for."""
    import torch

    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return cpu, given or choose.target_of(cpu)
    here = torch.device("cuda", torch.cuda.current_device())
    if given is None:
        return here, choose.target_of(here)
    major, minor = torch.cuda.get_device_capability(here)
    same = given.vendor == "nvidia" and given.compute_capability == 10 * major + minor
    return (here if same else cpu), given


def _jobs(spec: AttentionSpec, plan: Plan, kernels: Kernels) -> tuple[Job, ...]:
    """What to compile ahead: the schedules of the spec's shapes, the most general and one of each
    loop order, or all."""
    chosen = dict(plan.choices)
    if kernels == "all":
        schedules = dict.fromkeys(chosen.values())
        return tuple(
            Job(s, aligned, kind)
            for aligned in (False, True)
            for s in schedules
            for kind in kernel_kinds(s)
        )
    short = Bucket(None, SINGLE_TILE_MAX)
    wanted = [bucket_of(s.q_len, s.kv_len) for s in spec.shapes] or [short]
    schedules = dict.fromkeys(chosen[bucket] for bucket in (Bucket(None, None), *wanted))
    for schedule in chosen.values():
        if all(schedule.loop_order != other.loop_order for other in schedules):
            schedules[schedule] = None
    return tuple(
        Job(schedule, True, kind) for schedule in schedules for kind in kernel_kinds(schedule)
    )


def _written(
    problem: Problem,
    plan: Plan,
    folder: Folder,
    compiled: Mapping[Job, CompiledKernel],
    verification: Verification | None,
) -> BuildResult:
    """Write the files, the manifest last: it names all others with their digests."""
    from flashgen.compiler.report import report

    spec = problem.spec
    contents: dict[str, bytes] = {f"{module_name(plan)}.py": plan.text.encode()}
    kernels = []
    for job, found in compiled.items():
        stem = kernel_file(plan, job)
        files = (f"{stem}.{found.assembly_kind}", f"{stem}.{found.binary_kind}")
        contents |= {files[0]: found.assembly.encode(), files[1]: found.binary}
        kernels.append(_built(problem, job, found, files))
    result = BuildResult(
        spec=spec,
        target=problem.target,
        plan=plan,
        entries=entries_of(problem, plan),
        out=folder.path,
        kernels=tuple(kernels),
        verification=verification,
        warnings=(
            *spec.warnings(),
            *plan.notes,
            *_kernel_warnings(kernels),
            *_family_warnings(plan),
        ),
        not_served=("backward",) if spec.backward else (),
        versions=_versions(),
    )
    contents[REPORT] = report(result).encode()
    result = replace(result, files=digests(contents))
    manifest = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    folder.write(contents, manifest.encode())
    return result


def _built(
    problem: Problem, job: Job, found: CompiledKernel, files: tuple[str, str]
) -> BuiltKernel:
    """ScheduleError where the compiler needs more shared memory than the target has."""
    limit = problem.target.smem_per_block_bytes
    needs = _needs(problem, job)
    planned = needs.smem_bytes_of(job.schedule)
    if found.smem_bytes > limit:
        rejection = Rejection("smem_bytes", found.smem_bytes, limit)
        raise ScheduleError(
            f"{problem.name}: {job}: {rejection} (the budget said {planned} B)\n"
            "  hint: pass a schedule with a smaller tile or fewer stages.",
            [rejection],
        )
    return BuiltKernel(
        schedule=job.schedule,
        kernel=job.kernel,
        rows="aligned" if job.aligned else "any",
        files=files,
        budget_smem_bytes=planned,
        smem_bytes=found.smem_bytes,
        budget_regs_per_thread=needs.regs_per_thread_of(job.schedule),
        regs_per_thread=found.regs_per_thread,
        spill_bytes=found.spill_bytes,
    )


def _needs(problem: Problem, job: Job) -> Budget:
    """The budget of one of a schedule's kernels."""
    from flashgen.schedule.budget import Budget, budget_for

    splits = {"flash1": 1, "flash1_split": 2, "merge": 2}.get(job.kernel, 1)
    needs = budget_for(problem, replace(job.schedule, num_kv_splits=splits))
    return Budget(problem, needs.others[0]) if job.kernel == "merge" else needs


def _kernel_warnings(kernels: Sequence[BuiltKernel]) -> list[str]:
    return [
        f"{kernel.schedule} ({kernel.rows} rows): "
        f"{kernel.spill_bytes} B of registers spilled per thread"
        for kernel in kernels
        if kernel.spill_bytes
    ]


def _family_warnings(plan: Plan) -> list[str]:
    """What a user of Hopper kernels must know."""
    if not _has_family(plan, HOPPER):
        return []
    return [
        "kernels of the family gluon_sm90 run on a GPU of compute capability 9.0 only; without one "
        "they are verified in an emulator; tensors that TMA cannot take (strides that are no "
        "multiples of 16 bytes, an unaligned start, expanded dimensions) are served by the "
        "portable kernel",
    ]


def _versions() -> dict[str, str]:
    import platform

    import torch
    import triton

    from flashgen import __version__

    return {
        "flashgen": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
