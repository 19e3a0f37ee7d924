"""Where a Hopper schedule was asked for and the portable family serves: why, and where it says so.

Also what is refused outright: each message is a golden text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.compiler import build, choose, explain, machine_code
from flashgen.compiler.building import BuildResult, kernel_file
from flashgen.compiler.machine_code import Job
from flashgen.errors import FlashgenError, FlashgenWarning, ScheduleError
from flashgen.problem import Problem
from flashgen.runtime.said import forget
from flashgen.schedule import families
from flashgen.schedule.model import Bucket, Schedule, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target
from flashgen.tune import lookup, verdicts
from flashgen.tune.processes import ChildEndedError, SilentError, in_time
from flashgen.tune.table import Table, table_path, write_table

TARGET = "nvidia-h200"
OWN = Sm90(scheduler="dynamic", separate_out=True)
HOPPER = Schedule(
    family="gluon_sm90", block_m=128, block_n=128, num_warps=12, num_stages=2, sm90=OWN
)
SPEC = AttentionSpec(
    name="hopper",
    head_dim=64,
    dtype="bf16",
    mask="causal",
    shapes=[{"batch": 1, "q_heads": 8, "kv_heads": 8, "q_len": 4096, "kv_len": 4096}],
)
NO_GLUON = "triton 3.5.1 has no Gluon for Hopper, 3.6 or newer is needed"


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


def without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (families, choose):
        monkeypatch.setattr(module, "gluon_missing", lambda: NO_GLUON)


def built(folder: Path, spec: AttentionSpec = SPEC, **options: Any) -> BuildResult:
    return build(spec, folder, **{"target": TARGET, "schedule": HOPPER, "verify": False, **options})


# **** the portable family serves ****

Setup = Callable[[pytest.MonkeyPatch], None]
FALLBACKS: dict[str, tuple[Setup, AttentionSpec, str]] = {
    "gluon": (without_gluon, SPEC, TARGET),
    "arch": (lambda patch: None, SPEC, "nvidia-a100-80gb"),
    "head-dim": (lambda patch: None, SPEC.replace(head_dim=20), TARGET),
}


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_a_build_says_which_family_serves_and_why(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    setup, spec, target = FALLBACKS[name]
    setup(monkeypatch)
    result = built(tmp_path / "out", spec, target=target)
    assert {schedule.family for _, schedule in result.plan.choices} == {"triton"}
    assert set(result.plan.origins) == {"untuned"}
    (warning,) = (each for each in result.warnings if "is not used" in each)
    golden(f"errors/family-{name}.txt", warning)
    assert f"- {warning}" in result.report.read_text()
    assert warning in str(result)
    assert warning in json.loads(result.manifest.read_text())["warnings"]


def test_the_report_of_a_build_names_the_family_of_each_schedule(tmp_path: Path) -> None:
    text = built(tmp_path / "out").report.read_text()
    assert "| lengths | family | schedule | chosen by |" in text
    row = f"| q_len any, kv_len any | gluon_sm90 | {HOPPER} | given | "
    assert row in text
    plain = built(tmp_path / "plain", schedule=None).report.read_text()
    assert "| triton | loop flash2 " in plain


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_machine_code_that_spills_makes_place_for_the_portable_family(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """A score expression that needs more registers than a consumer has, by what ptxas counts."""
    spec = SPEC.replace(
        head_dim=128,
        mask=[],
        score={"expr": "s + a[h,k] * tanh(s * c[b,k])"},
        inputs={
            "a": {"shape": ["q_heads", "kv_len"], "dtype": "fp32"},
            "c": {"shape": ["batch", "kv_len"], "dtype": "fp32"},
        },
    )
    result = built(tmp_path / "out", spec)
    (warning,) = (each for each in result.warnings if "is not used" in each)
    count = re.search(r"spill_bytes: must be at most 0 \(got (\d+)\)", warning)
    assert count is not None
    assert int(count[1]) > 0  # how many differs between versions of ptxas
    golden("errors/family-spills.txt", warning.replace(f"got {count[1]}", "got N"))
    assert {kernel.schedule.family for kernel in result.kernels} == {"triton"}
    verdicts.forget_here()
    (kept,) = verdicts.known()
    assert (kept.state, kept.subject.schedule) == ("refused", HOPPER)
    again = built(tmp_path / "out", spec)
    assert warning in again.warnings
    plain = built(tmp_path / "plain", SPEC)
    assert {kernel.schedule for kernel in plain.kernels} == {HOPPER}


def test_a_compiler_that_never_ends_is_remembered_by_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """The deadline is too short for any compiler here, though not for what is compiled already."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(machine_code, "_HELPER", "hasty_helper:serve")
    with pytest.warns(FlashgenWarning, match="hung before on this toolchain"):
        result = built(tmp_path / "out")
    (warning,) = (each for each in result.warnings if "is not used" in each)
    golden("errors/family-hung.txt", warning)
    (kept,) = verdicts.known()
    assert (kept.state, kept.reason) == ("hung", "compiling took over 0.05 s")
    assert kept.subject.machine.driver == "unknown"


