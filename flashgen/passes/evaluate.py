"""SymPy expressions evaluated on whole arrays, or on lines that stand for them (`passes.lines`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec


@dataclass(frozen=True)
class Evaluator:
    """Evaluates SymPy expressions on whole arrays; integers stay integers."""

    values: Mapping[sp.Symbol, Any]
    tensors: Mapping[str, NDArray[Any]]
    spec: AttentionSpec | None  # whose inputs the tensors are

    def __call__(self, e: sp.Basic) -> Any:  # noqa: PLR0911 -- one return for each kind
        if e in self.values:
            return self.values[e]
        if isinstance(e, sp.Indexed):
            return self._read(e)
        if e.is_Number:
            return int(e) if e.is_Integer else float(e)
        if e in (sp.true, sp.false):
            return np.bool_(e == sp.true)
        if isinstance(e, sp.floor):
            above, below = (self(part) for part in sp.fraction(sp.together(e.args[0])))
            return np.floor_divide(above, below)
        if isinstance(e, sp.ceiling):
            return -self(sp.floor(-e.args[0]))
        if isinstance(e, sp.Piecewise):
            branches = [(self(value), self(condition)) for value, condition in e.args]
            rest: Any = 0
            for value, condition in reversed(branches):
                rest = np.where(condition, value, rest)
            return rest
        return (
            reduce(_OPERATIONS[e.func], map(self, e.args))
            if e.func in _OPERATIONS
            else self._one(e)
        )

    def _one(self, e: sp.Basic) -> Any:
        return _FUNCTIONS[e.func](*map(self, e.args))

    def _read(self, read: sp.Indexed) -> Any:
        """The elements read; 0 for those outside, which the predicate's own conditions hide."""
        tensor = self.tensors[str(read.base)]
        inside: Any = np.bool_(True)
        indices = []
        assert self.spec is not None, "no spec declares what is read"
        declared = self.spec.input(str(read.base)).shape
        for index, extent, named in zip(
            map(self, read.indices), tensor.shape, declared, strict=True
        ):
            place = np.asarray(0 if named == 1 else index)
            within = (place >= 0) & (place < extent)
            inside = inside & within
            indices.append(np.where(within, place, 0))
        if tensor.size == 0:
            return np.zeros(np.broadcast(*indices).shape, dtype=np.int64)
        value = tensor[tuple(indices)]
        return np.where(inside, value.astype(np.int64) if value.dtype == bool else value, 0)


def evaluate_on(e: sp.Basic, values: Mapping[sp.Symbol, Any]) -> Any:
    """`e`, which reads no tensor, on arrays."""
    return Evaluator(values, {}, None)(e)


def _divided(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """An operation whose result is 0 where the divisor is."""
    by_zero = np.equal(right, 0)
    return np.where(by_zero, 0, operation(left, np.where(by_zero, 1, right)))


_OPERATIONS: Mapping[type[sp.Basic], Callable[[Any, Any], Any]] = {
    sp.Add: np.add,
    sp.Mul: np.multiply,
    sp.Max: np.maximum,
    sp.Min: np.minimum,
    sp.And: np.logical_and,
    sp.Or: np.logical_or,
    sp.Mod: np.mod,
    sym.FloorDiv: partial(_divided, np.floor_divide),
    sym.FloorMod: partial(_divided, np.mod),
    sp.Eq: np.equal,
    sp.Ne: np.not_equal,
    sp.Le: np.less_equal,
    sp.Lt: np.less,
    sp.Ge: np.greater_equal,
    sp.Gt: np.greater,
}
_FUNCTIONS: Mapping[type[sp.Basic], Callable[..., Any]] = {
    sp.Not: np.logical_not,
    sp.ITE: np.where,
    sp.Abs: np.abs,
    sp.Pow: lambda base, exponent: np.asarray(base, dtype=np.float64) ** exponent,
    sp.exp: np.exp,
    sp.log: np.log,
    sp.tanh: np.tanh,
}
