"""The number formats that flashgen knows: one row each, with the names other systems give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "integer", "boolean"]


@dataclass(frozen=True)
class DType:
    """A number format: `bytes` is its size in memory, `torch_name` the attribute of `torch`.

    `triton_name` is the attribute of `triton.language`; `accumulates` names the format in which
    a matmul of such elements is summed on the device (None: not a matmul operand).
    """

    name: str
    bytes: int
    torch_name: str
    triton_name: str
    kind: Kind
    accumulates: str | None = None

    @property
    def bits(self) -> int:
        """Size of one element in memory, in bits."""
        return 8 * self.bytes


# tf32 is fp32 in memory; the name says how a matmul reads it (19 bits of each operand).
# fp8_e4m3 is the finite-only variant (largest value 448), as Hopper and MI300 multiply it.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 4, "float32", "float32", "float", "fp32"),
        DType("tf32", 4, "float32", "float32", "float", "fp32"),
        DType("fp16", 2, "float16", "float16", "float", "fp32"),
        DType("bf16", 2, "bfloat16", "bfloat16", "float", "fp32"),
        DType("fp8_e4m3", 1, "float8_e4m3fn", "float8e4nv", "float", "fp32"),
        DType("int32", 4, "int32", "int32", "integer"),
        DType("int64", 8, "int64", "int64", "integer"),
        DType("bool", 1, "bool", "int1", "boolean"),
    )
}

# What `dtype:` may name, in the order in which messages list it, and what `inputs:` may.
MATMUL_DTYPES: tuple[str, ...] = ("fp16", "bf16", "fp32", "tf32", "fp8_e4m3")
OUTPUT_DTYPES: tuple[str, ...] = ("fp16", "bf16", "fp32", "fp8_e4m3")
INPUT_DTYPES: tuple[str, ...] = ("fp32", "fp16", "bf16", "int32", "int64", "bool")


def get_dtype(name: str) -> DType:
    """The row of `name`; KeyError for a name that is not in the table."""
    return DTYPES[name]


def output_dtype(q: str) -> str:
    """The format of the output where a spec gives only that of q.

    tf32 says how fp32 in memory is multiplied; the output of an FP8 matmul is kept in bf16.
    """
    return {"tf32": "fp32", "fp8_e4m3": "bf16"}.get(q, q)
