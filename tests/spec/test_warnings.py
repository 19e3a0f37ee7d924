"""Redundant specs are valid and say so, one sentence each, with a golden text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import HEAD, INPUTS

from flashgen.spec import AttentionSpec, parse_spec

ALL_INPUTS_USED = (
    "score: [{expr: 's + gain + slopes[h] + rel[0, h, row, k] + count[b, h, row, k]'}]\n"
    "mask: [{same: doc}, {expr: 'm[b, h, row, k] or k < reach'}]\n"
)

WARNED: dict[str, str] = {
    "warning-window-right": "mask: [causal, {window: {left: 3, right: 2}}]\n",
    "warning-mask-twice": "mask: [causal, {window: {left: 3}}, causal]\n",
    "warning-window-within": "mask: [{window: {left: 3}}, {window: {left: 5, right: 2}}, "
    "{window: {left: 3, right: 1}}]\n",
    "warning-mask-always": "mask: {expr: 1 < 2}\n",
    "warning-mask-never": "mask: {expr: 2 < 1}\n",
    "warning-score-twice": "score: [{softcap: 50}, {softcap: 50.0}]\n",
    "warning-grad-without-backward": (
        "inputs: {rel: {shape: [q_len, kv_len], dtype: bf16}}\n"
        "score: {bias: {tensor: rel, grad: true}}\n"
    ),
    "warning-input-unused": "inputs: {doc: {shape: [batch, kv_len], dtype: int32}}\n",
    "warning-axis": (
        "inputs: {doc: {shape: [batch, kv_len], dtype: int32}}\nmask: {expr: 'doc[k, b] == 0'}\n"
    ),
    "warning-shape-twice": (
        "shapes:\n"
        "  - {batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 1}\n"
        "  - {batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 1}\n"
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warning(name: str, golden: Callable[[str, str], None]) -> None:
    warnings = parse_spec(HEAD + WARNED[name]).warnings()
    assert warnings
    golden(f"errors/{name}.txt", "\n".join(warnings))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mask: [causal, {window: {left: 4095, right: 0}}]\n",  # the form that design and models use
        "mask: [causal, {window: {left: 4095}}]\n",
        "mask: [{window: {left: 3}}, {window: {right: 3}}]\n",
        "scale: 0\n",
        "inputs: {x: {shape: [q_len], dtype: int32}}\nmask: {expr: 'x[row] <= k and x[q] < 9'}\n",
        INPUTS + ALL_INPUTS_USED,
    ],
)
def test_no_warning(text: str) -> None:
    assert parse_spec(HEAD + text).warnings() == ()


def test_python_form_warns_alike() -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal", "causal"])
    assert spec.warnings() == ("mask[1]: the same as mask[0]; it has no effect",)
