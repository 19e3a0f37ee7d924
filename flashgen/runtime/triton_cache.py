"""Triton's own disk cache: where it cannot be written, kernels are kept in a temporary folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from triton import knobs


def use_writable_cache() -> str | None:
    """Make Triton's cache folder one that can be written; what to say if that is another one."""
    wanted = Path(knobs.cache.dir)
    reason = _refusal(wanted)
    if reason is None:
        return None
    knobs.cache.dir = tempfile.mkdtemp(prefix="flashgen-triton-")
    return (
        f"{wanted}: Triton's kernel cache cannot be written ({reason}); machine code of this "
        "process is kept in a temporary folder\n"
        "  hint: set TRITON_CACHE_DIR to a folder that can be written."
    )


def _refusal(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".flashgen-")
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
