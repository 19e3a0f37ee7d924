"""What a tile graph is made of: tiles (the edges' cargo) and operations (the nodes).

Both are frozen values without behaviour beyond counting themselves. A tile says where it lives and
at which loop level it is made: level 0 runs once for each tile of the outer loop (a query tile in
the flash2 order, a key tile in flash1), level 1 once for each tile pair that is visited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import sympy as sp

from flashgen.dtypes import get_dtype

MemorySpace = Literal["hbm", "smem", "reg"]
Shape = tuple[sp.Expr, ...]

ZERO = sp.Integer(0)


@dataclass(frozen=True)
class Tile:
    """A block of numbers on its way from one operation to another.

    `shape` is symbolic, in elements. `staged` marks a shared-memory tile that the software pipeline
    keeps `num_stages` of. `in_place_of` names the tile whose storage this one takes over: an
    update of running state, or an element-wise step on the scores.
    """

    name: str
    shape: Shape
    dtype: str
    space: MemorySpace
    level: int
    staged: bool = False
    in_place_of: str | None = None

    @property
    def elements(self) -> sp.Expr:
        """Elements of the tile; 1 for a scalar."""
        return sp.Mul(*self.shape)

    @property
    def bytes(self) -> sp.Expr:
        """Bytes of one copy of the tile."""
        return get_dtype(self.dtype).bytes * self.elements


@dataclass(frozen=True)
class Op:
    """An operation that runs once per iteration of the loop at `level`."""

    name: str
    level: int

    @property
    def kind(self) -> str:
        """The word that `pretty` prints for this operation, e.g. "matmul"."""
        return _snake(type(self).__name__)

    @property
    def detail(self) -> str:
        """What `pretty` prints in the operation's brackets, after its inputs."""
        return ""

    @property
    def flops(self) -> sp.Expr:
        """Floating-point operations of one execution, by the project's way of counting."""
        return ZERO


@dataclass(frozen=True)
class Tensor(Op):
    """A whole array in device memory; a node only, its tiles leave or enter it.

    A workspace is the kernel's own: what it holds between two loop steps or two kernels. Read and
    written by one kernel it is two nodes, so that the graph has no cycle.
    """

    shape: Shape
    dtype: str
    role: Literal["input", "output", "workspace"]

    @property
    def bytes(self) -> sp.Expr:
        """Bytes of the whole array."""
        return get_dtype(self.dtype).bytes * sp.Mul(*self.shape)


@dataclass(frozen=True)
class Load(Op):
    """Brings a tile from device memory on chip; what lies outside the array arrives as 0."""


@dataclass(frozen=True)
class Store(Op):
    """Takes a tile from registers to device memory."""


@dataclass(frozen=True)
class ConditionalLoad(Load):
    """A load of some of the loop's steps; in the others the tile starts as `otherwise` (text).

    `trips` counts the steps that load, per batch and query head.
    """

    condition: str
    otherwise: str
    trips: sp.Expr

    @property
    def detail(self) -> str:
        return f"{self.condition}, else {self.otherwise}"


@dataclass(frozen=True)
class ConditionalStore(Store):
    """A store of some of the loop's steps; `trips` counts them, per batch and query head."""

    condition: str
    trips: sp.Expr

    @property
    def detail(self) -> str:
        return self.condition


@dataclass(frozen=True)
class Init(Op):
    """Makes a tile of running state, filled with `value` (text)."""

    value: str

    @property
    def detail(self) -> str:
        return self.value


@dataclass(frozen=True)
class Matmul(Op):
    """`rows` x `inner` times `inner` x `columns`, summed in fp32.

    It reads `left`, `right` (transposed if `transpose_right`) and, if given, `accumulator`, to
    which it adds: names of tiles. The extents are those of the maths, without padding: they count
    FLOPs.
    """

    rows: sp.Expr
    columns: sp.Expr
    inner: sp.Expr
    left: str
    right: str
    transpose_right: bool = False
    accumulator: str | None = None

    @property
    def detail(self) -> str:
        right = f"{self.right}.T" if self.transpose_right else self.right
        return f"{self.left} {right}" + (f" + {self.accumulator}" if self.accumulator else "")

    @property
    def flops(self) -> sp.Expr:
        return 2 * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class _PerScore(Op):
    """Element-wise work on a score tile of `rows` x `columns`, at `flops_per_score` each."""

    rows: sp.Expr
    columns: sp.Expr
    flops_per_score: ClassVar[int] = 0

    @property
    def flops(self) -> sp.Expr:
        return self.flops_per_score * self.rows * self.columns


@dataclass(frozen=True)
class Scale(_PerScore):
    """scores * softmax_scale: 1 FLOP per score."""

    flops_per_score: ClassVar[int] = 1


@dataclass(frozen=True)
class Score(_PerScore):
    """One step of the score pipeline, as text over `s`; by convention its FLOPs do not count.

    `item` is the kind of step (softcap, alibi, bias, expr).
    """

    item: str
    expression: str

    @property
    def detail(self) -> str:
        return f"s = {self.expression}"


@dataclass(frozen=True)
class Mask(_PerScore):
    """Sets scores to -inf where `predicate` (text) does not hold; its FLOPs are not counted."""

    predicate: str

    @property
    def detail(self) -> str:
        return self.predicate


@dataclass(frozen=True)
class OnlineSoftmax(_PerScore):
    """Row maximum, exponentials and row sum, updating the running m_i and l_i.

    4 FLOPs per score: maximum, subtraction, exponential, sum. Also gives `alpha`, the factor by
    which what was summed before has to shrink.
    """

    flops_per_score: ClassVar[int] = 4


@dataclass(frozen=True)
class Softmax(_PerScore):
    """Row maximum, exponentials and row sum of a row that is complete; 4 FLOPs per score."""

    flops_per_score: ClassVar[int] = 4


@dataclass(frozen=True)
class Cast(Op):
    """Rounds a tile to `dtype`, so that the next matmul can take it."""

    dtype: str

    @property
    def detail(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class Rescale(Op):
    """acc * alpha: rebases the accumulator on the new row maximum; by convention not counted."""


@dataclass(frozen=True)
class Sink(Op):
    """An extra logit that joins the softmax denominator, and only that: l_i + exp(sink - m_i)."""


@dataclass(frozen=True)
class Normalize(Op):
    """acc / l_i, 0 for a row that saw no key, rounded to `dtype`."""

    dtype: str

    @property
    def detail(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class LogSumExp(Op):
    """lse = m_i + ln(l_i), natural; -inf for a row that saw no key."""


@dataclass(frozen=True)
class Merge(Op):
    """Adds one split's l_i and acc to the running ones, weighted by exp(m_i - the new maximum)."""


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
