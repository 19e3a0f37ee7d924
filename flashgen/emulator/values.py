"""Numbers, tensors and pointers of a kernel, with Triton's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton.language as tl

TRITON_DTYPE: dict[torch.dtype, tl.dtype] = {
    torch.bool: tl.int1,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
TORCH_DTYPE: dict[str, torch.dtype] = {str(dtype): found for found, dtype in TRITON_DTYPE.items()}
_RANK = list(TRITON_DTYPE)  # of two dtypes the later one is computed in


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of one of Triton's."""
    return dtype if isinstance(dtype, torch.dtype) else TORCH_DTYPE[str(dtype)]


@dataclass(frozen=True)
class PointerType:
    """Of a pointer to elements of a torch dtype."""

    element: torch.dtype


@dataclass(frozen=True)
class Type:
    """What kernels ask of a value's type."""

    layout: Any
    shape: tuple[int, ...]
    element_ty: Any

    def is_block(self) -> bool:
        return bool(self.shape)


_AS_COLUMN, _AS_ROW = (slice(None), None), (None, slice(None))  # what kernels index by most


class Value:
    """A scalar (0-d) or a tensor; a pointer where `points_to` is set: data are addresses in bytes.

    layout: that of who made it, kept by element-wise operations, because inline PTX needs it.
    """

    __slots__ = ("data", "layout", "points_to")

    def __init__(
        self, data: torch.Tensor, layout: Any = None, points_to: torch.dtype | None = None
    ) -> None:
        self.data, self.layout, self.points_to = data, layout, points_to

    # ---- what a kernel asks

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Any:
        return TRITON_DTYPE[self.data.dtype]

    @property
    def type(self) -> Type:
        return Type(self.layout, self.shape, self.points_to and TRITON_DTYPE[self.points_to])

    def to(self, dtype: Any) -> Value:
        if isinstance(dtype, PointerType):
            return Value(self.data.to(torch.int64), self.layout, dtype.element)
        wanted = torch_dtype(dtype)
        data = self.data
        if data.dtype.is_floating_point and not wanted.is_floating_point:
            data = torch.trunc(data)
        return Value(data.to(wanted), self.layout)

    def reshape(self, shape: Sequence[Any]) -> Value:
        return Value(self.data.reshape([int(n) for n in shape]), None, self.points_to)

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(*order))

    def __getitem__(self, key: Any) -> Value:
        if key == _AS_COLUMN:
            data = self.data.unsqueeze(1)
        elif key == _AS_ROW:
            data = self.data.unsqueeze(0)
        else:
            data = self.data[key]
        return Value(data, None, self.points_to)

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __index__(self) -> int:
        return int(self._scalar())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._scalar())

    def __hash__(self) -> int:
        return id(self)

    def _scalar(self) -> Any:
        if self.data.dim():
            raise TypeError(f"a tensor {self.shape} where a number of the whole program is needed")
        return self.data.item()

    # ---- arithmetic

    def __add__(self, other: Any) -> Value:
        if self.points_to is not None:
            return _moved(self, other)
        if isinstance(other, Value) and other.points_to is not None:
            return _moved(other, self)
        return binary(self, other, torch.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return binary(self, other, torch.sub)

    def __rsub__(self, other: Any) -> Value:
        return binary(other, self, torch.sub)

    def __mul__(self, other: Any) -> Value:
        return binary(self, other, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return binary(_as_float(self), _as_float(other), torch.div)

    def __rtruediv__(self, other: Any) -> Value:
        return binary(_as_float(other), _as_float(self), torch.div)

    def __floordiv__(self, other: Any) -> Value:
        return binary(self, other, _divided)

    def __rfloordiv__(self, other: Any) -> Value:
        return binary(other, self, _divided)

    def __mod__(self, other: Any) -> Value:
        return binary(self, other, torch.fmod)

    def __rmod__(self, other: Any) -> Value:
        return binary(other, self, torch.fmod)

    def __lshift__(self, other: Any) -> Value:
        return binary(self, other, torch.bitwise_left_shift)

    def __rshift__(self, other: Any) -> Value:
        return binary(self, other, torch.bitwise_right_shift)

    def __and__(self, other: Any) -> Value:
        return binary(self, other, torch.bitwise_and)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return binary(self, other, torch.bitwise_or)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Value:
        return binary(self, other, torch.bitwise_xor)

    __rxor__ = __xor__

    def __neg__(self) -> Value:
        return Value(-self.data, self.layout)

    def __invert__(self) -> Value:
        return Value(~self.data, self.layout)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return binary(self, other, torch.eq)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return binary(self, other, torch.ne)

    def __lt__(self, other: Any) -> Value:
        return binary(self, other, torch.lt)

    def __le__(self, other: Any) -> Value:
        return binary(self, other, torch.le)

    def __gt__(self, other: Any) -> Value:
        return binary(self, other, torch.gt)

    def __ge__(self, other: Any) -> Value:
        return binary(self, other, torch.ge)


def scalar(number: int | float, dtype: torch.dtype = torch.int32) -> Value:
    """A number that is known only when the kernel runs."""
    if number == 0 and isinstance(number, float):  # a key of a cache that -0.0 would share
        return Value(torch.tensor(number, dtype=dtype))
    return _kept_scalar(number, dtype)


@lru_cache(maxsize=4096)
def _kept_scalar(number: int | float, dtype: torch.dtype) -> Value:
    """Nobody writes into a value's data."""
    return Value(torch.tensor(number, dtype=dtype))


def as_value(number: Any) -> Value:
    """A value; Python's numbers become those of Triton."""
    if isinstance(number, Value):
        return number
    if isinstance(number, bool):
        return scalar(number, torch.bool)
    if isinstance(number, int):
        return scalar(number, torch.int32 if -(2**31) <= number < 2**31 else torch.int64)
    return scalar(number, torch.float32)


def together(a: Any, b: Any) -> tuple[Value, Value]:
    """Both in the dtype that Triton would compute in; a Python number takes the other's kind."""
    x, y = as_value(a), as_value(b)
    of_x, of_y = x.data.dtype, y.data.dtype
    if x.data.dim() != y.data.dim() and x.data.dim() and y.data.dim():
        raise TypeError(f"tensors of different ranks: {x.shape} and {y.shape}")
    if of_x is of_y:
        return x, y
    if x is a and y is not b:
        wanted = _weak(of_y, of_x)
    elif y is b and x is not a:
        wanted = _weak(of_x, of_y)
    else:
        wanted = _common(of_x, of_y)
    return _cast(x, wanted), _cast(y, wanted)


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def binary(a: Any, b: Any, operation: Operation) -> Value:
    """`operation` on both, broadcast along axes of length 1."""
    x, y = together(a, b)
    result = operation(x.data, y.data)
    layout = x.layout
    if layout is None or x.data.shape != result.shape:
        layout = y.layout
        if layout is not None and y.data.shape != result.shape:
            layout = None
    return Value(result, layout)


def _cast(value: Value, wanted: torch.dtype) -> Value:
    return value if value.data.dtype == wanted else Value(value.data.to(wanted), value.layout)


@cache
def _common(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if {a, b} == {torch.float16, torch.bfloat16}:
        return torch.float32
    return max(a, b, key=_RANK.index)


@cache
def _weak(number: torch.dtype, other: torch.dtype) -> torch.dtype:
    if number.is_floating_point:
        return other if other.is_floating_point else torch.float32
    if other is torch.bool and number is not torch.bool:
        return number
    return other if other.is_floating_point else _common(number, other)


def _as_float(value: Any) -> Value:
    found = as_value(value)
    return found if found.data.dtype.is_floating_point else found.to(torch.float32)


def _divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Triton's // of integers, which rounds towards 0."""
    return torch.div(a, b, rounding_mode="trunc")


def _moved(pointer: Value, by: Any) -> Value:
    assert pointer.points_to is not None
    steps = as_value(by)
    data = torch.add(pointer.data, steps.data.to(torch.int64), alpha=pointer.points_to.itemsize)
    layout = steps.layout if steps.data.shape == data.shape else pointer.layout
    return Value(data, layout, pointer.points_to)
