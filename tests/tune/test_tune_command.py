"""`flashgen tune` on fake timings: what it prints, writes, checks, compares and refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from entries import FAST, OTHER, SPEC, TARGET, TOO_LARGE, entry, table
from fakes import FakeMeasurer, smooth, timed
from tuning_cases import ALL_FEASIBLE, BUCKET, CASE, DEFAULT
from typer.testing import CliRunner, Result

from flashgen import settings
from flashgen.cli.main import app
from flashgen.cli.tune import line_of
from flashgen.compiler import tuning, tuning_html
from flashgen.runtime.said import forget
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.tune import lookup
from flashgen.tune.search import Progress
from flashgen.tune.table import Table, read_table, table_path, write_table
from flashgen.tune.toolchain import Device

OPTIMUM = min(ALL_FEASIBLE, key=smooth)


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> FakeMeasurer:
    """In the place of GPUs."""
    fake = FakeMeasurer()
    monkeypatch.setattr(tuning, "on_gpu", lambda problem: lambda case, devices: fake)
    monkeypatch.setattr(tuning, "_devices", tuning._numbers)
    monkeypatch.setattr(tuning, "device_here", lambda index: Device.of_target(TARGET))
    forget()
    return fake


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "tuned.yaml"
    path.write_text(SPEC.to_yaml())
    return str(path)


def run(spec: str, *arguments: str) -> Result:
    command = ["tune", spec, "--target", TARGET.id, *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def put(value: Table) -> Path:
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    write_table(path, value)
    lookup.forget()
    return path


def test_a_table_on_the_terminal_and_one_in_the_cache(
    measurer: FakeMeasurer, spec: str, golden: Callable[[str, str], None]
) -> None:
    told = run(spec, "--trials", "120")
    assert told.exit_code == 0, told.output
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    assert read_table(path).entries[0].schedule == OPTIMUM
    golden("tune/command/table.txt", told.stdout.replace(str(path), "TABLE"))


def test_json_is_all_of_standard_output(measurer: FakeMeasurer, spec: str) -> None:
    told = run(spec, "--trials", "14", "--json")
    facts = json.loads(told.stdout)
    assert facts["gpu"] == TARGET.id
    (result,) = facts["results"]
    assert result["entry"]["schedule"]["block_m"] == OPTIMUM.block_m
    assert result["trials"] <= 14
    assert result["feasible"] == len(ALL_FEASIBLE)


def test_options_reach_the_search(measurer: FakeMeasurer, spec: str, tmp_path: Path) -> None:
    told = run(
        *(spec, "--shape", "1,4,4,100,100", "--shape", "2,4,4,4096,4096", "--sampler", "random"),
        *("--seconds", "50", "--trials", "4", "--storage", str(tmp_path / "x.journal")),
        *("--out", str(tmp_path / "tables"), "--devices", "0"),
    )
    assert told.exit_code == 0, told.output
    assert (tmp_path / "x.journal").is_file()
    found = read_table(tmp_path / "tables" / TARGET.id / "tuned.json")
    assert {each.bucket for each in found.entries} == {bucket_of(100, 100), bucket_of(4096, 4096)}


WRONG = {
    "shape": ("--shape", "1,2,3"),
    "shape-heads": ("--shape", "1,5,3,8,8"),
    "devices": ("--devices", "first"),
    "trials": ("--trials", "0"),
    "seconds": ("--seconds", "-1"),
    "check-and-diff": ("--check", "--diff"),
    "out": ("--out", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_2_and_measures_nothing(
    name: str, measurer: FakeMeasurer, spec: str
) -> None:
    assert run(spec, *WRONG[name]).exit_code == 2
    assert measurer.measured == []


def test_an_unreachable_storage_is_10(measurer: FakeMeasurer, spec: str) -> None:
    told = run(spec, "--storage", "grpc://127.0.0.1:1")
    assert told.exit_code == 10
    assert "error: trials: grpc://127.0.0.1:1: cannot be reached or used" in told.stderr


def test_ctrl_c_says_the_best_so_far_and_is_130(measurer: FakeMeasurer, spec: str) -> None:
    def interrupt(schedule: Schedule) -> None:
        if len(measurer.measured) == 5:
            raise KeyboardInterrupt

    measurer.on_measure = interrupt
    told = run(spec)
    assert told.exit_code == 130
    assert re.search(
        r"best so far (loop flash2|gluon_sm90) .* us, is kept\n  table: .*tuned\.json", told.stderr
    )
    assert read_table(table_path(settings.user_tables_dir(), TARGET.id, "tuned")).entries


def test_every_candidate_failing_is_10_and_says_how(measurer: FakeMeasurer, spec: str) -> None:
    measurer.fails = dict.fromkeys(ALL_FEASIBLE, "hung")
    told = run(spec, "--trials", "12")
    assert told.exit_code == 10
    assert "12 hung" in told.stdout
    assert "no schedule could be timed" in told.stderr


def test_diff_shows_and_writes_nothing(measurer: FakeMeasurer, spec: str) -> None:
    path = put(table(entry(OTHER)))
    before = path.read_bytes()
    told = run(spec, "--trials", "30", "--diff")
    assert f"forward, q_len any, kv_len <= 2048: {OTHER} (12.35 us) -> {OPTIMUM}" in told.stdout
    assert "1 of 1 entries would change" in told.stdout
    assert path.read_bytes() == before
    path.unlink()
    facts = json.loads(run(spec, "--trials", "30", "--diff", "--json").stdout)
    assert [change["was"] for change in facts["diff"]] == ["none"]


# **** check ****


def holds(schedule: Schedule = FAST, **changes: Any) -> Table:
    return table(entry(schedule, time_us=smooth(schedule), **changes))


CHECKS: dict[str, tuple[Table, Callable[[Schedule], float], Mapping[Schedule, str], str]] = {
    "ok": (holds(), smooth, {}, "ok ("),
    "slower": (holds(), lambda s: 1.2 * smooth(s), {}, "slower (+20.0%)"),
    "faster": (holds(), lambda s: 0.8 * smooth(s), {}, "faster (-20.0%)"),
    "beaten": (
        holds(),
        lambda s: 50.0 if s == DEFAULT else smooth(s),
        {},
        "beaten (the untuned choice takes 50 us)",
    ),
    "stale": (holds(TOO_LARGE), smooth, {}, "stale (smem_bytes: needs 294912 B"),
    "wrong": (holds(), smooth, {FAST: "wrong"}, "failed (wrong: as the test asked)"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, measurer: FakeMeasurer, spec: str) -> None:
    value, clock, fails, state = CHECKS[name]
    measurer.clock, measurer.fails = clock, fails  # type: ignore[assignment]
    path = put(value)
    before = path.read_bytes()
    told = run(spec, "--check")
    assert state in told.stdout
    assert told.exit_code == (0 if name in {"ok", "faster"} else 10)
    assert path.read_bytes() == before
    assert "kernel: was 0123456789abcdef, is" in told.stdout
    assert "torch: was 2.11.0, is" in told.stdout
    (facts,) = json.loads(run(spec, "--check", "--json").stdout)
    assert facts["state"] == state.partition(" ")[0]


def test_check_without_a_table(measurer: FakeMeasurer, spec: str) -> None:
    told = run(spec, "--check")
    assert told.exit_code == 1
    assert "cannot be read (No such file or directory)" in told.stderr


def test_check_of_an_older_spec(measurer: FakeMeasurer, spec: str) -> None:
    put(Table("tuned", "ab" * 32, TARGET.id, (entry(),)))
    told = run(spec, "--check")
    assert told.exit_code == 10
    assert "the spec changed since its table was written" in told.stderr


# **** progress and pictures ****


def progress(**changes: Any) -> Progress:
    values: dict[str, Any] = {
        "doing": f"measuring {OTHER}",
        "trials": 12,
        "most_trials": 65,
        "feasible": 324,
        "best": timed(FAST, 100.0),
        "default_us": 112.0,
        "bound_us": 61.0,
        "seconds_left": 48.2,
        "failures": Counter(wrong=2, hung=1),
        "discarded": 3,
    }
    return Progress(**{**values, **changes})


def test_lines_of_progress(golden: Callable[[str, str], None]) -> None:
    nothing = progress(best=None, default_us=None, failures={}, discarded=0)
    lines = [line_of(CASE, each) for each in (nothing, progress(), progress(default_us=None))]
    golden("tune/command/progress.txt", "\n".join(lines))
    assert CASE.bucket == BUCKET


def test_a_page_with_optunas_pictures(measurer: FakeMeasurer, spec: str, tmp_path: Path) -> None:
    refused, failed = ALL_FEASIBLE[40], ALL_FEASIBLE[41]
    measurer.refuses, measurer.fails = {refused: "ptxas <sm_90>"}, {failed: "hung"}
    page = tmp_path / "pages" / "tuning.html"
    told = run(spec, "--sampler", "random", "--trials", "400", "--html", str(page))
    assert told.exit_code == 0, told.output
    text = page.read_text()
    for heading in ("History", "Importances", "Slices", "Predicted against measured"):
        assert f"<h3>{heading}</h3>" in text
    assert "ptxas &lt;sm_90&gt;" in text or str(refused) not in text
    assert text.count("plotly.js v") == 1
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_a_page_needs_plotly_and_says_so_before_measuring(
    measurer: FakeMeasurer, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_html, "find_spec", lambda name: None)
    told = run(spec, "--html", str(tmp_path / "x.html"))
    assert told.exit_code == 1
    assert "hint: pip install -c constraints.txt '.[plot]', in a checkout" in told.stderr
    assert measurer.measured == []


def test_tuning_needs_optuna_and_says_so(
    measurer: FakeMeasurer, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.tune import storage

    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    told = run(spec)
    assert told.exit_code == 10
    assert "hint: pip install 'optuna>=4.2'" in told.stderr


def test_the_schema_of_tables_is_published() -> None:
    told = CliRunner().invoke(app, ["schema", "--tuned-configs"])
    assert json.loads(told.stdout)["title"] == "flashgen tuned configs, version 1"
    assert len(json.loads(told.stdout)["required"]) == 6
