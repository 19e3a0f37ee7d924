"""Ctrl-C ends a command also where a library swallows the exception, as importing torch can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = threading.Event()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, at the latest at the next `check`.

    Where it is ignored (nohup, a background job) or handled by someone else, it stays so.
    """
    _pressed.clear()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_pressed() -> bool:
    """Whether Ctrl-C was pressed since the command began."""
    return _pressed.is_set()


def check() -> None:
    """KeyboardInterrupt if Ctrl-C was pressed and the command goes on all the same."""
    if was_pressed():
        raise KeyboardInterrupt


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    _pressed.set()
    raise KeyboardInterrupt
