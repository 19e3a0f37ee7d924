"""Is an output right? Rows of it, from every batch and head, are held against the fp64 oracle."""

from __future__ import annotations

import torch

from flashgen import reference
from flashgen.bench.record import WRONG, Accuracy
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.tune.summary import rounded
from flashgen.tune.tensors import Arguments

SLAB_ROWS = 32
MAX_SLABS = 8
MAX_SCORES = 3 * 10**8  # of the oracle, in fp64: some tenths of a second on a data-centre GPU
# bf16 attention is off by 1.6e-3 to 2.5e-3 in this norm, whoever computes it; a wrong mask or score
# by far more.
MAX_RELATIVE_ERROR = 1e-2


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


class Oracle:
    """fp64 results of one case, computed once and held against every contestant's output."""

    def __init__(self, spec: AttentionSpec, shape: Shape, arguments: Arguments) -> None:
        self._spec = spec
        self._slabs = slabs(shape)
        out64: list[torch.Tensor] = []
        plain: list[torch.Tensor] = []
        for rows in self._slabs:
            for attend, found in ((reference.attention, out64), (reference.eager, plain)):
                out, _ = attend(
                    spec,
                    arguments.q,
                    arguments.k,
                    arguments.v,
                    inputs=arguments.inputs,
                    sink=arguments.sink,
                    kv_lens=arguments.kv_lens,
                    rows=rows,
                )
                found.append(out)
        self._out64 = torch.cat(out64, dim=self._row_axis)
        self._bound = reference.error_bound(
            self._out64, torch.cat(plain, dim=self._row_axis), spec.dtype.out
        )

    @property
    def _row_axis(self) -> int:
        return 2 if self._spec.layout == "bhsd" else 1

    def judge(self, out: torch.Tensor, *, poisoned: bool) -> Accuracy:
        """The errors of a whole output, in the spec's layout."""
        rows = [out.narrow(self._row_axis, r.start, len(r)) for r in self._slabs]
        got = torch.cat(rows, dim=self._row_axis).to(self._out64)
        difference = got - self._out64
        scale = float(self._out64.norm())
        return Accuracy(
            max_error=rounded(float(difference.abs().max())) if got.numel() else 0.0,
            bound=rounded(self._bound),
            relative_error=rounded(float(difference.norm()) / scale) if scale else 0.0,
            rows=sum(map(len, self._slabs)),
            finite=bool(torch.isfinite(out).all()),
            poisoned=poisoned,
        )


def fault(accuracy: Accuracy) -> str | None:
    """Why an output is too wrong to be timed; None if it is not."""
    if not accuracy.finite:
        return f"{WRONG}the output holds NaN or infinity"
    if not accuracy.relative_error <= MAX_RELATIVE_ERROR:
        return f"{WRONG}relative error {accuracy.relative_error:.2g} against fp64"
    return None


def poison(like: torch.Tensor) -> int:
    """Fill memory of the size of `like` with NaN and free it: the next such tensor starts as NaN.

    Returns the address, by which it is seen whether an output did start there.
    """
    filled = torch.empty_like(like)
    filled.fill_(float("nan"))
    address: int = filled.data_ptr()
    return address
