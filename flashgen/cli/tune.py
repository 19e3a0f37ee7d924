"""`flashgen tune`: find the fastest schedules on the GPU here, and keep, check or compare them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.arguments import (
    FamilyOption,
    JsonOption,
    TargetOption,
    find_spec,
    named_path,
    parse_shape,
    shape_of,
)
from flashgen.cli.output import print_json, print_table, progress, say
from flashgen.errors import FlashgenError, TuningError
from flashgen.spec.model import AttentionSpec

if TYPE_CHECKING:
    from flashgen.compiler.tuning import Tuning
    from flashgen.tune.drift import Drift
    from flashgen.tune.search import Progress
    from flashgen.tune.session import Result
    from flashgen.tune.study import Case
    from flashgen.tune.table import Table

LINE_EVERY_S = 5.0  # where progress is lines and not one that changes


def tune(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="A spec file, or the name of a shipped spec.", show_default=False
        ),
    ],
    target: TargetOption = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="B,H,HK,Q,K",
            help="Batch, query heads, K/V heads, query and key length; repeatable "
            "(default: the spec's shapes).",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Search for so long in each shape bucket.")
    ] = 60.0,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="At most so many schedules a bucket, those of earlier runs included "
            "(default: a fifth of the feasible ones).",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="all|N,N…", help="GPUs that measure, each with a worker (default: one)."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where trials are kept: a journal file or folder, postgresql://… or "
            "grpc://HOST:PORT (default: the cache).",
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="What proposes schedules: model, tpe or random.")
    ] = "model",
    family: FamilyOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            parser=named_path,
            help="Folder of tables to write or check, such as tuned_configs (default: yours).",
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="Try schedules again that failed or did not compile before."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only time the table's entries again.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what would change in the table; write nothing.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", parser=named_path, help="Write a page on the run."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest schedule for each shape bucket on the GPU here, and write it to a table.

    Trials are kept: a run that is repeated, killed or given other limits measures nothing twice.
    Ctrl-C keeps the best so far.
    """
    if check and diff:
        raise typer.BadParameter("--check and --diff: choose one")
    if html is not None:
        from flashgen.compiler.tuning_html import need_plotly

        need_plotly()  # before minutes are spent
    found = find_spec(spec)
    numbers = _devices(devices)
    if check:
        _check(found, target, out, numbers, json)
        return
    given = [shape_of(found, parse_shape(text)) for text in shape or []]
    shapes = [each for each in given if each is not None]
    before = _table_before(found, target, out) if diff else None
    tuning = _tuned(
        found,
        target=target,
        shapes=shapes or None,
        seconds=seconds,
        trials=trials,
        devices=numbers,
        storage=storage,
        sampler=sampler,
        family=family,
        out=out,
        retry_failed=retry_failed,
        write=not diff,
    )
    if html is not None:
        from flashgen.compiler.tuning_html import write_html

        write_html(tuning, html)
    if json:
        facts = tuning.to_dict()
        print_json({**facts, "diff": _diff(before, tuning)} if diff else facts)
    else:
        _print(tuning, before if diff else None, diff)
    if all(result.outcome and _all_failed(result) for result in tuning.results):
        raise TuningError(f"{found.display_name}: no schedule could be timed")


def _tuned(spec: AttentionSpec, **options: object) -> Tuning:
    """Tune, with progress; Ctrl-C says the best so far."""
    from flashgen.compiler.tuning import TuningInterrupted, tune

    try:
        with progress() as tell:
            return tune(spec, report=_reporter(tell), **options)  # type: ignore[arg-type]
    except TuningInterrupted as interrupted:
        say(f"{interrupted}\n  table: {interrupted.tuning.path}")
        raise


def _reporter(tell: Callable[[str], None]) -> Callable[[Case, Progress], None]:
    """Progress as one line: every step on a terminal, elsewhere now and then."""
    import sys

    every = 0.0 if sys.stderr.isatty() else LINE_EVERY_S
    last = [-every]

    def report(case: Case, progress: Progress) -> None:
        now = time.monotonic()
        if now - last[0] >= every:
            last[0] = now
            tell(line_of(case, progress))

    return report


