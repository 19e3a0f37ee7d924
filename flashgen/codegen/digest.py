"""What generated text depends on besides the problem: the templates and the code generator itself.

Read by the warm path, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from flashgen import settings

_PACKAGES = ("spec", "passes", "codegen", "schedule")


@cache
def generator_digest() -> str:
    """Content of the templates and the code that fills them: editing either makes caches stale."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    roots = [
        (settings.templates_dir(), "*.jinja"),
        *((package / name, "*.py") for name in _PACKAGES),
    ]
    for root, pattern in roots:
        for path in sorted(root.rglob(pattern)):
            digest.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
