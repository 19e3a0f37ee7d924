"""What Triton does once a process, begun in threads while the kernel's source is being written.

Hashing Triton's library (0.4 s) on one side; finding the GPU and building the driver's helper with
the C compiler on the other, mostly outside the interpreter lock. One after the other they took
longer than the source.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache

from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver

from flashgen.runtime.launcher import start_thread
from flashgen.runtime.triton_key import remember_triton_key


@dataclass(frozen=True)
class Warming:
    """Work under way."""

    threads: tuple[threading.Thread, ...]

    def join(self) -> None:
        """Wait for all of it. What failed shows again where Triton needs it."""
        for thread in self.threads:
            thread.join()


@cache
def start_warming() -> Warming:
    """Begin, once a process; join before a launch."""
    remember_triton_key()
    return Warming((start_thread("key", _hash_library), start_thread("driver", _find_gpu)))


def _hash_library() -> None:
    triton_cache.triton_key()


def _find_gpu() -> None:
    driver.active.get_current_target()
