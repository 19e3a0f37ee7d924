"""The `flashgen` script and `python -m flashgen`: nothing is imported before Ctrl-C is handled."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


def main() -> None:
    """Run the command of this process's arguments; does not return."""
    try:
        from flashgen.cli.main import app

        app(prog_name="flashgen")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
