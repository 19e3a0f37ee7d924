"""The model of on-chip memory against Triton: a few kernels compiled here, all those on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import triton

from flashgen.bench.model_check.compare import Row, compare
from flashgen.bench.model_check.compiled import OVER_TIME, Compiled, Kept, kernel_text, key_of
from flashgen.bench.model_check.pool import Job, compile_all
from flashgen.bench.model_check.report import Record, load, render
from flashgen.bench.model_check.run import compile_cases
from flashgen.bench.model_check.sample import TARGETS, Case, sample
from flashgen.bench.record import RecordError
from flashgen.codegen.context import QK_PART
from flashgen.schedule import on_chip
from flashgen.schedule.model import Schedule
from flashgen.schedule.on_chip import nearest_triton
from flashgen.target import get_target

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "compiler").glob("*.json"))
H200 = get_target("nvidia-h200")


def case(arch: str, dtype: str, form: str, tile: tuple[int, ...], **fields: object) -> Case:
    block_m, block_n, num_warps, num_stages = tile
    schedule = Schedule(
        kernel=fields.pop("kernel", "loop"),  # type: ignore[arg-type]
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    head_dim = fields.pop("head_dim", (64, 64))
    return Case(arch, dtype, head_dim, form, schedule, **fields)  # type: ignore[arg-type]


# The default tile of a report (PyTorch issue 180278), and the one that fitted and was fastest.
R7 = (
    case("sm_86", "bf16", "plain", (64, 64, 4, 3), head_dim=(192, 128)),
    case("sm_86", "bf16", "plain", (128, 32, 8, 2), head_dim=(192, 128)),
)
FEW = (
    *R7,
    case("sm_90", "bf16", "causal", (128, 64, 8, 3), head_dim=(128, 128)),
    case("sm_90", "fp16", "documents", (64, 32, 4, 3), head_dim=(192, 128)),
    case("sm_90", "tf32", "bias", (128, 64, 4, 1)),
    case("sm_90", "fp32", "plain", (16, 128, 8, 3)),
    case("sm_80", "tf32", "softcap", (32, 64, 8, 3)),
    case("sm_80", "fp16", "table", (128, 64, 8, 1), kernel="single_tile"),
    case("sm_80", "bf16", "causal", (64, 16, 8, 1)),
    case("sm_100", "bf16", "plain", (64, 128, 8, 1), head_dim=(256, 256)),
    case("sm_80", "tf32", "bias", (128, 256, 4, 1), head_dim=(32, 32)),
    # Rows that are not aligned: no stages, and score inputs that are read one by one.
    case("sm_90", "bf16", "causal", (128, 64, 8, 3), aligned=False),
    case("sm_90", "bf16", "documents", (64, 128, 4, 2), head_dim=(256, 256), aligned=False),
    case("sm_80", "fp16", "bias", (128, 64, 4, 2), aligned=False),
    case("sm_80", "fp16", "bias", (32, 256, 4, 2), head_dim=(32, 32), aligned=False),
    case("sm_86", "bf16", "table", (128, 32, 8, 2), head_dim=(32, 32), aligned=False),
    case("sm_100", "bf16", "bias", (64, 32, 8, 3), aligned=False),
    case("sm_100", "fp16", "softcap", (64, 128, 8, 3), head_dim=(128, 128), aligned=False),
)


def test_kernels_as_they_are_compiled_here(tmp_path: Path) -> None:
    """And case R7: the first tile needs 139,264 B of 101,376 B, the second one fits."""
    found = compile_cases(FEW, (), lambda _: None, kept=tmp_path / "kept.jsonl")
    version = nearest_triton(triton.__version__)
    rows = [compare(each, found[each], version) for each in FEW]
    assert [row.id for row in rows if row.off != 0 or row.breaks_a_bound or row.error] == []
    assert [row.launchable for row in rows[:2]] == [not row.reason for row in rows[:2]]
    assert rows[0].allocated_bytes == rows[0].smem_bytes == 139_264
    assert rows[0].rejection == "smem_bytes: needs 139264 B, target has 101376 B"
    assert rows[1].launchable


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_model_agrees_with_what_was_compiled(path: Path) -> None:
    """Each case of the committed record, compared again with the model as it is now."""
    record = load(path)
    version = nearest_triton(record.environment["triton"])
    _, _, seed = path.stem.partition("-seed-")
    size = len(record.rows) + record.not_run
    cases = {each.id: each for each in sample(size, int(seed or 0))}
    rows = [compare(cases[row.id], _compiled(row), version) for row in record.rows]
    now = dataclasses.replace(record, rows=tuple(rows))
    assert [row.id for row in now.faults] == []
    admitted = [row for row in rows if not row.reason]
    assert sum(row.wrongly_admitted for row in admitted) < 0.02 * len(admitted)
    assert len(rows) >= 150
    assert {row.arch for row in rows} == set(TARGETS)


def test_three_versions_of_triton_are_on_record() -> None:
    versions = {nearest_triton(load(path).environment["triton"]) for path in RECORDS}
    assert versions == set(on_chip.KNOWN_TRITON)
    assert max(len(load(path).rows) for path in RECORDS) >= 400


def test_a_sample_that_the_model_was_not_fitted_on_is_on_record() -> None:
    held_out = [load(path) for path in RECORDS if "-seed-" in path.stem]
    assert max(len(record.rows) for record in held_out) >= 400
    assert all("--seed" in record.command for record in held_out)


def test_the_report_is_made_from_the_record_alone() -> None:
    for path in RECORDS:
        assert render(load(path)) == path.with_suffix(".md").read_text("utf-8")


def _compiled(row: Row) -> Compiled:
    return Compiled(
        row.allocated_bytes, row.tmem_columns, row.launchable, row.regs, row.spill_bytes, row.error
    )


def test_fp32_kernels_load_parts_as_wide_as_the_model_says() -> None:
    assert on_chip.QK_PART == QK_PART


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("3.5.1", (3, 6)), ("3.6.0", (3, 6)), ("3.7.1", (3, 7)), ("3.8.0", (3, 8)), ("4.0", (3, 8))],
)
def test_the_nearest_version(version: str, nearest: tuple[int, int]) -> None:
    assert nearest_triton(version) == nearest


# **** the sample ****


def test_a_smaller_sample_begins_a_larger_one() -> None:
    assert sample(40) == sample(60)[:40]
    assert len(set(sample(200))) == 200
    assert {each.arch for each in sample(20)} == set(TARGETS)


# **** processes and kept results ****

SLEEPS = "import time; time.sleep(60)\n"
DIES = "import os; os._exit(3)\n"


@pytest.mark.parametrize(
    ("text", "error"), [(SLEEPS, f"{OVER_TIME}: 1 s"), (DIES, "the compiler died (3)")]
)
def test_a_job_that_is_late_or_dies_is_an_outcome(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "bad" / "kernel.py"
    path.parent.mkdir()
    path.write_text(text)
    job = Job("key", path, "kernel", {}, {}, 1, H200)
    outcomes = list(
        compile_all(
            [job, job], workers=1, deadline_s=1, cache=tmp_path / "cache", until=float("inf")
        )
    )
    assert [(found.error, found.smem_bytes) for _, found in outcomes] == [(error, None)] * 2


def test_no_job_begins_when_time_is_over(tmp_path: Path) -> None:
    job = Job("key", tmp_path / "kernel.py", "kernel", {}, {}, 1, H200)
    found = compile_all([job], workers=1, deadline_s=1, cache=tmp_path, until=0.0)
    assert list(found) == []


def test_kept_results_survive_a_run_that_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kept.jsonl"
    Kept(path).add("one", Compiled(4096, fits=True))
    with path.open("a") as file:
        file.write('{"key": "two", "smem_by')
    assert Kept(path).found == {"one": Compiled(4096, fits=True)}


def test_where_machine_code_fails_the_allocation_stays_known(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    Kept(path).add("one", Compiled(4096, fits=True, seconds=1))
    Kept(path).add("one", Compiled(error="over time: 9 s", seconds=9))
    assert Kept(path).found == {"one": Compiled(4096, 0, True, error="over time: 9 s", seconds=9)}


MODULE = """
WIDTH = tl.constexpr(64)  # a comment

