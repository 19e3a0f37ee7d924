"""Samplers on exhaustive data that a formula made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from entries import SPEC, TARGET
from fakes import FakeMeasurer, smooth, timed
from tuning_cases import FEASIBLE

from flashgen.tune import comparison
from flashgen.tune.comparison import (
    Exhaustive,
    Replay,
    empty,
    from_json,
    measure_all,
    replay,
    to_json,
)
from flashgen.tune.measurement import Measurement
from flashgen.tune.strategies import SAMPLERS, strategy


@pytest.fixture(scope="module")
def data() -> Exhaustive:
    base = empty(SPEC, TARGET.id, SPEC.shapes[0])
    found = {s: timed(s, smooth(s)) for s in FEASIBLE}
    found[FEASIBLE[3]] = Measurement(FEASIBLE[3], "hung", reason="deadline")
    predicted = {s: base.predicted_us[s] for s in FEASIBLE}
    return Exhaustive(SPEC, TARGET.id, SPEC.shapes[0], found, {}, predicted, base.default)


def test_data_reads_back(data: Exhaustive) -> None:
    again = from_json(to_json(data))
    assert again.found == data.found
    assert again.default == data.default
    assert (again.spec, again.shape) == (data.spec, data.shape)


def test_measuring_goes_on_where_it_ended(data: Exhaustive) -> None:
    part = Exhaustive(
        SPEC,
        TARGET.id,
        data.shape,
        dict(list(data.found.items())[:10]),
        {},
        data.predicted_us,
        data.default,
    )
    measurer = FakeMeasurer(refuses={FEASIBLE[-1]: "does not compile"})
    whole = measure_all(part, measurer, time.monotonic() + 600)
    assert set(measurer.measured) == set(FEASIBLE) - set(part.found) - {FEASIBLE[-1]}
    assert whole.discarded == {FEASIBLE[-1]: "does not compile"}
    late = FakeMeasurer()
    assert measure_all(part, late, time.monotonic() - 1).found == part.found
    assert late.measured == []


def test_trials_to_a_share_of_the_optimum() -> None:
    found = Replay("random", ((1.5, 1.1, 1.0), (1.5, 1.5, 1.5), (1.01, 1.0, 1.0)))
    assert found.trials_to(0.02) == 3
    assert found.ratio_after(1) == 1.5
    assert Replay("random", ((1.5,),)).trials_to() == float("inf")


def test_tpe_asked_for_one_chooses_what_it_would_of_many(data: Exhaustive) -> None:
    free = list(data.found)
    known = {free.pop(0): each for each in list(data.found.values())[:9]}
    for seed in range(3):
        many = strategy("tpe", lambda: data.predicted_us, seed).order(known, free)
        one = strategy("tpe", lambda: data.predicted_us, seed, used=1).order(known, free)
        assert one[0] == many[0]
        assert set(one) == set(many) == set(free)


@pytest.mark.slow
def test_processes_change_nothing(data: Exhaustive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SEEDS", 2)
    (found,) = comparison.replay_all([data])
    for name in SAMPLERS:
        seeds = range(1 if name == "model" else 2)
        assert found[name] == replay(data, name, seeds, len(found[name].runs[0]))


@pytest.mark.slow
def test_the_report_has_every_sampler(
    data: Exhaustive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(comparison, "SEEDS", 2)
    (tmp_path / "tuned.json").write_text(to_json(data))
    assert comparison.main(["compare", str(tmp_path)]) == 0
    text = (tmp_path / "comparison.md").read_text()
    assert text == capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("| tuned b2 q2048 k2048 | 68")]
    assert len(row.split("|")) == 12
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_nothing_to_compare(tmp_path: Path) -> None:
    assert comparison.main(["compare", str(tmp_path)]) == 1
