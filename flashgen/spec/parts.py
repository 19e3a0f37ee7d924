"""The pieces of a spec, as frozen values in canonical form, and the words the language allows.

These are plain dataclasses: what they hold is checked where a spec is read (`spec/read.py`),
so that a fault is reported with its place, whatever form it was written in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SPEC_VERSION = 1

Align = Literal["bottom_right", "top_left"]
Sink = Literal["none", "per_head"]
KvLens = Literal["none", "per_batch"]
Layout = Literal["bhsd", "bshd", "packed"]
LoopOrder = Literal["flash2", "flash1", "auto"]

ALIGNS: tuple[str, ...] = ("bottom_right", "top_left")
SINKS: tuple[str, ...] = ("none", "per_head")
KV_LENS: tuple[str, ...] = ("none", "per_batch")
LAYOUTS: tuple[str, ...] = ("bhsd", "bshd", "packed")
LOOP_ORDERS: tuple[str, ...] = ("flash2", "flash1", "auto")

# What an input's axis may be called, and the position (an expression symbol) that runs along it.
EXTENTS: tuple[str, ...] = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
SHAPE_FIELDS = EXTENTS

MAX_HEAD_DIM = 1024
MAX_EXTENT = 2**31 - 1  # lengths and positions are int32 on the device
MAX_GROUP = 65536
MAX_PAGE_SIZE = 65536
MAX_INPUT_RANK = 6
MAX_ITEMS = (
    32  # of a mask, a score pipeline, the inputs: far above any model, small enough to print
)
MAX_SHAPES = 1024
MAX_NAME = 100
MAX_INPUT_NAME = 64
MAX_DESCRIPTION = 4000
MAX_POSITION = 2**29  # of a call: sums of three positions are int32 on the device
SHAPE_LIMITS = {  # of one of the spec's shapes: what a call may have
    field: MAX_POSITION if field in ("q_len", "kv_len") else MAX_EXTENT for field in SHAPE_FIELDS
}
MAX_INT64 = 2**63 - 1  # whole numbers of expressions
MIN_NUMBER, MAX_NUMBER = 1e-15, 1e15  # of scale and softcap, in size: fp32 holds their quotients
MIN_FP32 = 2.0**-126  # what is smaller has fewer digits, or none
MAX_FP32 = 3.4028234663852886e38  # the largest finite fp32, in which scores are computed

NAME_PATTERN = r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*"
INPUT_NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_]*"

# Names that mean something in an expression (spec/expr.py), or in a call of the kernel.
SYMBOLS: tuple[str, ...] = ("s", "q", "row", "k", "b", "h", "hk", "q_len", "kv_len")
FUNCTIONS: dict[str, tuple[int, int | None]] = {  # name: least and most arguments
    "abs": (1, 1),
    "min": (2, None),
    "max": (2, None),
    "exp": (1, 1),
    "log": (1, 1),
    "tanh": (1, 1),
    "sigmoid": (1, 1),
    "where": (3, 3),
    "floor": (1, 1),
}
CALL_ARGUMENTS: tuple[str, ...] = (
    "q",
    "k",
    "v",
    "sink",
    "kv_lens",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "page_table",
    "out",
    "lse",
)


@dataclass(frozen=True)
class HeadDim:
    """Elements of a query or key vector (`qk`) and of a value or output vector (`v`)."""

    qk: int
    v: int


@dataclass(frozen=True)
class DTypes:
    """Formats of q, of k and v, and of the output: names of `flashgen.dtypes`."""

    q: str
    kv: str
    out: str


@dataclass(frozen=True)
class Heads:
    """Query heads per K/V head; None: read at run time."""

    group: int | None = None


@dataclass(frozen=True)
class Causal:
    """A query sees the keys up to its own position: k <= q."""


@dataclass(frozen=True)
class Window:
    """A query sees keys q - left … q + right; None: no limit on that side."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class Same:
    """A query sees the keys whose entry of `input` equals its own."""

    input: str


@dataclass(frozen=True)
class Expr:
    """An expression in canonical spelling: a condition in a mask, the new score in a pipeline."""

    expr: str


@dataclass(frozen=True)
class Softcap:
    """cap * tanh(s / cap)."""

    cap: float


@dataclass(frozen=True)
class Alibi:
    """s - slopes[h] * |q - k|, where `input` names the slopes."""

    input: str


@dataclass(frozen=True)
class Bias:
    """s + tensor[b, h, row, k], the indices aligned to the tensor's rank from the right."""

    tensor: str
    grad: bool = False


@dataclass(frozen=True)
class Input:
    """A tensor the caller passes by name; an extent is a number or one of `EXTENTS`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Paged:
    """K and V live in pages of `page_size` keys, found through a page table."""

    page_size: int


@dataclass(frozen=True)
class Shape:
    """Sizes to tune and report for."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int


MaskItem: TypeAlias = Causal | Window | Same | Expr
ScoreItem: TypeAlias = Softcap | Alibi | Bias | Expr
Part: TypeAlias = (
    HeadDim
    | DTypes
    | Heads
    | Causal
    | Window
    | Same
    | Expr
    | Softcap
    | Alibi
    | Bias
    | Input
    | Paged
    | Shape
)
