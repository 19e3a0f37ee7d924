"""Triton's key of itself, remembered between processes.

Triton hashes its whole library (0.4 GB) once in every process before its first kernel: 0.4 s, more
than the rest of a warm start together. The hash is kept here, under the size and time of every file
that goes into it, so that its value is the same and only the waiting goes.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import triton
from triton.runtime import cache as triton_cache

from flashgen import settings
from flashgen.fingerprint import fingerprint
from flashgen.runtime.artifact import replace_file


@functools.cache
def remember_triton_key() -> None:
    """From now on, Triton's key in this process comes from a file if its library is unchanged."""
    original = triton_cache.triton_key
    triton_cache.triton_key = functools.cache(lambda: _remembered(original))


def find_triton_key() -> None:
    """Have Triton's key now; processes forked from this one have it too."""
    remember_triton_key()
    triton_cache.triton_key()


def _remembered(original: object) -> str:
    path = settings.cache_dir() / "triton-key.json"
    signature = _signature()
    try:
        known = json.loads(path.read_text("utf-8"))
        if known["library"] == signature:
            return str(known["key"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not readable: hash again, as Triton would
    key = str(original())  # type: ignore[operator]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"library": signature, "key": key}))
    except OSError:
        pass  # a folder that cannot be written costs 0.4 s a process, nothing else
    return key


def _signature() -> str:
    """Names, sizes and times of the files that Triton hashes: its Python code and its libraries."""
    root = Path(triton.__file__).parent
    files = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith((".py", ".so")):
                status = (Path(folder) / name).stat()
                files.append([str(Path(folder, name)), status.st_size, status.st_mtime_ns])
    return fingerprint([triton.__version__, sorted(files)])
