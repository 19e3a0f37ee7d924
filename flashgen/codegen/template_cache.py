"""Compiled templates, kept between processes: 0.2 s of the first rendering in each."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

from flashgen.errors import FlashgenWarning

_DIGEST_BYTES = hashlib.sha256().digest_size


class TemplateCache(BytecodeCache):
    """A folder with a file a template: the SHA-256 of what follows, then the compiled template.

    It never ends a rendering. What is damaged is compiled again, and said once. A folder that
    cannot be written costs the time and nothing else; the cache of kernels, in the same place,
    says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = False

    def load_bytecode(self, bucket: Bucket) -> None:
        path = self._path(bucket)
        try:
            if not path.is_file():  # a pipe would keep its reader waiting
                return
            data = path.read_bytes()
        except OSError:
            return
        digest, compiled = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(compiled).digest() == digest:
            bucket.bytecode_from_string(compiled)
        elif not self._said:
            self._said = True
            warnings.warn(
                f"{self._folder}: a cached template is damaged; it is compiled again",
                FlashgenWarning,
                stacklevel=2,
            )

    def dump_bytecode(self, bucket: Bucket) -> None:
        compiled = bucket.bytecode_to_string()
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._replace(self._path(bucket), hashlib.sha256(compiled).digest() + compiled)

    def _path(self, bucket: Bucket) -> Path:
        return self._folder / f"{bucket.key}.template"

    def _replace(self, path: Path, data: bytes) -> None:
        """Readers see the old file or the new one, never half of it."""
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
