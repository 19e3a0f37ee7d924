"""Repeated calls: what a call with the same signature needs is worked out once.

A signature is everything about a call that checks, grid and kernel depend on, and no tensor. The
first call with it is checked and launched as any other; what it launched is kept, without its
tensors: the compiled kernel, the grid and every number. The next one is a look-up in a dictionary,
a new output and the launch.

The launch is Triton's own of a compiled kernel, `compiled[grid](*arguments)`. `kernel[grid](…)`
would find the same one again by the types of all arguments, at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from triton.compiler import CompiledKernel

from flashgen.dtypes import get_dtype
from flashgen.runtime.check import check_scalar, expected_arguments
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

Signature: TypeAlias = Hashable
Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Repeat: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], Outputs]

MAX_KEPT = 4096  # signatures of one callable: some megabytes; lengths that grow would fill memory

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


def signature(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Mapping[str, Any]
) -> Signature:
    """Equal for calls that the same checks, grid and kernel serve.

    Raises whatever an argument raises that is no plain tensor; the checks say it better.
    """
    tensors = [each for each in others.values() if isinstance(each, _Tensor)] if others else ()
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()  # raises for what is not strided
    grads = negative = False
    for each in tensors:
        addresses |= each.data_ptr()
        negative |= each.is_neg()
    if _is_grad_enabled():
        grads = any(each.requires_grad for each in (q, k, v, *tensors))
    found = (
        *(grads, negative or q.is_neg() or k.is_neg() or v.is_neg()),
        addresses & 15,  # one kernel serves whatever is not aligned, in whichever tensor
        *(type(q), q.shape, q.stride(), q.dtype, q.device),
        *(type(k), k.shape, k.stride(), k.dtype, k.device),
        *(type(v), v.shape, v.stride(), v.dtype, v.device),
    )
    if not others:
        return found
    rest: list[object] = []
    for name, value in others.items():
        rest += (name, type(value))
        if isinstance(value, _Tensor):
            rest += (value.shape, value.stride(), value.dtype, value.device)
    return (*found, *rest)


class Seen:
    """Stands in for a kernel at one launch: launches it, and knows afterwards with what."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches = 0
        self.compiled: Any = None
        self.grid: tuple[int, ...] = ()
        self.values: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            self.compiled = self._kernel[grid](*positional, **named)
            self.launches += 1
            self.grid = grid
            names = self._kernel.arg_names
            given = dict(zip(names, positional, strict=False)) | named
            self.values = {name: given[name] for name in names}

        return launch


def repeat_of(
    spec: AttentionSpec,
    seen: Seen,
    tensors: Mapping[str, torch.Tensor],
    *,
    returns_lse: bool,
) -> Repeat | None:
    """How to make the launch that was seen again, for other tensors of the same signature.

    tensors: those of the call, by name (q, k, v, out, lse and the inputs). None where the launch
    cannot be made again so: there were several or none, or one was given something that was made
    for this call only.
    """
    if seen.launches != 1 or not isinstance(seen.compiled, CompiledKernel):
        return None
    scalars = {f"{i.name}_value": i for i in expected_arguments(spec) if not i.shape}
    values: list[Any] = []
    places: dict[str, int] = {}
    numbers: list[tuple[int, Input]] = []
    for place, (name, value) in enumerate(seen.values.items()):
        if name in scalars:
            numbers.append((place, scalars[name]))
            values.append(None)
        elif isinstance(value, torch.Tensor):
            source = name.removesuffix("_ptr")
            if not _is_same_memory(value, tensors.get(source)):
                return None
            places[source] = place
            values.append(None)
        elif isinstance(value, (int, float, str, type(None))):
            values.append(value)
        else:  # a tensor map has an address in it
            return None
    grid = (*seen.grid, 1, 1)[:3]
    out = tensors["out"]
    lse = tensors["lse"] if returns_lse else None
    return _repeat(
        seen.compiled[grid],
        values,
        places,
        numbers,
        out,
        lse,
        is_out_like_q=_alike(out, tensors["q"]),
    )


def _alike(out: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether `empty_like(q)`, the quicker way, makes such an output."""
    same = type(q) is torch.Tensor and q.dtype == out.dtype and q.shape == out.shape
    return same and q.is_contiguous() and q.stride() == out.stride()


def _is_same_memory(value: torch.Tensor, source: torch.Tensor | None) -> bool:
    """Whether a kernel that was given `value` can be given `source`: strides are numbers of their
    own. A conversion, of a sink to fp32 say, is other memory."""
    return (
        source is not None and value.dtype == source.dtype and value.data_ptr() == source.data_ptr()
    )


def _repeat(
    launch: Callable[..., object],
    template: list[Any],
    places: dict[str, int],
    numbers: list[tuple[int, Input]],
    out_like: torch.Tensor,
    lse_like: torch.Tensor | None,
    *,
    is_out_like_q: bool,
) -> Repeat:
    """The launch as a function, with everything that it needs at hand."""
    at_q, at_k, at_v, at_out = (places.pop(name) for name in ("q", "k", "v", "out"))
    at_lse = places.pop("lse", None)
    rest = tuple(places.items())
    scalars = tuple((place, declared, _converter(declared)) for place, declared in numbers)
    out_shape, out_dtype, device = tuple(out_like.shape), out_like.dtype, out_like.device
    lse_shape = None if lse_like is None else tuple(lse_like.shape)
    index = device.index
    empty, empty_like = torch.empty, torch.empty_like
    current_device, float32 = torch.cuda.current_device, torch.float32

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Mapping[str, Any]
    ) -> Outputs:
        values = template.copy()
        values[at_q] = q
        values[at_k] = k
        values[at_v] = v
        out = empty_like(q) if is_out_like_q else empty(out_shape, dtype=out_dtype, device=device)
        values[at_out] = out
        for name, place in rest:
            values[place] = others[name]
        for place, declared, convert in scalars:
            value = others[declared.name]
            check_scalar(declared, value)
            values[place] = convert(value)
        lse = None
        if lse_shape is not None:
            lse = empty(lse_shape, dtype=float32, device=device)
            values[at_lse] = lse  # type: ignore[index]
        if current_device() == index:
            launch(*values)
        else:
            with torch.cuda.device(index):
                launch(*values)
        return out if lse is None else (out, lse)

    return repeat


def _converter(declared: Input) -> Callable[[Any], float | int]:
    return float if get_dtype(declared.dtype).kind == "float" else int
