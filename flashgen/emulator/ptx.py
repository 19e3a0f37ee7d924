"""Inline PTX, for all threads of a warpgroup at once (PTX ISA, "Instruction Set").

Only what the templates use. Registers hold 32 bits; a predicate holds one. A branch must be taken
by a whole warp or by none of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

LANES = 32
_STATEMENT = re.compile(r"(?:@(!?)(\w+)\s+)?([\w.]+)\s*(.*)", re.DOTALL)
_DECIMAL = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?$")
_FLOAT = re.compile(r"0f([0-9A-Fa-f]{8})$")


class PtxError(Exception):
    """An instruction that is not emulated, or a warp that parts at a branch."""


def run_ptx(text: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Registers by name, [warps, lanes] each and int32, after the text ran."""
    state = dict(registers)
    warps = next(iter(registers.values())).shape[0]
    on = everybody = _all_warps(warps)  # itself while no warp is elsewhere
    asleep: dict[str, torch.Tensor] = {}  # label -> warps that jumped there
    for statement in _statements(text):
        if statement.opcode == ":":
            if statement.target in asleep:
                on = on | asleep.pop(statement.target)
                on = everybody if bool(on.all()) else on
            continue
        active = on
        if statement.guard:
            active = on & (state[statement.guard] != (1 if statement.negated else 0))
        if statement.opcode == "bra":
            jumps = _whole_warps(active, on)
            asleep[statement.target] = asleep.get(statement.target, torch.zeros_like(on)) | jumps
            on = on & ~jumps
            continue
        sources = [
            state[each] if each in state else _constant(each, warps) for each in statement.sources
        ]
        result = _operation(statement.opcode)(*sources)
        if result.dtype is not torch.int32:
            result = result.to(torch.int32)
        if active is not everybody:
            before = state.get(statement.target)
            result = torch.where(active, result, 0 if before is None else before)
        state[statement.target] = result
    return state


@dataclass(frozen=True)
class _Statement:
    """target: the register written, or the label of a branch or (opcode ":") of this place."""

    opcode: str
    target: str
    sources: tuple[str, ...] = ()
    guard: str | None = None
    negated: bool = False


@cache
def _statements(text: str) -> tuple[_Statement, ...]:
    """Instructions and labels; declarations are not needed."""
    body = text.replace("{", " ").replace("}", " ")
    body = re.sub(r"(\w+):", r"\1:;", body)
    parts = [part.strip() for part in body.split(";")]
    return tuple(_parsed(part) for part in parts if part and not part.startswith(".reg"))


def _parsed(statement: str) -> _Statement:
    if statement.endswith(":"):
        return _Statement(":", statement[:-1])
    found = _STATEMENT.fullmatch(statement)
    if found is None:
        raise PtxError(f"no instruction: {statement}")
    negated, guard, opcode, rest = found.groups()
    target, *sources = (each.strip() for each in rest.split(","))
    return _Statement(opcode, target, tuple(sources), guard, bool(negated))


@cache
def _all_warps(warps: int) -> torch.Tensor:
    return torch.ones(warps, 1, dtype=torch.bool)


def _whole_warps(active: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    taken = active.expand(-1, LANES)
    if bool((taken.any(1) != taken.all(1)).any()):
        raise PtxError("a warp parts at a branch")
    return taken[:, :1] & on


@cache
def _constant(name: str, warps: int) -> torch.Tensor:
    if name == "%laneid":
        return torch.arange(LANES, dtype=torch.int32).expand(warps, LANES)
    found = _FLOAT.fullmatch(name)
    if found:
        bits = struct.unpack("<i", struct.pack("<I", int(found[1], 16)))[0]
        return torch.full((warps, LANES), bits, dtype=torch.int32)
    if _DECIMAL.match(name):
        return _bits(torch.full((warps, LANES), float(name)))
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
        number = (int(name, 0) + 2**31) % 2**32 - 2**31  # the same bits, signed
        return torch.full((warps, LANES), number, dtype=torch.int32)
    raise PtxError(f"{name} is used before it is written")


# **** instructions ****


def _f32(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.float32).view(torch.int32)


def _of_floats(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *sources: _bits(operation(*map(_f32, sources)))


def _compared(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *sources: operation(*map(_f32, sources))


def _vote_any(predicate: torch.Tensor, _lanes: torch.Tensor) -> torch.Tensor:
    return (predicate != 0).any(1, keepdim=True).expand(-1, LANES)


def _butterfly(bits: torch.Tensor, by: torch.Tensor, *_rest: torch.Tensor) -> torch.Tensor:
    return bits[:, torch.arange(LANES) ^ int(by[0, 0])]


def _exp2(numbers: torch.Tensor) -> torch.Tensor:
    """ex2.approx.ftz: subnormal inputs and results are 0."""
    result = torch.exp2(torch.where(numbers.abs() < 2.0**-126, 0.0, numbers))
    return torch.where(result < 2.0**-126, 0.0, result)


def _by_table(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """lop3: bit 4a + 2b + c of the table, for each bit."""
    result = torch.zeros_like(a)
    for row in range(8):
        if int(table[0, 0]) >> row & 1:
            terms = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result


def _tanh(numbers: torch.Tensor) -> torch.Tensor:
    """tanh.approx: as far off as it may be, 2**-11 of itself."""
    exact = torch.tanh(numbers)
    coarse = (exact.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)
    return torch.where(exact.isnan(), exact, coarse.view(torch.float32))


def _neu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) | a.isnan() | b.isnan()


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.s32": lambda a, by: a >> by,
    "lop3.b32": _by_table,
    "setp.ne.u32": lambda a, b: a != b,
    "or.pred": lambda a, b: a | b,
    "and.pred": lambda a, b: a & b,
    "vote.sync.any.pred": _vote_any,
    "shfl.sync.bfly.b32": _butterfly,
    "selp.b32": lambda a, b, predicate: torch.where(predicate != 0, a, b),
    "setp.gt.f32": _compared(torch.gt),
    "setp.lt.f32": _compared(torch.lt),
    "setp.eq.f32": _compared(torch.eq),
    "setp.neu.f32": _compared(_neu),
    "max.f32": _of_floats(torch.fmax),
    "min.f32": _of_floats(torch.fmin),
    "abs.f32": _of_floats(torch.abs),
    "add.f32": _of_floats(torch.add),
    "sub.f32": _of_floats(torch.sub),
    "mul.f32": _of_floats(torch.mul),
    "fma.rn.f32": _of_floats(_fma),
    "ex2.approx.ftz.f32": _of_floats(_exp2),
    "tanh.approx.f32": _of_floats(_tanh),
    "rcp.approx.ftz.f32": _of_floats(torch.reciprocal),
}


def _operation(opcode: str) -> Callable[..., torch.Tensor]:
    found = _OPERATIONS.get(opcode)
    if found is None:
        raise PtxError(f"{opcode} is not emulated")
    return found
