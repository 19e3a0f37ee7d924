"""Triton's C function that launches a kernel, built while the kernel is being compiled.

Triton 3.6 builds one for each signature with the C compiler, after the kernel: 0.3 s of the wait
for a first result. It keeps it on disk, so that it is enough to ask for the same one earlier, in a
thread; the C compiler runs outside the interpreter lock. Later versions build none.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from triton.runtime.driver import driver

from flashgen.runtime.ahead import parameter_type, pointer_types_of
from flashgen.spec.model import AttentionSpec


def start_preparing_launch(
    kernels: Sequence[Any], spec: AttentionSpec
) -> tuple[threading.Thread, ...]:
    """Have the launchers of a generated module's kernels in Triton's disk cache soon.

    Nothing waits for it, and it says nothing: a launch that does not find one builds it itself.
    """
    return (
        start_thread("launchers", lambda: _build(kernels, spec)),
        start_thread("launch-imports", _import_what_a_launch_imports),
    )


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Begin `work` beside this thread; it does not keep the process alive."""
    thread = threading.Thread(target=work, name=f"flashgen-{name}", daemon=True)
    thread.start()
    return thread


def _build(kernels: Sequence[Any], spec: AttentionSpec) -> None:
    pointers = pointer_types_of(spec)
    for kernel in kernels:
        with suppress(Exception):  # the launch will meet it again, where it is reported
            if kernel.is_gluon():  # its tensor maps have types that only a launch knows
                continue
            signature = {p.name: parameter_type(p, pointers) for p in kernel.params}
            source = SimpleNamespace(fn=kernel, signature=signature, constants={})
            # Of the kernel's metadata the C function needs nothing: what follows it is left out.
            driver.active.launcher_cls(source, SimpleNamespace())


def _import_what_a_launch_imports() -> None:
    """A module that a first launch imports (0.05 s), here while assembler and C compiler run."""
    with suppress(Exception):
        if driver.active.get_current_target().backend == "cuda":
            importlib.import_module("triton.experimental.gluon.nvidia.hopper")
