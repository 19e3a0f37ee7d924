"""Kernel text in Triton's names -> the same text in Gluon's.

Macros, loop bounds and score expressions are written once, with the `tl.` names; a kernel in Gluon
takes them through this table. What is not in it has no counterpart that means the same.
"""

from __future__ import annotations

import re

_SAME_NAME = frozenset(
    "abs cdiv exp exp2 float32 floor int32 int64 load log log2 max maximum min minimum multiple_of "
    "sqrt store sum where zeros_like".split()
)
_NAME = re.compile(r"\btl\.(\w+)")


def gluon_text(text: str) -> str:
    """`text` with `gl.` names; LookupError for a function that Gluon has not under the same name.

    >>> gluon_text("tl.where(kv_idx < 4, tl.exp2(x), 0.0)")
    'gl.where(kv_idx < 4, gl.exp2(x), 0.0)'
    """
    return _NAME.sub(_in_gluon, text)


def _in_gluon(found: re.Match[str]) -> str:
    if found[1] not in _SAME_NAME:
        raise LookupError(f"tl.{found[1]} has no counterpart in the Gluon family")
    return f"gl.{found[1]}"
