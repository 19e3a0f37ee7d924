"""Random calls: a spec, shapes, strides and values, and what the oracle says of the result.

A `Drawn` is plain data whose repr rebuilds it, so that a failing one can be kept as a regression.
Around every tensor lies NaN: in the padding of its rows, before its first and after its last
element, in keys that no query sees and in the outputs before the call. Whatever reads or leaves out
too much shows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen import reference
from flashgen.compiler.choose import compile as compile_spec
from flashgen.reference import Comparison
from flashgen.runtime.launch import Attention, Loaded
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

GUARD = 64  # elements around each tensor: a multiple of 16 bytes in every dtype

# How a logical [batch, heads, len, dim] tensor lies in memory.
FORMS = (
    "contiguous",
    "length_first",  # a view of [batch, len, heads, dim]
    "heads_last",  # a view of [len, batch, dim, heads]: no axis contiguous but heads
    "dim_outer",  # a view of [batch, heads, dim, len]
    "offset",  # contiguous, but the first element is not at a multiple of 16 bytes
    "padded",  # rows one element longer than the head dim
    "padded_16",  # rows longer by 16 elements: aligned, not contiguous
    "fused",  # one third of a fused [.., 3, dim] tensor
    "every_other",  # each second element along dim
    "one_batch",  # batch expanded, stride 0
    "one_head",  # heads expanded, stride 0
    "one_row",  # length expanded, stride 0
)

NO_POSITION = -(2**30)
NUDGES = 32  # draws of roundings that say what error is usual in fp32


@dataclass(frozen=True)
class Drawn:
    """A call as data. `sizes`: batch, q_heads, kv_heads, q_len, kv_len; `tile`: kernel, block_m,
    block_n, or None for the default schedules; `splits`: of the keys, in the flash1 loop; `poison`:
    what, besides memory that is not part of any tensor and keys that no query sees, is NaN.
    """

    spec: dict[str, Any]
    sizes: tuple[int, int, int, int, int]
    tile: tuple[str, int, int] | None = None
    forms: dict[str, str] = field(default_factory=dict)
    magnitude: float = 1.0
    poison: str = "unseen"
    seed: int = 0
    splits: int | None = 1

    @property
    def q_dtype(self) -> str:
        """The format of q."""
        dtype = self.spec["dtype"]
        return str(dtype["q"] if isinstance(dtype, dict) else dtype)

    @property
    def schedule(self) -> Schedule | None:
        if self.tile is None:
            return None
        kernel, block_m, block_n = self.tile
        order = "flash1" if self.spec.get("loop_order") == "flash1" else "flash2"
        return Schedule(
            kernel=kernel,
            loop_order=order,
            block_m=block_m,
            block_n=block_n,
            num_warps=4,
            num_stages=1,
            num_kv_splits=self.splits if (kernel, order) == ("loop", "flash1") else 1,
        )


@dataclass(frozen=True)
class Call:
    """Tensors of one call, in the layout of its spec."""

    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    sink: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None

    @property
    def reserved(self) -> dict[str, torch.Tensor]:
        found = {"sink": self.sink, "kv_lens": self.kv_lens}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


# ---- judging -------------------------------------------------------------------------------------


MOST_LOADED = 16
_LOADED: dict[tuple[AttentionSpec, Schedule | None, torch.device], Loaded] = {}


def kernel_of(spec: AttentionSpec, schedule: Schedule | None = None) -> Attention:
    """The callable with lse, whose outputs are NaN with a guard around them before each launch.

    So are the workspaces that the generated module allocates. A module is imported once for several
    callables, since Triton's interpreter rewrites its functions each time.
    """
    kernel = compile_spec(spec, schedule=schedule, return_lse=True)
    plain = kernel.empty_outputs

    def poisoned(sizes: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = plain(sizes, q)
        return guarded(out), guarded(lse)

    kernel.empty_outputs = poisoned
    load = kernel._load

    def loaded(device: torch.device) -> Loaded:
        key = spec, schedule, device
        if key in _LOADED and device.type == "cpu":
            return _LOADED[key]
        found = load(device)
        found.module.torch = PoisonedTorch()  # what a generated module calls torch
        if len(_LOADED) == MOST_LOADED:
            del _LOADED[next(iter(_LOADED))]
        _LOADED[key] = found
        return found

    kernel._load = loaded
    return kernel


class PoisonedTorch:
    """torch, but that `empty` tensors hold NaN, and numbers that are no position."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: int, **options: Any) -> torch.Tensor:
        tensor = torch.empty(*shape, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else NO_POSITION)


def guarded(like: torch.Tensor) -> torch.Tensor:
    """NaN in the shape of `like`, contiguous, between two guards that hold NaN as well."""
    buffer = torch.full((like.numel() + 2 * GUARD,), math.nan, dtype=like.dtype, device=like.device)
    return buffer[GUARD : GUARD + like.numel()].view(like.shape)


