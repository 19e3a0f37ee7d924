"""`flashgen build`: a spec becomes a folder with the kernel, its machine code and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen import settings
from flashgen.cli.arguments import (
    FamilyOption,
    JsonOption,
    SpecArgument,
    TargetOption,
    find_spec,
    named_path,
)
from flashgen.cli.output import print_json, progress


def build(
    spec: SpecArgument,
    target: TargetOption = None,
    family: FamilyOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            parser=named_path,
            help="Folder to write (default: out/NAME).",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare with the fp64 oracle, or leave the kernel unverified.")
    ] = True,
    all_kernels: Annotated[
        bool,
        typer.Option(
            "--all-kernels",
            help="Write machine code of all schedules, not only of those for the spec's shapes.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compile a spec's kernel, verify it and write it.

    The folder gets a standalone module, machine code, manifest.json and report.md.
    """
    settings.one_thread()
    found = find_spec(spec)
    folder = out or Path("out") / found.display_name
    with progress() as say:
        from flashgen import compiler

        result = compiler.build(
            found,
            folder,
            target=target,
            family=family,
            verify=verify,
            kernels="all" if all_kernels else "needed",
            progress=say,
        )
    if json:
        print_json({"out": str(result.out), **result.to_dict()})
    else:
        typer.echo(str(result))
