"""Checks of a call's tensors: each message names the argument, what came and what fits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.dtypes import get_dtype
from flashgen.errors import TensorError
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import MAX_FP32, MAX_POSITION, Input

AXES = {"bhsd": ("batch", "heads", "len", "dim"), "bshd": ("batch", "len", "heads", "dim")}
MAX_INT32 = 2**31 - 1  # whole scalars are int32 on the device


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call, read from q and k."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int

    def extent(self, name: int | str) -> int:
        """An input's declared extent as a number."""
        if isinstance(name, int):
            return name
        return {
            "batch": self.batch,
            "q_heads": self.num_q_heads,
            "kv_heads": self.num_kv_heads,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
        }[name]


def check_call(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: Mapping[str, object],
) -> Sizes:
    """Sizes of the call; TensorError for the first argument that does not fit."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_operand(spec, name, tensor, q)
    sizes = _sizes(spec, q, k, v)
    _check_names(spec, others)
    for declared in expected_arguments(spec):
        _check_input(declared, others[declared.name], sizes, q.device)
    _refuse_gradients(spec, {"q": q, "k": k, "v": v, **others})
    return sizes


def expected_arguments(spec: AttentionSpec) -> tuple[Input, ...]:
    """Keyword arguments of a call, reserved ones included, in the order of the module's `run`."""
    found = list(spec.inputs)
    if spec.sink == "per_head":
        found.append(Input("sink", ("q_heads",), "float"))
    if spec.kv_lens == "per_batch":
        found.append(Input("kv_lens", ("batch",), "int"))
    return tuple(found)


# What a reserved argument may be: its format is not declared in the spec.
_FREE_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.bfloat16, torch.float16),
    "int": (torch.int32, torch.int64),
}


def _dtypes(name: str) -> tuple[torch.dtype, ...]:
    return _FREE_DTYPES.get(name) or (getattr(torch, get_dtype(name).torch_name),)


