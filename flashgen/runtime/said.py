"""Warnings that are shown once in a process: nothing falls back silently, nothing nags."""

from __future__ import annotations

import warnings

from flashgen.errors import FlashgenWarning

_SAID: set[str] = set()


def say_once(text: str, *, inside: int = 0) -> None:
    """Warn with `text` the first time it comes up in this process; the place that is shown is the
    caller of who calls this, or `inside` calls further out."""
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, FlashgenWarning, stacklevel=3 + inside)


def forget() -> None:
    """Say everything again; for tests."""
    _SAID.clear()