def guards_intact(tensor: torch.Tensor) -> bool:
    """Whether nothing was written before or after a tensor of `guarded`."""
    size = tensor.numel() + 2 * GUARD
    buffer = torch.as_strided(tensor, (size,), (1,), tensor.storage_offset() - GUARD)
    return bool(buffer[:GUARD].isnan().all() and buffer[size - GUARD :].isnan().all())


def judge(call: Call, schedule: Schedule | None = None) -> Comparison:
    """Run a call and hold it against the oracle; AssertionError where it wrote past its outputs."""
    kernel = kernel_of(call.spec, schedule)
    out, lse = kernel(call.q, call.k, call.v, **call.inputs, **call.reserved)
    assert guards_intact(out), "wrote past the ends of out"
    assert guards_intact(lse), "wrote past the ends of lse"
    return held_against_oracle(call, out, lse)


def held_against_oracle(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, rows: range | None = None
) -> Comparison:
    """`out`, `lse` of a call (or of some rows of it) against fp64, in the bound of design.md."""
    arguments = {"inputs": call.inputs, "sink": call.sink, "kv_lens": call.kv_lens, "rows": rows}
    ref_out, ref_lse = reference.attention(call.spec, call.q, call.k, call.v, **arguments)
    eager_out, eager_lse = reference.eager(call.spec, call.q, call.k, call.v, **arguments)
    return reference.compare(
        out,
        lse,
        ref_out,
        ref_lse,
        eager_out,
        eager_lse=eager_lse,
        out_dtype=call.spec.dtype.out,
        sink=call.sink,
        layout=call.spec.layout,
    )


def verdict(drawn: Drawn, device: str = "cpu") -> Comparison:
    """The verdict on a drawn call, in the bound of design.md.

    In fp32, where few roundings count (few rows, or keys that are all alike), eager's own are small
    by luck. Where its bound is missed there, the usual error is also what moving the elements of q
    and k by 1 ulp does to the exact result; the formula stays.
    """
    call = built(drawn, device)
    comparison = judge(call, drawn.schedule)
    if drawn.q_dtype != "fp32" or comparison.max_error <= comparison.bound:
        return comparison
    exact, _ = _oracle(call)
    bounds = [
        reference.error_bound(exact, _oracle(_nudged(call, draw))[0], call.spec.dtype.out)
        for draw in range(NUDGES)
    ]
    return replace(comparison, bound=max(comparison.bound, *bounds))


def _nudged(call: Call, draw: int) -> Call:
    """The call in fp64 with every element of q and k off by 1 ulp of fp32, one way or the other."""
    random = torch.Generator().manual_seed(draw)

    def off(tensor: torch.Tensor) -> torch.Tensor:
        sign = 2 * torch.randint(2, tensor.shape, generator=random).to(tensor.device) - 1
        return tensor.double() * (1 + torch.finfo(torch.float32).eps * sign)

    return replace(call, q=off(call.q), k=off(call.k))


def _oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attention(
        call.spec, call.q, call.k, call.v, inputs=call.inputs, sink=call.sink, kv_lens=call.kv_lens
    )


# ---- tensors -------------------------------------------------------------------------------------


def built(drawn: Drawn, device: str = "cpu") -> Call:
    """The tensors of a drawn call: the same for the same data, on any machine."""
    spec = AttentionSpec(**drawn.spec)
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
    sizes = dict(zip(names, drawn.sizes, strict=True))
    random = _Random(drawn.seed)
    others = {i.name: _input_values(i, sizes, random) for i in spec.inputs}
    sink = kv_lens = None
    if spec.sink == "per_head":
        sink = random.normal("sink", (sizes["q_heads"],)) * random.pick("sink_size", (1, 10, 100))
        sink = sink.to(random.pick("sink_dtype", (torch.float32, torch.bfloat16, torch.float16)))
    if spec.kv_lens == "per_batch":
        kv_lens = random.integers("kv_lens", (sizes["batch"],), 0, sizes["kv_len"])
        kv_lens = kv_lens.to(random.pick("kv_lens_dtype", (torch.int32, torch.int64)))
    visible = reference.mask(spec, **sizes, inputs=others, kv_lens=kv_lens)
    # [batch, kv_heads, kv_len]: keys that no query of the group sees.
    group = sizes["q_heads"] // sizes["kv_heads"]
    seen = visible.reshape(
        sizes["batch"], sizes["kv_heads"], group * sizes["q_len"], sizes["kv_len"]
    )
    unseen = ~seen.any(dim=2)

    def operand(name: str, heads: str, length: str, dim: int) -> torch.Tensor:
        form = drawn.forms.get(name, "contiguous")
        dtype = reference.torch_dtype(spec.dtype.q if name == "q" else spec.dtype.kv)
        shape = [sizes["batch"], sizes[heads], sizes[length], dim]
        shared = {"one_batch": 0, "one_head": 1, "one_row": 2}.get(form)
        if shared is not None:
            shape[shared] = min(shape[shared], 1)
        value = (random.normal(name, tuple(shape)) * drawn.magnitude).to(dtype)
        if name != "q" and drawn.poison != "none":
            hidden = unseen if shared is None else unseen.all(dim=shared, keepdim=True)
            value[hidden[: shape[0], : shape[1], : shape[2]]] = math.nan
        if drawn.poison == f"seen_{name}" and shape[0] * shape[1] * shape[2]:
            value[:, :, random.pick(f"{name}_row", range(shape[2]))] = math.nan
        full = (sizes["batch"], sizes[heads], sizes[length], dim)
        return _in_layout(_laid_out(value.to(device), form).expand(full), spec.layout)

    return Call(
        spec=spec,
        q=operand("q", "q_heads", "q_len", spec.head_dim.qk),
        k=operand("k", "kv_heads", "kv_len", spec.head_dim.qk),
        v=operand("v", "kv_heads", "kv_len", spec.head_dim.v),
        inputs={
            name: _spread(value.to(device), drawn.forms.get(name, "contiguous"))
            if isinstance(value, torch.Tensor)
            else value
            for name, value in others.items()
        },
        sink=None if sink is None else _spread(sink.to(device), drawn.forms.get("sink", "")),
        kv_lens=None
        if kv_lens is None
        else _spread(kv_lens.to(device), drawn.forms.get("kv_lens", "")),
    )


