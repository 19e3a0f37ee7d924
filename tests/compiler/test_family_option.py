"""A family that is asked for: `--family` of build and show, what it chooses, and why it cannot be
had. Each message is a golden text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flashgen.cli.main import app
from flashgen.compiler import build, choose
from flashgen.compiler.chosen import of_family
from flashgen.errors import ScheduleError
from flashgen.problem import Problem
from flashgen.runtime.said import forget
from flashgen.schedule import best, families, sm90
from flashgen.schedule.model import Bucket, Schedule, Sm90, all_buckets, bucket_of
from flashgen.schedule.orders import judged_by
from flashgen.schedule.predict import predicted_time_us
from flashgen.schedule.predict_sm90 import likely_spills
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target
from flashgen.tune import lookup, verdicts
from flashgen.tune.lookup import NOTHING
from flashgen.tune.verdicts import Machine

TARGET = get_target("nvidia-h200")
pytestmark = pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
SPEC = AttentionSpec(
    name="asked",
    head_dim=128,
    dtype="bf16",
    mask="causal",
    shapes=[{"batch": 1, "q_heads": 16, "kv_heads": 16, "q_len": 16384, "kv_len": 16384}],
)
PROBLEM = Problem(SPEC, TARGET)
LONG = bucket_of(16384, 16384)
HOPPER = Schedule(
    family="gluon_sm90",
    block_m=128,
    block_n=128,
    num_warps=12,
    num_stages=2,
    sm90=Sm90(scheduler="dynamic", separate_out=True),
)


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_triton_cache: Path
) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared_triton_cache))
    monkeypatch.delenv("FLASHGEN_CONFIG_DIR", raising=False)
    verdicts.forget_here()
    lookup.forget()
    forget()
    yield
    verdicts.forget_here()
    lookup.forget()


def run(folder: Path, command: str, *arguments: str, spec: AttentionSpec = SPEC) -> Result:
    path = folder / f"{spec.display_name}.yaml"
    path.write_text(spec.to_yaml(), encoding="utf-8")
    return CliRunner().invoke(app, [command, str(path), *arguments])


# **** what is chosen ****


def test_the_best_predicted_of_the_family_in_each_bucket_that_it_serves() -> None:
    found = of_family(PROBLEM, NOTHING, "gluon_sm90")
    for (bucket, schedule), origin in zip(found.choices, found.origins, strict=True):
        if sm90.is_short(bucket):
            assert (schedule, origin) == (default_schedule(PROBLEM, bucket), "untuned")
        else:
            assert (schedule.family, origin) == ("gluon_sm90", "predicted")
    shape, assumed = judged_by(PROBLEM, LONG)
    assert not assumed
    chosen = dict(found.choices)[LONG]
    assert not likely_spills(chosen, PROBLEM)
    times = {
        each: predicted_time_us(PROBLEM, each, shape)
        for each in enumerate_space(PROBLEM, LONG, ("gluon_sm90",)).feasible
        if not likely_spills(each, PROBLEM)
    }
    assert times[chosen] == min(times.values())
    assert found.origin == "predicted for 8 of 48 shape buckets, else untuned"


def test_of_triton_the_untuned_choice() -> None:
    found = of_family(PROBLEM, NOTHING, "triton")
    assert set(found.origins) == {"untuned"}
    assert list(found.choices) == [(b, default_schedule(PROBLEM, b)) for b in all_buckets()]


def test_a_plan_of_a_family_is_another_plan() -> None:
    plain, _ = choose.plan(SPEC, TARGET, has_lse=False)
    hopper, path = choose.plan(SPEC, TARGET, family="gluon_sm90", has_lse=False)
    assert {schedule.family for _, schedule in plain.choices} == {"triton"}
    assert dict(hopper.choices)[LONG].family == "gluon_sm90"
    assert choose.plan(SPEC, TARGET, family="gluon_sm90", has_lse=False) == (hopper, path)


def test_show_has_the_familys_kernel(tmp_path: Path) -> None:
    told = run(tmp_path, "show", "--family", "gluon_sm90", "--json")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert {row["family"] for row in facts["schedules"]} == {"triton", "gluon_sm90"}
    assert "def attention_fwd_sm90(" in facts["source"]
    plain = run(tmp_path, "show", "--family", "triton")
    assert "sm90" not in plain.stdout


def test_a_build_says_who_chose(tmp_path: Path) -> None:
    spec = SPEC.replace(head_dim=64)
    out = tmp_path / "out"
    told = run(
        *(tmp_path, "build", "--family", "gluon_sm90", "--target", TARGET.id, "--no-verify"),
        *("--out", str(out)),
        spec=spec,
    )
    assert told.exit_code == 0, told.output
    facts = json.loads((out / "manifest.json").read_text())
    rows = {json.dumps(row["bucket"]): row for row in facts["schedules"]}
    row = rows[json.dumps(LONG.to_dict())]
    assert (row["schedule"]["family"], row["chosen_by"]) == ("gluon_sm90", "predicted")
    assert row["measured"] is None
    assert any(kernel["schedule"]["family"] == "gluon_sm90" for kernel in facts["kernels"])
    assert "| gluon_sm90 | " in (out / "report.md").read_text()


def test_the_next_best_takes_the_place_of_what_was_refused_here() -> None:
    machine = Machine("NVIDIA H200", "570.86.15", "2.11.0", "3.6.0", "of triton")
    seen: list[Schedule] = []
    for _ in range(best.MOST_REFUSED):
        plan, _ = choose.plan(
            SPEC, TARGET, family="gluon_sm90", has_lse=False, machine=lambda: machine
        )
        chosen = dict(plan.choices)[LONG]
        assert chosen.family == "gluon_sm90"
        assert chosen not in seen
        notes = [f"schedule {each} is not used: spill_bytes: 8" for each in seen]
        assert [note for note in plan.notes if "is not used" in note] == notes
        seen.append(chosen)
        verdicts.remember(
            verdicts.subject_of(plan, SPEC.display_name, chosen, machine),
            "refused",
            "spill_bytes: 8",
        )
    plan, _ = choose.plan(SPEC, TARGET, family="gluon_sm90", has_lse=False, machine=lambda: machine)
    assert dict(plan.choices)[LONG] == default_schedule(PROBLEM, LONG)


# **** why it cannot be had ****

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arch": ({}, "nvidia-a100-80gb"),
    "dtype": ({"dtype": "fp32"}, TARGET.id),
    "rows": ({"head_dim": 20}, TARGET.id),
    "mask": ({"mask": {"expr": "k < 4 or abs(q - k) < 128"}}, TARGET.id),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_had(
    name: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    fields, target = REFUSED[name]
    told = run(
        *(tmp_path, "show", "--family", "gluon_sm90", "--target", target),
        spec=SPEC.replace(**fields),
    )
    assert told.exit_code == 5
    golden(f"errors/family-none-{name}.txt", told.stderr)


def test_a_triton_without_gluon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    reason = "triton 3.5.1 has no Gluon for Hopper, 3.6 or newer is needed"
    monkeypatch.setattr(families, "gluon_missing", lambda: reason)
    monkeypatch.setattr(choose, "gluon_missing", lambda: reason)
    golden("errors/family-none-gluon.txt", run(tmp_path, "show", "--family", "gluon_sm90").stderr)


def test_where_every_schedule_is_rejected_the_reasons_are_counted() -> None:
    tight = Problem(SPEC.replace(head_dim=256), TARGET)
    assert best.why_none("gluon_sm90", tight, Bucket(16, None)) == (
        "short lengths of gluon_sm90: not served"
    )
    assert best.why_none("gluon_sm90", tight, LONG) == (
        "all are rejected, 560 for smem_bytes, 48 for regs_per_thread, 18 for smem_bytes of an SM"
    )


WRONG: dict[str, tuple[str, ...]] = {
    "unknown": ("show", "--family", "cuda"),
    "view": ("show", "--family", "triton", "--graph"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_make_no_sense(
    name: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    told = run(tmp_path, *WRONG[name])
    assert told.exit_code == 2
    golden(f"errors/family-option-{name}.txt", told.stderr.splitlines()[-1])


def test_a_family_beside_a_schedule(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as error:
        build(SPEC, tmp_path / "out", schedule=HOPPER, family="triton", target=TARGET.id)
    golden("errors/family-and-schedule.txt", str(error.value))
