"""A spec bound to a GPU: what the compiler is asked to solve, in the vocabulary of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.dtypes import get_dtype
from flashgen.spec.model import AttentionSpec
from flashgen.target import Target

# The smallest extent of a tensor-core tile (tl.dot needs 16 in every dimension).
MIN_TILE_DIM = 16


def padded_dim(extent: int) -> int:
    """The next power of two, at least `MIN_TILE_DIM`: the width of the tile that holds `extent`.

    >>> [padded_dim(extent) for extent in (1, 16, 72, 128, 192)]
    [16, 16, 128, 128, 256]
    """
    return max(MIN_TILE_DIM, 1 << (extent - 1).bit_length())


@dataclass(frozen=True)
class Problem:
    """`spec` to be compiled for `target`; equal problems give equal kernels."""

    spec: AttentionSpec
    target: Target

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: budgets and spaces are looked up by problem, for each schedule."""
        return hash((self.spec, self.target))

    def __reduce__(self) -> tuple[object, ...]:
        """Only the fields travel: another process hashes text differently."""
        return Problem, (self.spec, self.target)

    @property
    def name(self) -> str:
        """The spec's name; an unnamed spec is called after its fingerprint."""
        return self.spec.display_name

    @property
    def head_dim_qk(self) -> int:
        """Elements of a query or key vector."""
        return self.spec.head_dim.qk

    @property
    def head_dim_v(self) -> int:
        """Elements of a value or output vector."""
        return self.spec.head_dim.v

    @property
    def head_dim_qk_padded(self) -> int:
        """Width of a query or key tile, in elements."""
        return padded_dim(self.head_dim_qk)

    @property
    def head_dim_v_padded(self) -> int:
        """Width of a value or output tile, in elements."""
        return padded_dim(self.head_dim_v)

    @property
    def elem_bytes(self) -> int:
        """Bytes of one element of q."""
        return get_dtype(self.spec.dtype.q).bytes

    @property
    def kv_elem_bytes(self) -> int:
        """Bytes of one element of k and v."""
        return get_dtype(self.spec.dtype.kv).bytes

    @property
    def out_elem_bytes(self) -> int:
        """Bytes of one element of the output."""
        return get_dtype(self.spec.dtype.out).bytes

    @property
    def gqa_group(self) -> int | None:
        """Query heads per K/V head; None: read at run time."""
        return self.spec.heads.group

    @property
    def softmax_scale(self) -> float:
        """The factor of q·k, in natural units."""
        return self.spec.softmax_scale
