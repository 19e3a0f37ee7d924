"""`flashgen build`: a spec becomes a folder with the kernel, its machine code and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.arguments import JsonOption, SpecArgument, TargetOption, find_spec
from flashgen.cli.output import print_json, progress


def build(
    spec: SpecArgument,
    target: TargetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Folder to write. [default: out/<name>]"),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare with the fp64 oracle before writing the manifest.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Compile a spec, verify it, and write module, machine code, manifest.json and report.md."""
    found = find_spec(spec)
    folder = out or Path("out") / found.display_name
    with progress() as say:
        say("loading torch and triton")
        from flashgen import compiler

        result = compiler.build(found, folder, target=target, verify=verify, progress=say)
    if json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))
