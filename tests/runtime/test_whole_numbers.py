"""Whole numbers beyond 32 bits, divisors that are 0, and sums that cancel: kernel against oracle.

47,000 keys: the product of two positions is beyond 2**31.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, reference
from flashgen.errors import TensorError
from flashgen.reference import Comparison
from flashgen.schedule.model import Schedule

KEYS = 47_000
MOST = 2**31 - 1
TILE = Schedule(block_m=16, block_n=64, num_warps=4, num_stages=1)
NEAR = {"window": {"left": 150}}  # few keys: what they are compared with is what counts
DECLARED: dict[str, dict[str, Any]] = {
    "ids": {"shape": ["batch", "kv_len"], "dtype": "int32"},
    "wide": {"shape": ["batch", "kv_len"], "dtype": "int64"},
    "table": {"shape": [64], "dtype": "fp32"},
    "n": {"shape": [], "dtype": "int32"},
    "x": {"shape": [], "dtype": "fp32"},
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[2]))


QKV = (random(1, 1, 3, 16), random(1, 1, KEYS, 16), random(1, 1, KEYS, 16).flip(2))
KEY = torch.arange(KEYS)[None]
HIGH = (MOST - KEY % 4).int()  # ids just below the largest
LOW = torch.where(KEY % 3 == 0, -(2**31), KEY % 11 - 5).int()  # and the smallest there is


def compared(spec: AttentionSpec, inputs: dict[str, Any]) -> Comparison:
    out, lse = flashgen.compile(spec, schedule=TILE, return_lse=True)(*QKV, **inputs)
    expected = reference.attention(spec, *QKV, inputs=inputs)
    eager, eager_lse = reference.eager(spec, *QKV, inputs=inputs)
    return reference.compare(out, lse, *expected, eager, eager_lse=eager_lse)


def spec_of(mask: list[Any], score: list[Any], inputs: dict[str, Any]) -> AttentionSpec:
    declared = {name: DECLARED[name] for name in inputs}
    return AttentionSpec(head_dim=16, dtype="fp32", mask=mask, score=score, inputs=declared)


def visible(spec: AttentionSpec, inputs: dict[str, Any]) -> int:
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 3, "kv_len": KEYS}
    return int(reference.mask(spec, **sizes, inputs=inputs).sum())


MASKS: dict[str, tuple[dict[str, Any], int]] = {  # expression: inputs, how many pairs it shows
    "q * 100000 < k * 100001": ({}, 3),
    "k * k - q * q >= -5000000": ({}, 162),
    "(q * k) % 7 == 3": ({}, 43),
    "q * 65536 // 65537 <= k": ({}, 6),
    "(q * 100000 - k * 100000) % 300000 == 0": ({}, 153),
    "k + 2147483647 > q + 2147483600": ({}, 141),
    "where(k % 2 == 0, q, 2147483647) * 2 > k": ({}, 453),
    "max(k, 2147483644) + 5 > q * 45000": ({}, 453),
    "k // (2147483647 * 2147483647) == 0": ({}, 453),
    "k / 1000000007 + q / 998244353 < 1": ({}, 453),
    "k < n + 1": ({"n": MOST}, 453),
    "k >= q - n": ({"n": MOST}, 453),
    "k * 3 > q * 3 - n": ({"n": MOST}, 453),
    "ids[b, k] + 2 > ids[b, q]": ({"ids": HIGH}, 415),
    "abs(ids[b, k]) > 5": ({"ids": LOW}, 151),
    "-ids[b, k] < 1": ({"ids": LOW}, 161),
    "wide[b, k] > wide[b, q] - 8": ({"wide": KEY << 40}, 3),
    # A divisor of 0 gives 0.
    "k // n == q // n": ({"n": 0}, 453),
    "k % n == q % n": ({"n": 0}, 453),
    "(q * n) // n == q": ({"n": 0}, 0),
    "k // n * n + k % n == k": ({"n": -7}, 453),
    "k % ids[b, k] < 3": ({"ids": LOW}, 434),
    "k // (k % 3) > 20000": ({}, 302),
    "k // x > 3.0": ({"x": 0.0}, 0),
    "k % x < 1.2": ({"x": 0.0}, 453),
    "k // kv_len == 0": ({}, 453),
}


@pytest.mark.parametrize("expr", MASKS)
def test_masks(expr: str) -> None:
    inputs, pairs = MASKS[expr]
    spec = spec_of(["causal", NEAR, {"expr": expr}], [], inputs)
    assert visible(spec, inputs) == pairs
    assert compared(spec, inputs).ok


SCORES: dict[str, dict[str, Any]] = {
    "s - 0.000001 * (q * k - 2147483647)": {},
    "s + q * k * x": {"x": 1e-9},
    "s + 1e10 / (q * k)": {},
    "s + table[(q * k) % 64]": {"table": torch.linspace(-2, 2, 64)},
    "s + table[floor(0.5 * abs(q - k))]": {"table": torch.linspace(-2, 2, 64)},
    "s + log(1 + abs(q * k - k * k))": {},
    "s + exp(0.001 * ((q * k) % 100)) + tanh((q * k) % 100 * 0.01)": {},
    "s + n + n - 2147483647 - 2147483647 + x * k": {"n": MOST, "x": 1e-4},
    "s + 0.01 * (k // (k % 5)) - k % n": {"n": 0},
    # A factor times a difference of large positions.
    "s - 0.1 * (q - k)": {},
    "s - (q - k)": {},
    "q + s * 0.25 - k - 3": {},
    "s - (q - k + 7) / 300": {},
    "s * 0.5 - 0.3 * (2 * k - 3 * q + q) * 0.1": {},
    "s + 0.01 * (k - ids[b, k])": {"ids": (KEY - 9).int()},
}


@pytest.mark.parametrize("expr", SCORES)
def test_scores(expr: str) -> None:
    inputs = SCORES[expr]
    assert compared(spec_of(["causal", NEAR], [{"expr": expr}], inputs), inputs).ok


def test_lengths_have_a_limit(golden: Callable[[str, str], None]) -> None:
    k = torch.zeros(1, 1, 1, 16).expand(1, 1, 2**29 + 1, 16)
    with pytest.raises(TensorError) as raised:
        flashgen.compile(spec_of([], [], {}))(QKV[0], k, k)
    golden("errors/tensor-length-limit.txt", str(raised.value))