def _check_operand(spec: AttentionSpec, name: str, tensor: object, q: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(name, type(tensor).__name__, "a torch.Tensor")
    _check_plain(name, tensor)
    if tensor.dim() != 4:
        axes = ", ".join(AXES[spec.layout])
        raise TensorError(
            name, f"shape {_shape(tensor)}", f"4 dimensions [{axes}] (layout {spec.layout})"
        )
    wanted = getattr(torch, get_dtype(spec.dtype.q if name == "q" else spec.dtype.kv).torch_name)
    if tensor.dtype != wanted:
        raise TensorError(
            name,
            _dtype(tensor.dtype),
            _dtype(wanted),
            f"the spec says dtype {spec.dtype.q}{_conversion(name, tensor, wanted)}.",
        )
    dim = spec.head_dim.v if name == "v" else spec.head_dim.qk
    if tensor.shape[-1] != dim:
        raise TensorError(
            name, f"head dim {tensor.shape[-1]} in shape {_shape(tensor)}", f"head dim {dim}"
        )
    _check_device(name, tensor, q.device)


def _conversion(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> str:
    if tensor.is_complex():
        return ""
    plain = f"{name}.dequantize()" if tensor.is_quantized else name
    return f"; use {plain}.to({wanted})"


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """TensorError for what has no memory of its own with one value for each element."""
    kind = type(tensor)
    got, hint = "", None
    if tensor.is_nested:
        got, hint = "a nested tensor", "pad it, and pass the lengths of the keys as kv_lens."
    elif tensor.layout is not torch.strided:
        got, hint = f"a tensor of layout {tensor.layout}", f"use {name}.to_dense()."
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        got, hint = f"a {kind.__name__}", "its operations are not those of plain tensors."
    elif tensor.is_neg():  # memory holds the values with the other sign
        got, hint = "a view with its sign to be changed", f"use {name}.resolve_neg()."
    else:
        try:
            tensor.data_ptr()
        except RuntimeError:
            got, hint = "a tensor without memory", "torch.vmap and torch.func are not served."
    if got:
        raise TensorError(name, got, "a dense tensor with memory of its own", hint)


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise TensorError(name, f"device {tensor.device}", f"device {device}, where q is")
    if tensor.device.type not in {"cuda", "cpu"}:
        raise TensorError(name, f"device {tensor.device}", "a GPU, or the CPU (interpreted)")


def _sizes(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sizes:
    heads, length = AXES[spec.layout].index("heads"), AXES[spec.layout].index("len")
    sizes = Sizes(q.shape[0], q.shape[heads], k.shape[heads], q.shape[length], k.shape[length])
    if k.shape[0] != sizes.batch:
        raise TensorError("k", f"batch {k.shape[0]}", f"batch {sizes.batch}, as q")
    for axis, what in ((0, "batch"), (heads, "heads"), (length, "length")):
        if v.shape[axis] != k.shape[axis]:
            raise TensorError("v", f"{what} {v.shape[axis]}", f"{what} {k.shape[axis]}, as k")
    if max(sizes.q_len, sizes.kv_len) > MAX_POSITION:
        raise TensorError(
            "q", f"length {max(sizes.q_len, sizes.kv_len)}", f"at most {MAX_POSITION}"
        )
    _check_heads(spec, sizes)
    return sizes


def _check_heads(spec: AttentionSpec, sizes: Sizes) -> None:
    num_q, num_kv, group = sizes.num_q_heads, sizes.num_kv_heads, spec.heads.group
    if group is not None and num_q != group * num_kv:
        raise TensorError(
            "k", f"{num_kv} heads for {num_q} query heads", f"{group} query heads per K/V head"
        )
    if num_q and (num_kv == 0 or num_q % num_kv):
        raise TensorError(
            "k",
            f"{num_kv} heads for {num_q} query heads",
            "a number of heads that divides q's",
            "grouped-query attention needs q_heads % kv_heads == 0.",
        )


def _check_names(spec: AttentionSpec, others: Mapping[str, object]) -> None:
    wanted = [declared.name for declared in expected_arguments(spec)]
    for name in others:
        if name not in wanted:
            raise TensorError(name, "an argument that the spec does not declare", _listed(wanted))
    missing = [name for name in wanted if name not in others]
    if missing:
        needed = ", ".join(f"{name}=" for name in missing)
        noun = "an argument" if len(missing) == 1 else "arguments"
        raise TensorError(", ".join(missing), "nothing", f"{noun} {needed} ({_listed(wanted)})")


def _listed(names: Sequence[str]) -> str:
    return f"only {', '.join(names)}" if names else "no arguments beyond q, k, v"


def _check_input(declared: Input, value: object, sizes: Sizes, device: torch.device) -> None:
    if not declared.shape:
        check_scalar(declared, value)
        return
    name = declared.name
    if not isinstance(value, torch.Tensor):
        raise TensorError(name, type(value).__name__, "a torch.Tensor")
    _check_plain(name, value)
    shape = tuple(sizes.extent(extent) for extent in declared.shape)
    if tuple(value.shape) != shape:
        declared_shape = ", ".join(map(str, declared.shape))
        raise TensorError(
            name, f"shape {_shape(value)}", f"shape {list(shape)} = [{declared_shape}]"
        )
    allowed = _dtypes(declared.dtype)
    if value.dtype not in allowed:
        raise TensorError(name, _dtype(value.dtype), " or ".join(map(_dtype, allowed)))
    _check_device(name, value, device)


def check_scalar(declared: Input, value: Any) -> None:
    """TensorError for what is no number of the declared kind and size."""
    name, kind = declared.name, get_dtype(declared.dtype).kind
    if isinstance(value, torch.Tensor):
        hint = (
            f"pass a Python number, or declare shape [1] and read {name}[0] to keep it on the GPU."
        )
        if value.dim() or value.device.type != "cpu":
            raise TensorError(
                name, f"a tensor of shape {_shape(value)} on {value.device}", "a number", hint
            )
        value = value.item()
    if not _is_number(value, kind):
        raise TensorError(
            name, f"{type(value).__name__} {value!r}", f"a number of dtype {declared.dtype}"
        )
    limit = MAX_FP32 if kind == "float" else MAX_INT32
    if limit < abs(value) < math.inf:
        raise TensorError(name, str(value)[:40], f"a number of at most {limit:g} in size")


def _is_number(value: object, kind: str) -> bool:
    """Whether a scalar of this kind can be read from `value`, numpy's numbers among them."""
    if type(value).__name__ in {"bool", "bool_"}:
        return kind == "boolean"
    return isinstance(value, numbers.Real if kind == "float" else numbers.Integral)


def _refuse_gradients(spec: AttentionSpec, tensors: Mapping[str, object]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise TensorError(
                name,
                "a tensor that requires grad",
                "tensors without gradients: no kernel family serves the backward yet",
                "call under torch.no_grad(), or pass detached tensors.",
            )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
