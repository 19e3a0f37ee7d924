"""`flashgen bench`: time a suite on the GPU here, or make the table of an earlier run again."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.arguments import JsonOption
from flashgen.errors import VerificationError


class Suite(str, Enum):
    """What is measured."""

    SPECS = "specs"
    FLEX = "flex"
    DISPATCH = "dispatch"


def bench(
    suite: Annotated[
        Suite,
        typer.Option(
            help="specs: all shipped specs; flex: against FlexAttention; dispatch: host time."
        ),
    ] = Suite.SPECS,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write DIR/<gpu>/<suite>.json and .md."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Only cases with TEXT in their id; repeatable."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Begin no case later than this. [default: by suite, 180 to 480]",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Suite specs: verify each spec first.")] = True,
    render: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only print the table of this JSON record."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time a suite on the GPU here and print its table; progress goes to standard error."""
    if render is not None:
        from flashgen.bench.record import load

        record = load(render)
    else:
        from flashgen.bench.suites import Request, run_suite

        request = Request(suite.value, out, tuple(only or ()), seconds, verify)
        record = run_suite(request, lambda line: typer.echo(line, err=True))
    if json:
        typer.echo(record.to_json(), nl=False)
    else:
        from flashgen.bench.report import render as render_table

        typer.echo(render_table(record), nl=False)
    if record.wrong:
        raise VerificationError(f"bench: flashgen was wrong in {', '.join(record.wrong)}")


if __name__ == "__main__":
    typer.run(bench)
