"""`flashgen verify`: compare a spec's kernel with the fp64 oracle."""

from __future__ import annotations

from typing import Annotated

import typer

from flashgen import settings
from flashgen.cli.arguments import (
    FamilyOption,
    JsonOption,
    SpecArgument,
    TargetOption,
    find_spec,
)
from flashgen.cli.output import print_json, progress


def verify(
    spec: SpecArgument,
    target: TargetOption = None,
    family: FamilyOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="cpu, cuda or cuda:1 (default: a GPU if there is one)."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare a spec's kernel with the fp64 oracle.

    Every case is printed; ends with 6 where one differs by more than the bound.
    """
    settings.one_thread()
    found = find_spec(spec)
    with progress() as say:
        say("loading torch and triton")
        from flashgen import compiler

        if device is not None and device.partition(":")[0] not in {"cpu", "cuda"}:
            raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
        result = compiler.verify(found, target=target, family=family, device=device, progress=say)
    if json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))
    result.check()
