"""The input of a score that TMA can bring in tiles: one number for each row and key, as it lies.

A bias or a relative table that was spread out: [..., q_len, kv_len], read once in the score at the
position of the row and of the key. Other reads by pairs (a table looked up at a distance, a mask)
are not tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy as sp

from flashgen.passes.inputs import collapse_broadcasts, range_conditions
from flashgen.passes.simplify import under_mask
from flashgen.passes.visibility import visibility
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

FORMATS = frozenset({"fp16", "bf16", "fp32"})
MAX_RANK = 4  # batch, heads, rows, keys


@dataclass(frozen=True)
class ScoreTile:
    """`read` of `tensor`; its leading indices are numbers of the program."""

    tensor: Input
    read: sp.Indexed


@cache
def score_tile(spec: AttentionSpec) -> ScoreTile | None:
    """The spec's tile; None where there is none, or several."""
    natural = collapse_broadcasts(sym.score_expression(spec), spec)
    score = under_mask(natural, visibility(spec).predicate)
    reads = [read for read in score.atoms(sp.Indexed) if read.has(sym.K)]
    if len(reads) != 1 or visibility(spec).predicate.has(reads[0].base):
        return None
    (read,) = reads
    tensor = spec.input(str(read.base))
    *leading, row, key = read.indices if len(read.indices) > 1 else (None, None, None)
    of_program = all(index in (sym.B, sym.H, sym.HK) or index == 0 for index in leading)
    whole = (row, key) == (sym.ROW, sym.K) and tensor.shape[-2:] == ("q_len", "kv_len")
    fits = tensor.dtype in FORMATS and len(tensor.shape) <= MAX_RANK
    if not (whole and of_program and fits) or range_conditions(read, spec):
        return None
    return ScoreTile(tensor, read)