def line_of(case: Case, progress: Progress) -> str:
    """What a search is at: best against roofline and default, time left, failures by reason."""
    parts = [f"{case.bucket}: {progress.trials} of {progress.most_trials} trials"]
    best = progress.best
    if best is not None and best.time_us is not None:
        text = f"best {best.time_us:.4g} us ({best.schedule})"
        if progress.default_us:
            text += f", {progress.default_us / best.time_us:.3f} x the untuned"
        if progress.bound_us:
            text += f", {100 * progress.bound_us / best.time_us:.0f}% of the roofline"
        parts.append(text)
    failed = [f"{count} {state}" for state, count in sorted(progress.failures.items())]
    if progress.discarded:
        failed.append(f"{progress.discarded} not compiled")
    parts += [", ".join(failed)] if failed else []
    parts.append(f"{progress.seconds_left:.0f} s left")
    return f"{'; '.join(parts)}; {progress.doing}"


def _print(tuning: Tuning, before: Table | None, diff: bool) -> None:
    rows: list[tuple[str, ...]] = [
        ("lengths", "schedule", "us", "untuned", "rate", "roofline", "trials", "stopped")
    ]
    rows += [_row(result) for result in tuning.results]
    print_table(rows)
    if diff:
        typer.echo("")
        changes = _diff(before, tuning)
        for change in changes:
            typer.echo(f"{change['place']}: {change['was']} -> {change['is']}")
        typer.echo(f"{len(changes)} of {len(tuning.results)} entries would change in {tuning.path}")
    elif tuning.path.is_file():
        typer.echo(f"table: {tuning.path}")


def _row(result: Result) -> tuple[str, ...]:
    entry, found = result.entry, result.outcome
    stopped = found.stopped if found else "another process tuned it"
    if entry is None:
        failed = ", ".join(f"{n} {state}" for state, n in (found.failures if found else {}).items())
        return (str(result.case.bucket), "-", "-", "-", "-", "-", failed or "0", stopped)
    return (
        str(entry.bucket),
        str(entry.schedule),
        f"{entry.time_us:.4g}",
        f"{entry.speedup:.3f} x" if entry.speedup else "failed",
        f"{entry.rate:.4g} {entry.unit}",
        f"{100 * entry.bound_us / entry.time_us:.0f}%",
        f"{entry.trials} of {entry.feasible}",
        stopped,
    )


def _all_failed(result: Result) -> bool:
    return result.entry is None and not (result.outcome and result.outcome.only_one)


def _diff(before: Table | None, tuning: Tuning) -> list[dict[str, str]]:
    """Entries that are not what the table has."""
    changes = []
    for result in tuning.results:
        entry = result.entry
        old = before.entry(entry.bucket, entry.direction) if before and entry else None
        if entry is None or (old is not None and old.schedule == entry.schedule):
            continue
        was = f"{old.schedule} ({old.time_us:.4g} us)" if old else "none"
        now = f"{entry.schedule} ({entry.time_us:.4g} us)"
        changes.append({"place": entry.place, "was": was, "is": now})
    return changes


def _table_before(spec: AttentionSpec, target: str | None, out: Path | None) -> Table | None:
    from flashgen.compiler.tuning import table_of

    try:
        return table_of(spec, target=target, out=out)
    except FlashgenError as error:
        say(f"warning: {error}")
        return None


def _check(
    spec: AttentionSpec,
    target: str | None,
    out: Path | None,
    devices: str | list[int] | None,
    json: bool,
) -> None:
    from flashgen.compiler.tuning import check_entries

    with progress() as tell:
        found = check_entries(spec, target=target, out=out, devices=devices, progress=tell)
    if json:
        print_json([each.to_dict() for each in found])
    else:
        _print_drift(found)
    bad = [each for each in found if not each.ok]
    if bad:
        raise TuningError(
            f"{spec.display_name}: {len(bad)} of {len(found)} entries no longer hold\n"
            f"  hint: `flashgen tune {spec.display_name}` finds new ones."
        )


def _print_drift(found: tuple[Drift, ...]) -> None:
    rows = [("lengths", "schedule", "was us", "is us", "untuned us", "", "changed since")]
    rows += [
        (
            str(each.entry.bucket),
            str(each.entry.schedule),
            f"{each.entry.time_us:.4g}",
            f"{each.time_us:.4g}" if each.time_us else "-",
            f"{each.default_us:.4g}" if each.default_us else "-",
            f"{each.state} ({each.reason})",
            "; ".join(each.changed) or "nothing",
        )
        for each in found
    ]
    print_table(rows)


def _devices(text: str | None) -> str | list[int] | None:
    if text is None or text == "all":
        return text
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"--devices: expected all, or numbers such as 0,1 (got {text!r})")
    return [int(part) for part in parts]
