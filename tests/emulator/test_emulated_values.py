"""Triton's arithmetic, memory and PTX, as the emulator has them."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from flashgen.emulator.memory import AddressError, Memory
from flashgen.emulator.ptx import PtxError, run_ptx
from flashgen.emulator.values import Value, scalar

NUMBERS = st.integers(-1000, 1000)


@given(NUMBERS, NUMBERS.filter(bool))
def test_integers_are_divided_towards_zero(a: int, b: int) -> None:
    quotient, rest = scalar(a) // b, scalar(a) % b
    assert int(quotient) == int(a / b)
    assert int(quotient) * b + int(rest) == a


def test_dtypes_of_results() -> None:
    half, whole = Value(torch.ones(2, dtype=torch.float16)), Value(torch.ones(2, dtype=torch.int32))
    assert (half * 1.5).dtype == tl.float16
    assert (whole * 1.5).dtype == tl.float32
    assert (whole + scalar(1, torch.int64)).dtype == tl.int64
    assert (whole + 2**40).dtype == tl.int64
    assert (half + Value(torch.ones(2, dtype=torch.bfloat16))).dtype == tl.float32
    assert (whole / 2).dtype == tl.float32
    assert ((whole == 1) + 1).dtype == tl.int32


def test_what_a_tensor_is_not() -> None:
    with pytest.raises(TypeError, match="different ranks"):
        Value(torch.ones(2)) + Value(torch.ones(2, 2))
    with pytest.raises(TypeError, match="a number of the whole program"):
        bool(Value(torch.ones(2)) > 0)


def test_memory_is_that_of_the_arguments() -> None:
    memory, tensor = Memory(), torch.arange(8, dtype=torch.float32)
    pointer = memory.pointer(tensor[2:])
    places = pointer + Value(torch.tensor([0, 5, 6]))
    loaded = memory.load(places, Value(torch.tensor([True, True, False])), 7.0)
    assert loaded.data.tolist() == [2.0, 7.0, 7.0]
    memory.store(pointer + Value(torch.tensor([1])), Value(torch.tensor([9.0])))
    assert tensor[3] == 9.0
    with pytest.raises(AddressError, match="in no tensor of the kernel"):
        memory.load(places)
    assert int(memory.add(memory.pointer(torch.tensor([4])), 3)) == 4


WARPS = torch.arange(64, dtype=torch.int32).reshape(2, 32)


def test_a_warp_takes_a_branch_as_one() -> None:
    """Only the warp with a number over 40 adds."""
    text = """{ .reg .pred p; setp.gt.f32 p, $1, 0f42200000; vote.sync.any.pred p, p, 0xffffffff;
        mov.b32 $0, $1; @!p bra UNCHANGED; add.f32 $0, $1, 0f3F800000; UNCHANGED: }"""
    bits = WARPS.float().view(torch.int32)
    result = run_ptx(text, {"$1": bits})["$0"].view(torch.float32)
    assert torch.equal(result, torch.stack([WARPS[0].float(), WARPS[1].float() + 1]))


def test_a_butterfly_crosses_lanes() -> None:
    swapped = run_ptx("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", {"$1": WARPS})["$0"]
    assert swapped[0, :4].tolist() == [2, 3, 0, 1]


def test_what_is_not_emulated_is_named() -> None:
    with pytest.raises(PtxError, match=r"popc\.b32 is not emulated"):
        run_ptx("popc.b32 $0, $1;", {"$1": WARPS})
    with pytest.raises(PtxError, match="a warp parts at a branch"):
        run_ptx(
            "setp.gt.f32 p, $1, 0f00000000; @p bra END; mov.b32 $0, $1; END:",
            {"$1": WARPS.float().view(torch.int32)},
        )
