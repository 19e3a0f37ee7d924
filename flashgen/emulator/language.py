"""What kernels know as `gl`: functions on values; layouts and dtypes are Gluon's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from triton.experimental.gluon import language

from flashgen.emulator.machine import Machine
from flashgen.emulator.memory import Memory
from flashgen.emulator.ptx import LANES, PtxError, run_ptx
from flashgen.emulator.shared import SharedMemory
from flashgen.emulator.values import (
    PointerType,
    Value,
    as_value,
    binary,
    scalar,
    together,
    torch_dtype,
)


class Language:
    """`gl` of one program. What is not here is Gluon's own: layouts, dtypes."""

    def __init__(
        self, machine: Machine, memory: Memory, shared: SharedMemory, program: int, programs: int
    ) -> None:
        self._machine, self._memory = machine, memory
        self._program, self._programs = program, programs
        self.load, self.store, self.atomic_add = memory.load, memory.store, memory.add
        self.allocate_shared_memory = shared.allocate

    def __getattr__(self, name: str) -> Any:
        return _FUNCTIONS[name] if name in _FUNCTIONS else getattr(language, name)

    def program_id(self, axis: int) -> Value:
        return scalar(self._program)

    def num_programs(self, axis: int) -> Value:
        return scalar(self._programs)

    def warp_specialize(
        self, functions_and_args: Sequence[tuple[Any, Sequence[Any]]], *_registers: Any
    ) -> None:
        self._machine.run_roles(
            [
                (f"{function.__name__} {number}", partial(function, *args))
                for number, (function, args) in enumerate(functions_and_args)
            ]
        )


def run_range(*bounds: Any) -> Iterator[Value]:
    """`range` in a kernel: its numbers are known only when it runs."""
    return (scalar(number) for number in range(*map(int, bounds)))


# **** making values ****


def _full(shape: Sequence[Any], value: Any, dtype: Any, layout: Any = None) -> Value:
    data = as_value(value).data.to(torch_dtype(dtype)).expand([int(n) for n in shape])
    return Value(data.clone(), layout)


def _zeros(shape: Sequence[Any], dtype: Any, layout: Any = None) -> Value:
    return _full(shape, 0, dtype, layout)


def _arange(start: Any, end: Any, layout: Any = None) -> Value:
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), layout)


def _convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(value.data, layout, value.points_to)


def _expand_dims(value: Value, axis: int) -> Value:
    return Value(value.data.unsqueeze(axis))


# **** element by element ****


