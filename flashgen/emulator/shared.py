"""Shared memory of a program, tensor maps, and what moves tiles between them and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.emulator.machine import Barrier, HandOverError, Machine, Product
from flashgen.emulator.values import TRITON_DTYPE, Value, as_value, torch_dtype


class Shared:
    """A buffer, or a part of one: `data` is a view of it."""

    def __init__(self, data: torch.Tensor, layout: Any, machine: Machine) -> None:
        self.data, self.layout, self._machine = data, layout, machine

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return TRITON_DTYPE[self.data.dtype]

    def index(self, number: Any) -> Shared:
        return Shared(self.data[int(number)], self.layout, self._machine)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.layout, self._machine)

    def reshape(self, shape: Sequence[Any]) -> Shared:
        return Shared(self.data.view([int(n) for n in shape]), self.layout, self._machine)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.layout, self._machine)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone(), layout)

    def store(self, value: Any) -> None:
        self.data.copy_(as_value(value).data.to(self.data.dtype))
        self._machine.current.unfenced.append(self.key)

    @property
    def key(self) -> int:
        """Where it begins."""
        return self.data.data_ptr()


class SharedMemory:
    """Buffers of one program and the barriers in them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._barriers: dict[int, Barrier] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is given twice

    def allocate(self, dtype: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> Shared:
        """Undefined, which is NaN or -1, without a value."""
        wanted = torch_dtype(dtype)
        rest = float("nan") if wanted.is_floating_point else -1
        data = torch.full([int(n) for n in shape], rest, dtype=wanted)
        self._kept.append(data)
        made = Shared(data, layout, self._machine)
        if value is not None:
            made.store(value)
        return made

    def init(self, place: Shared, arrivals: int) -> None:
        if place.key in self._barriers:
            raise HandOverError("a barrier is made twice")
        self._barriers[place.key] = Barrier(arrivals)

    def barrier(self, place: Shared) -> Barrier:
        if place.key not in self._barriers:
            raise HandOverError("a barrier is used that was never made")
        return self._barriers[place.key]


@dataclass(frozen=True)
class BlockType:
    """Of a tile that a tensor map moves."""

    shape: list[int]
    nbytes: int


class TensorMap:
    """A host tensor descriptor inside the kernel."""

    def __init__(self, descriptor: Any) -> None:
        base = descriptor.base
        self.tensor = base.as_strided(descriptor.shape, descriptor.strides, base.storage_offset())
        self.layout = descriptor.layout
        self.dtype = TRITON_DTYPE[base.dtype]
        shape = [int(n) for n in descriptor.block_shape]
        self.block_type = BlockType(shape, base.element_size() * torch.Size(shape).numel())

    def region(self, first: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the tile at these coordinates lies in the tensor, and that part of the tile."""
        of_tensor, of_tile = [], []
        for start, size, extent in zip(
            map(int, first), self.block_type.shape, self.tensor.shape, strict=True
        ):
            low = min(max(start, 0), extent)
            high = max(min(start + size, extent), low)
            of_tensor.append(slice(low, high))
            of_tile.append(slice(low - start, high - start) if high > low else slice(0, 0))
        return tuple(of_tensor), tuple(of_tile)


class Tma:
    """`tma` of a kernel: under the names of all versions of Triton."""

    def __init__(self, machine: Machine, memory: SharedMemory) -> None:
        self._machine, self._memory = machine, memory
        self.async_load = self.async_copy_global_to_shared
        self.async_store = self.async_copy_shared_to_global

    def async_copy_global_to_shared(
        self,
        desc: TensorMap,
        coord: Sequence[Any],
        barrier: Shared,
        result: Shared,
        pred: Any = True,
    ) -> None:
        """The tile is NaN until the copy is done; what lies outside the tensor becomes 0."""
        if not bool(pred):
            return
        if result.shape != desc.block_type.shape:
            raise HandOverError(f"a tile {desc.block_type.shape} for a buffer {result.shape}")
        result.data.fill_(float("nan"))
        place = [int(n) for n in coord]
        found = self._memory.barrier(barrier)

        def copy() -> None:
            of_tensor, of_tile = desc.region(place)
            result.data.zero_()
            result.data[of_tile] = desc.tensor[of_tensor]
            found.receive(desc.block_type.nbytes)

        self._machine.copies.append(copy)
        self._machine.switch()

    def async_copy_shared_to_global(
        self, desc: TensorMap, coord: Sequence[Any], src: Shared
    ) -> None:
        role = self._machine.current
        if src.key in role.unfenced:
            raise HandOverError("TMA stores from a buffer that was written and not fenced")
        place = [int(n) for n in coord]

        def copy() -> None:
            of_tensor, of_tile = desc.region(place)
            desc.tensor[of_tensor] = src.data.reshape(desc.block_type.shape)[of_tile]

        role.stores.append(copy)
        self._machine.switch()

    def store_wait(self, pendings: int) -> None:
        self._machine.switch()
        self._machine.complete_stores(int(pendings))


class Mbarrier:
    """`mbarrier` of a kernel."""

    def __init__(self, machine: Machine, memory: SharedMemory, layout: Any) -> None:
        self._machine, self._memory = machine, memory
        self.MBarrierLayout = layout

    def init(self, mbarrier: Shared, count: Any) -> None:
        self._memory.init(mbarrier, int(count))

    def arrive(self, mbarrier: Shared, *, count: Any = 1, pred: Any = True) -> None:
        if bool(pred):
            self._memory.barrier(mbarrier).arrive(int(count))
        self._machine.switch()

    def expect(self, mbarrier: Shared, bytes_per_cta: Any, pred: Any = True) -> None:
        if bool(pred):
            self._memory.barrier(mbarrier).expect(int(bytes_per_cta))

    def wait(self, mbarrier: Shared, phase: Any, pred: Any = True) -> None:
        if not bool(pred):
            return
        found, parity = self._memory.barrier(mbarrier), int(phase)
        doing = f"phase {parity} of a barrier in phase {found.phase} ({found.missing} missing)"
        self._machine.wait_until(lambda: found.has_ended(parity), doing)


class Wgmma:
    """Asynchronous products of a warpgroup."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def multiply(
        self, a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False
    ) -> Product | Value:
        """a [m, k] @ b [k, n] + acc in fp32; what is in shared memory is read when it is done."""
        start = acc.data if bool(use_acc) else torch.zeros_like(acc.data)
        held = a.data.clone() if isinstance(a, Value) else None

        def compute() -> Value:
            left = a.data if held is None else held
            return Value(left.float() @ b.data.float() + start, acc.layout)

        product = Product(compute)
        self._machine.start_product(product)
        if is_async:
            return product
        self._machine.complete_products(0)
        return product.result

    def wait(self, num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
        self._machine.switch()
        self._machine.complete_products(int(num_outstanding))
        results = [dep.result if isinstance(dep, Product) else dep for dep in deps]
        return results[0] if len(results) == 1 else tuple(results)


def matrix_product(a: Any, b: Any, acc: Value) -> Value:
    """mma of warps, on registers."""
    return Value(a.data.float() @ b.data.float() + acc.data, acc.layout)
