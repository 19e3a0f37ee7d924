"""Spec -> callable: choose the schedules, then let the pipeline work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.codegen.digest import generator_digest
from flashgen.compiler.arguments import schedule_argument, spec_argument, target_argument
from flashgen.errors import NotServedError, ScheduleError, TargetError
from flashgen.fingerprint import fingerprint
from flashgen.runtime import artifact
from flashgen.runtime.frozen import refuse_if_frozen
from flashgen.runtime.said import say_once
from flashgen.schedule.families import gluon_missing
from flashgen.schedule.model import HOPPER, Bucket, Family, Schedule, all_buckets
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Paged
from flashgen.target import TARGETS, Target, get_target, target_from_device_name
from flashgen.tune.lookup import NOTHING, tables_of
from flashgen.tune.toolchain import version_of
from flashgen.tune.verdicts import Machine, digest_of, recall, subject_of

if TYPE_CHECKING:
    import torch

    from flashgen.problem import Problem
    from flashgen.runtime.artifact import Plan
    from flashgen.runtime.check import Sizes
    from flashgen.runtime.launch import Attention

# Whose schedules serve CPU tensors, and builds without a named target and without a GPU.
DEFAULT_TARGET = "nvidia-h200"


def compile(  # noqa: A001 -- the public name; a module-level builtin is not needed here
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    schedule: Schedule | None = None,
    return_lse: bool = False,
    tune: str | None = None,
) -> Attention:
    """A callable `(q, k, v, **inputs) -> out`, or `(out, lse)` with `return_lse`.

    target: a GPU id (`flashgen list --targets`) or None, the GPU that the tensors are on; schedule:
    one for all lengths that its kernel can take, instead of the chosen ones; tune: "auto" tunes at
    the first call of each shape bucket that has no tuned config, None never tunes. Nothing is
    generated or compiled before the first call. Raises NotServedError for a spec that no kernel
    family serves; its first call ScheduleError, for one that fits no tile or a schedule that does
    not fit.
    """
    from flashgen.runtime.launch import Attention

    check_served(spec_argument("compile", spec))
    fixed, given = target_argument(target), schedule_argument(schedule)

    def target_for(device: torch.device) -> Target:
        return fixed or target_of(device)

    def plan_for(device: torch.device) -> tuple[Plan, Path]:
        def machine() -> Machine:
            from flashgen.compiler.first_run import machine_here

            return machine_here(device.index or 0)

        where = machine if device.type == "cuda" else None
        target = target_for(device)
        return plan(spec, target, schedule=given, has_lse=return_lse, machine=where)

    def guard(
        device: torch.device, plan: Plan, path: Path, schedule: Schedule, sizes: Sizes
    ) -> bool:
        from flashgen.compiler.first_run import FirstRuns

        return FirstRuns(spec, target_for)(device, plan, path, schedule, sizes)

    if tune is not None:
        from flashgen.compiler.tuning import SelfTuning, mode_argument

        mode_argument(tune)
        return SelfTuning(spec, plan_for, return_lse=return_lse, target=fixed, guard=guard)
    return Attention(spec, plan_for, return_lse=return_lse, guard=guard)


def unserved_features(spec: AttentionSpec) -> tuple[str, ...]:
    """Features of a valid spec that no kernel family here serves; empty where it can be built."""
    operands = {spec.dtype.q, spec.dtype.kv}
    found = {
        "kv_cache: paged": isinstance(spec.kv_cache, Paged),
        "layout: packed": spec.layout == "packed",
        "dtype: fp8_e4m3": "fp8_e4m3" in {*operands, spec.dtype.out},
        "different dtypes of q and kv": len(operands) > 1,
        "dropout": spec.dropout > 0,
    }
    return tuple(name for name, present in found.items() if present)


def check_served(spec: AttentionSpec) -> None:
    """NotServedError with every feature that is not served."""
    missing = unserved_features(spec)
    if missing:
        raise NotServedError(spec.display_name, missing)


def plan(
    spec: AttentionSpec,
    target: Target,
    *,
    schedule: Schedule | None = None,
    family: Family | None = None,
    has_lse: bool,
    machine: Callable[[], Machine] | None = None,
) -> tuple[Plan, Path]:
    """The generated module for a target, from the disk cache or made now, and its path.

    Tuned configs are looked up here, once a plan, and are part of its key. family: the only one
    whose schedules are chosen, where it has some for a bucket; ScheduleError where it has none at
    all, or beside a given schedule. machine: where the
    kernels are to run; Hopper schedules that are known to be bad there make place for the portable
    family.
    """
    if schedule is not None and family is not None:
        raise ScheduleError(
            f"family: got {family} and a schedule, which has its own: leave out one"
        )
    made, path = _made(spec, target, schedule, {}, has_lse=has_lse, family=family)
    known: dict[Schedule, str] = {}
    while machine is not None and HOPPER in {each.family for _, each in made.choices}:
        found = refusals(made, spec, machine())
        if not found:
            break
        known |= found  # of a family that is asked for, the next best come instead
        made, path = _made(spec, target, schedule, known, has_lse=has_lse, family=family)
    for note in made.notes:
        say_once(note)
    return made, path


def refusals(plan: Plan, spec: AttentionSpec, machine: Machine) -> dict[Schedule, str]:
    """Hopper schedules of a plan that are known not to be usable on `machine`, with the reason."""
    found = {}
    for schedule in dict.fromkeys(schedule for _, schedule in plan.choices):
        if schedule.family == HOPPER:
            verdict = recall(subject_of(plan, spec.display_name, schedule, machine))
            if verdict is not None and verdict.refusal:
                found[schedule] = verdict.refusal
    return found


def _made(
    spec: AttentionSpec,
    target: Target,
    schedule: Schedule | None,
    refused: Mapping[Schedule, str],
    *,
    has_lse: bool,
    family: Family | None = None,
) -> tuple[Plan, Path]:
    tables = tables_of(spec, target) if schedule is None else NOTHING
    key = fingerprint(
        {
            "spec": spec.fingerprint,
            "name": spec.display_name,
            "target": target.id,
            "schedule": schedule and schedule.to_dict(),
            "family": family,
            "has_lse": has_lse,
            "tuned": tables.key,
            "refused": sorted([str(each), why] for each, why in refused.items()),
            "triton": [version_of("triton"), gluon_missing()],  # Gluon's names depend on it
            "generator": generator_digest(),
        }
    )

    def build() -> Plan:
        from flashgen import pipeline
        from flashgen.compiler.chosen import of_family, tuned, untuned, without_refused
        from flashgen.problem import Problem

        refuse_if_frozen(f"generate {spec.display_name} for {target.id}")
        problem = Problem(spec, target)
        if family is not None:
            found = of_family(problem, tables, family, refused)
        else:
            found = tuned(problem, tables) if tables.sources else untuned(problem, schedule)
        found = without_refused(found, problem, refused)
        made = pipeline.generate(
            problem,
            found.choices,
            has_lse=has_lse,
            origin=found.origin,
            origins=found.kinds,
        )
        return replace(
            made, origins=found.origins, notes=found.notes, hopper_digest=digest_of(made)
        )

    return artifact.fetch(spec.display_name, key, build)


def choose(problem: Problem, schedule: Schedule | None) -> list[tuple[Bucket, Schedule]]:
    """The schedule of every shape bucket: the given one, or the untuned best guess.

    That also where the given one is a single tile that does not hold all keys of the bucket.
    """
    from flashgen.schedule.space import check, default_schedule

    if schedule is None:
        return [(bucket, default_schedule(problem, bucket)) for bucket in all_buckets()]
    rejection = check(schedule, problem)
    if rejection:
        raise ScheduleError(f"schedule {schedule}: {rejection}", [rejection])
    if schedule.kernel == "loop":
        return [(bucket, schedule) for bucket in all_buckets()]
    fits = {bucket: check(schedule, problem, bucket) is None for bucket in all_buckets()}
    return [(b, schedule if fit else default_schedule(problem, b)) for b, fit in fits.items()]


def target_of(device: torch.device) -> Target:
    """The catalogue's entry for the GPU `device` is, or for a near relative, which is said."""
    if device.type == "cpu":
        return get_target(DEFAULT_TARGET)
    import torch

    name = torch.cuda.get_device_name(device)
    known = target_from_device_name(name)
    if known:
        return known
    major, minor = torch.cuda.get_device_capability(device)
    relatives = [
        t
        for t in TARGETS.values()
        if t.vendor == "nvidia" and t.compute_capability == 10 * major + minor
    ]
    if not relatives:
        raise TargetError(
            f"{name} (compute capability {major}.{minor}) is not in the catalogue\n"
            "  hint: pass target= with the id of a GPU that is like it; `flashgen list --targets` "
            "shows them."
        )
    nearest = min(relatives, key=lambda t: (t.smem_per_block_bytes, t.sm_count))
    say_once(
        f"{name} is not in the catalogue; schedules of {nearest.id} are used "
        "(same compute capability)"
    )
    return nearest
