"""Tensors for a verification: inputs that fit what the spec declares, in buffers full of poison.

Every tensor is a view into a larger buffer. What is not an element of it is NaN (or an id that
matches nothing), and so are keys and values that no query may see: a kernel that reads them shows
it. Output and lse start as NaN, and what surrounds them must still be NaN afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flashgen import reference
from flashgen.dtypes import get_dtype
from flashgen.reference import torch_dtype
from flashgen.runtime.check import Sizes
from flashgen.spec.expr import Binary, Call, Index, Name, Node, parse_expression, walk
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Bias, Expr, Input, Same, Shape

Strides = Literal["plain", "transposed", "unaligned", "expanded", "strided"]

MARGIN_BYTES = 512  # of poison before and after; a multiple of the 16 bytes that aligned rows need
NO_ID = -(2**31) + 11  # what surrounds integers
NAN_EVERY = 3  # cases
SINKS = (0.5, 100.0, -100.0, -1.25, 0.0)


class Case(Protocol):
    """What is drawn for: sizes, how tensors lie in memory, and a number that turns the patterns."""

    @property
    def shape(self) -> Shape: ...

    @property
    def strides(self) -> Strides: ...

    @property
    def index(self) -> int: ...


@dataclass(frozen=True)
class Buffer:
    """A tensor inside poison: `view` is the tensor, `whole` the buffer around it."""

    whole: Tensor
    view: Tensor

    def intact_around(self) -> bool:
        """Whether everything outside the view is still NaN."""
        rest = self.whole.clone()
        inner = rest.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        inner.fill_(math.nan)
        return bool(rest.isnan().all())


@dataclass(frozen=True)
class Arguments:
    """Everything one call takes, and the buffers it fills."""

    sizes: Sizes
    q: Tensor
    k: Tensor
    v: Tensor
    inputs: Mapping[str, Tensor | int | float | bool]
    sink: Tensor | None
    kv_lens: Tensor | None
    out: Buffer
    lse: Buffer

    @property
    def others(self) -> dict[str, object]:
        """The keyword arguments of the call."""
        found: dict[str, object] = dict(self.inputs)
        found |= {} if self.sink is None else {"sink": self.sink}
        return found | ({} if self.kv_lens is None else {"kv_lens": self.kv_lens})


def draw(spec: AttentionSpec, case: Case, device: torch.device, *, wide: bool) -> Arguments:
    """Arguments and poisoned outputs of a case; `wide`: bf16 values in fp32 (interpreter)."""
    shape = case.shape
    generator = torch.Generator(device).manual_seed(case.index)
    drawer = _Drawer(spec, case, device, generator, wide)
    inputs, kv_lens = drawer.inputs()
    sizes = Sizes(shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len)
    k, v = drawer.operand("k"), drawer.operand("v")
    _hide(spec, case, (k, v), inputs, kv_lens)
    return Arguments(
        sizes=sizes,
        q=drawer.operand("q"),
        k=k,
        v=v,
        inputs=inputs,
        sink=drawer.sink() if spec.sink == "per_head" else None,
        kv_lens=kv_lens,
        out=drawer.output(),
        lse=embed((shape.batch, shape.q_heads, shape.q_len), torch.float32, "plain", device),
    )


def draw_inputs(spec: AttentionSpec, case: Case) -> dict[str, Tensor | int | float | bool]:
    """The inputs that `draw` gives a case on a CPU, by name; kv_lens among them."""
    device = torch.device("cpu")
    generator = torch.Generator(device).manual_seed(case.index)
    inputs, kv_lens = _Drawer(spec, case, device, generator, wide=True).inputs()
    return inputs if kv_lens is None else {**inputs, "kv_lens": kv_lens}


def embed(
    shape: Sequence[int], dtype: torch.dtype, strides: Strides, device: torch.device
) -> Buffer:
    """A view of `shape` in a poisoned buffer, laid out as `strides` says."""
    extents = list(shape)
    if strides == "transposed" and len(extents) > 2:
        extents[1], extents[2] = extents[2], extents[1]
    step, pad = (2, 0) if strides == "strided" else (1, 1 if strides == "unaligned" else 0)
    stored = [*extents[:-1], extents[-1] * step + pad]
    steps = [math.prod(stored[axis + 1 :]) for axis in range(len(stored))]
    steps[-1] = step
    if strides == "transposed" and len(extents) > 2:
        steps[1], steps[2] = steps[2], steps[1]
    if strides == "expanded":
        steps[0] = 0
    margin = MARGIN_BYTES // dtype.itemsize
    whole = torch.full(
        (math.prod(stored) + 2 * margin,), _poison(dtype), dtype=dtype, device=device
    )
    offset = margin + (1 if strides == "unaligned" else 0)
    return Buffer(whole, whole.as_strided(tuple(shape), steps, offset))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else NO_ID


def _fill(buffer: Buffer, values: Tensor, strides: Strides) -> Tensor:
    target = buffer.view[:1] if strides == "expanded" else buffer.view
    target.copy_(values[:1] if strides == "expanded" else values)
    return buffer.view


def _hide(
    spec: AttentionSpec,
    case: Case,
    operands: tuple[Tensor, Tensor],
    inputs: Mapping[str, Tensor | int | float | bool],
    kv_lens: Tensor | None,
) -> None:
    """Poison the keys and values that no row sees; where batches share memory, no row of any.

    In one of `NAN_EVERY` cases a value that few rows see is NaN too: theirs are NaN, no others.
    """
    shape, index = case.shape, case.index
    if shape.q_heads * shape.q_len * shape.kv_len > reference.BLOCK_SCORES:
        return  # a dense mask of a large shape; keys beyond kv_lens are poisoned at smaller ones
    visible = reference.mask(
        spec,
        batch=shape.batch,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        inputs=inputs,
        kv_lens=kv_lens,
        device=operands[0].device,
    )
    by_head = visible.unflatten(1, (shape.kv_heads, -1))
    unseen = ~by_head.any(dim=3).any(dim=2)
    shared = operands[0].stride(0) == 0
    if shared:
        unseen = unseen.all(dim=0, keepdim=True)
    held = []
    for tensor in operands:
        once = tensor[:1] if shared else tensor
        held.append(once.transpose(1, 2) if spec.layout == "bshd" else once)
        held[-1][unseen] = math.nan
    if not shared and has_nan(index):
        key = _rarely_seen(by_head)
        if key is not None:
            held[1][key] = math.nan


def has_nan(index: int) -> bool:
    """Whether the case of this number has a NaN among the values that some row sees."""
    return index % NAN_EVERY == 1


def _rarely_seen(visible: Tensor) -> tuple[int, int, int] | None:
    """(batch, K/V head, key) of the key that fewest rows see, if most rows of its head do not."""
    rows = visible.shape[2] * visible.shape[3]
    counts = visible.sum(dim=(2, 3))
    counts = torch.where(counts == 0, rows, counts)
    if counts.numel() == 0 or int(counts.min()) * 2 > rows:
        return None
    place = int(counts.argmin())
    heads, keys = counts.shape[1:]
    return place // (heads * keys), place // keys % heads, place % keys


class _Drawer:
    """Draws the tensors of one case."""

    def __init__(
        self,
        spec: AttentionSpec,
        case: Case,
        device: torch.device,
        generator: torch.Generator,
        wide: bool,
    ) -> None:
        self.spec, self.case, self.device, self.wide = spec, case, device, wide
        self.shape = case.shape
        self.generator = generator

    def operand(self, name: str) -> Tensor:
        spec, shape = self.spec, self.shape
        heads, length = (
            (shape.q_heads, shape.q_len) if name == "q" else (shape.kv_heads, shape.kv_len)
        )
        dim = spec.head_dim.v if name == "v" else spec.head_dim.qk
        extents = self._ordered(shape.batch, heads, length, dim)
        strides = self.case.strides
        if name == "q" and strides == "expanded":
            strides = "plain"
        dtype = spec.dtype.q if name == "q" else spec.dtype.kv
        return self._floats(extents, dtype, strides, self._normal(extents))

    def output(self) -> Buffer:
        shape = self.shape
        extents = self._ordered(shape.batch, shape.q_heads, shape.q_len, self.spec.head_dim.v)
        strides = self.case.strides
        strides = strides if strides in ("transposed", "unaligned") else "plain"
        return embed(extents, self._held(self.spec.dtype.out), strides, self.device)

    def inputs(self) -> tuple[dict[str, Tensor | int | float | bool], Tensor | None]:
        """All inputs, and kv_lens where there are some: what is drawn before all else."""
        kv_lens = self.kv_lens() if self.spec.kv_lens == "per_batch" else None
        return {declared.name: self.input(declared) for declared in self.spec.inputs}, kv_lens

    def sink(self) -> Tensor:
        values = [SINKS[(h + self.case.index) % len(SINKS)] for h in range(self.shape.q_heads)]
        buffer = embed([len(values)], torch.float32, "plain", self.device)
        return _fill(buffer, torch.tensor(values, device=self.device), "plain")

    def kv_lens(self) -> Tensor:
        full = self.shape.kv_len
        return self._integers(
            self._pattern((full // 2 + 1, 0, full, 1, full - 1), most=full), "int32"
        )

    def input(self, declared: Input) -> Tensor | int | float | bool:
        """Values that mean something for the way in which the spec uses `declared`."""
        kind = get_dtype(declared.dtype).kind
        extents = [self._extent(extent) for extent in declared.shape]
        if not declared.shape:
            return self._scalar(declared)
        if any(isinstance(i, Same) and i.input == declared.name for i in self.spec.mask):
            return self._integers(self._ids(extents), declared.dtype)
        if kind == "boolean":
            return self._booleans(declared, extents)
        if kind == "integer":
            return self._integers(self._counts(declared, extents), declared.dtype)
        return self._floats(
            extents, declared.dtype, self._input_strides(extents), self._reals(declared, extents)
        )

    # ---- values

    def _scalar(self, declared: Input) -> int | float | bool:
        kind = get_dtype(declared.dtype).kind
        if kind == "boolean":
            return self.case.index % 2 == 0
        if kind == "float":
            return (0.5, 1.25, 2.0)[self.case.index % 3]
        length = self.shape.kv_len
        pattern = (length // 3, 1, length + 5, 0, 7)
        value = pattern[self.case.index % len(pattern)]
        return max(value, 1) if needs_positive(self.spec, declared.name) else value

    def _ids(self, extents: list[int]) -> Tensor:
        """Document numbers along the last axis: in order, or (every other case) in any order."""
        length = extents[-1]
        if self.case.index % 2:
            return torch.randint(0, 3, extents, generator=self.generator, device=self.device)
        cuts = torch.randint(
            0, max(length, 1), (*extents[:-1], 2), generator=self.generator, device=self.device
        )
        places = torch.arange(length, device=self.device)
        return (places[:, None] >= cuts[..., None, :]).sum(-1) + 7

    def _booleans(self, declared: Input, extents: list[int]) -> Tensor:
        """Three of five true; some rows of a mask see nothing at all."""
        drawn = torch.rand(extents, generator=self.generator, device=self.device) < 0.6
        if "q_len" in declared.shape:
            rows = drawn.movedim(declared.shape.index("q_len"), 0)
            rows[self.case.index % 3 :: 5] = False
        elif self.case.index % 2 and extents and "batch" in declared.shape:
            drawn.movedim(declared.shape.index("batch"), 0)[:1] = False
        strides = self._input_strides(extents)
        return _fill(embed(extents, torch.bool, strides, self.device), drawn, strides)

    def _counts(self, declared: Input, extents: list[int]) -> Tensor:
        """Lengths and positions, from 0 to beyond kv_len; every other case small numbers."""
        length = self.shape.kv_len
        if declared.shape == ("batch",):
            drawn = self._pattern((length // 3, 0, length, length + 5, 1), most=length + 5)
        else:
            most = 4 if self.case.index % 2 else max(length + 1, 2)
            drawn = torch.randint(0, most, extents, generator=self.generator, device=self.device)
        return drawn.clamp(min=1) if needs_positive(self.spec, declared.name) else drawn

    def _reals(self, declared: Input, extents: list[int]) -> Tensor:
        if declared.shape == ("q_heads",):
            slopes = torch.arange(1, extents[0] + 1, device=self.device)
            return torch.exp2(-slopes.float() * 8 / max(extents[0], 1))
        if needs_positive(self.spec, declared.name):
            return torch.rand(extents, generator=self.generator, device=self.device) + 0.5
        drawn = self._normal(extents)
        is_bias = any(isinstance(i, Bias) and i.tensor == declared.name for i in self.spec.score)
        if is_bias and self.case.index % 3 == 2:  # a bias may hide a pair
            hidden = torch.rand(extents, generator=self.generator, device=self.device) < 0.1
            drawn = drawn.masked_fill(hidden, -math.inf)
        return drawn

    def _pattern(self, values: Sequence[int], *, most: int) -> Tensor:
        """One number a batch, from `values` in turn, within 0 to `most`."""
        found = [
            min(max(values[(b + self.case.index) % len(values)], 0), most)
            for b in range(self.shape.batch)
        ]
        return torch.tensor(found, dtype=torch.int64, device=self.device)

    def _normal(self, extents: Sequence[int]) -> Tensor:
        return torch.randn(list(extents), generator=self.generator, device=self.device)

    # ---- placing

    def _integers(self, values: Tensor, dtype: str) -> Tensor:
        extents = list(values.shape)
        strides = self._input_strides(extents)
        return _fill(embed(extents, torch_dtype(dtype), strides, self.device), values, strides)

    def _floats(
        self, extents: Sequence[int], dtype: str, strides: Strides, values: Tensor
    ) -> Tensor:
        rounded = values.to(torch_dtype(dtype)).to(self._held(dtype))
        return _fill(embed(extents, self._held(dtype), strides, self.device), rounded, strides)

    def _held(self, dtype: str) -> torch.dtype:
        found = torch_dtype(dtype)
        return torch.float32 if self.wide and found == torch.bfloat16 else found

    def _input_strides(self, extents: Sequence[int]) -> Strides:
        """As the case says; one axis can only be plain or strided."""
        strides = self.case.strides
        if strides == "expanded":
            return "plain"
        return strides if len(extents) > 2 or strides == "strided" else "plain"

    def _ordered(self, batch: int, heads: int, length: int, dim: int) -> tuple[int, ...]:
        by_length = self.spec.layout == "bshd"
        return (batch, length, heads, dim) if by_length else (batch, heads, length, dim)

    def _extent(self, extent: int | str) -> int:
        return extent if isinstance(extent, int) else int(getattr(self.shape, extent))


def needs_positive(spec: AttentionSpec, name: str) -> bool:
    """Whether an input divides, or has its logarithm taken: 0 would have no meaning there."""
    texts = [item.expr for item in (*spec.mask, *spec.score) if isinstance(item, Expr)]
    return any(
        _reads(part, name)
        for text in texts
        for node in walk(parse_expression(text))
        for part in _delicate(node)
    )


def _delicate(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Binary) and node.operator in {"/", "//", "%"}:
        return (node.right,)
    if isinstance(node, Call) and node.function == "log":
        return node.arguments
    return ()


def _reads(node: Node, name: str) -> bool:
    return any(isinstance(part, Name | Index) and part.name == name for part in walk(node))
