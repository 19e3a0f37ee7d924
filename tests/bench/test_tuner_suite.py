"""Suite `tuner`: it goes on where an earlier run ended, and a race decides; times are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.bench import tuner_suite
from flashgen.bench.record import CaseRecord, Record, load
from flashgen.bench.report import progress_line, render
from flashgen.bench.run import Run
from flashgen.bench.specs_suite import case_id
from flashgen.bench.tuner_report import _Row
from flashgen.bench.tuner_suite import (
    SHAPES,
    Picked,
    earlier_cases,
    racers,
    reasons,
    run_case,
    run_tuner,
    stored,
    tune_cold,
)
from flashgen.errors import TuningError
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import comparison
from flashgen.tune.comparison import Exhaustive, empty
from flashgen.tune.measurement import Measurement

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="small", head_dim=64, dtype="bf16", mask=["causal"])
SHAPE = Shape(1, 2, 2, 64, 2048)
EMPTY = empty(SPEC, TARGET.id, SHAPE)
ALL = tuple(EMPTY.predicted_us)
BEST, REFUSED, HANGS, PICK = ALL[40], ALL[3], ALL[5], ALL[7]


def time_of(schedule: Schedule) -> float:
    return 100.0 if schedule == BEST else 101.0 if schedule == PICK else 150.0 + ALL.index(schedule)


class Formula:
    """Measures by `time_of`."""

    def __init__(self) -> None:
        self.prepared: list[Schedule] = []
        self.measured: list[Schedule] = []
        self.raced: list[tuple[Schedule, ...]] = []
        self.closed = 0

    def prepare(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, str]:
        self.prepared += schedules
        return {s: "spills 300 bytes a thread, over 256" for s in schedules if s == REFUSED}

    def measure(self, schedule: Schedule) -> Measurement:
        self.measured.append(schedule)
        if schedule == HANGS:
            return Measurement(schedule, "hung", reason="no answer within 10 s")
        return self._timed(schedule)

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        self.raced.append(tuple(schedules))
        return {schedule: self._timed(schedule) for schedule in schedules}

    def close(self) -> None:
        self.closed += 1

    def _timed(self, schedule: Schedule) -> Measurement:
        time = time_of(schedule)
        return Measurement(schedule, "measured", time, time - 1, time + 1)


def a_run(out: Path | None = None, **more: Any) -> Run:
    environment = {"gpu": "none", "generator digest": "0123"}
    record = Record("tuner", TARGET.id, environment, "flashgen bench", "2026-11-29")
    return Run(record, lambda line: None, out=out, **more)


def picked(data: Exhaustive) -> Picked:
    return Picked(PICK, trials=12, feasible=len(ALL), seconds=21.5, process_s=33.0)


def run_one(
    run: Run,
    data: Exhaustive = EMPTY,
    tune: Callable[[Exhaustive], Picked] = picked,
    measurer: Formula | None = None,
) -> Formula:
    formula = measurer or Formula()
    run_case(run, "small/case", data, TARGET, lambda data, target: formula, tune)
    return formula


def test_the_pick_races_the_best_of_all_and_the_untuned_schedule(
    golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    run = a_run(tmp_path)
    formula = run_one(run)
    assert formula.closed == 1
    assert set(formula.measured) == set(ALL) - {REFUSED}
    (raced,) = formula.raced
    assert raced[:3] == (PICK, EMPTY.default, BEST)
    (case,) = run.record.cases
    row = _Row(case)
    assert row.pick_ratio == pytest.approx(1.01)
    assert row.is_reached
    assert case.facts["discarded"] == {"spills": 1}
    assert case.facts["states"] == {"measured": len(ALL) - 2, "hung": 1}
    failed = Picked(error="exit code 10: no optuna")
    run_one(run, tune=lambda data: failed)
    golden("bench/tuner.md", render(replace(run.record, seconds=12.0)))
    assert Record.from_json(run.record.to_json()) == run.record
    assert progress_line(case) == (
        f"small/case: {len(ALL) - 2} schedules timed, pick 1.010 of the best, 12 trials"
    )
    assert load(tmp_path / TARGET.id / "tuner.json").cases == run.record.cases


def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BATCH", 8)
    measurer, clock = Formula(), iter(range(1000))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(clock))

    run = a_run(tmp_path, budget_s=30.0, began=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "time", Clock)
        patch.setattr(tuner_suite, "time", Clock)
        patch.setattr(Run, "seconds", 0.0)
        run_one(run, measurer=measurer)
    done = len(measurer.measured)
    assert 0 < done < len(ALL) - 1
    assert not run.record.cases
    assert run.record.not_run[0].endswith("schedules are still to be timed; run again")
    again = a_run(tmp_path)
    data = stored(again, EMPTY)
    assert len(data.found) == done
    rest = run_one(again, data)
    assert not set(rest.measured) & set(measurer.measured)
    assert len(rest.measured) + done == len(ALL) - 1
    assert len(again.record.cases) == 1


def test_what_is_kept_of_another_shape_or_damaged_does_not_count(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    tuner_suite.keep_data(run, replace(EMPTY, found={BEST: Formula()._timed(BEST)}))
    assert stored(run, EMPTY).found
    other = empty(SPEC, TARGET.id, replace(SHAPE, kv_len=1024))
    assert not stored(run, other).found
    path = tuner_suite.data_path(run, EMPTY)
    assert path is not None
    path.write_text(path.read_text()[:100])
    assert not stored(run, EMPTY).found
    assert stored(a_run(), EMPTY) is EMPTY


def test_a_finished_case_is_not_run_again_with_the_same_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = a_run(tmp_path)
    run_one(first)
    assert [case.id for case in earlier_cases(a_run(tmp_path))] == ["small/case"]
    other = a_run(tmp_path)
    other.record = replace(other.record, environment={"gpu": "another"})
    assert not earlier_cases(other)
    assert not earlier_cases(a_run())

    ids = [_id(name) for name in SHAPES]
    known = tuple(replace(first.record.cases[0], id=each) for each in ids)
    monkeypatch.setattr(tuner_suite, "earlier_cases", lambda run: known)
    run = a_run()
    run_tuner(run, torch.device("cpu"))
    assert run.record.cases == known


def _id(name: str) -> str:
    from flashgen import settings
    from flashgen.spec.parse import load_spec

    return case_id(load_spec(settings.specs_dir() / f"{name}.yaml"), SHAPES[name])


def test_a_measurer_that_fails_leaves_the_others_their_time() -> None:
    class Failing(Formula):
        def prepare(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, str]:
            raise TuningError("tune: the compiling process ended early")

    run = a_run()
    assert run_one(run, measurer=Failing()).closed == 1
    assert run.record.not_run == (
        "small/case: TuningError: tune: the compiling process ended early",
    )


def test_racers_are_few_and_have_times() -> None:
    found = {s: Formula()._timed(s) for s in ALL}
    data = replace(EMPTY, found=found)
    field = racers(data, Picked(BEST))
    assert field[:2] == (BEST, EMPTY.default)
    assert len(field) <= 2 + tuner_suite.RACERS
    del found[EMPTY.default]
    assert EMPTY.default not in racers(data, Picked(None))


def test_reasons_are_counted_without_their_numbers() -> None:
    texts = ["needs 9 B of shared memory", "needs 8 B of it", "CompileError: no", "spills 4"]
    assert reasons(texts) == {"needs": 2, "CompileError": 1, "spills": 1}


def answered(stdout: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "flashgen", "tune"]
        assert Path(command[4]).read_text() == SPEC.to_yaml()
        assert command[command.index("--shape") + 1] == "1,2,2,64,2048"
        for name in ("FLASHGEN_CACHE_DIR", "TRITON_CACHE_DIR"):
            assert not Path(options["env"][name]).exists()
        return subprocess.CompletedProcess(list(command), 0, stdout, "")

    return run


def test_a_cold_run_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "entry": {"schedule": PICK.to_dict()},
        "trials": 12,
        "feasible": 60,
        "seconds": 21.5,
    }
    monkeypatch.setattr(subprocess, "run", answered(json.dumps({"results": [result]})))
    found = tune_cold(EMPTY)
    assert replace(found, process_s=0.0) == Picked(PICK, 12, 60, 21.5)
    monkeypatch.setattr(
        subprocess, "run", answered(json.dumps({"results": [result | {"entry": None}]}))
    )
    assert tune_cold(EMPTY).schedule is None
    monkeypatch.setattr(subprocess, "run", answered("not JSON"))
    assert tune_cold(EMPTY).error.startswith("JSONDecodeError")


def test_a_cold_run_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, with no GPU to be seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "exit code" in tune_cold(EMPTY).error


def case_with(**picked: Any) -> CaseRecord:
    run = a_run()
    run_one(run)
    (case,) = run.record.cases
    return replace(case, facts={**case.facts, "picked": {**case.facts["picked"], **picked}})


@pytest.mark.parametrize(
    "worse",
    [
        {"schedule": str(EMPTY.default)},
        {"schedule": None},
        {"trials": len(ALL)},
        {"process_s": 61.0},
    ],
)
def test_a_pick_that_is_slow_or_late_does_not_count(worse: dict[str, Any]) -> None:
    assert _Row(case_with()).is_reached
    assert not _Row(case_with(**worse)).is_reached
