"""`python -m flashgen.bench.model_check`: hold the model of on-chip memory against the compiler."""

from __future__ import annotations

import os
import platform
import shlex
import time
from pathlib import Path
from typing import Annotated

import triton
import typer

import flashgen
from flashgen.bench.model_check.compare import compare
from flashgen.bench.model_check.report import Record, load, render
from flashgen.bench.model_check.run import DEADLINE_S, compile_cases
from flashgen.bench.model_check.sample import Case, sample
from flashgen.bench.run import now
from flashgen.codegen.digest import generator_digest
from flashgen.schedule.on_chip import nearest_triton
from flashgen.schedule.space import check

SIZE = 600
ASSEMBLED = 6  # every so many cases that are admitted have machine code made


def main(
    *,
    size: Annotated[
        int, typer.Option("--cases", help="Cases of the sample, from its start.")
    ] = SIZE,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the sample; the model was fitted on that of 0.")
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Only cases with TEXT in their id; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Write DIR/triton-<version>.json and .md; -seed-N."
        ),
    ] = None,
    machine_code: Annotated[
        bool, typer.Option(help="Make machine code too, of every sixth case and of those rejected.")
    ] = True,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where compiled results are kept. [default: the cache]"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [default: cores]")] = None,
    deadline: Annotated[float, typer.Option(help="Seconds for one kernel.")] = DEADLINE_S,
    seconds: Annotated[float, typer.Option(help="Begin no kernel later than this.")] = float("inf"),
    from_record: Annotated[
        Path | None,
        typer.Option("--render", metavar="FILE", help="Only print the report of this record."),
    ] = None,
) -> None:
    """Compile the sample without a GPU and report the model's errors; fails if one is too large.

    Progress goes to standard error. Results are kept: another run compiles what is new.
    """
    if from_record is not None:
        typer.echo(render(load(from_record)), nl=False)
        return
    start, started = time.monotonic(), now()
    cases = [c for c in sample(size, seed) if not only or any(text in c.id for text in only)]
    compiled = compile_cases(
        cases,
        assembled_of(cases) if machine_code else (),
        lambda line: typer.echo(line, err=True),
        kept=keep,
        workers=jobs,
        deadline_s=deadline,
        seconds=seconds,
    )
    version = nearest_triton(triton.__version__)
    rows = tuple(compare(case, found, version) for case, found in compiled.items())
    record = Record(
        environment=environment(),
        command=command_line(size, seed, only or (), machine_code=machine_code),
        started=started,
        seconds=round(time.monotonic() - start, 1),
        not_run=len(cases) - len(compiled),
        rows=rows,
    )
    typer.echo(render(record), nl=False)
    if out is not None:
        write(record, out, seed)
    if record.faults or record.not_run:
        raise typer.Exit(1)


def assembled_of(cases: list[Case]) -> tuple[Case, ...]:
    """Cases of which machine code is made: not rejected for memory; a sixth of those admitted."""
    wanted = []
    for number, case in enumerate(cases):
        rejection = check(case.schedule, case.problem)
        if number % ASSEMBLED == 0 if rejection is None else rejection.reason != "smem_bytes":
            wanted.append(case)
    return tuple(wanted)


def environment() -> dict[str, str]:
    """Versions, as text."""
    return {
        "triton": triton.__version__,
        "python": platform.python_version(),
        "flashgen": flashgen.__version__,
        "generator digest": generator_digest()[:16],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def command_line(
    size: int, seed: int, only: tuple[str, ...] | list[str], *, machine_code: bool
) -> str:
    words = ["python", "-m", "flashgen.bench.model_check", "--cases", str(size)]
    words += ["--seed", str(seed)] if seed else []
    for text in only:
        words += ["--only", text]
    if not machine_code:
        words.append("--no-machine-code")
    return shlex.join(words)


def write(record: Record, folder: Path, seed: int = 0) -> None:
    """The record and its report, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"triton-{record.environment['triton']}" + (f"-seed-{seed}" if seed else "")
    for suffix, text in ((".json", record.to_json()), (".md", render(record))):
        temporary = folder / f".{name}{suffix}.partial"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / f"{name}{suffix}")


if __name__ == "__main__":
    typer.run(main)
