"""Inputs that are read through one another, or called like something else in the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, FlashgenError, reference
from flashgen.errors import TensorError

KEYS = 9


def right(spec: AttentionSpec, /, **inputs: Any) -> bool:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, KEYS, 16), torch.randn(1, 1, KEYS, 16), torch.randn(1, 1, KEYS, 16)
    out, lse = flashgen.compile(spec, return_lse=True)(q, k, v, **inputs)
    expected, expected_lse = reference.attention(spec, q, k, v, inputs=inputs)
    eager, eager_lse = reference.eager(spec, q, k, v, inputs=inputs)
    found = reference.compare(out, lse, expected, expected_lse, eager, eager_lse=eager_lse)
    return found.ok


def masked(mask: Any, /, **inputs: Any) -> AttentionSpec:
    return AttentionSpec(head_dim=16, dtype="fp32", mask=[mask], inputs=inputs)


@pytest.mark.parametrize("expr", ["a[z[k]] <= q", "z[a[k]] <= q", "a[a[k]] < 3 or z[a[z[k]]] > q"])
def test_reads_through_other_reads(expr: str) -> None:
    keys = {"shape": ["kv_len"], "dtype": "int32"}
    spec = masked({"expr": expr}, a=keys, z=keys)
    assert right(spec, a=torch.randperm(KEYS).int(), z=torch.randperm(KEYS).int())


@pytest.mark.parametrize("name", ["scale", "mask", "softmax", "load_q", "acc", "merge", "self"])
def test_names_of_operations_and_arguments(name: str) -> None:
    spec = masked({"expr": f"k < {name}[b]"}, **{name: {"shape": ["batch"], "dtype": "int32"}})
    assert right(spec, **{name: torch.tensor([5], dtype=torch.int32)})


@pytest.mark.parametrize("side", [2**30, 2**31 - 1])
@pytest.mark.parametrize("which", ["left", "right"])
def test_a_window_side_beyond_all_lengths_is_no_limit(which: str, side: int) -> None:
    assert right(masked({"window": {"left": 3, "right": 2, which: side}}))


@pytest.mark.parametrize(
    ("dtype", "value", "name"),
    [("int32", 2**31, "int"), ("int64", -(2**100), "int64"), ("fp32", 10**400, "fp32")],
)
def test_scalars_out_of_range(
    dtype: str, value: int, name: str, golden: Callable[[str, str], None]
) -> None:
    spec = masked({"expr": "k < n"}, n={"shape": [], "dtype": dtype})
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(TensorError) as raised:
        flashgen.compile(spec)(q, q, q, n=value)
    golden(f"errors/tensor-scalar-range-{name}.txt", str(raised.value))


def test_a_name_is_no_spec(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(FlashgenError) as raised:
        flashgen.compile("llama3_8b")  # type: ignore[arg-type]
    golden("errors/tensor-not-a-spec.txt", str(raised.value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (),
            "first, last, sink, kv_lens: got nothing, "
            "expected arguments first=, last=, sink=, kv_lens= (only first, ",
        ),
        (
            ("first", "sink"),
            "last, kv_lens: got nothing, expected arguments last=, kv_lens= (only first, ",
        ),
        (
            ("first", "last", "sink"),
            "kv_lens: got nothing, expected an argument kv_lens= (only first, ",
        ),
    ],
)
def test_all_that_is_missing_is_named(given: tuple[str, ...], message: str) -> None:
    declared = {"shape": ["batch"], "dtype": "int32"}
    spec = AttentionSpec(
        head_dim=16,
        dtype="fp32",
        mask=[{"expr": "k < first[b] or k < last[b]"}],
        inputs={"first": declared, "last": declared},
        sink="per_head",
        kv_lens="per_batch",
    )
    tensors = {
        "first": torch.ones(1, dtype=torch.int32),
        "last": torch.ones(1, dtype=torch.int32),
        "sink": torch.zeros(2),
    }
    q, kv = torch.randn(1, 2, KEYS, 16), torch.randn(1, 1, KEYS, 16)
    with pytest.raises(TensorError) as caught:
        flashgen.compile(spec)(q, kv, kv, **{name: tensors[name] for name in given})
    assert str(caught.value).startswith(message)


def test_reads_past_the_used_length_are_outside() -> None:
    """As docs/spec.md has it: the comparison does not hold, and in a score the read is 0."""
    keys = {"shape": ["batch", "kv_len"], "dtype": "int32"}
    spec = AttentionSpec(
        head_dim=16,
        dtype="fp32",
        mask=[{"expr": "x[b, k + 1] >= 0 or k == 2"}],
        score=[{"expr": "s + x[b, k + 1]"}],
        inputs={"x": keys},
        kv_lens="per_batch",
    )
    x, q, kv = torch.full((1, KEYS), 7).int(), torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, KEYS, 16)
    attend = flashgen.compile(spec, return_lse=True)
    # Keys 0 to 2 are seen, each raised by 7; the last of three is not: x ends there.
    for used, total in ((4, 3 * math.exp(7)), (3, 2 * math.exp(7) + 1)):
        _, found = attend(q, kv, kv, x=x, kv_lens=torch.tensor([used], dtype=torch.int32))
        assert found.item() == pytest.approx(math.log(total), rel=1e-5)
