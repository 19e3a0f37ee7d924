"""Frozen: from now on nothing is generated, compiled or tuned; what would be raises instead.

For servers that have warmed up, and around CUDA-graph capture: a call that would stop for seconds
is an error that names what it needed. Whoever is about to do slow work calls `refuse_if_frozen`.
"""

from __future__ import annotations

import threading
from types import TracebackType

from flashgen import settings
from flashgen.errors import FrozenError

_lock = threading.Lock()
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
    """FrozenError if frozen; what: the work that would begin, "compile small for nvidia-h200"."""
    if is_frozen():
        raise FrozenError(what)


def thaw() -> None:
    """Undo every `freeze()` of this process."""
    _add(-_depth)


def _add(number: int) -> None:
    global _depth  # noqa: PLW0603 -- one state a process, as the kernels are
    with _lock:
        _depth += number