def _in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


class _Random:
    """Named draws, so that one does not depend on which others there are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(name), dtype=torch.float32)

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator(name), dtype=torch.float32)

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator(name))

    def pick(self, name: str, choices: Any) -> Any:
        return choices[int(self.integers(name, (), 0, len(choices) - 1))]


def _input_values(declared: Input, sizes: Mapping[str, int], random: _Random) -> Any:
    """Values of a declared input, by its name and dtype: ids, a mask, slopes, a bias, lengths."""
    name, dtype = declared.name, reference.torch_dtype(declared.dtype)
    shape = tuple(e if isinstance(e, int) else sizes[e] for e in declared.shape)
    if dtype == torch.bool:
        value = random.uniform(name, shape) < random.pick(f"{name}_share", (0.02, 0.5, 0.9))
    elif dtype.is_floating_point:
        value = random.normal(name, shape) * (0.3 if name == "slopes" else 2.0)
        if name.startswith("rel"):  # a bias that hides: all of it, some of it, nothing
            hides = random.uniform(f"{name}_hides", shape) < random.pick(
                f"{name}_share", (0, 0, 0.4)
            )
            value = torch.where(hides, -math.inf, value)
        value = value.to(dtype)
    elif name.startswith("doc"):
        value = random.integers(name, shape, 0, random.pick(f"{name}_ids", (0, 1, 3)))
        if random.pick(f"{name}_sorted", (True, True, False)):
            value = value.sort(dim=-1).values
        value = value.to(dtype)
    else:
        value = random.integers(name, shape, -3, sizes["kv_len"] + 4).to(dtype)
    return value if shape else value.item()


def _laid_out(value: torch.Tensor, form: str) -> torch.Tensor:
    """`value`, [batch, heads, len, dim], in the memory layout `form`, with NaN around it."""
    batch, heads, length, dim = value.shape
    shapes = {
        "length_first": ((batch, length, heads, dim), (0, 2, 1, 3)),
        "heads_last": ((length, batch, dim, heads), (1, 3, 0, 2)),
        "dim_outer": ((batch, heads, dim, length), (0, 1, 3, 2)),
    }
    extra = {
        "padded": dim + 1,
        "padded_16": dim + 16 + -dim % 16,
        "fused": 3 * dim,
        "every_other": 2 * dim,
    }
    if form in shapes:
        shape, order = shapes[form]
        view = _nan(shape, value).permute(order)
    elif form in extra:
        wide = _nan((batch, heads, length, extra[form]), value)
        starts = {"fused": slice(dim, 2 * dim), "every_other": slice(None, None, 2)}
        view = wide[..., starts.get(form, slice(0, dim))]
    else:
        view = _nan(value.shape, value, offset=1 if form == "offset" else 0)
    view.copy_(value)
    return view


def _nan(shape: tuple[int, ...], like: torch.Tensor, offset: int = 0) -> torch.Tensor:
    size = math.prod(shape)
    buffer = torch.full((size + 2 * GUARD,), math.nan, dtype=like.dtype, device=like.device)
    return buffer[GUARD + offset : GUARD + offset + size].view(shape)


def _spread(value: torch.Tensor, form: str) -> torch.Tensor:
    """A declared input in another memory layout, of whatever rank."""
    fill = math.nan if value.is_floating_point() else 1
    if value.dim() and form in {"padded", "padded_16", "fused"}:
        extent = value.shape[-1] + (16 if form == "padded_16" else 3)
        wide = value.new_full((*value.shape[:-1], extent), fill)
        wide[..., : value.shape[-1]] = value
        return wide[..., : value.shape[-1]]
    if value.dim() and form == "every_other":
        wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), fill)
        wide[..., ::2] = value
        return wide[..., ::2]
    if value.dim() > 1 and form in {"length_first", "heads_last", "dim_outer"}:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "offset":
        return torch.cat([value.new_zeros(1), value.reshape(-1)])[1:].view(value.shape)
    return value
