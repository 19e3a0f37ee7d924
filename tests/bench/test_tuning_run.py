"""Tuning several specs in one budget, on fake timings and a clock that is made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashgen
from flashgen.bench import tuning_run
from flashgen.bench.tuning_run import START_S, TuningRun, plans
from flashgen.errors import TuningError
from flashgen.schedule.model import HOPPER, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target
from flashgen.tune import lookup
from flashgen.tune.table import read_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tune"))
try:
    from fakes import FakeMeasurer
finally:
    sys.path.pop(0)

TARGET = get_target("nvidia-h200")
HEADS = {"batch": 1, "q_heads": 8, "kv_heads": 8}


def spec(name: str, *lengths: tuple[int, int], **fields: Any) -> AttentionSpec:
    shapes = [{**HEADS, "q_len": q, "kv_len": k} for q, k in lengths]
    return AttentionSpec(name=name, head_dim=256, dtype="bf16", shapes=shapes, **fields)


LONG = spec("long", (2048, 2048), (1, 2048), mask="causal")
SHORT = spec("short", (1, 4096))
NONE = spec("none")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_CONFIG_DIR", raising=False)
    lookup.forget()
    yield
    lookup.forget()


def clock_of(schedule: Schedule) -> float:
    return (50.0 if schedule.family == HOPPER else 80.0) + schedule.num_stages


class Tuner:
    """`flashgen.tune` on fake timings; keeps what it was asked, and lets a clock go on."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.now, self.took_s = 0.0, took_s

    def clock(self) -> float:
        return self.now

    def __call__(self, spec: AttentionSpec, **options: Any) -> Any:
        self.asked.append({"spec": spec.display_name, **options})
        self.now += self.took_s
        if spec.display_name == "broken":
            raise TuningError("tune: no process can be had\n  hint: none")
        measurer = FakeMeasurer(clock=clock_of)
        return flashgen.tune(
            spec, trials=14, make_measurer=lambda case, devices: measurer, **options
        )


def run(folder: Path, tuner: Tuner, *specs: AttentionSpec, seconds: float = 480.0) -> TuningRun:
    made = TuningRun(folder / "out", seconds, 45.0, clock=tuner.clock, say=lambda text: None)
    made.tune_all(plans(specs, TARGET), TARGET, tuner)
    return made


def test_what_there_is_to_tune() -> None:
    found = plans([LONG, SHORT, NONE], TARGET)
    assert [str(plan) for plan in found] == [
        "long: 2 buckets, 1 of them with Hopper kernels",
        "short: 1 buckets, 0 of them with Hopper kernels",
    ]


def test_tables_a_record_and_a_page(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    made = run(tmp_path, Tuner(), LONG, spec("broken", (512, 512)), SHORT)
    assert [row["family"] for row in made.rows] == [HOPPER, "triton", "triton"]
    table = read_table(tmp_path / "out" / "tuned_configs" / TARGET.id / "long.json")
    assert {entry.schedule.family for entry in table.entries} == {"triton", HOPPER}
    record = json.loads((tmp_path / "out" / "tuning.json").read_text("utf-8"))
    assert record["results"] == json.loads(json.dumps(made.rows))
    assert list((tmp_path / "out" / "trials").iterdir())
    golden("bench/tuning-run.md", (tmp_path / "out" / "tuning.md").read_text("utf-8"))


def test_time_is_shared_and_what_there_is_none_for_is_said(tmp_path: Path) -> None:
    tuner = Tuner(took_s=60.0)
    made = run(tmp_path, tuner, LONG, SHORT, spec("late", (4096, 4096)), seconds=130.0)
    shares = [asked["seconds"] for asked in tuner.asked]
    assert shares == [(130 - 3 * START_S) / 4, (70 - 2 * START_S) / 2]
    assert made.left_out == {"late": "the budget of 130 s was spent"}
    assert "- late: the budget of 130 s was spent" in (tmp_path / "out" / "tuning.md").read_text()


def test_a_second_run_goes_on_from_the_first_ones_trials(tmp_path: Path) -> None:
    run(tmp_path, Tuner(), LONG)
    again = run(tmp_path, Tuner(), LONG)
    assert [row["new_trials"] for row in again.rows] == [0, 0]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["tuning_run", "--out", str(tmp_path), "--check"])
    with pytest.raises(SystemExit, match="error: tuning measures on a GPU"):
        tuning_run.main()
