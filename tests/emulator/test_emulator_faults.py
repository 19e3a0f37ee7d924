"""Kernels with a fault put in: the emulator says which, or the result is wrong in some order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from emulated_runs import Sizes, compared
from hopper_cases import hopper

from flashgen.emulator import DeadlockError, HandOverError
from flashgen.spec.model import AttentionSpec

SPEC = AttentionSpec(name="faulty", head_dim=64, dtype="fp16")
SCHEDULE = hopper(2, 64, 2, scheduler="static", separate_out=True)
SIZES = Sizes(250, 300, q_heads=2, batch=2)


def replaced(old: str, new: str, *, times: int | None = None) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new) if times is None else text.replace(old, new, times)

    return change


def seen_wrong(tmp_path: Path, text: Callable[[str], str], seeds: int = 12) -> bool:
    """Whether some order of roles shows the fault in the result."""
    return not all(
        compared(tmp_path, SPEC, SCHEDULE, SIZES, seed=seed, text=text).ok for seed in range(seeds)
    )


INDENT = 12 * " "  # of the loop over key tiles where products overlap
RELEASE_V = """\
            acc, probs = warpgroup_mma_wait(0, deps=[acc_due, probs])
            release(v_empty, n, STAGES)
"""


def test_a_buffer_that_is_never_released_is_a_deadlock(tmp_path: Path) -> None:
    text = replaced(RELEASE_V, RELEASE_V.replace("release(v_empty, n, STAGES)", "pass"))
    with pytest.raises(DeadlockError, match=r"producer 2 waits for phase"):
        compared(tmp_path, SPEC, SCHEDULE, SIZES, text=text)


def test_a_buffer_released_before_its_product_is_done_shows(tmp_path: Path) -> None:
    first, second = RELEASE_V.splitlines(keepends=True)
    assert seen_wrong(tmp_path, replaced(RELEASE_V, second + first))


def test_a_buffer_read_before_it_is_full_shows(tmp_path: Path) -> None:
    text = replaced(f"{INDENT}wait_full(v_full, n, STAGES)\n{INDENT}acc_due", f"{INDENT}acc_due")
    assert seen_wrong(tmp_path, text)


def test_output_overwritten_while_tma_reads_it_shows(tmp_path: Path) -> None:
    assert seen_wrong(tmp_path, replaced("        tma.store_wait(0)\n", "        pass\n", times=1))


def test_a_store_without_a_fence_is_named(tmp_path: Path) -> None:
    text = replaced("        fence_async_shared()\n", "        pass\n")
    with pytest.raises(HandOverError, match="written and not fenced"):
        compared(tmp_path, SPEC, SCHEDULE, SIZES, text=text)


def test_one_arrival_too_many_is_named(tmp_path: Path) -> None:
    twice = "release(k_empty, n, STAGES)\n    release(k_empty, n, STAGES)"
    text = replaced("    release(k_empty, n, STAGES)\n    probs", f"    {twice}\n    probs")
    with pytest.raises((HandOverError, DeadlockError)):
        compared(tmp_path, SPEC, SCHEDULE, SIZES, text=text)


def test_a_record_overwritten_while_its_tile_is_attended_shows(tmp_path: Path) -> None:
    assert seen_wrong(tmp_path, replaced("PLACES = gl.constexpr(4)", "PLACES = gl.constexpr(1)"))


def test_a_result_used_before_it_is_waited_for_is_named(tmp_path: Path) -> None:
    text = replaced(
        "scores = warpgroup_mma_wait(1, deps=[scores_due])", "scores = scores_due.result"
    )
    with pytest.raises(HandOverError, match="used before it was waited for"):
        for seed in range(8):
            compared(tmp_path, SPEC, SCHEDULE, SIZES, seed=seed, text=text)
