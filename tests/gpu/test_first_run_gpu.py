"""Hopper kernels on the GPU: one that never ends costs its own process and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashgen.compiler import choose, first_run, verify
from flashgen.compiler.choose import compile as compile_spec
from flashgen.compiler.first_run import Deadlines, FirstRuns, Task, Trying, machine_here
from flashgen.errors import FlashgenWarning
from flashgen.problem import Problem
from flashgen.runtime.check import Sizes
from flashgen.runtime.said import forget
from flashgen.schedule.model import Schedule, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.tune import verdicts
from flashgen.tune.verdicts import HUNG, recall, subject_of

SPEC = AttentionSpec(name="first_run", head_dim=128, dtype="bf16", mask="causal")
SCHEDULE = Schedule(
    family="gluon_sm90",
    block_m=128,
    block_n=128,
    num_warps=12,
    num_stages=2,
    sm90=Sm90(scheduler="dynamic", separate_out=True),
)
SHORT = Deadlines(start=180.0, compile=60.0, run=10.0)


@pytest.fixture(autouse=True)
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "flashgen"))
    verdicts.forget_here()
    forget()
    yield
    verdicts.forget_here()


def qkv(length: int = 700) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, length, 128, device="cuda").bfloat16() for _ in range(3)]


def is_right(out: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    q, k, v = (tensor.float() for tensor in tensors)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return bool((out.float() - wanted).abs().max() < 2e-2)


def test_a_kernel_that_waits_for_ever_is_ended_remembered_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_run, "DEADLINES", SHORT)
    device = torch.device("cuda", torch.cuda.current_device())
    target = choose.target_of(device)
    plan, path = choose.plan(SPEC, target, schedule=SCHEDULE, has_lse=False)
    guard = FirstRuns(SPEC, lambda _: target, "hanging:Hanging")
    begun = time.monotonic()
    assert not guard(device, plan, path, SCHEDULE, Sizes(2, 4, 4, 700, 700))
    print(f"\nhung, found out and ended after {time.monotonic() - begun:.1f} s")
    verdicts.forget_here()  # as in the next process
    found = recall(subject_of(plan, SPEC.display_name, SCHEDULE, machine_here(device.index or 0)))
    assert found is not None
    assert (found.state, found.refusal) == ("hung", HUNG)
    assert found.reason.startswith("no answer within 10 s, running b2 h4:2 q129 k259")

    tensors = qkv()  # and the GPU serves others
    attention = compile_spec(SPEC, schedule=SCHEDULE)
    with pytest.warns(FlashgenWarning, match="hung before on this toolchain; family triton serves"):
        out = attention(*tensors)
    assert isinstance(out, torch.Tensor)
    assert is_right(out, tensors)
    assert "family gluon_sm90, " not in attention.report()


def test_a_good_kernel_is_tried_once_and_then_starts_at_once(tmp_path: Path) -> None:
    """Seconds of the first call with a trial, and of the first call of a later process."""
    tensors = qkv()
    torch.cuda.synchronize()
    begun = time.monotonic()
    attention = compile_spec(SPEC, schedule=SCHEDULE)
    out = attention(*tensors)
    torch.cuda.synchronize()
    print(f"\nfirst call, tried in a process of its own before: {time.monotonic() - begun:.1f} s")
    assert isinstance(out, torch.Tensor)
    assert is_right(out, tensors)
    assert "family gluon_sm90, " in attention.report()
    assert [verdict.state for verdict in verdicts.known()] == ["proven"]
    print(_later_process(tmp_path))


PROGRAM = """
import time, torch
from flashgen.compiler import first_run
from test_first_run_gpu import SCHEDULE, SPEC, compile_spec, qkv
def no_trial(*arguments, **named):
    raise AssertionError("tried again")
first_run.tried = no_trial
tensors = qkv()
torch.cuda.synchronize()
begun = time.monotonic()
attention = compile_spec(SPEC, schedule=SCHEDULE)
attention(*tensors)
torch.cuda.synchronize()
print(f"first call of a later process: {time.monotonic() - begun:.2f} s")
assert "family gluon_sm90, " in attention.report(), attention.report()
"""


def _later_process(tmp_path: Path) -> str:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_verification_runs_hopper_kernels_in_a_process_of_its_own() -> None:
    shapes = [Shape(2, 4, 4, 128, 128), Shape(2, 6, 2, 1000, 1000)]
    found = verify(SPEC, schedule=SCHEDULE, shapes=shapes)
    assert {result.case.schedule for result in found.results} == {SCHEDULE}
    assert [result.failure for result in found.results] == [None, None]
    assert len(verdicts.known()) == found.ok


def test_machine_code_that_spills_is_refused_where_it_would_be_run() -> None:
    spec = SPEC.replace(head_dim=256, score={"softcap": 50.0})
    schedule = Schedule(
        family="gluon_sm90", block_m=128, block_n=128, num_warps=12, num_stages=1, sm90=Sm90()
    )
    device = torch.device("cuda", torch.cuda.current_device())
    target = choose.target_of(device)
    plan, path = choose.plan(spec, target, schedule=schedule, has_lse=False)
    task = Task(Problem(spec, target), plan, path, device.index or 0)
    with Trying(task) as trying, pytest.raises(first_run.UnusableError) as refused:
        trying.compile(schedule)
    assert refused.value.state == "refused"
    assert "spill_bytes: must be at most 0" in refused.value.reason
