"""Triton's interpreter does a launch's work once, and nothing that it throws away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import flashgen
from flashgen.runtime.interpret import check_interpreter, interpreting
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions for which the interpreter patches the language."""
    check_interpreter()
    done: list[str] = []
    patch = interpreter._patch_lang

    def counted(function: Any) -> Any:
        done.append(function.__name__)
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    return done


def _sums() -> Any:
    """A kernel that calls library functions in a loop: tl.sum, tl.cdiv."""

    @triton.jit
    def sums(x_ptr, y_ptr, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: N803
        total = 0.0
        for start in range(tl.cdiv(n, BLOCK)):
            at = start * BLOCK + tl.arange(0, BLOCK)
            total += tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), 0)
        tl.store(y_ptr, total)

    return sums


def test_the_language_is_patched_once_a_launch_and_again_for_the_next(patches: list[str]) -> None:
    x, y = torch.arange(100, dtype=torch.float32), torch.zeros(1)
    counts = []
    with interpreting():
        sums = _sums()
        for _ in range(2):
            y.zero_()
            sums[(1,)](x, y, 100, BLOCK=16)
            assert y.item() == x.sum().item()
            counts.append(len(patches))
    first, both = counts
    # By the modules through which functions see the language, and not for each of 8 calls.
    assert first <= 3
    assert 2 <= both - first <= 3
    assert patches.count("sums") == 2
    assert interpreter._patch_lang.__name__ == "counted"  # and that is put back


def test_two_kernels_of_one_call_both_find_the_language_patched() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"], loop_order="flash1")
    schedule = Schedule(
        block_m=16, block_n=16, num_warps=1, num_stages=1, loop_order="flash1", num_kv_splits=2
    )
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    out = flashgen.compile(spec, schedule=schedule)(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_overflow_is_computed_only_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    found = builder.options
    with interpreting():
        assert not builder.options.sanitize_overflow
    assert builder.options is found
    monkeypatch.setattr(builder, "options", replace(found, debug=True))
    with interpreting():
        assert builder.options.sanitize_overflow
