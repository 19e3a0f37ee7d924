"""The tuner on real GPUs: every measuring process times on its own, and no schedule twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from flashgen.compiler.tuning import tune
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.tune.worker import Asked, Worker

pytestmark = pytest.mark.gpu

SPEC = AttentionSpec(
    name="tuned_here",
    head_dim=64,
    dtype="fp16",
    heads={"group": 1},
    mask="causal",
    shapes=[{"batch": 2, "q_heads": 4, "kv_heads": 4, "q_len": 2048, "kv_len": 2048}],
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, Schedule]]:
    """(GPU, schedule) of every measurement that is no race."""
    pytest.importorskip("optuna")
    seen: Counter[tuple[int, Schedule]] = Counter()
    ask = Worker.ask

    def counted(self: Worker, what: Asked, deadline_s: float) -> object:
        if what.what == "measure":
            seen.update((self.device, schedule) for schedule in what.schedules)
        return ask(self, what, deadline_s)

    monkeypatch.setattr(Worker, "ask", counted)
    return seen


@pytest.mark.parametrize("devices", ["0", "all"])
def test_a_short_search(devices: str, asked: Counter[tuple[int, Schedule]], tmp_path: Path) -> None:
    if devices == "all" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    numbers = "all" if devices == "all" else (0,)
    found = tune(
        SPEC,
        devices=numbers,
        trials=14,
        seconds=240,
        storage=str(tmp_path / "trials"),
        out=tmp_path,
    )
    (result,) = found.results
    assert result.outcome is not None and result.entry is not None
    assert not result.outcome.failures
    schedules = [schedule for _, schedule in asked]
    assert len(schedules) == len(set(schedules)), "a schedule was timed twice"
    assert len(schedules) >= 14
    assert len({gpu for gpu, _ in asked}) == (2 if devices == "all" else 1)
    assert result.entry.speedup is not None and result.entry.speedup >= 1
