"""Tuning over both families, on fake timings: what comes first, what is kept of a trial, which
table comes out, what is rejected, and `--family`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from entries import SPEC, TARGET, entry, table
from fakes import FakeMeasurer, timed
from tuning_cases import ALL_FEASIBLE, BUCKET, DEFAULT, PROBLEM
from typer.testing import CliRunner

import flashgen
from flashgen import AttentionSpec, settings
from flashgen.cli.main import app
from flashgen.compiler import choose, tuning
from flashgen.compiler.tuning import Tuning
from flashgen.errors import FlashgenWarning
from flashgen.problem import Problem
from flashgen.runtime.said import forget
from flashgen.schedule import sm90
from flashgen.schedule.model import HOPPER, Schedule, bucket_of
from flashgen.schedule.predict_sm90 import likely_spills
from flashgen.target import get_target
from flashgen.tune import lookup
from flashgen.tune.session import case_of, digest_of, space_of
from flashgen.tune.strategies import ModelOrder, TpeOrder, _Axes, _standardised
from flashgen.tune.study import parameters
from flashgen.tune.table import read_table, write_table
from flashgen.tune.table_schema import table_schema
from flashgen.tune.toolchain import Device
from flashgen.tune.work import predictions

OURS = [each for each in ALL_FEASIBLE if each.family == HOPPER]
SHAPE = SPEC.shapes[0]
PREDICTED = predictions(PROBLEM, ALL_FEASIBLE, SHAPE)
BEST = min(OURS, key=lambda each: (likely_spills(each, PROBLEM), PREDICTED[each], each))


def hopper_wins(schedule: Schedule) -> float:
    """Hopper kernels take half of what is predicted, others 1.2 times that."""
    return PREDICTED[schedule] * (0.5 if schedule.family == HOPPER else 1.2)


def triton_wins(schedule: Schedule) -> float:
    return PREDICTED[schedule] * (3.0 if schedule.family == HOPPER else 1.0)


def tune(
    clock: Callable[[Schedule], float], spec: AttentionSpec = SPEC, **others: Any
) -> tuple[Tuning, FakeMeasurer]:
    measurer = FakeMeasurer(clock=clock)
    for name in ("fails", "refuses"):
        setattr(measurer, name, others.pop(name, {}))
    found = flashgen.tune(
        spec, target=TARGET.id, make_measurer=lambda case, devices: measurer, **others
    )
    return found, measurer


def case() -> Any:
    return case_of(PROBLEM, Device.of_target(TARGET), BUCKET, SHAPE)


# **** what is searched ****


def test_the_untuned_choice_then_the_two_best_of_each_family() -> None:
    space = space_of(PROBLEM, case(), PREDICTED)
    first = space.first
    assert first[0] == DEFAULT
    assert [each.family for each in space.seeds[:4]] == ["triton", HOPPER] * 2
    assert space.seeds[1] == BEST
    assert PREDICTED[space.seeds[3]] > PREDICTED[BEST]  # not the same but for what tells nothing
    assert not any(each.family == HOPPER and likely_spills(each, PROBLEM) for each in first)
    assert len(space.feasible) == len(ALL_FEASIBLE)


def test_the_fastest_of_both_families_is_the_entry() -> None:
    found, measurer = tune(hopper_wins, trials=24)
    (kept,) = found.table.entries if found.table else ()
    assert kept.schedule.family == HOPPER
    assert kept.default == DEFAULT
    assert kept.kernel_digest == digest_of(PROBLEM, kept.schedule)
    assert {each.family for each in measurer.measured} == {"triton", HOPPER}
    plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    assert dict(plan.choices)[BUCKET] == kept.schedule
    found, _ = tune(triton_wins, trials=24, storage="memory")
    (kept,) = found.table.entries if found.table else ()
    assert kept.schedule.family == "triton"
    assert kept.kernel_digest == digest_of(PROBLEM, DEFAULT)


def test_the_model_learns_which_family_is_faster() -> None:
    """After a few trials most of what is asked for next is of the faster family."""
    for clock, fast in ((hopper_wins, HOPPER), (triton_wins, "triton")):
        known = {
            each: timed(each, clock(each)) for each in space_of(PROBLEM, case(), PREDICTED).first
        }
        free = [each for each in ALL_FEASIBLE if each not in known]
        order = ModelOrder(PREDICTED).order(known, free)
        assert sum(each.family == fast for each in order[1:21]) >= 14


def test_what_compilers_refuse_is_no_trial_and_what_hangs_is_one() -> None:
    refuses = {BEST: "spill_bytes: must be at most 0 (got 208)"}
    hangs = {each: "hung" for each in OURS if each.sm90 and each.sm90.scheduler == "dynamic"}
    hangs.pop(BEST, None)
    found, measurer = tune(hopper_wins, trials=30, refuses=refuses, fails=hangs)
    (result,) = found.results
    outcome = result.outcome
    assert outcome is not None
    assert outcome.discarded[BEST] == "spill_bytes: must be at most 0 (got 208)"
    assert BEST not in measurer.measured
    assert set(outcome.failures) <= {"hung"}
    assert result.entry is not None
    assert result.entry.schedule not in hangs


def test_an_entry_of_the_family_reads_back_and_is_of_the_published_format(tmp_path: Path) -> None:
    written = table(entry(BEST, time_us=12.5))
    write_table(tmp_path / "tuned.json", written)
    assert read_table(tmp_path / "tuned.json") == written
    data = json.loads((tmp_path / "tuned.json").read_text("utf-8"))
    jsonschema.validate(data, table_schema())
    data["entries"][0]["schedule"]["sm90"]["scheduler"] = "fifo"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, table_schema())


# **** trials ****


def test_a_familys_own_fields_are_parameters_of_its_trials() -> None:
    common = set(parameters(DEFAULT))
    own = {
        *("consumers", "scheduler", "q_buffers", "separate_out", "direct_out", "group_mb"),
        *("packed_heads", "overlapped", "programs_per_sm"),
    }
    assert set(parameters(BEST)) == common | own
    assert (parameters(DEFAULT)["hopper"], parameters(BEST)["hopper"]) == (0, 1)
    values: dict[str, set[int]] = {}
    for each in OURS:
        for name, value in parameters(each).items():
            values.setdefault(name, set()).add(value)
    assert values["scheduler"] == {0, 1, 2}
    assert values["q_buffers"] == {1, 2}
    assert values["consumers"] == {2, 3, 4}
    assert len({tuple(parameters(each).items()) for each in OURS}) == len(OURS)


def test_the_study_has_them(tmp_path: Path) -> None:
    from optuna import load_study
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    found, _ = tune(hopper_wins, trials=16, storage=str(tmp_path / "x.journal"))
    (result,) = found.results
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "x.journal")))
    trials = load_study(study_name=result.case.study, storage=storage).trials
    ours = [trial for trial in trials if trial.params["hopper"]]
    assert ours
    assert all("scheduler" in trial.params for trial in ours)
    others = [trial for trial in trials if not trial.params["hopper"]]
    assert others
    assert not any("scheduler" in trial.params for trial in others)


def test_a_study_is_of_both_kernels() -> None:
    made = case()
    assert made.hopper_digest == digest_of(PROBLEM, BEST) != made.kernel_digest
    assert replace(made, hopper_digest="0" * 16).key != made.key
    elsewhere = Problem(SPEC, get_target("nvidia-a100-80gb"))
    other = case_of(elsewhere, Device.of_target(elsewhere.target), BUCKET, SHAPE)
    assert other.hopper_digest == ""


def test_tpe_proposes_within_a_family() -> None:
    known = {
        each: timed(each, hopper_wins(each)) for each in (*ALL_FEASIBLE[::40], DEFAULT, *OURS[::40])
    }
    free = [each for each in ALL_FEASIBLE if each not in known]
    order = TpeOrder(seed=1, asked=12).order(known, free)
    assert sorted(order) == sorted(free)
    assert sum(each.family == HOPPER for each in order[:12]) >= 8


def test_another_family_is_farther_than_any_of_the_same() -> None:
    axes = _Axes.of(ALL_FEASIBLE)
    place = axes.place(BEST)
    far = min(axes.distance({**axes.place(OURS[0]), **place}, each) for each in [DEFAULT])
    assert all(axes.distance(place, each) < far for each in OURS)
    assert axes.distance(place, BEST) == 0


def test_numbers_of_one_family_say_nothing_of_the_other() -> None:
    others = [each for each in ALL_FEASIBLE if each.family == "triton"][:5]
    rows = _standardised([*others, *OURS[:5]])
    own, which = rows[:, :-2], rows[:, -2:]
    assert which.argmax(axis=1).tolist() == [1] * 5 + [0] * 5
    assert not (own[:5].any(axis=0) & own[5:].any(axis=0)).any()
    assert np.allclose(own.mean(axis=0), 0)


# **** --family ****


@pytest.mark.parametrize("family", ["triton", "gluon_sm90"])
def test_one_family_beside_the_untuned_choice(family: str) -> None:
    found, measurer = tune(hopper_wins, trials=16, family=family)
    (result,) = found.results
    measured = {each.family for each in measurer.measured}
    assert measured == {"triton", family}
    assert result.outcome is not None
    assert {each.family for each in result.outcome.space.feasible} == {"triton", family}
    if family == HOPPER:
        assert [each for each in measurer.measured if each.family == "triton"] == [DEFAULT]
        assert result.entry is not None
        assert result.entry.schedule.family == HOPPER


def test_the_untuned_choice_wins_where_the_family_is_slower() -> None:
    found, _ = tune(triton_wins, trials=16, family="gluon_sm90")
    (result,) = found.results
    assert result.entry is not None
    assert result.entry.schedule == DEFAULT


def test_families_share_a_study() -> None:
    """What was measured for both is not measured again for one of them."""
    tune(hopper_wins, trials=30)
    _, again = tune(hopper_wins, trials=12, family="gluon_sm90")
    assert again.measured == []


def shapes(*lengths: tuple[int, int]) -> list[dict[str, int]]:
    heads = {"batch": 1, "q_heads": 4, "kv_heads": 4}
    return [{**heads, "q_len": q, "kv_len": k} for q, k in lengths]


def test_buckets_that_the_family_does_not_serve_are_left_out() -> None:
    forget()
    with pytest.warns(FlashgenWarning) as said:
        found, _ = tune(
            hopper_wins_anywhere,
            trials=8,
            family="gluon_sm90",
            shapes=shapes((2048, 2048), (1, 2048)),
        )
    assert [result.case.bucket for result in found.results] == [bucket_of(2048, 2048)]
    texts = [str(each.message) for each in said]
    assert texts == [
        "tuned: q_len <= 16, kv_len <= 2048 is not tuned with family gluon_sm90: "
        "short lengths of gluon_sm90: not served"
    ]


def hopper_wins_anywhere(schedule: Schedule) -> float:
    return 50.0 + schedule.num_stages if schedule.family == HOPPER else 100.0


def test_short_rows_are_tuned_with_triton_alone() -> None:
    found, measurer = tune(hopper_wins_anywhere, trials=4, shapes=shapes((1, 2048)))
    assert {each.family for each in measurer.measured} == {"triton"}
    assert found.results[0].case.hopper_digest == ""
    assert sm90.is_short(found.results[0].case.bucket)


def test_short_rows_of_a_group_are_tuned_with_heads_that_share_tiles(tmp_path: Path) -> None:
    def most_packed_wins(schedule: Schedule) -> float:
        return hopper_wins_anywhere(schedule) / schedule.packed_heads

    grouped = SPEC.replace(heads={"group": 4}, shapes=[])
    short = [{"batch": 1, "q_heads": 16, "kv_heads": 4, "q_len": 9, "kv_len": 2048}]
    found, measurer = tune(most_packed_wins, grouped, trials=24, shapes=short)
    (kept,) = found.table.entries if found.table else ()
    assert kept.schedule.packed_heads == 4
    assert {each.packed_heads for each in measurer.measured} == {1, 2, 4}
    assert {each.packed_heads for each in measurer.measured if each.family == HOPPER} == {2, 4}
    assert found.table is not None
    write_table(tmp_path / "tuned.json", found.table)
    assert read_table(tmp_path / "tuned.json") == found.table
    jsonschema.validate(json.loads((tmp_path / "tuned.json").read_text("utf-8")), table_schema())
    plan, _ = choose.plan(grouped, TARGET, has_lse=False)
    assert dict(plan.choices)[kept.bucket] == kept.schedule


NONE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "arch": ({}, ("--target", "nvidia-a100-80gb")),
    "dtype": ({"dtype": "fp32"}, ("--target", TARGET.id)),
    "short": ({}, ("--target", TARGET.id, "--shape", "2,4,4,1,2048", "--shape", "2,4,4,9,99")),
}


@pytest.mark.parametrize("name", NONE)
def test_a_family_that_cannot_be_tuned(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    fields, arguments = NONE[name]
    monkeypatch.setattr(tuning, "_devices", tuning._numbers)
    monkeypatch.setattr(tuning, "device_here", lambda index: Device.of_target(TARGET))
    path = tmp_path / "tuned.yaml"
    path.write_text(SPEC.replace(**fields).to_yaml(), encoding="utf-8")
    told = CliRunner().invoke(app, ["tune", str(path), "--family", "gluon_sm90", *arguments])
    assert told.exit_code == 10
    golden(f"errors/family-tune-{name}.txt", told.stderr)
    assert not settings.user_tables_dir().exists()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    fake = FakeMeasurer(clock=hopper_wins)
    monkeypatch.setattr(tuning, "on_gpu", lambda problem: lambda case, devices: fake)
    monkeypatch.setattr(tuning, "_devices", tuning._numbers)
    monkeypatch.setattr(tuning, "device_here", lambda index: Device.of_target(TARGET))
    path = tmp_path / "tuned.yaml"
    path.write_text(SPEC.to_yaml(), encoding="utf-8")
    told = CliRunner().invoke(
        app,
        ["tune", str(path), "--target", TARGET.id, "--family", "gluon_sm90", "--trials", "12"],
    )
    assert told.exit_code == 0, told.output
    path = next(settings.user_tables_dir().rglob("tuned.json"))
    assert read_table(path).entries[0].schedule.family == HOPPER
    golden("tune/command/family.txt", told.stdout.replace(str(path), "TABLE"))
    lookup.forget()