def _unary(operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    def apply(value: Any) -> Value:
        found = as_value(value)
        return Value(operation(found.data), found.layout)

    return apply


def _where(condition: Any, a: Any, b: Any) -> Value:
    x, y = together(a, b)
    chosen = as_value(condition)
    data = torch.where(chosen.data, x.data, y.data)
    layouts = [v.layout for v in (chosen, x, y) if v.data.shape == data.shape and v.layout]
    return Value(data, layouts[0] if layouts else None)


def _extreme(
    ignoring: Callable[..., torch.Tensor], with_nan: Callable[..., torch.Tensor]
) -> Callable[..., Value]:
    def apply(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        is_all = propagate_nan is not None and "ALL" in str(propagate_nan)
        x, _ = together(a, b)
        is_float = x.data.dtype.is_floating_point
        return binary(a, b, ignoring if is_float and not is_all else with_nan)

    return apply


# **** over an axis ****


def _reduced(value: Value, axis: Any, fold: Callable[[torch.Tensor, int], torch.Tensor]) -> Value:
    data = value.data
    if axis is None:
        data, axis = data.reshape(-1), 0
    result = fold(data, int(axis))
    whole = result.dim() == 0
    return Value(result, None if whole or value.layout is None else _slice(int(axis), value.layout))


def _slice(axis: int, layout: Any) -> Any:
    return language.SliceLayout(axis, layout)


def _sum(value: Value, axis: Any = None) -> Value:
    wanted = torch.int32 if value.data.dtype is torch.bool else value.data.dtype
    return _reduced(value, axis, lambda data, over: data.sum(over, dtype=wanted))


def _most(sign: int) -> Callable[..., Value]:
    def fold(data: torch.Tensor, axis: int) -> torch.Tensor:
        extreme = torch.amax if sign > 0 else torch.amin
        if not data.dtype.is_floating_point:
            return extreme(data, axis)
        kept = extreme(torch.where(data.isnan(), -sign * float("inf"), data), axis)
        return torch.where(data.isnan().all(axis), float("nan"), kept)

    return lambda value, axis=None: _reduced(value, axis, fold)


def _reduce(value: Value, axis: Any, combine: Callable[[Value, Value], Value]) -> Value:
    def fold(data: torch.Tensor, over: int) -> torch.Tensor:
        parts = [Value(part) for part in data.unbind(over)]
        result = parts[0]
        for part in parts[1:]:
            result = combine(result, part)
        return result.data

    return _reduced(value, axis, fold)


# **** inline PTX ****


@cache
def _places(layout: Any, shape: torch.Size) -> torch.Tensor:
    """[registers, warps, lanes]: the element, by its number, that each register of each thread
    holds. In a slice several threads hold the same one."""
    registers, lanes, warps = map(_combinations, _bases(layout))
    places = registers[:, None, None] ^ warps[None, :, None] ^ lanes[None, None, :]
    number = torch.zeros(places.shape[:-1], dtype=torch.int64)
    for place, extent in zip(places.unbind(-1), shape, strict=True):
        number = number * extent + place
    return number


def _bases(layout: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Of registers, lanes and warps of a linear layout, or of slices of one."""
    if not isinstance(layout, language.SliceLayout):
        return tuple(
            tuple(map(tuple, each))
            for each in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
        )
    dim = layout.dim
    return tuple(
        tuple((*base[:dim], *base[dim + 1 :]) for base in each) for each in _bases(layout.parent)
    )


def _is_linear(layout: Any) -> bool:
    while isinstance(layout, language.SliceLayout):
        layout = layout.parent
    return isinstance(layout, language.DistributedLinearLayout)


def _combinations(bases: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    axes = len(bases[0]) if bases else 0
    result = torch.zeros(1, axes, dtype=torch.int64)
    for base in bases:
        result = torch.cat([result, result ^ torch.tensor(base)])
    return result


def _inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: Any
) -> Any:
    """PTX on `pack` consecutive numbers of a thread at a time (`run_ptx`); a register holds one,
    or two of 16 bits."""
    values = [as_value(each) for each in args]
    dtypes = dtype if isinstance(dtype, tuple | list) else (dtype,)
    shape = torch.broadcast_shapes(*(value.data.shape for value in values))
    threads = _threads_of(values, shape)
    pack = int(pack)
    outputs: list[list[torch.Tensor]] = [[] for _ in dtypes]
    spread = [_in_threads(value, shape, threads) for value in values]
    per_register = [_per_register(torch_dtype(each)) for each in dtypes]
    counts = [pack // each for each in per_register]
    starts = range(0, spread[0].shape[0] * _per_register(values[0].data.dtype), pack)
    for first in starts:
        numbers = [
            part
            for value, each in zip(values, spread, strict=True)
            for part in _of_pack(each, first, pack, _per_register(value.data.dtype))
        ]
        made = _run(asm, constraints, numbers, sum(counts))
        for output, count in zip(outputs, counts, strict=True):
            output.extend(made[:count])
            made = made[count:]
    results = tuple(
        _from_threads(torch.stack(parts), wanted, shape, threads, values)
        for parts, wanted in zip(outputs, dtypes, strict=True)
    )
    return results if isinstance(dtype, tuple | list) else results[0]


def _per_register(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point and dtype.itemsize == 2 else 1


def _of_pack(registers: torch.Tensor, first: int, pack: int, each: int) -> torch.Tensor:
    return registers[first // each : (first + pack) // each]


def _run(
    asm: str, constraints: str, inputs: Sequence[torch.Tensor], num_outputs: int
) -> list[torch.Tensor]:
    """Outputs come first; an input tied to an output ("0") starts in its register."""
    registers: dict[str, torch.Tensor] = {}
    for number, (constraint, bits) in enumerate(
        zip(constraints.split(",")[num_outputs:], inputs, strict=True)
    ):
        name = constraint if constraint.isdigit() else str(num_outputs + number)
        registers[f"${name}"] = bits
    after = run_ptx(asm, registers)
    return [after[f"${number}"] for number in range(num_outputs)]


def _threads_of(values: Sequence[Value], shape: torch.Size) -> torch.Tensor | None:
    """`_places` of the first layout that covers the whole shape; None: numbers of the program."""
    if not shape:
        return None
    for value in values:
        if value.data.shape == shape and _is_linear(value.layout):
            return _places(value.layout, shape)
    raise TypeError("inline PTX needs one operand in a linear layout")


def _in_threads(value: Value, shape: torch.Size, threads: torch.Tensor | None) -> torch.Tensor:
    """[registers, warps, lanes], int32."""
    bits = value.data.contiguous()
    if threads is not None and _per_register(bits.dtype) == 2:
        pairs = bits.expand(shape).take(threads).unflatten(0, (-1, 2))
        return pairs.movedim(1, -1).contiguous().view(torch.int32)[..., 0]
    bits = bits.view(torch.int32) if bits.dtype.is_floating_point else bits.to(torch.int32)
    if threads is None:
        return bits.expand(1, 1, LANES)
    return bits.expand(shape).take(threads)


def _from_threads(
    bits: torch.Tensor,
    dtype: Any,
    shape: torch.Size,
    threads: torch.Tensor | None,
    values: Sequence[Value],
) -> Value:
    wanted = torch_dtype(dtype)
    if _per_register(wanted) == 2:
        bits = bits.contiguous()[..., None].view(wanted).movedim(-1, 1).flatten(0, 1)
    numbers = bits.contiguous().view(wanted) if wanted.is_floating_point else bits.to(wanted)
    if threads is None:
        return Value(numbers[0, 0, 0])
    result = torch.empty(shape, dtype=wanted).put_(threads, numbers)
    if threads.numel() > result.numel() and not _same(result.take(threads), numbers):
        raise PtxError("threads that hold the same element have different results for it")
    layout = next(v.layout for v in values if v.data.shape == shape and v.layout is not None)
    return Value(result, layout)


def _same(numbers: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.allclose(numbers, others, rtol=0, atol=0, equal_nan=True)


_FUNCTIONS: dict[str, Any] = {
    "static_range": range,
    "full": _full,
    "zeros": _zeros,
    "zeros_like": lambda value: Value(torch.zeros_like(value.data), value.layout),
    "arange": _arange,
    "convert_layout": _convert_layout,
    "expand_dims": _expand_dims,
    "to_tensor": as_value,
    "multiple_of": lambda value, _multiple: value,
    "max_contiguous": lambda value, _count: value,
    "pointer_type": lambda dtype: PointerType(torch_dtype(dtype)),
    "exp2": _unary(torch.exp2),
    "exp": _unary(torch.exp),
    "log2": _unary(torch.log2),
    "log": _unary(torch.log),
    "sqrt": _unary(torch.sqrt),
    "floor": _unary(torch.floor),
    "abs": _unary(torch.abs),
    "where": _where,
    "maximum": _extreme(torch.fmax, torch.maximum),
    "minimum": _extreme(torch.fmin, torch.minimum),
    "cdiv": lambda a, b: (as_value(a) + (as_value(b) - 1)) // b,
    "sum": _sum,
    "max": _most(1),
    "min": _most(-1),
    "reduce": _reduce,
    "inline_asm_elementwise": _inline_asm_elementwise,
}
