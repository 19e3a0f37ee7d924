"""Builds of flash1 and auto: a schedule's kernels one by one, and both orders in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashgen.compiler import build
from flashgen.compiler.report import report
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec

TARGET = "nvidia-h200"
SHAPE = {"batch": 1, "q_heads": 8, "kv_heads": 8, "q_len": 1, "kv_len": 16384}
SPEC = AttentionSpec(
    name="ordered", head_dim=16, dtype="fp16", mask=["causal"], loop_order="flash1", shapes=[SHAPE]
)
SCHEDULE = Schedule(
    loop_order="flash1", block_m=16, block_n=64, num_warps=4, num_stages=1, num_kv_splits=None
)


def test_a_flash1_build_has_every_kernel_of_its_schedule(tmp_path: Path) -> None:
    built = build(SPEC, tmp_path, target=TARGET, schedule=SCHEDULE, verify=False)
    assert [kernel.kernel for kernel in built.kernels] == ["flash1", "flash1_split", "merge"]
    manifest = json.loads(built.manifest.read_text())
    for kernel, said in zip(built.kernels, manifest["kernels"], strict=True):
        assert said["kernel"] == kernel.kernel
        assert said["files"][0] == f"ordered.{kernel.kernel}_16x64_w4_s1.ptx"
        assert (tmp_path / said["files"][1]).stat().st_size
    (shape,) = manifest["shapes"]
    assert shape["schedule"] == str(SCHEDULE).replace("splits to fill", "16 splits")
    assert shape["workspace_bytes"] == 8 * 16 * (4 * 16 + 2 * 4)
    assert "16 splits" in built.report.read_text()
    assert "Loop order" not in built.report.read_text()


def test_the_report_of_auto_has_both_orders(tmp_path: Path) -> None:
    spec = SPEC.replace(loop_order="auto")
    built = build(spec, tmp_path, target=TARGET, verify=False)
    text = report(built)
    section = text.partition("## Loop order")[2].partition("## Schedules")[0]
    rows = [line for line in section.splitlines() if line.startswith("| q_len")]
    buckets = [bucket for bucket, _ in built.plan.choices if bucket.kernel == "loop"]
    assert len(rows) == len(buckets)
    (own,) = [row for row in rows if "(assumed)" not in row]
    assert own.startswith("| q_len <= 16, kv_len <= 16384 | b1 h8:8 q1 k16384 |")
    assert "| flash1 | predicted " in own
    chosen = dict(built.plan.choices)
    assert chosen[Bucket(16, 16384)].loop_order == "flash1"
    assert chosen[Bucket(None, None)].loop_order == "flash2"


def test_a_given_schedule_is_said_to_be_given(tmp_path: Path) -> None:
    spec = SPEC.replace(loop_order="auto")
    built = build(spec, tmp_path, target=TARGET, schedule=SCHEDULE, verify=False)
    rows = [line for line in report(built).splitlines() if line.endswith("| tuned, or given |")]
    assert rows
    assert all("| flash1 |" in row for row in rows)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_fixed_number_of_splits_is_one_kernel_or_two(splits: int, tmp_path: Path) -> None:
    schedule = Schedule.from_dict({**SCHEDULE.to_dict(), "num_kv_splits": splits})
    built = build(SPEC, tmp_path, target=TARGET, schedule=schedule, verify=False)
    wanted = ["flash1"] if splits == 1 else ["flash1_split", "merge"]
    assert [kernel.kernel for kernel in built.kernels] == wanted
    assert "SM_COUNT" not in built.module.read_text()
