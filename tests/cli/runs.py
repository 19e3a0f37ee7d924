"""Running the command line: inside this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from flashgen.cli.main import app

CHECKOUT = Path(__file__).resolve().parents[2]

MINIMAL = "flashgen: 1\nname: tiny\nhead_dim: 16\ndtype: fp16\n"


def run(*arguments: str) -> Result:
    """The command inside this process; exceptions that it does not handle come out."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def run_process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """`python -m flashgen` as a person runs it."""
    command = [sys.executable, "-m", "flashgen", *arguments]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, check=False, env=environment(), **options
    )


def environment() -> dict[str, str]:
    """This process's environment, with the package in front of the path."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
