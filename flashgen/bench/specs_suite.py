"""Suite `specs`: every shipped spec is built, verified and timed on its own shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import torch

from flashgen import compiler, settings
from flashgen.bench.accuracy import Oracle
from flashgen.bench.contest import contest, free_memory
from flashgen.bench.peers import Contestant, flashgen_attention
from flashgen.bench.preparation import Outcome, Task
from flashgen.bench.record import CaseRecord
from flashgen.bench.run import Run
from flashgen.bench.work import Work, case_record, count_work
from flashgen.compiler.choose import plan, target_of, unserved_features
from flashgen.errors import FlashgenError
from flashgen.schedule.model import bucket_of
from flashgen.schedule.roofline import roofline
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune.summary import rounded
from flashgen.tune.tensors import Arguments, argument_bytes, draw, sets_needed
from flashgen.tune.timing import Clock, describe

MEMORY_SHARE = 0.8  # of what is free: the oracle and the launcher need some too
FLASHGEN = "flashgen"

# Small lengths, at least one in every bucket, those first that show most.
PROOF_Q_LENS = (259, 1, 19, 35, 3)
PROOF_KV_LENS = (1031, 517, 261, 131, 67, 35, 19, 13, 2051, 4099, 8195, 16387)
PROOF_BATCH = 2
PROOF_KV_HEADS = 2


def run_specs(
    run: Run,
    clock: Clock,
    device: torch.device,
    l2_bytes: int,
    *,
    verify: bool,
    prepared: Iterable[Outcome] = (),
) -> None:
    """Every wanted shape of every shipped spec, as far as the budget goes.

    What no worker has built and verified beforehand is so here.
    """
    proved = {each.name: each.facts for each in prepared if each.error is None}
    target = target_of(device)
    for name, spec, shapes in wanted_specs(run):
        missing = unserved_features(spec)
        if missing:
            run.leave_out(spec.display_name, f"not served yet: {', '.join(missing)}")
            continue
        verdict = proved.get(name) if verify else {}
        for shape in shapes:
            if not run.has_time_for(case_id(spec, shape)):
                continue
            if verdict is None:
                run.say(f"{run.seconds:6.1f} s  {spec.display_name}: building and verifying")
                verdict = prove(spec, device)
            needed = argument_bytes(spec, shape)
            free = free_bytes(device)
            if needed > MEMORY_SHARE * free:
                reason = f"needs {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free"
                run.leave_out(case_id(spec, shape), reason)
                continue
            run.add(
                measure_shape(spec, shape, clock, device, l2_bytes, target=target, facts=verdict)
            )


def wanted_specs(run: Run) -> list[tuple[str, AttentionSpec, list[Shape]]]:
    """File name, spec and wanted shapes of each shipped spec that has any."""
    found = []
    for path in sorted(settings.specs_dir().glob("*.yaml")):
        spec = load_spec(path)
        shapes = [shape for shape in spec.shapes if run.wants(case_id(spec, shape))]
        if shapes:
            found.append((path.stem, spec, shapes))
    return found


def spec_tasks(run: Run) -> list[Task]:
    """To build and verify each wanted spec that a kernel family serves."""
    return [
        Task("spec", (name,)) for name, spec, _ in wanted_specs(run) if not unserved_features(spec)
    ]


def free_bytes(device: torch.device) -> float:
    """Device memory that nobody uses; no limit on the CPU."""
    if device.type != "cuda":
        return float("inf")
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def case_id(spec: AttentionSpec, shape: Shape) -> str:
    """E.g. `llama3_8b/b1/h32:8/q8192/k8192`."""
    return (
        f"{spec.display_name}/b{shape.batch}/h{shape.q_heads}:{shape.kv_heads}"
        f"/q{shape.q_len}/k{shape.kv_len}"
    )


def prove(spec: AttentionSpec, device: torch.device) -> dict[str, Any]:
    """What `flashgen build` and `flashgen verify` say of the spec's shapes: facts for a case.

    `flashgen verify` by itself goes through every schedule and all edges of its tiles, for minutes;
    here it goes through the schedules that serve the shapes.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
            built = compiler.build(spec, folder, target=target_of(device), verify=False)
        result = compiler.verify(spec, device=str(device), shapes=proof_shapes(spec, device))
    except FlashgenError as error:
        return {"verified": False, "verification": describe(error)}
    return {
        "built kernels": len(built.kernels),
        "verified": result.ok,
        "verification": result.summary,
    }


def proof_shapes(spec: AttentionSpec, device: torch.device) -> list[Shape]:
    """A small shape, off every tile's edge, for each schedule that serves the spec's shapes."""
    chosen = dict(plan(spec, target_of(device), has_lse=False)[0].choices)
    needed = dict.fromkeys(chosen[bucket_of(shape.q_len, shape.kv_len)] for shape in spec.shapes)
    found = []
    for schedule in needed:
        q_len, kv_len = next(
            (q_len, kv_len)
            for kv_len in PROOF_KV_LENS
            for q_len in PROOF_Q_LENS
            if chosen[bucket_of(q_len, kv_len)] == schedule
        )
        heads = PROOF_KV_HEADS * (spec.heads.group or 2)
        found.append(Shape(PROOF_BATCH, heads, PROOF_KV_HEADS, q_len, kv_len))
    return found


def measure_shape(
    spec: AttentionSpec,
    shape: Shape,
    clock: Clock,
    device: torch.device,
    l2_bytes: int,
    *,
    target: Target,
    facts: dict[str, Any],
    rounds: int | None = None,
) -> CaseRecord:
    """The default schedule of a spec on one shape."""
    number = sets_needed(argument_bytes(spec, shape), l2_bytes)
    sets = [draw(spec, shape, seed=seed, device=device) for seed in range(number)]
    work = count_work(spec, shape, sets[0].inputs, kv_lens=sets[0].kv_lens, device=device)
    with torch.no_grad():
        oracle = Oracle(spec, shape, sets[0])
        contestant = Contestant(FLASHGEN, lambda: flashgen_attention(spec))
        results = contest([contestant], sets, oracle, clock, rounds=rounds)
        extra = extra_bytes(spec, sets[0]) if results[0].error is None else None
    del sets, oracle
    free_memory(device)
    more = {
        "schedule": schedule_text(spec, shape, target),
        "catalogue floor us": catalogue_floor_us(spec, work, target),
        "bytes beyond output": extra,
        "tensor sets": number,
    }
    name = spec.display_name
    return case_record(case_id(spec, shape), name, spec, shape, work, results, {**facts, **more})


def schedule_text(spec: AttentionSpec, shape: Shape, target: Target) -> str:
    """The schedule that serves the shape."""
    found, _ = plan(spec, target, has_lse=False)
    return str(dict(found.choices)[bucket_of(shape.q_len, shape.kv_len)])


def catalogue_floor_us(spec: AttentionSpec, work: Work, target: Target) -> float:
    """The roofline at the catalogue's rates."""
    return rounded(roofline(work.matmul_flops, work.dram_bytes, target, spec.dtype.q).time_us)


def extra_bytes(spec: AttentionSpec, arguments: Arguments) -> int | None:
    """Device memory that a call takes beyond its output, at its peak; None on the CPU."""
    device = arguments.q.device
    if device.type != "cuda":
        return None
    attend = flashgen_attention(spec)
    attend(arguments)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = attend(arguments)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return max(0, peak - out.numel() * out.element_size())
