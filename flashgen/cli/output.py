"""What commands print: JSON, plain tables, and progress while something takes its time."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import typer

from flashgen.cli.interrupt import check

Progress = Callable[[str], None]

QUIET_SECONDS = 1.0  # what is done sooner needs no progress


def say(text: str) -> None:
    """A line on standard error; where that is full or gone, the exit code has to tell."""
    with suppress(OSError):
        typer.echo(text, err=True)


def print_json(value: object) -> None:
    """`value` (JSON types) on standard output, for scripts and for eyes."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of text in aligned columns, two spaces apart; the last column may be of any length."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())


@contextmanager
def progress() -> Iterator[Progress]:
    """A function to call with each step's name; it says on standard error what is being done.

    On a terminal one line that changes, gone at the end; elsewhere a line a step, and none for what
    is over within a second.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, markup=False).status("", spinner="dots") as status:
            yield lambda step: _announce(step, status.update)
        return
    steps = _Steps()
    timer = threading.Timer(QUIET_SECONDS, steps.speak)
    timer.daemon = True
    timer.start()
    try:
        yield lambda step: _announce(step, steps.next)
    finally:
        timer.cancel()


def _announce(step: str, say: Progress) -> None:
    check()
    say(step)


class _Steps:
    """Steps by name; the latest one is kept back until `speak`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet = True
        self._latest: str | None = None

    def next(self, step: str) -> None:
        with self._lock:
            self._latest = step
            if not self._quiet:
                say(f"{step} ...")

    def speak(self) -> None:
        with self._lock:
            self._quiet = False
            if self._latest is not None:
                say(f"{self._latest} ...")
