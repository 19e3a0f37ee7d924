"""What runs in a measuring worker: on the CPU, in Triton's interpreter, with a made-up clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from triton.runtime.errors import OutOfResources

from flashgen.problem import Problem
from flashgen.runtime.launch import Attention
from flashgen.schedule.model import Schedule, all_buckets
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import runner as runner_module
from flashgen.tune.candidates import Candidates, Case
from flashgen.tune.runner import CaseRunner, failed, small_shape

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(
    name="run",
    head_dim=16,
    dtype="fp16",
    heads={"group": 1},
    mask=["causal", {"same": "doc"}],
    inputs={"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
    sink="per_head",
)
SHAPE = Shape(1, 1, 1, 40, 70)
TILE = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=2)
OTHER = replace(TILE, block_n=128)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting takes 40 ms a tile."""
    monkeypatch.setattr(runner_module, "SMALL_Q_LEN", 20)
    monkeypatch.setattr(runner_module, "SMALL_KV_LEN", 70)


def made(clock: FakeClock | None = None, *, has_lse: bool = False) -> CaseRunner:
    candidates = Candidates.of(Problem(SPEC, TARGET), [TILE], has_lse=has_lse)
    return CaseRunner(Case(candidates, SHAPE), CPU, clock or FakeClock(default=25.0))


@pytest.mark.parametrize("has_lse", [False, True])
def test_a_right_schedule_is_timed(has_lse: bool) -> None:
    clock = FakeClock(default=25.0)
    runner = made(clock, has_lse=has_lse)
    found = runner.measure(TILE)
    assert found.measured, found.reason
    assert (found.time_us, found.low_us, found.high_us) == (25_000.0, 25_000.0, 25_000.0)
    assert len(found.samples_us) == runner_module.ROUNDS_ALONE
    assert len(clock.pauses) == runner_module.ROUNDS_ALONE
    assert runner.intact()


def test_a_race_takes_turns() -> None:
    clock = FakeClock(default=25.0)
    found = made(clock).race([TILE, OTHER, TILE])
    assert list(found) == [TILE, OTHER]
    assert all(each.measured for each in found.values())
    timed = [call for call, _ in clock.diary][-2 * runner_module.ROUNDS_RACE :]
    assert all(one != other for one, other in zip(timed[::2], timed[1::2], strict=True))


def test_launches_that_take_long_are_few() -> None:
    clock = FakeClock(default=1_700.0)
    found = made(clock).measure(TILE)
    assert len(found.samples_us) == 2
    # One launch to check the output, which the clock does not see, one to estimate, two to time.
    assert len(clock.diary) == 3


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """Every launch is followed by `change(q, k, v, out, lse)`."""
    plain = Attention.interpret

    def interpret(
        self: Attention, sizes: Any, q: Any, k: Any, v: Any, others: Any, out: Any, lse: Any
    ) -> None:
        plain(self, sizes, q, k, v, others, out, lse)
        change(q, k, v, out, lse)

    monkeypatch.setattr(Attention, "interpret", interpret)


def test_a_value_that_is_off_is_wrong_and_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()
    spoil(monkeypatch, lambda q, k, v, out, lse: out[..., -1, 3].add_(0.5))
    found = runner.measure(TILE)
    assert found.state == "wrong"
    assert found.reason.startswith("at q_len 20, kv_len 70: max error 0.5")
    assert runner.intact()


def test_a_value_that_was_never_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()
    spoil(monkeypatch, lambda q, k, v, out, lse: out[..., -1, :].fill_(math.nan))
    found = runner.measure(TILE)
    assert found.state == "wrong"
    assert "finite on one side only" in found.reason


def test_only_the_timed_call_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()

    def change(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        if q.shape[2] == SHAPE.q_len:
            out.mul_(1.5)

    spoil(monkeypatch, change)
    found = runner.measure(TILE)
    assert found.state == "wrong"
    assert found.reason.startswith("at q_len 40, kv_len 70: max error")


def test_a_wrong_lse_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made(has_lse=True)
    spoil(monkeypatch, lambda q, k, v, out, lse: lse.mul_(1.01))
    found = runner.measure(TILE)
    assert found.state == "wrong"
    assert "lse error" in found.reason


def test_writing_beside_the_output_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()

    def change(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        whole = out.as_strided((1,), (1,), out.storage_offset() + out.numel())
        whole.fill_(1.0)

    spoil(monkeypatch, change)
    found = runner.measure(TILE)
    assert (found.state, found.reason) == (
        "wrong",
        "at q_len 20, kv_len 70: wrote outside the output",
    )


def test_a_schedule_that_changes_inputs_is_no_more_to_be_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = made()
    assert runner.intact()

    def change(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        if q.shape[2] == SHAPE.q_len:
            v[0, 0, 1, 1] += 1

    spoil(monkeypatch, change)
    runner.measure(TILE)
    assert not runner.intact()


def test_errors_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()

    def fail(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    spoil(monkeypatch, fail)
    found = runner.measure(TILE)
    assert found.state == "failed"
    assert found.reason == "RuntimeError: CUDA error: an illegal memory access was encountered"
    too_much = failed(TILE, OutOfResources(300_000, 232_448, "shared memory"))
    assert too_much.state == "does_not_fit"
    assert "300000" in too_much.reason
    assert runner.measure(replace(TILE, kernel="single_tile", num_stages=1)).state == "failed"


def test_a_device_that_no_longer_answers_is_not_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "_synchronise", lost)
    assert not runner.intact()


BIAS = SPEC.replace(
    score=[{"bias": {"tensor": "rel"}}],
    inputs={
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
        "rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "fp16"},
    },
)


@pytest.mark.parametrize(
    ("spec", "shape", "small"),
    [
        (SPEC, Shape(4, 8, 8, 4096, 4096), Shape(2, 2, 2, 261, 331)),
        (SPEC.replace(heads="any"), Shape(4, 8, 2, 16, 128), Shape(2, 8, 2, 13, 125)),
        (BIAS, Shape(4, 8, 8, 512, 512), Shape(2, 2, 2, 261, 336)),
        (BIAS, Shape(4, 8, 8, 512, 509), Shape(2, 2, 2, 261, 331)),
        (BIAS, Shape(4, 8, 8, 512, 16), Shape(2, 2, 2, 261, 16)),
    ],
)
def test_the_small_call_is_in_the_same_bucket_and_as_aligned(
    spec: AttentionSpec, shape: Shape, small: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "SMALL_Q_LEN", 261)
    monkeypatch.setattr(runner_module, "SMALL_KV_LEN", 331)
    assert small_shape(Problem(spec, TARGET), shape) == small


def test_the_module_is_written_once_for_all_schedules(own_folders: Path) -> None:
    candidates = Candidates.of(Problem(SPEC, TARGET), [TILE, OTHER], has_lse=False)
    again = Candidates.of(Problem(SPEC, TARGET), [OTHER], has_lse=False)
    assert candidates.path == again.path
    assert len(list((own_folders / "cache" / "kernels").iterdir())) == 1
    choices = dict(candidates.plan_of(OTHER).choices)
    assert set(choices) == set(all_buckets())
    assert set(choices.values()) == {OTHER}
