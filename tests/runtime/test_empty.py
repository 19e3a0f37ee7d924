"""Nothing to attend with or to: 0 batches, heads, rows or keys. Kernel and oracle agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, reference
from flashgen.errors import TensorError

SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bshd": {"layout": "bshd"},
    "group": {"heads": {"group": 2}},
    "causal-sink-kv_lens": {"mask": "causal", "sink": "per_head", "kv_lens": "per_batch"},
    "inputs": {
        "mask": [{"same": "doc"}, {"expr": "m[b, h, row, k]"}],
        "score": [{"alibi": "slopes"}],
        "inputs": {
            "m": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "bool"},
            "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
            "slopes": {"shape": ["q_heads"], "dtype": "fp32"},
        },
    },
}
NAMES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
SIZES = (
    (0, 2, 1, 5, 5),
    (0, 0, 0, 0, 0),
    (1, 0, 0, 5, 5),
    (1, 0, 2, 5, 5),
    (1, 2, 1, 0, 5),
    (2, 2, 1, 5, 0),
    (2, 2, 1, 0, 0),
    (1, 2, 0, 5, 5),
    (0, 3, 0, 2, 2),
    (0, 3, 2, 2, 2),
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_empty(name: str, sizes: tuple[int, ...]) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", **SPECS[name])
    extents = dict(zip(NAMES, sizes, strict=True))
    qkv = [
        torch.randn(extents["batch"], extents[heads], extents[length], 16)
        for heads, length in (("q_heads", "q_len"), ("kv_heads", "kv_len"), ("kv_heads", "kv_len"))
    ]
    if spec.layout == "bshd":
        qkv = [tensor.transpose(1, 2) for tensor in qkv]
    inputs = {
        declared.name: torch.ones(
            [extents[str(extent)] for extent in declared.shape],
            dtype=reference.torch_dtype(declared.dtype),
        )
        for declared in spec.inputs
    }
    reserved = {}
    if spec.sink == "per_head":
        reserved["sink"] = torch.full((extents["q_heads"],), 0.5)
    if spec.kv_lens == "per_batch":
        reserved["kv_lens"] = torch.full((extents["batch"],), extents["kv_len"])

    def kernel() -> Any:
        return flashgen.compile(spec, return_lse=True)(*qkv, **inputs, **reserved)

    def oracle() -> Any:
        return reference.attention(spec, *qkv, inputs=inputs, **reserved)

    def eager() -> Any:
        return reference.eager(spec, *qkv, inputs=inputs, **reserved)

    refusals = []
    for call in (kernel, oracle, eager):
        try:
            result = call()
        except TensorError as error:
            refusals.append(str(error))
            continue
        assert not refusals
        out, lse = (tensor.double() for tensor in result)
        assert out.shape == (*qkv[0].shape[:3], 16)
        assert lse.shape == (extents["batch"], extents["q_heads"], extents["q_len"])
        assert torch.equal(out, torch.zeros_like(out))
        nothing = 0.5 if spec.sink == "per_head" else float("-inf")
        assert torch.equal(lse, torch.full_like(lse, nothing))
    assert len(set(refusals)) <= 1
    group, heads = spec.heads.group, (extents["q_heads"], extents["kv_heads"])
    fits = heads[0] == 2 * heads[1] or (group is None and heads[0] == 0)
    assert len(refusals) == (0 if fits else 3)