@triton.jit
def helper(x):
    return x + {number}

@triton.jit(do_not_specialize=range(2))
def kernel(x_ptr, n):
    tl.store(x_ptr, helper(n) + WIDTH)

@triton.jit(do_not_specialize=range(2))
def other(x_ptr, n):
    pass

def run(kernel):
    pass
"""


def test_results_are_kept_by_what_a_kernel_is_made_of() -> None:
    text = MODULE.format(number=1)
    one = FEW[0]
    commented = text.replace("# a comment", "# another").replace("pass", "return", 1)
    assert "other" not in kernel_text(text, "kernel")
    assert key_of(one, commented, "kernel", "3.7.1") == key_of(one, text, "kernel", "3.7.1")
    keys = {
        key_of(one, text, "kernel", "3.7.1"),
        key_of(one, text, "kernel", "3.8.0"),
        key_of(one, MODULE.format(number=2), "kernel", "3.7.1"),
        key_of(FEW[1], text, "kernel", "3.7.1"),
    }
    assert len(keys) == 4


# **** the report ****


def row(**fields: object) -> Row:
    usual = Row(
        id="sm_90 bf16 d64 plain loop flash2 64x64 4 warps 2 stages",
        arch="sm_90",
        dtype="bf16",
        aligned=True,
        smem_bytes=4096,
        least_smem_bytes=4096,
        least_regs=67,
        reason="",
        rejection="",
        allocated_bytes=4096,
        tmem_columns=0,
        launchable=True,
        regs=128,
        spill_bytes=0,
        error="",
    )
    return dataclasses.replace(usual, **fields)  # type: ignore[arg-type]


REJECTED: dict[str, object] = {"reason": "smem_bytes", "rejection": "smem_bytes: needs 9 B"}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, False),
        ({"smem_bytes": 4104}, True),  # sm_90 is exact
        ({"arch": "sm_80", "smem_bytes": 4400}, False),
        ({"arch": "sm_80", "smem_bytes": 4600}, True),
        ({"arch": "sm_80", "smem_bytes": 3900}, True),
        ({"smem_bytes": 4104, "aligned": False}, True),
        ({"least_smem_bytes": 4097, "aligned": False}, False),  # a bound of aligned rows
        ({**REJECTED, "aligned": False}, False),
        ({"least_smem_bytes": 4097}, True),
        ({"regs": 60}, True),
        ({"regs": 60, "spill_bytes": 8}, False),
        (REJECTED, True),
        ({**REJECTED, "launchable": False}, False),
        ({**REJECTED, "spill_bytes": 16}, False),
        ({**REJECTED, "regs": None, "spill_bytes": None, "error": "over time: 9 s"}, False),
        ({"launchable": False}, False),  # admitted in vain: counted, not a fault by itself
    ],
)
def test_what_counts_as_a_fault(fields: dict[str, object], fault: bool) -> None:
    assert bool(_record(row(**fields)).faults) is fault


def _record(*rows: Row) -> Record:
    environment = {"triton": "3.7.1", "python": "3.11.0"}
    return Record(environment, "python -m x", "2026-01-01 00:00:00 UTC", 12.0, 1, rows)


def test_the_report(golden: Callable[[str, str], None]) -> None:
    record = _record(
        row(),
        row(arch="sm_80", smem_bytes=4400, regs=255, spill_bytes=12),
        row(arch="sm_80", launchable=False, regs=None, spill_bytes=None),
        row(aligned=False),
        row(arch="sm_80", smem_bytes=4400, aligned=False, dtype="tf32"),
        row(**REJECTED),
        row(**REJECTED, launchable=False, regs=None, spill_bytes=None),
        row(reason="regs_per_thread", rejection="regs_per_thread: needs 300", spill_bytes=640),
        row(
            reason="regs_per_thread", rejection="x", regs=None, spill_bytes=None, error="over time"
        ),
    )
    golden("bench/model-check.md", render(record))
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 2, "columns": []}'])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="record"):
        load(path)
