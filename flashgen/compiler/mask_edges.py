"""The edges of a mask, and which cases of a verification they change.

An edge is a side of a window, or a whole number in an expression. A case reaches it where the mask
without it would show other pairs of the case's tensors: only there can a kernel without it be
found out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy as sp

from flashgen.errors import SpecError
from flashgen.passes.count import visible_matrix
from flashgen.passes.visibility import visibility
from flashgen.spec.expr import Number, parse_expression, walk
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Causal, Expr, MaskItem, Window

if TYPE_CHECKING:
    from flashgen.compiler.cases import Case

MIN_EDGE = 17  # below this every case reaches them
FAR = 2**28  # in place of a number: beyond all positions of a case


@dataclass(frozen=True)
class Edge:
    """Where a mask changes: `length` positions, as item `place` of the mask says.

    side: of a window, left or right; None: a number in an expression.
    """

    place: int
    length: int
    side: str | None = None

    def __str__(self) -> str:
        kind = "expr" if self.side is None else f"window.{self.side}"
        return f"{self.length} (mask[{self.place}].{kind})"

    def without(self, spec: AttentionSpec) -> AttentionSpec | None:
        """The spec with a mask that lacks this edge; None where such a number cannot be written."""
        before, after = spec.mask[: self.place], spec.mask[self.place + 1 :]
        try:
            return spec.replace(mask=[*before, *self._without(spec.mask[self.place]), *after])
        except SpecError:
            return None

    def _without(self, item: MaskItem) -> tuple[MaskItem, ...]:
        if isinstance(item, Expr):
            number = rf"(?<![\w.]){self.length}(?![\w.])"
            return (Expr(re.sub(number, str(FAR), item.expr)),)
        assert isinstance(item, Window)
        left, right = (None if self.side == side else getattr(item, side) for side in SIDES)
        return () if left is None and right is None else (Window(left, right),)


SIDES = ("left", "right")


def mask_edges(spec: AttentionSpec) -> tuple[Edge, ...]:
    """The edges beyond those that every case reaches, near ones first."""
    found = {
        edge
        for place, item in enumerate(spec.mask)
        for edge in _edges_of(item, place, causal=Causal() in spec.mask)
        if edge.length >= MIN_EDGE
    }
    return tuple(sorted(found, key=lambda edge: (edge.length, edge.place, edge.side or "")))


def _edges_of(item: MaskItem, place: int, *, causal: bool) -> Iterator[Edge]:
    if isinstance(item, Window):
        for side in SIDES:
            length = getattr(item, side)
            if length is not None and not (causal and side == "right"):  # hidden already
                yield Edge(place, length, side)
    if isinstance(item, Expr):
        for node in walk(parse_expression(item.expr)):
            if isinstance(node, Number) and isinstance(node.value, int):
                yield Edge(place, node.value)


def reaches(spec: AttentionSpec, case: Case, edge: Edge) -> bool:
    """Whether the mask without `edge` would show other pairs, in the first head of some batch."""
    other = edge.without(spec)
    if other is None or visibility(other).predicate == visibility(spec).predicate:
        return False
    inputs, shape = _inputs(spec, case), case.shape
    batches = range(shape.batch if inputs else 1)
    return any(
        bool(
            np.not_equal(
                visible_matrix(spec, shape, inputs, batch=batch),
                visible_matrix(other, shape, inputs, batch=batch),
            ).any()
        )
        for batch in batches
    )


def _inputs(spec: AttentionSpec, case: Case) -> Mapping[str, Any]:
    """What the mask may read, as the verification on a CPU draws it; nothing where it need not be
    known."""
    predicate = visibility(spec).predicate
    read = {*map(str, predicate.free_symbols), *map(str, predicate.atoms(sp.IndexedBase))}
    if spec.kv_lens == "none" and not any(declared.name in read for declared in spec.inputs):
        return {}
    from flashgen.runtime.draw import draw_inputs

    return draw_inputs(spec, case)
