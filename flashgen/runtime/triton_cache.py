"""Triton's own disk cache: what is damaged there is compiled again, and where it cannot be written,
kernels are kept in a temporary folder.

Triton takes what it finds: a binary that was cut short is used as it is, and a missing one is an
error.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from flashgen.runtime.said import say_once

ROOM_BYTES = 4 << 20  # asked for before there is work; a kernel leaves about 1 MB


def use_writable_cache() -> str | None:
    """Make Triton's cache folder one that can be written; what to say if that is another one."""
    reason = _refusal(Path(knobs.cache.dir))
    return None if reason is None else _use_temporary(reason)


def _use_temporary(reason: str) -> str:
    """Machine code goes to a temporary folder from now on; what to say of it."""
    wanted = knobs.cache.dir
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
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".flashgen-") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)  # a full disk still takes empty files
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


@contextmanager
def checked_entries() -> Iterator[None]:
    """Within it, Triton compiles what its cache lacks parts of; it costs a launch 0.4 us.

    A cache that the user brings (TRITON_CACHE_MANAGER) is left alone.
    """
    if knobs.cache.manager_class is not None:
        yield
        return
    knobs.cache.manager_class = WholeEntries
    try:
        yield
    finally:
        del knobs.cache.manager_class  # not by a scope: the folder may have become another one


@contextmanager
def whole_entries(*, anew: bool = False) -> Iterator[None]:
    """As `checked_entries`, and entries have their assembly; anew: all are compiled."""
    with checked_entries(), knobs.compilation.scope():
        knobs.compilation.store_binary_only = False
        if anew:
            say_damaged()
            knobs.compilation.always_compile = True
        yield


def say_damaged() -> None:
    say_once(
        f"{knobs.cache.dir}: machine code in Triton's kernel cache is damaged or incomplete; it is "
        "compiled again"
    )


class WholeEntries(FileCacheManager):
    """Triton's disk cache, where a kernel with a part that is missing or cut short is not there."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._for_kernels = not (override or dump)
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._move(key, error)

    def get_group(self, filename: str) -> dict[str, str] | None:
        try:
            group: dict[str, str] | None = super().get_group(filename)
        except (AttributeError, TypeError):  # a list of files that is none
            group = {"": ""}
        if not group or is_whole(group):
            return group
        say_damaged()
        return None

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        try:
            return str(super().put(data, filename, binary))
        except OSError as error:
            for left in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(left, ignore_errors=True)
            self._move(self.key, error)
            return str(super().put(data, filename, binary))

    def _move(self, key: str, error: OSError) -> None:
        if not self._for_kernels:
            raise error
        say_once(_use_temporary(_reason(error)))
        super().__init__(key)


def is_whole(group: Mapping[str, str]) -> bool:
    """Whether the files of a kernel (name -> path) are complete, as far as they tell."""
    try:
        found = {Path(path).suffix[1:]: _read(Path(path)) for path in group.values()}
        metadata = json.loads(found["json"])
        parts = _PARTS[metadata["target"]["backend"]]
        binary = {kind for kind, check in parts.items() if check is _is_whole_elf}
        for kind in found.keys() - binary:
            found[kind].decode()
        expected = binary if knobs.compilation.store_binary_only else parts.keys()
        return isinstance(metadata["shared"], int) and all(
            parts[kind](found[kind]) for kind in expected
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _read(path: Path) -> bytes:
    if not path.is_file():  # a pipe would keep its reader waiting
        raise FileNotFoundError(path)
    return path.read_bytes()


def _is_whole_elf(data: bytes) -> bool:
    """Whether the tables and sections that the header of a 64-bit ELF file names are in it."""
    if len(data) < _ELF.size or data[:5] != b"\x7fELF\x02":
        return False
    programs_at, sections_at, program_size, programs, section_size, sections = _ELF.unpack_from(
        data
    )
    ends = (programs_at + program_size * programs, sections_at + section_size * sections)
    if not sections or section_size < _SECTION.size or max(ends) > len(data):
        return False
    table = data[sections_at : sections_at + section_size * sections]
    for start in range(0, len(table), section_size):
        kind, offset, size = _SECTION.unpack_from(table, start)
        if kind != _SECTION_WITHOUT_BYTES and offset + size > len(data):
            return False
    return True


# The fields that are read, of the ELF header and of a section's.
_ELF = struct.Struct("<32xQQ4x2xHHHH2x")
_SECTION = struct.Struct("<4xI16xQQ")
_SECTION_WITHOUT_BYTES = 8


def _is_whole_ptx(data: bytes) -> bool:
    """Whether a kernel begins and every block that begins ends."""
    return b".entry" in data and data.count(b"{") == data.count(b"}") > 0


def _is_whole_amdgcn(data: bytes) -> bool:
    return b".end_amdgpu_metadata" in data


# Back end -> what a kernel consists of, beside its metadata.
_PARTS: dict[str, dict[str, Callable[[bytes], bool]]] = {
    "cuda": {"ptx": _is_whole_ptx, "cubin": _is_whole_elf},
    "hip": {"amdgcn": _is_whole_amdgcn, "hsaco": _is_whole_elf},
}
