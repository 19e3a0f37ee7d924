"""`flashgen bench`: time suites on the GPU here, or make the table of an earlier run again."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.arguments import JsonOption
from flashgen.errors import VerificationError

if TYPE_CHECKING:
    from flashgen.bench.record import Record


class Suite(str, Enum):
    """What is measured."""

    SPECS = "specs"
    FLEX = "flex"
    DISPATCH = "dispatch"
    SCHEDULES = "schedules"
    COUNTERS = "counters"
    LOOP_ORDERS = "loop-orders"
    TUNER = "tuner"
    FA_PAPER = "fa-paper"


def bench(
    suite: Annotated[
        list[Suite] | None,
        typer.Option(
            help="specs: all shipped specs; flex: against FlexAttention; dispatch: host time; "
            "schedules, counters: what models of time and of bytes are held against; "
            "loop-orders: flash1 against flash2; tuner: its pick against exhaustive search, which "
            "goes on from run to run; fa-paper: Hopper kernels against the fastest peers, on all "
            "GPUs that are visible. "
            "Repeatable: several are one run. [default: specs]"
        ),
    ] = None,
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
            help="Begin no case later than this. [default: by suite, 180 to 720]",
        ),
    ] = None,
    contestant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE.py:FUNCTION",
            help="Suite fa-paper: time a function of a file, too; repeatable. See "
            "benchmarks/README.md for how it is called.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Suite specs: build and verify each spec first.")
    ] = True,
    render: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only print the table of this JSON record."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time suites on the GPU here and print their tables; progress goes to standard error."""
    if render is not None:
        from flashgen.bench.record import load

        records: tuple[Record, ...] = (load(render),)
    else:
        from flashgen.bench.fa_outside import contestants_of
        from flashgen.bench.suites import Request, run_suites

        suites = tuple(dict.fromkeys(each.value for each in suite or [Suite.SPECS]))
        request = Request(
            suites, out, tuple(only or ()), seconds, verify, contestants_of(contestant or [])
        )
        records = run_suites(request, lambda line: typer.echo(line, err=True))
    typer.echo(_as_json(records) if json else _as_tables(records), nl=False)
    wrong = [case_id for record in records for case_id in record.wrong]
    if wrong:
        raise VerificationError(f"bench: flashgen was wrong in {', '.join(wrong)}")


def _as_json(records: tuple[Record, ...]) -> str:
    """The record of one suite; of several, a list of them."""
    texts = [record.to_json() for record in records]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]\n"


def _as_tables(records: tuple[Record, ...]) -> str:
    from flashgen.bench.report import render

    return "\n".join(render(record) for record in records)


if __name__ == "__main__":
    typer.run(bench)
