"""What conformance tests ask: is a call right, and is what is not served refused?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from property.drawn import Call, Drawn, judge, kernel_of, verdict

from flashgen import reference
from flashgen.compiler.choose import check_served, unserved_features
from flashgen.compiler.choose import compile as compile_spec
from flashgen.errors import NotServedError, TensorError
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

# Small tiles, so that a few dozen keys are several of them and the interpreter is done soon.
TILE = ("loop", 16, 32)


def assert_right(
    spec: dict[str, Any],
    sizes: tuple[int, int, int, int, int],
    tile: tuple[str, int, int] | None = TILE,
    **drawn: Any,
) -> None:
    """A random call of (batch, q_heads, kv_heads, q_len, kv_len) agrees with the oracle."""
    comparison = verdict(Drawn(spec=spec, sizes=sizes, tile=tile, **drawn))
    assert comparison.ok, str(comparison)


def assert_call_right(call: Call, tile: tuple[str, int, int] | None = TILE) -> None:
    """A call with given tensors agrees with the oracle."""
    comparison = judge(call, schedule(tile))
    assert comparison.ok, str(comparison)


def schedule(tile: tuple[str, int, int] | None) -> Schedule | None:
    return Drawn(spec={}, sizes=(0, 0, 0, 0, 0), tile=tile).schedule


def attend(
    spec: AttentionSpec, *qkv: torch.Tensor, tile: tuple[str, int, int] | None = TILE, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a spec, from outputs that hold NaN before."""
    result = kernel_of(spec, schedule(tile))(*qkv, **others)
    assert isinstance(result, tuple)
    return result


def oracle(
    spec: AttentionSpec, *qkv: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    reserved = {name: others.pop(name) for name in ("sink", "kv_lens") if name in others}
    return reference.attention(spec, *qkv, inputs=others, **reserved)


def assert_refused(spec: dict[str, Any], *features: str) -> None:
    """A valid spec that no kernel serves: an error that names each feature, nothing silent."""
    valid = AttentionSpec(**spec)
    assert unserved_features(valid) == features
    with pytest.raises(NotServedError) as refusal:
        compile_spec(valid)
    assert all(feature in str(refusal.value) for feature in features)
    with pytest.raises(NotServedError):
        check_served(valid)


def assert_gradient_refused(
    spec: dict[str, Any], sizes: tuple[int, int, int, int, int], *wanted: str
) -> None:
    """Tensors that require grad are refused by name, and computed where no gradient is wanted."""
    batch, q_heads, kv_heads, q_len, kv_len = sizes
    built = AttentionSpec(**spec)
    dtype = reference.torch_dtype(built.dtype.q)
    tensors: dict[str, Any] = {
        "q": torch.randn(batch, q_heads, q_len, built.head_dim.qk).to(dtype),
        "k": torch.randn(batch, kv_heads, kv_len, built.head_dim.qk).to(dtype),
        "v": torch.randn(batch, kv_heads, kv_len, built.head_dim.v).to(dtype),
    }
    extents = dict(zip(("batch", "q_heads", "kv_heads", "q_len", "kv_len"), sizes, strict=True))
    for declared in built.inputs:
        shape = [extents.get(str(e), e) for e in declared.shape]
        value = torch.randn(shape).to(reference.torch_dtype(declared.dtype))
        tensors[declared.name] = value if shape else value.item()
    if built.sink == "per_head":
        tensors["sink"] = torch.randn(q_heads)
    kernel = compile_spec(built, schedule=schedule(TILE))
    plain = kernel(**tensors)
    for name in wanted:
        graded = {**tensors, name: tensors[name].clone().requires_grad_()}
        with pytest.raises(TensorError) as refusal:
            kernel(**graded)
        assert str(refusal.value).startswith(f"{name}:")
        assert "backward" in str(refusal.value)
        with torch.no_grad():
            assert torch.equal(kernel(**graded), plain)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_finite(*tensors: torch.Tensor) -> None:
    assert all(bool(torch.isfinite(t).all()) for t in tensors)


MINUS_INF = -math.inf
