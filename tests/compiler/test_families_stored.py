"""Tables of tuned configs that name Hopper schedules: look-up, plans, freezing, show, manifest and
report; and that such an entry is proof of a first run on the toolchain it was measured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_first_runs import GOOD
from typer.testing import CliRunner

from flashgen import freeze
from flashgen.cli.main import app
from flashgen.compiler import build, choose, explain
from flashgen.compiler.first_run import FirstRuns
from flashgen.errors import FrozenError
from flashgen.problem import Problem
from flashgen.runtime.check import Sizes
from flashgen.runtime.frozen import thaw
from flashgen.runtime.said import forget
from flashgen.schedule import families, sm90
from flashgen.schedule.model import Bucket, Schedule, all_buckets, bucket_of
from flashgen.schedule.space import default_schedule
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import get_target
from flashgen.tune import lookup, verdicts
from flashgen.tune.session import digest_of
from flashgen.tune.table import Entry, Table, table_path, write_table
from flashgen.tune.toolchain import Device, Toolchain
from flashgen.tune.verdicts import Machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tune"))
try:
    from entries import entry
finally:
    sys.path.pop(0)

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(
    name="stored",
    head_dim=64,
    dtype="bf16",
    mask="causal",
    shapes=[
        {"batch": 1, "q_heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096},
        {"batch": 8, "q_heads": 8, "kv_heads": 8, "q_len": 1, "kv_len": 4096},
    ],
)
PROBLEM = Problem(SPEC, TARGET)
LONG = bucket_of(4096, 4096)
MACHINE = Machine("NVIDIA H200", "570.86.15", "2.11.0", "3.6.0", "of triton")
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
SIZES = Sizes(1, 8, 8, 4096, 4096)


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_triton_cache: Path
) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared_triton_cache))
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(tmp_path / "tables"))
    monkeypatch.setenv("FAKE_FIRST_RUNS", str(tmp_path / "asked"))
    for name in ("FLASHGEN_TRY_FIRST", "FLASHGEN_FROZEN"):
        monkeypatch.delenv(name, raising=False)
    verdicts.forget_here()
    forget()
    put(tmp_path)
    yield
    verdicts.forget_here()
    lookup.forget()
    thaw()


def put(folder: Path, schedule: Schedule = GOOD, **changes: object) -> Entry:
    """A table with one entry, measured on `MACHINE` unless `changes` say otherwise."""
    made = entry(
        schedule,
        LONG,
        shape=SPEC.shapes[0],
        kernel_digest=digest_of(PROBLEM, schedule),
        device=Device(MACHINE.gpu, "9.0", 132, 232448, "560.1"),
        toolchain=Toolchain("0.1.0", "2.9.0", MACHINE.triton),
    )
    made = replace(made, **changes)  # type: ignore[arg-type]
    store(folder, made)
    return made


def store(folder: Path, *entries: Entry) -> None:
    table = Table(SPEC.display_name, SPEC.fingerprint, TARGET.id, entries)
    write_table(table_path(folder / "tables", TARGET.id, SPEC.display_name), table)
    lookup.forget()


# **** look-up ****


def test_a_stored_hopper_schedule_serves_its_bucket_and_near_ones() -> None:
    plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    chosen = dict(plan.choices)
    origins = dict(zip(chosen, plan.origins, strict=True))
    assert (chosen[LONG], origins[LONG]) == (GOOD, "tuned")
    near = [bucket for bucket, origin in origins.items() if origin.startswith("tuned for")]
    assert {bucket.kv_len_max for bucket in near} == {1024, 2048, 8192, 16384}
    assert {chosen[bucket] for bucket in near} == {GOOD}
    others = [bucket for bucket in all_buckets() if bucket not in {LONG, *near}]
    assert all(chosen[bucket] == default_schedule(PROBLEM, bucket) for bucket in others)
    short = [bucket for bucket in all_buckets() if sm90.is_short(bucket)]
    assert {chosen[bucket].family for bucket in short} == {"triton"}


def test_one_for_few_rows_is_ignored_with_its_reason(tmp_path: Path) -> None:
    few = Bucket(16, 4096)
    put(tmp_path, bucket=few)
    plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    assert {schedule.family for _, schedule in plan.choices} == {"triton"}
    (note,) = plan.notes
    assert "short lengths of gluon_sm90: not served; the entry is ignored" in note


def test_a_triton_without_gluon_serves_by_the_portable_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "gluon_missing", lambda: "triton 3.5.1 has no Gluon")
    monkeypatch.setattr(choose, "gluon_missing", lambda: "triton 3.5.1 has no Gluon")
    plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    assert dict(plan.choices)[LONG] == default_schedule(PROBLEM, LONG)
    (note,) = plan.notes
    assert note == f"schedule {GOOD} is not used: triton 3.5.1 has no Gluon; family triton serves"


def test_show_explain_and_list(tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(app, ["show", str(spec_file(tmp_path)), "--target", TARGET.id])
    assert shown.exit_code == 0
    assert "def attention_fwd_sm90(" in shown.stdout
    facts = json.loads(
        run(app, ["show", str(spec_file(tmp_path)), "--target", TARGET.id, "--json"]).stdout
    )
    assert {row["family"] for row in facts["schedules"]} == {"triton", "gluon_sm90"}
    told = explain(SPEC, target=TARGET.id)
    assert told.schedule == GOOD
    assert (told.choice and told.choice.origin) == "tuned"
    assert f"untuned   {default_schedule(PROBLEM, LONG)}" in str(told)
    assert run(app, ["list"]).exit_code == 0


def spec_file(folder: Path) -> Path:
    path = folder / "stored.yaml"
    path.write_text(SPEC.to_yaml(), encoding="utf-8")
    return path


def test_the_manifest_and_the_report_of_a_build(tmp_path: Path) -> None:
    result = build(SPEC, tmp_path / "out", target=TARGET.id, verify=False)
    facts = json.loads(result.manifest.read_text())
    rows = {json.dumps(row["bucket"]): row for row in facts["schedules"]}
    row = rows[json.dumps(LONG.to_dict())]
    assert (row["schedule"], row["chosen_by"]) == (GOOD.to_dict(), "tuned")
    assert row["measured"]["untuned"]["time_us"] == 15.0
    assert f"| gluon_sm90 | {GOOD} | tuned | " in result.report.read_text()
    built = {kernel.schedule.family for kernel in result.kernels}
    assert built == {"triton", "gluon_sm90"}
    assert facts["shapes"][0]["schedule"] == str(GOOD)


# **** proof of a first run ****


def allowed(*, has_lse: bool, machine: Machine = MACHINE) -> bool:
    plan, path = choose.plan(SPEC, TARGET, has_lse=has_lse, machine=lambda: machine)
    guard = FirstRuns(SPEC, lambda _: TARGET, "fake_first_runs:FakeRunner", lambda _: machine)
    return guard(CPU, plan, path, GOOD, SIZES)


def was_tried(folder: Path) -> bool:
    return (folder / "asked").exists()


@pytest.mark.parametrize("has_lse", [False, True])
def test_what_was_measured_here_is_not_tried_before_a_call(
    tmp_path: Path, *, has_lse: bool
) -> None:
    """Another driver and torch launch the same machine code; a kernel with lse is the same one."""
    assert allowed(has_lse=has_lse)
    assert not was_tried(tmp_path)
    assert [verdict.state for verdict in verdicts.known()] == ["proven"]


def test_a_frozen_process_launches_what_was_measured_here(tmp_path: Path) -> None:
    choose.plan(SPEC, TARGET, has_lse=False)
    freeze()
    assert allowed(has_lse=False)
    assert not was_tried(tmp_path)


@pytest.mark.parametrize("has_lse", [False, True])
def test_what_was_measured_here_is_not_tried_in_a_module_with_packed_heads(
    tmp_path: Path, *, has_lse: bool
) -> None:
    """Beside a schedule whose heads share tiles the text of the others has a constant more."""
    assert GOOD.sm90 is not None
    packed = replace(GOOD, sm90=replace(GOOD.sm90, packed_heads=4))
    short = replace(
        put(tmp_path, packed),
        bucket=bucket_of(9, 4096),
        shape=Shape(batch=8, q_heads=8, kv_heads=2, q_len=9, kv_len=4096),
    )
    store(tmp_path, short, put(tmp_path))
    plan, path = choose.plan(SPEC, TARGET, has_lse=has_lse, machine=lambda: MACHINE)
    assert {GOOD, packed} <= {schedule for _, schedule in plan.choices}
    assert plan.hopper_digest != digest_of(PROBLEM, GOOD)
    guard = FirstRuns(SPEC, lambda _: TARGET, "fake_first_runs:FakeRunner", lambda _: MACHINE)
    for schedule in (GOOD, packed):
        assert guard(CPU, plan, path, schedule, SIZES)
    assert not was_tried(tmp_path)


ELSEWHERE: dict[str, Machine] = {
    "triton": replace(MACHINE, triton="3.7.1"),
    "gpu": replace(MACHINE, gpu="NVIDIA H100 80GB HBM3"),
    "ptxas": replace(MACHINE, ptxas="/opt/ptxas, V13.1"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_with_another_toolchain_it_is_tried(tmp_path: Path, name: str) -> None:
    assert allowed(has_lse=False, machine=ELSEWHERE[name])
    assert was_tried(tmp_path)


def test_another_kernel_is_tried(tmp_path: Path) -> None:
    """Templates may have changed since: what is proven of one text says nothing of another."""
    put(tmp_path, kernel_digest="0123456789abcdef")
    assert allowed(has_lse=True)
    assert was_tried(tmp_path)


def test_a_frozen_process_does_not_try(tmp_path: Path) -> None:
    put(tmp_path, kernel_digest="0123456789abcdef")
    choose.plan(SPEC, TARGET, has_lse=False)
    freeze()
    with pytest.raises(FrozenError):
        allowed(has_lse=False)
    assert not was_tried(tmp_path)


def test_what_hung_here_is_not_vouched_for(tmp_path: Path) -> None:
    plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    subject = verdicts.subject_of(plan, SPEC.display_name, GOOD, MACHINE)
    verdicts.remember(subject, "hung", "no answer")
    without, _ = choose.plan(SPEC, TARGET, has_lse=False, machine=lambda: MACHINE)
    assert {schedule.family for _, schedule in without.choices} == {"triton"}
    guard = FirstRuns(SPEC, lambda _: TARGET, "fake_first_runs:FakeRunner", lambda _: MACHINE)
    assert not guard(CPU, plan, tmp_path, GOOD, SIZES)
