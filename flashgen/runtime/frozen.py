"""Frozen: from now on nothing is generated, compiled or tuned; what would be raises instead.

For servers that have warmed up: a call that would stop for seconds is an error that names what it
needed. While a CUDA graph is being captured it is one too: the driver loads no kernel then. Whoever
is about to do slow work calls `refuse_if_frozen`; a launch, of which only Triton knows whether it
has to compile, is made inside `not_compiling`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from flashgen import settings
from flashgen.errors import CaptureError, FrozenError

_lock = threading.Lock()
_hook_lock = threading.RLock()
_depth = 0


class freeze:  # noqa: N801 -- called and used in `with` like a function
    """Calling it freezes this process for good; as a context manager, until the block ends.

    A call that then needs a kernel that is not there raises FrozenError. FLASHGEN_FROZEN=1 does the
    same for a whole process.
    """

    def __init__(self) -> None:
        _add(1)

    def __enter__(self) -> freeze:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _add(-1)


def is_frozen() -> bool:
    """Whether slow work raises here."""
    return _depth > 0 or settings.frozen()


def refuse_if_frozen(what: str) -> None:
    """FrozenError if frozen, CaptureError during a capture; what: the work that would begin,
    "compile small for nvidia-h200"."""
    error = _refusal(what)
    if error is not None:
        raise error


def _refusal(what: str) -> FrozenError | None:
    if is_frozen():
        return FrozenError(what)
    return CaptureError(what) if is_capturing() else None


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda and cuda.is_initialized() and cuda.is_current_stream_capturing())


@contextmanager
def not_compiling(what: str) -> Iterator[None]:
    """Launches inside it raise where Triton would compile a generated kernel and slow work is
    refused; elsewhere it does nothing. Kernels of others compile as ever."""
    error = _refusal(what)
    if error is None:
        yield
        return
    from triton import knobs

    def refuse(**asked: Any) -> object:
        if str(getattr(asked.get("fn"), "module", "")).startswith("flashgen_generated"):
            raise error
        return before(**asked) if before else None

    with _hook_lock:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = refuse
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before


def thaw() -> None:
    """Undo every `freeze()` of this process."""
    _add(-_depth)


def _add(number: int) -> None:
    global _depth  # noqa: PLW0603 -- one state a process, as the kernels are
    with _lock:
        _depth += number
