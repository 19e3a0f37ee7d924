"""`flashgen list`: the shipped specs, the GPUs that kernels can be compiled for, or kernels that
are not used here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flashgen.cli.arguments import JsonOption, shipped_specs
from flashgen.cli.output import print_json, print_table, say
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.target import TARGETS, Target


def list_(
    targets: Annotated[bool, typer.Option("--targets", help="List GPUs instead of specs.")] = False,
    hung: Annotated[
        bool,
        typer.Option(
            "--hung", help="List Hopper kernels that hung here or were refused, which no call runs."
        ),
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="With --hung: forget them, so that they are retried.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """List the shipped specs, or the GPU catalogue, or kernels that hung."""
    if targets and hung:
        raise typer.BadParameter("--targets and --hung: choose one")
    if forget and not hung:
        raise typer.BadParameter("--forget goes with --hung")
    if hung:
        _list_hung(json, forget=forget)
    elif targets:
        _list_targets(json)
    else:
        _list_specs(json)


def _list_specs(json: bool) -> None:
    specs = [load_spec(path) for path in shipped_specs().values()]
    if json:
        print_json([_spec_row(spec) for spec in specs])
        return
    rows = [("name", "dtype", "head_dim", "heads", "description")]
    rows += [
        (
            spec.display_name,
            spec.dtype.q,
            _head_dim(spec),
            f"{spec.heads.group}:1" if spec.heads.group else "any",
            spec.description or "",
        )
        for spec in specs
    ]
    print_table(rows)


def _spec_row(spec: AttentionSpec) -> dict[str, object]:
    return {
        "name": spec.display_name,
        "description": spec.description,
        "fingerprint": spec.fingerprint,
        "spec": spec.canonical(),
        "shapes": [asdict(shape) for shape in spec.shapes],
    }


def _head_dim(spec: AttentionSpec) -> str:
    dims = spec.head_dim
    return str(dims.qk) if dims.qk == dims.v else f"{dims.qk}/{dims.v}"


def _list_targets(json: bool) -> None:
    if json:
        print_json([_target_row(target) for target in TARGETS.values()])
        return
    rows = [("id", "name", "arch", "SMs", "shared memory", "memory", "TB/s", "bf16 TFLOP/s")]
    rows += [
        (
            target.id,
            target.name,
            target.arch,
            str(target.sm_count),
            f"{target.smem_per_block_bytes // 1024} KiB",
            f"{target.dram_bytes / 1e9:.0f} GB",
            f"{target.dram_bytes_per_s / 1e12:.2f}",
            f"{target.matmul_flops_per_s['bf16'] / 1e12:.0f}",
        )
        for target in TARGETS.values()
    ]
    print_table(rows)


def _target_row(target: Target) -> dict[str, object]:
    fields = {name: getattr(target, name) for name in target.__dataclass_fields__}
    return {
        **fields,
        "matmul_flops_per_s": dict(target.matmul_flops_per_s),
        "sources": list(target.sources),
        "device_names": list(target.device_names),
    }


def _list_hung(json: bool, *, forget: bool) -> None:
    from flashgen.tune import verdicts

    found = verdicts.known(bad=True)
    if json:
        print_json([verdict.to_dict() for verdict in found])
    elif found:
        rows = [("spec", "schedule", "state", "why", "when", "toolchain")]
        rows += [
            (v.subject.spec, str(v.subject.schedule), v.state, v.reason, v.when, str(m))
            for v in found
            for m in (v.subject.machine,)
        ]
        print_table(rows)
    else:
        typer.echo(f"no kernel hung or was refused here ({verdicts.folder()})")
    if forget and found:
        verdicts.forget_bad()
        say(f"{len(found)} forgotten: they are tried again, in a process of their own")
