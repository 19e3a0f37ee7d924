"""Reads of the caller's tensors inside a kernel: where, at which address, under which mask.

A read whose index is the position that runs along its axis (`k` along `kv_len`, `h` along
`q_heads`) cannot leave the tensor except in lanes past the end of a tile. Any other index is
checked: an index outside an input is never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy as sp
from sympy.printing.precedence import PRECEDENCE

from flashgen.codegen.expr import TritonPrinter
from flashgen.codegen.integers import WIDE_SYMBOLS, is_rounded_real
from flashgen.dtypes import get_dtype
from flashgen.passes.inputs import range_conditions
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

Scope = Literal["program", "rows", "keys", "pairs"]


@dataclass(frozen=True)
class InputRead:
    """One distinct `tensor[indices]`: `variable` holds its value in the kernel.

    statement is the load in a full key tile, masked_statement the one in a partial tile (they
    differ for scopes keys and pairs only). base_lines come before all key tiles: what of the
    address is the same in each, with the indices in it.
    """

    variable: str
    tensor: str
    scope: Scope
    statement: str
    masked_statement: str
    in_score: bool
    base_lines: tuple[str, ...] = ()
    index_statements: tuple[str, ...] = ()

    @property
    def base_statement(self) -> str:
        """The base lines as one text of a kernel's body."""
        return "\n    ".join(self.base_lines)

    @property
    def base_variables(self) -> tuple[str, ...]:
        """What the base lines assign."""
        return tuple(line.partition(" = ")[0] for line in self.base_lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """Statements in a full key tile."""
        return (*self.index_statements, self.statement)

    @property
    def masked_lines(self) -> tuple[str, ...]:
        """Statements in a partial key tile."""
        return (*self.index_statements, self.masked_statement)


def scope_of(read: sp.Indexed) -> Scope:
    """How often a read happens: once a program, per row, per key, or per (row, key) pair."""
    by_row = any(index.has(sym.Q, sym.ROW) for index in read.indices)
    by_key = any(index.has(sym.K) for index in read.indices)
    return ("pairs" if by_key else "rows") if by_row else ("keys" if by_key else "program")


def moves(index: sp.Expr) -> bool:
    """Whether an index changes with the row or the key."""
    return bool(index.has(sym.Q, sym.ROW, sym.K))


def reads_of(expressions: Iterable[sp.Basic]) -> tuple[sp.Indexed, ...]:
    """The distinct reads in some expressions, in a fixed order, each after those in its indices."""
    found = {read for e in expressions for read in e.atoms(sp.Indexed)}
    return tuple(sorted(found, key=lambda read: (_depth(read), sp.default_sort_key(read))))


def _depth(read: sp.Indexed) -> int:
    """How many reads deep an index of `read` is: 0 in doc[k], 1 in doc[perm[k]]."""
    inner = (part for index in read.indices for part in index.atoms(sp.Indexed))
    return max((1 + _depth(part) for part in inner), default=0)


def is_dense(read: sp.Indexed) -> bool:
    """Read per pair with the key position along the last axis: worth wide loads."""
    return scope_of(read) == "pairs" and read.indices[-1] == sym.K


def variables_for(reads: Sequence[sp.Indexed]) -> dict[sp.Indexed, str]:
    """A kernel variable for each read, named after the tensor and what it is indexed by.

    doc[b, q] -> doc_at_q, rel[b, h, row, k] -> rel_at_row_k
    """
    names: dict[sp.Indexed, str] = {}
    for read in reads:
        plain = [str(i) for i in read.indices if i.is_Symbol]
        moving = [n for n in plain if n in {"q", "row", "k"}] or plain[-1:]
        stem = "_".join([str(read.base), "at", *(moving or ["index"])])
        taken = sum(name == stem or name.startswith(f"{stem}_") for name in names.values())
        names[read] = f"{stem}_{taken + 1}" if taken else stem
    return names


def strides_of(reads: Iterable[sp.Indexed], spec: AttentionSpec) -> tuple[tuple[str, ...], ...]:
    """Of each tensor the strides that some index of 32 bits is multiplied by."""
    axes: dict[str, set[int]] = {}
    for read in reads:
        tensor = spec.input(str(read.base))
        for axis, (index, extent) in enumerate(zip(read.indices, tensor.shape, strict=True)):
            if extent != 1 and index not in WIDE_SYMBOLS:
                axes.setdefault(tensor.name, set()).add(axis)
    return tuple(
        tuple(f"stride_{name}_{axis}" for axis in sorted(found))
        for name, found in sorted(axes.items())
    )


def dense_tensors(reads: Iterable[sp.Indexed]) -> frozenset[str]:
    """Names of the tensors that some read wants wide loads from."""
    return frozenset(str(read.base) for read in reads if is_dense(read))


def input_read(
    read: sp.Indexed,
    variable: str,
    spec: AttentionSpec,
    printer: TritonPrinter,
    *,
    dense: frozenset[str] = frozenset(),
    in_score: bool = False,
    in_tile: str = "kv_exists",
) -> InputRead:
    """Address, checks and load statements of one read; `in_tile` says which keys exist."""
    tensor = spec.input(str(read.base))
    scope = scope_of(read)
    computed = {
        index: f"{variable}_index{axis}"
        for axis, index in enumerate(read.indices)
        if not index.is_Atom
    }
    statements = {e: f"{name} = {_index(e, printer)}" for e, name in computed.items()}
    printer = TritonPrinter({**printer.names, **computed}, printer.helpers, precise=printer.precise)
    offsets = [
        _offset(tensor, axis, index, printer, is_dense_tensor=tensor.name in dense)
        for axis, (index, extent) in enumerate(zip(read.indices, tensor.shape, strict=True))
        if extent != 1
    ]
    address = " + ".join([f"{tensor.name}_ptr", *offsets])
    base_lines: tuple[str, ...] = ()
    if tensor.name in dense and scope == "pairs":
        fixed = [statements.pop(e) for e in computed if not moves(e)]
        base, address = _split_address(read, tensor, variable, offsets)
        base_lines = (*fixed, base)
    checks = tuple(f"({printer.doprint(c)})" for c in range_conditions(read, spec))
    if scope in {"rows", "pairs"}:
        checks = ("row_exists", *checks)
    masked = (*checks, in_tile) if scope in {"keys", "pairs"} else checks
    return InputRead(
        variable=variable,
        tensor=tensor.name,
        scope=scope,
        statement=f"{variable} = {_load(address, checks, tensor)}",
        masked_statement=f"{variable} = {_load(address, masked, tensor)}",
        in_score=in_score,
        base_lines=base_lines,
        index_statements=tuple(statements.values()),
    )


def _index(e: sp.Expr, printer: TritonPrinter) -> str:
    """An index as kernel text; what is rounded down to one is a real number till then."""
    text = printer.doprint(e)
    return f"({text}).to(tl.int32)" if is_rounded_real(e) else text


def _split_address(
    read: sp.Indexed, tensor: Input, variable: str, offsets: Sequence[str]
) -> tuple[str, str]:
    """Statement of a program-wide base that the compiler knows to be aligned, and the rest."""
    indices = [i for i, extent in zip(read.indices, tensor.shape, strict=True) if extent != 1]
    along = list(zip(offsets, map(moves, indices), strict=True))
    fixed = [f"{tensor.name}_ptr", *(offset for offset, moving in along if not moving)]
    rest = " + ".join(offset for offset, moving in along if moving)
    unit = f"16 if ALIGN > 1 else {get_dtype(tensor.dtype).bytes}"
    base = f"{variable}_base = tl.multiple_of({' + '.join(fixed)}, {unit})"
    return base, f"{variable}_base + ({rest})"


def _offset(
    tensor: Input, axis: int, index: sp.Expr, printer: TritonPrinter, *, is_dense_tensor: bool
) -> str:
    stride = f"stride_{tensor.name}_{axis}"
    if is_dense_tensor and axis == len(tensor.shape) - 1:
        stride = f"(1 if ALIGN > 1 else {stride})"
    elif is_dense_tensor:
        stride = f"({stride} * ({elems_per_16_bytes(tensor)} if ALIGN > 1 else 1))"
    return f"{printer.parenthesize(index, PRECEDENCE['Mul'])} * {stride}"


def elems_per_16_bytes(tensor: Input) -> int:
    """Elements in 16 bytes, the unit in which an aligned tensor's row strides are passed."""
    return 16 // get_dtype(tensor.dtype).bytes


def _load(address: str, checks: Sequence[str], tensor: Input) -> str:
    text = f"tl.load({address}" + (f", mask={' & '.join(checks)}, other=0)" if checks else ")")
    if get_dtype(tensor.dtype).kind == "boolean":
        return f"({text} != 0).to(tl.int32)"
    return f"{text}.to(tl.float32)" if tensor.dtype in {"fp16", "bf16"} else text
