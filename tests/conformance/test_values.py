"""Group 6: large values, number formats, scale and bias, shipped masks against the oracle."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from asked import (
    assert_call_right,
    assert_finite,
    assert_gradient_refused,
    assert_refused,
    assert_right,
    attend,
    randn,
)
from property.drawn import Call

from flashgen import settings
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec

TILES: tuple[Any, ...] = (("loop", 16, 16), ("single_tile", 16, 32), None)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("length", [1, 20])
def test_n1_huge_bf16_inputs(tile: Any, length: int) -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16")
    x = torch.full((1, 1, length, 64), 133120.0, dtype=torch.bfloat16)
    out, lse = attend(spec, x, x, x, tile=tile)
    assert torch.equal(out, x)
    assert_finite(lse)


def test_n3_softcap_of_large_scores() -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        spec = {"head_dim": 64, "dtype": dtype, "score": [{"softcap": 15.0}], "mask": ["causal"]}
        assert_right(spec, (1, 1, 1, 40, 40), magnitude=10.0)


@pytest.mark.parametrize("cap", [1e-15, 1e-3, 1e4, 1e6, 1e15])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_n3_softcaps_of_any_size(cap: float, dtype: str) -> None:
    """A large cap hardly bends the scores; the error of a fast tanh, times it, would."""
    spec = {"head_dim": 16, "dtype": dtype, "score": [{"softcap": cap}], "mask": ["causal"]}
    for tile in TILES[:2]:
        assert_right(spec, (1, 2, 1, 20, 32), tile)


def test_n5_causal_fp16_inputs_times_three() -> None:
    assert_right(
        {"head_dim": 128, "dtype": "fp16", "mask": ["causal"]}, (1, 1, 1, 48, 48), magnitude=3.0
    )


def test_n5_n3_backward_is_refused() -> None:
    assert_gradient_refused(
        {"head_dim": 64, "dtype": "fp16", "score": [{"softcap": 15.0}]}, (1, 1, 1, 8, 8), "q"
    )


@pytest.mark.parametrize(
    "dtype", ["fp8_e4m3", {"q": "fp8_e4m3", "out": "bf16"}, {"q": "bf16", "out": "fp8_e4m3"}]
)
def test_n7_n8_fp8_is_refused(dtype: Any) -> None:
    assert_refused({"head_dim": 64, "dtype": dtype}, "dtype: fp8_e4m3")
    assert_refused({"head_dim": 64, "dtype": dtype, "backward": True}, "dtype: fp8_e4m3")


@pytest.mark.parametrize("scale", [0, -1, -0.125, 1, 1e-4, 7.5, 1e-15, -1e15])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_n10_any_scale(scale: float, dtype: str) -> None:
    for score in ([], [{"softcap": 5.0}]):
        spec = {"head_dim": 16, "dtype": dtype, "scale": scale, "score": score, "mask": ["causal"]}
        assert_right(spec, (1, 2, 1, 20, 40))


@pytest.mark.parametrize("tile", TILES)
def test_n10_u7_scale_zero_is_a_uniform_average(tile: Any) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", scale=0)
    q, k, v = (randn(1, 1, 20, 16, seed=n) for n in range(3))
    out, lse = attend(spec, q, k, v, tile=tile)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-6)
    assert torch.allclose(lse, torch.full((1, 1, 20), math.log(20)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_n12_a_finite_bias_is_not_scaled(head_dim: int, dtype: str) -> None:
    spec = AttentionSpec(
        head_dim=head_dim,
        dtype="fp16",
        score=[{"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": dtype}},
    )
    q, k, v = (randn(2, 2, 40, head_dim, seed=n).half() for n in range(3))
    bias = torch.rand(1, 2, 40, 40, generator=torch.Generator().manual_seed(3)) * 15 - 10
    for tile in (("loop", 16, 16), None):
        assert_call_right(
            Call(
                spec,
                q,
                k,
                v,
                {"rel": bias.to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))},
            ),
            tile,
        )


@pytest.mark.parametrize("keys", [1, 5, 17, 33, 50])
def test_n13_the_tail_of_a_tile_holds_nothing(keys: int) -> None:
    """NaN follows the last key in memory (and surrounds every tensor); none of it comes in."""
    for form in ("contiguous", "padded", "length_first"):
        forms = {"k": form, "v": form}
        assert_right({"head_dim": 64, "dtype": "fp16"}, (1, 1, 1, 8, keys), forms=forms)
        assert_right(
            {"head_dim": 40, "dtype": "fp16", "mask": ["causal"]},
            (1, 1, 1, 8, keys),
            None,
            forms=forms,
        )


# ---- N11: compiled against eager, over the shipped specs -----------------------------------------

SHIPPED = sorted(path.stem for path in settings.specs_dir().glob("*.yaml"))
SIZES = {"whisper_cross": (20, 40)}


def shortened(mask: Any) -> Any:
    """A mask with its lengths brought down to some dozen keys: 4095 to 12, 8192 to 14."""
    text = re.sub(r"\d{2,}", lambda found: str(int(found[0]).bit_length()), json.dumps(mask))
    return json.loads(text)


@pytest.mark.parametrize("name", SHIPPED)
def test_n11_shipped_specs_equal_eager(name: str) -> None:
    spec = load_spec(settings.specs_dir() / f"{name}.yaml")
    fields = {f: v for f, v in spec.canonical().items() if f != "head_dim"}
    group = spec.heads.group or 1
    heads = min(group, 3) if spec.heads.group is None else group
    queries, keys = SIZES.get(name, (33, 40))
    # Narrower heads, and one query tile for wide groups: the mask and the score are what counts.
    width = {"qk": 24, "v": 16} if spec.head_dim.qk != spec.head_dim.v else 16
    fields["scale"] = spec.softmax_scale
    fields["mask"] = shortened(fields["mask"])
    assert_right(
        {**fields, "head_dim": width},
        (1, heads, 1, min(queries, 16 if heads > 4 else queries), keys),
    )
    assert_right({**fields, "head_dim": width}, (2, group, 1, 3, 70), ("loop", 16, 16))
