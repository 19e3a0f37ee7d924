"""A process that someone waits for: fewer garbage collections, quick turns between threads.

Importing SymPy and writing a kernel makes 160,000 objects that live on, and a million where torch
is loaded; collecting among those took 0.2 s of 1.2 s (2 cores). A thread that reads a file in
pieces wants the interpreter lock for each piece; Python lets it wait 5 ms for every turn where
another thread is busy, which made hashing Triton's library take 0.9 s instead of 0.6 s (H200 host).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 400_000  # between collections; Python's default is 700 to 2,000
TURN_S = 0.0005

_lock = threading.Lock()
_inside: list[tuple[tuple[int, int, int], float]] = []  # what the first one found, for each inside


@contextmanager
def in_haste() -> Iterator[None]:
    """Within the block; the last thread that leaves one restores what the first one found."""
    with _lock:
        found = _inside[0] if _inside else (gc.get_threshold(), sys.getswitchinterval())
        _inside.append(found)
        gc.set_threshold(ALLOCATIONS)
        sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                gc.set_threshold(*found[0])
                sys.setswitchinterval(found[1])
