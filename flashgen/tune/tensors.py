"""Arguments for a benchmark: random tensors of a spec's declared shapes, and how much they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashgen.dtypes import get_dtype
from flashgen.passes.visibility import visibility
from flashgen.reference import torch_dtype
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Alibi, Input, Same, Shape

MEAN_DOCUMENT = 700  # keys; documents packed into a row are a few hundred to a few thousand tokens
MAX_SETS = 8


@dataclass(frozen=True)
class Arguments:
    """One call's arguments: q, k, v, the declared inputs, and sink and kv_lens where asked for."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    sink: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None

    @property
    def others(self) -> dict[str, object]:
        """The keyword arguments of a call; a run-time scalar as a Python number."""
        found: dict[str, object] = {
            name: tensor if tensor.dim() else tensor.item() for name, tensor in self.inputs.items()
        }
        if self.sink is not None:
            found["sink"] = self.sink
        if self.kv_lens is not None:
            found["kv_lens"] = self.kv_lens
        return found


def draw(
    spec: AttentionSpec,
    shape: Shape,
    *,
    seed: int,
    device: torch.device | str,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Arguments:
    """Standard normal q, k, v, and inputs of the kind that their use asks for, but `given` ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    given = given or {}
    inputs = {
        declared.name: given[declared.name].to(device)
        if declared.name in given
        else _draw_input(spec, declared, shape, seed).to(device)
        for declared in spec.inputs
    }
    kv_lens = _draw_kv_lens(spec, shape, seed)
    q, k, v = (
        torch.randn(sizes, generator=generator, device=device, dtype=_drawable(name)).to(
            torch_dtype(name)
        )
        for name, sizes in zip(
            (spec.dtype.q, spec.dtype.kv, spec.dtype.kv), operand_sizes(spec, shape), strict=True
        )
    )
    sink = None
    if spec.sink == "per_head":
        sink = torch.randn(shape.q_heads, generator=generator, device=device)
    return Arguments(q, k, v, inputs, sink, None if kv_lens is None else kv_lens.to(device))


def mask_inputs(spec: AttentionSpec, shape: Shape, *, seed: int) -> dict[str, torch.Tensor]:
    """What the mask reads of the arguments that `draw` makes with the same seed, on the CPU."""
    read = {str(symbol) for symbol in visibility(spec).predicate.free_symbols}
    found = {
        declared.name: _draw_input(spec, declared, shape, seed)
        for declared in spec.inputs
        if declared.name in read
    }
    kv_lens = _draw_kv_lens(spec, shape, seed)
    return found if kv_lens is None else found | {"kv_lens": kv_lens}


def operand_sizes(spec: AttentionSpec, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """The sizes of q, k and v in the spec's layout."""
    dims = (spec.head_dim.qk, spec.head_dim.qk, spec.head_dim.v)
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    lengths = (shape.q_len, shape.kv_len, shape.kv_len)
    middle = zip(heads, lengths, strict=True)
    ordered = [pair if spec.layout == "bhsd" else pair[::-1] for pair in middle]
    return tuple((shape.batch, *pair, dim) for pair, dim in zip(ordered, dims, strict=True))


def argument_bytes(spec: AttentionSpec, shape: Shape) -> int:
    """Bytes of one call's arguments and its output."""
    formats = (spec.dtype.q, spec.dtype.kv, spec.dtype.kv)
    operands = sum(
        math.prod(sizes) * get_dtype(name).bytes
        for sizes, name in zip(operand_sizes(spec, shape), formats, strict=True)
    )
    out = shape.batch * shape.q_heads * shape.q_len * spec.head_dim.v
    inputs = sum(
        math.prod(_extents(declared, shape)) * get_dtype(declared.dtype).bytes
        for declared in spec.inputs
    )
    return operands + out * get_dtype(spec.dtype.out).bytes + inputs


def sets_needed(call_bytes: int, l2_bytes: int) -> int:
    """How many tensor sets to rotate through, so that none is left in L2 when its turn comes."""
    return max(1, min(MAX_SETS, -(-2 * l2_bytes // max(1, call_bytes))))


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's slopes, fp32: 2^(-8 (h + 1) / heads)."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])


def document_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    """The document of every token of one packed row, int32."""
    ids = torch.arange(len(lengths), dtype=torch.int32)
    return torch.repeat_interleave(ids, torch.tensor(lengths, dtype=torch.int64))


def _extents(declared: Input, shape: Shape) -> list[int]:
    return [
        extent if isinstance(extent, int) else getattr(shape, extent) for extent in declared.shape
    ]


def _drawable(name: str) -> torch.dtype:
    """The dtype to draw in: fp8 has no random generator."""
    return torch.float32 if name == "fp8_e4m3" else torch_dtype(name)


def _draw_input(spec: AttentionSpec, declared: Input, shape: Shape, seed: int) -> torch.Tensor:
    sizes, kind = _extents(declared, shape), get_dtype(declared.dtype).kind
    dtype = torch_dtype(declared.dtype)
    generator = torch.Generator().manual_seed(seed)
    if any(isinstance(item, Alibi) and item.input == declared.name for item in spec.score):
        return slopes(shape.q_heads).expand(sizes).to(dtype)
    if any(isinstance(item, Same) and item.input == declared.name for item in spec.mask):
        return _draw_documents(sizes, generator).to(dtype)
    if kind == "float":
        return torch.randn(sizes, generator=generator).to(dtype)
    if kind == "boolean":
        return torch.rand(sizes, generator=generator) < 0.5
    return torch.randint(0, shape.kv_len + 1, sizes, generator=generator).to(dtype)


def _draw_kv_lens(spec: AttentionSpec, shape: Shape, seed: int) -> torch.Tensor | None:
    """Lengths from half of kv_len, int32; None where the spec has none."""
    if spec.kv_lens != "per_batch":
        return None
    generator = torch.Generator().manual_seed(seed)
    low, high = max(1, shape.kv_len // 2), shape.kv_len + 1
    return torch.randint(low, high, (shape.batch,), generator=generator, dtype=torch.int32)


def _draw_documents(sizes: list[int], generator: torch.Generator) -> torch.Tensor:
    """Ids that count up along the last axis: every token starts a document with the same chance."""
    starts = torch.rand(sizes, generator=generator) < 1.0 / MEAN_DOCUMENT
    return starts.to(torch.int64).cumsum(dim=-1)
