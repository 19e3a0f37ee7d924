"""What Triton does once a process, begun in a thread while the kernel's source is being written.

Hashing Triton's library, finding the GPU and building the driver's helper take about a second in a
process with cold caches, mostly outside the interpreter lock.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache

from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver

from flashgen.runtime.triton_key import remember_triton_key


@cache
def start_warming() -> threading.Thread:
    """Begin, once a process; join before a launch. An error shows again where Triton needs it."""
    thread = threading.Thread(target=_warm, name="flashgen-warm", daemon=True)
    thread.start()
    return thread


def _warm() -> None:
    remember_triton_key()
    triton_cache.triton_key()
    if driver.active.get_current_target().backend == "cuda":
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")  # a launch asks for it
