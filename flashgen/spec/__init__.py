"""The spec language: what attention is wanted, as data. (SymPy stays in `spec.symbolic`.)"""

from __future__ import annotations

from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec, parse_spec

__all__ = ["AttentionSpec", "load_spec", "parse_spec"]
