"""Memory of the GPU: the tensors that a kernel was given, by address."""

from __future__ import annotations

import torch

from flashgen.emulator.values import Value, as_value


class AddressError(Exception):
    """A load or store outside the tensors that the kernel was given."""


class Memory:
    """Loads and stores through pointers into the storages of registered tensors."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pointer(self, tensor: torch.Tensor | None) -> Value:
        """A pointer to the tensor's first element."""
        if tensor is None:
            return Value(torch.tensor(0), None, torch.float32)
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._storages[storage.data_ptr()] = storage
        return Value(torch.tensor(tensor.data_ptr()), None, tensor.dtype)

    def load(self, pointer: Value, mask: object = None, other: object = None) -> Value:
        """Elements at the addresses; `other` (undefined: NaN or -1) where the mask is false."""
        assert pointer.points_to is not None
        addresses, there = _there(pointer, mask)
        dtype = pointer.points_to
        if there is None:
            flat, numbers = self._elements(addresses, dtype)
            return Value(flat.take(numbers), pointer.layout)
        if other is None:
            rest = torch.tensor(-1.0 if not dtype.is_floating_point else float("nan")).to(dtype)
        else:
            rest = as_value(other).data.to(dtype)
        highest = int(torch.where(there, addresses, 0).max())
        if highest == 0 and not bool(there.any()):
            return Value(rest.expand(addresses.shape).clone(), pointer.layout)
        flat, numbers = self._elements(torch.where(there, addresses, highest), dtype)
        return Value(torch.where(there, flat.take(numbers), rest), pointer.layout)

    def store(self, pointer: Value, value: object, mask: object = None) -> None:
        """Write where the mask is true."""
        assert pointer.points_to is not None
        addresses, there = _there(pointer, mask)
        data = as_value(value).data.to(pointer.points_to).expand(addresses.shape)
        if there is not None:
            addresses, data = addresses[there], data[there]
        if addresses.numel():
            flat, numbers = self._elements(addresses, pointer.points_to)
            flat[numbers] = data

    def add(self, pointer: Value, amount: object, sem: str = "acq_rel") -> Value:
        """An atomic addition of one program; the number before it."""
        before = self.load(pointer)
        self.store(pointer, before + amount)
        return before

    def _elements(
        self, addresses: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage that holds all of the addresses, as elements, and which of them."""
        first, last = map(int, torch.aminmax(addresses))
        for start, storage in self._storages.items():
            if start <= first and last + dtype.itemsize <= start + storage.nbytes():
                offsets = addresses - start
                if bool((offsets & (dtype.itemsize - 1)).any()):
                    raise AddressError(f"an address is no multiple of {dtype.itemsize} bytes")
                flat = torch.empty(0, dtype=dtype).set_(storage)
                return flat, offsets >> (dtype.itemsize.bit_length() - 1)
        raise AddressError(f"addresses {first} to {last} are in no tensor of the kernel")


def _there(pointer: Value, mask: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Addresses and which of them count, in one shape; None: all."""
    if mask is None:
        return pointer.data, None
    there = as_value(mask).data.to(torch.bool)
    if there.shape == pointer.data.shape:
        return pointer.data, there
    addresses, there = torch.broadcast_tensors(pointer.data, there)
    return addresses, there
