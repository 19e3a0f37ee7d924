"""What a case's output must be: fp64 and eager results of some query rows, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashgen import reference
from flashgen.reference import Comparison, torch_dtype
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

SLAB_ROWS = 32
MAX_SLABS = 8
MAX_SCORES = 3 * 10**8  # of the oracle, in fp64: some tenths of a second on a data-centre GPU


def slabs(shape: Shape) -> list[range]:
    """Runs of query rows to check: the first and the last ones, and some between, at odd places.

    >>> slabs(Shape(1, 1, 1, 100, 100))
    [range(0, 100)]
    >>> [(rows.start, rows.stop) for rows in slabs(Shape(1, 8, 8, 4096, 4096))][:3]
    [(0, 32), (580, 612), (1161, 1193)]
    """
    if shape.q_len <= SLAB_ROWS * MAX_SLABS:
        return [range(shape.q_len)]
    row_scores = max(1, shape.batch * shape.q_heads * shape.kv_len)
    number = max(2, min(MAX_SLABS, MAX_SCORES // (row_scores * SLAB_ROWS)))
    last = shape.q_len - SLAB_ROWS
    starts = [last * index // (number - 1) for index in range(number)]
    return [range(start, start + SLAB_ROWS) for start in starts]


class Call(Protocol):
    """What a call is given, whoever drew it."""

    @property
    def q(self) -> torch.Tensor: ...

    @property
    def k(self) -> torch.Tensor: ...

    @property
    def v(self) -> torch.Tensor: ...

    @property
    def inputs(self) -> Mapping[str, Any]: ...

    @property
    def sink(self) -> torch.Tensor | None: ...

    @property
    def kv_lens(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Expected:
    """Results of some query rows of one call: by fp64, and as plain torch computes them."""

    spec: AttentionSpec
    rows: tuple[range, ...]
    sink: torch.Tensor | None
    out64: torch.Tensor
    lse64: torch.Tensor
    eager_out: torch.Tensor
    eager_lse: torch.Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, call: Call, rows: list[range]) -> Expected:
        """Compute both, a run of rows at a time."""
        q, k, v = call.q, call.k, call.v
        given: dict[str, Any] = {"inputs": call.inputs, "sink": call.sink, "kv_lens": call.kv_lens}
        parts = [
            (
                *reference.attention(spec, q, k, v, **given, rows=each),
                *reference.eager(spec, q, k, v, **given, rows=each),
            )
            for each in rows
        ]
        out64, lse64, eager_out, eager_lse = zip(*parts, strict=True)
        axis = row_axis(spec)
        return cls(
            spec,
            tuple(rows),
            call.sink,
            torch.cat(out64, dim=axis),
            torch.cat(lse64, dim=2),
            torch.cat(eager_out, dim=axis),
            torch.cat(eager_lse, dim=2),
        )

    def rows_of(self, out: torch.Tensor) -> torch.Tensor:
        """The checked rows of a whole output, in the spec's layout."""
        return _rows(out, self.rows, row_axis(self.spec))

    def compare(self, out: torch.Tensor, lse: torch.Tensor | None) -> Comparison:
        """Hold whole results against what is known of them; lse None: only `out` is judged."""
        return reference.compare(
            self.rows_of(out).to(torch_dtype(self.spec.dtype.out)),
            None if lse is None else _rows(lse, self.rows, 2),
            self.out64,
            self.lse64,
            self.eager_out,
            eager_lse=self.eager_lse,
            out_dtype=torch_dtype(self.spec.dtype.out),
            sink=self.sink,
            layout=self.spec.layout,
        )


def row_axis(spec: AttentionSpec) -> int:
    """The axis of query rows in an output."""
    return 2 if spec.layout == "bhsd" else 1


def _rows(tensor: torch.Tensor, rows: tuple[range, ...], axis: int) -> torch.Tensor:
    return torch.cat([tensor.narrow(axis, each.start, len(each)) for each in rows], dim=axis)
