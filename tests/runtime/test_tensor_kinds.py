"""Tensors that a kernel cannot be given: each is refused by name, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen import AttentionSpec
from flashgen.errors import TensorError

SHAPES = {**dict.fromkeys(("q", "k", "v"), (1, 2, 5, 16)), "rel": (1, 2, 5, 5)}
SPEC = AttentionSpec(
    head_dim=16,
    dtype="fp32",
    score=[{"bias": {"tensor": "rel"}}, {"expr": "s * gain"}],
    inputs={
        "rel": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "fp32"},
        "gain": {"shape": [], "dtype": "fp32"},
    },
)


class Wrapped(torch.Tensor):
    """A subclass that only has another name."""


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda t: 1.0,
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "mkldnn": lambda t: t.to_mkldnn(),
    "fake": fake,
    "meta": lambda t: t.to("meta"),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "complex": lambda t: t.to(torch.complex64),
    "negated": torch._neg_view,
    "fp64": lambda t: t.double(),
    "grad": lambda t: t.clone().requires_grad_(),
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    yield flashgen.compile(SPEC)


def arguments() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return {**tensors, "gain": 1.5}


@pytest.mark.filterwarnings("ignore")  # what torch says about kinds of tensors
@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_name(kind: str, kernel: Any, golden: Callable[[str, str], None]) -> None:
    texts = []
    for name in SHAPES:
        given = arguments()
        given[name] = KINDS[kind](given[name])
        with pytest.raises(TensorError) as raised:
            kernel(**given)
        assert raised.value.argument == name
        texts.append(str(raised.value))
    golden(f"errors/tensor-kind-{kind}.txt", "\n".join(dict.fromkeys(texts)))


def test_inside_vmap(kernel: Any, golden: Callable[[str, str], None]) -> None:
    given = arguments()
    with pytest.raises(TensorError) as raised:
        torch.vmap(lambda q: kernel(**{**given, "q": q}))(given["q"][None])
    golden("errors/tensor-kind-vmap.txt", str(raised.value))


@pytest.mark.parametrize("gain", ["2", None, 1j, True, [1.0]])
def test_what_is_no_number(gain: Any, kernel: Any, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(TensorError) as raised:
        kernel(**{**arguments(), "gain": gain})
    golden(f"errors/tensor-scalar-{type(gain).__name__}.txt", str(raised.value))


@pytest.mark.parametrize("gain", [np.float32(1.5), np.float64(1.5), torch.tensor(1.5)])
def test_numbers_of_other_libraries(gain: Any, kernel: Any) -> None:
    wanted = kernel(**arguments())
    assert torch.equal(kernel(**{**arguments(), "gain": gain}), wanted)
    whole = kernel(**{**arguments(), "gain": 2})
    assert torch.equal(kernel(**{**arguments(), "gain": np.int64(2)}), whole)


@pytest.mark.parametrize("kind", [Wrapped, torch.nn.Parameter])
def test_subclasses_with_plain_memory(kind: Any, kernel: Any) -> None:
    given = arguments()
    wanted = kernel(**given)
    with torch.no_grad():
        for name in SHAPES:
            wrapped = {**given, name: given[name].as_subclass(kind)}
            assert torch.equal(kernel(**wrapped), wanted)


def test_inference_mode(kernel: Any) -> None:
    wanted = kernel(**arguments())
    with torch.inference_mode():
        assert torch.equal(kernel(**arguments()), wanted)