def test_explain_names_the_family_and_says_why_a_tuned_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tune"))
    try:
        from entries import entry
    finally:
        sys.path.pop(0)
    shape = SPEC.shapes[0]
    bucket = Bucket(None, 4096)
    made = entry(HOPPER, bucket, shape=shape)
    table = Table(SPEC.display_name, SPEC.fingerprint, TARGET, (made,))
    write_table(table_path(tmp_path / "tables", TARGET, SPEC.display_name), table)
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(tmp_path / "tables"))
    lookup.forget()
    text = str(explain(SPEC, target=TARGET))
    assert "\n  schedule  128x128 12 warps 2 stages dynamic" in text
    assert ", family gluon_sm90\n" in text
    without_gluon(monkeypatch)
    golden("explain/no-gluon.txt", str(explain(SPEC, target=TARGET)).partition("\n\n")[0])


def test_files_of_schedules_that_differ_in_their_roles_only() -> None:
    plan, _ = choose.plan(SPEC, get_target(TARGET), schedule=HOPPER, has_lse=False)
    others = [replace(HOPPER, sm90=own) for own in (OWN, Sm90(), Sm90(group_mb=4))]
    assert len({kernel_file(plan, Job(each, aligned=True)) for each in others}) == 3


# **** refused ****

REFUSED: dict[str, Callable[[], object]] = {
    "head-dim-wide": lambda: choose.choose(
        Problem(SPEC.replace(head_dim=320), get_target(TARGET)), HOPPER
    ),
    "smem": lambda: choose.choose(
        Problem(SPEC.replace(head_dim=128), get_target(TARGET)), replace(HOPPER, num_stages=4)
    ),
    "registers": lambda: choose.choose(
        Problem(SPEC.replace(head_dim=256), get_target(TARGET)),
        replace(HOPPER, block_m=192, block_n=64, num_warps=16, num_stages=1, sm90=Sm90()),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schedules_that_cannot_be_used(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(ScheduleError) as error:
        REFUSED[name]()
    golden(f"errors/sm90-{name}.txt", str(error.value))


def test_a_captured_tensor_on_another_device(golden: Callable[[str, str], None]) -> None:
    slopes = {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}}
    spec = SPEC.replace(score={"alibi": "slopes"}, inputs=slopes)
    attend = flashgen.compile(spec, target=TARGET, schedule=HOPPER)
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(FlashgenError) as error:
        attend(q, q, q, slopes=torch.zeros(2, device="meta"))
    golden("errors/sm90-input-device.txt", str(error.value))


# **** a forked process with a deadline ****


def test_work_in_time() -> None:
    assert in_time(abs, -3, 60.0) == 3
    with pytest.raises(SilentError):
        in_time(_sleep, 1000, 0.2)
    with pytest.raises(ChildEndedError, match="the process ended with exit status 7"):
        in_time(_end, 7, 60.0)


def _sleep(seconds: int) -> None:
    import subprocess

    subprocess.run(["sleep", str(seconds)], check=False)


def _end(status: int) -> None:
    import os

    os._exit(status)
