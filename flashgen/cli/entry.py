"""The `flashgen` script and `python -m flashgen`: nothing is imported before Ctrl-C is handled."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress

from flashgen.cli.streams import forget_output, open_closed_streams
from flashgen.haste import in_haste

EXIT_CANNOT_WRITE = 1
EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


def main() -> None:
    """Run the command of this process's arguments; does not return."""
    open_closed_streams()
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # `flashgen list | head -1`: the reader has what it wanted
        forget_output()
        code = 0
    except OSError as error:
        if error.filename is not None:  # not a stream
            raise
        forget_output()
        with suppress(OSError):
            print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        code = EXIT_CANNOT_WRITE
    gc.freeze()  # else the interpreter looks at every object once more before it ends: 0.15 s
    sys.exit(code)


def _run() -> str | int | None:
    """The exit code."""
    try:
        with in_haste():
            from flashgen.cli.main import app

            app(prog_name="flashgen")
    except SystemExit as end:
        from flashgen.cli.interrupt import was_pressed

        # An import or a library that Ctrl-C broke off may have made another error of it.
        return EXIT_INTERRUPTED if was_pressed() else end.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0
