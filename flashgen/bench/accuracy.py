"""Is an output right? Rows of it, from every batch and head, are held against the fp64 oracle."""

from __future__ import annotations

import torch

from flashgen import reference
from flashgen.bench.record import WRONG, Accuracy
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.tune.oracle import Expected, slabs
from flashgen.tune.summary import rounded
from flashgen.tune.tensors import Arguments

# bf16 attention is off by 1.6e-3 to 2.5e-3 in this norm, whoever computes it; a wrong mask or score
# by far more.
MAX_RELATIVE_ERROR = 1e-2


class Oracle:
    """fp64 results of one case, computed once and held against every contestant's output."""

    def __init__(self, spec: AttentionSpec, shape: Shape, arguments: Arguments) -> None:
        self._expected = Expected.of(spec, arguments, slabs(shape))
        self._bound = reference.error_bound(
            self._expected.out64, self._expected.eager_out, spec.dtype.out
        )

    def judge(self, out: torch.Tensor, *, poisoned: bool) -> Accuracy:
        """The errors of a whole output, in the spec's layout."""
        exact = self._expected.out64
        got = self._expected.rows_of(out).to(exact)
        difference = got - exact
        scale = float(exact.norm())
        return Accuracy(
            max_error=rounded(float(difference.abs().max())) if got.numel() else 0.0,
            bound=rounded(self._bound),
            relative_error=rounded(float(difference.norm()) / scale) if scale else 0.0,
            rows=sum(map(len, self._expected.rows)),
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
