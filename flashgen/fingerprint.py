"""Content hashes: equal values give equal 64 hex characters on every machine, in every run."""

from __future__ import annotations

import hashlib
import json


def canonical_json(value: object) -> str:
    """`value` (JSON types only) as JSON text with sorted keys and no spaces; NaN and inf refused.

    >>> canonical_json({"b": 1, "a": [1.5, None]})
    '{"a":[1.5,null],"b":1}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def fingerprint(value: object) -> str:
    """SHA-256 of `canonical_json(value)`, as 64 hex characters."""
    return fingerprint_text(canonical_json(value))


def fingerprint_text(text: str) -> str:
    """SHA-256 of `text` in UTF-8, as 64 hex characters."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
