"""The `flashgen` command: which commands there are, and how an error becomes an exit code.

Nothing here imports torch, triton or sympy; a command that needs them does so when it runs.
"""

from __future__ import annotations

import errno
import warnings
from typing import Annotated, TextIO

import typer
from typer.core import TyperGroup

from flashgen import __version__
from flashgen.cli.bench import bench
from flashgen.cli.build import build
from flashgen.cli.doctor import doctor
from flashgen.cli.entry import EXIT_CANNOT_WRITE, EXIT_INTERRUPTED
from flashgen.cli.explain import explain
from flashgen.cli.interrupt import interruptible
from flashgen.cli.list import list_
from flashgen.cli.output import say
from flashgen.cli.schema import schema
from flashgen.cli.show import show
from flashgen.cli.streams import forget_output
from flashgen.cli.tune import tune
from flashgen.cli.verify import verify
from flashgen.errors import FlashgenError, SpecError

EPILOG = (
    "Exit codes: 0 ok, 1 other error, 2 wrong usage, 3 spec not valid, 4 not served by a kernel "
    "family yet, 5 no schedule fits, 6 differs from the oracle, 7 source not compiled, 8 unknown "
    "GPU, 9 wrong tensor, 10 nothing tuned, 130 interrupted."
)


class Commands(TyperGroup):
    """All commands; errors that a user can mend end as their text and their exit code."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            with interruptible(), warnings.catch_warnings():
                warnings.showwarning = _show_warning
                result = super().invoke(ctx)
        except FlashgenError as error:
            # Faults of a spec begin with file:line:column, where editors look for it.
            say(str(error) if isinstance(error, SpecError) else f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            raise _reader_gone() from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            say(
                f"error: {error.filename}: cannot be used ({error.strerror})\n"
                "  hint: choose a shorter path, in an option or in FLASHGEN_*_DIR."
            )
            raise typer.Exit(EXIT_CANNOT_WRITE) from None
        return result

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        try:
            return super().parse_args(ctx, args)  # prints what --help and --version ask for
        except BrokenPipeError:
            raise _reader_gone() from None


def _reader_gone() -> typer.Exit:
    """`flashgen list | head -1`: the reader has what it wanted."""
    forget_output()
    return typer.Exit(0)


app = typer.Typer(
    cls=Commands,
    help="Attention kernels from data: a spec in YAML becomes a verified, readable Triton kernel.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text: brackets and backticks stay as written
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # read by its callback
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the command."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one sentence: the place in the source is of no use to who runs a command."""
    say(f"warning: {message}")


app.command(name="build")(build)
app.command(name="verify")(verify)
app.command(name="tune")(tune)
app.command(name="list")(list_)
app.command(name="show")(show)
app.command(name="explain")(explain)
app.command(name="schema")(schema)
app.command(name="doctor")(doctor)
app.command(name="bench")(bench)
