"""Standard streams that are closed or full, or whose reader has gone."""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """What was started with `>&-` writes into nothing.

    Without this a file that is opened later would become the standard output.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _forget(number)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 -- stays open
            setattr(sys, name, stream)


def forget_output() -> None:
    """What is still to be written goes nowhere: the interpreter flushes once more at its end."""
    _forget(sys.stdout.fileno())


def _forget(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
