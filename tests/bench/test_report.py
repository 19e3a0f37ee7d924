"""Records survive their JSON, and tables are made from records alone, always the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.bench.cases import flex_cases
from flashgen.bench.record import Accuracy, CaseRecord, Ceiling, Record, RecordError, Result, load
from flashgen.bench.report import progress_line, render, with_mask_ratio
from flashgen.bench.run import Run
from flashgen.tune.summary import summarise

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "flashgen": "0.1.0",
}


def timed(name: str, ms: float, **more: object) -> Result:
    samples = (ms * 0.99, ms, ms * 1.02)
    accuracy = Accuracy(0.002, 0.004, 0.0017, 256, finite=True, poisoned=True)
    return Result(
        name,
        **{
            "how": "3 calls, graph",
            "ms": summarise(samples),
            "samples_ms": samples,
            "first_result_s": 1.5,
            "accuracy": accuracy,
            **more,
        },
    )


def record_of(suite: str, cases: list[CaseRecord], **more: object) -> Record:
    return Record(
        **{
            "suite": suite,
            "target": "nvidia-h200",
            "environment": ENVIRONMENT,
            "command": f"flashgen bench --suite {suite} --out benchmarks",
            "started": "2026-11-29 20:00:00 UTC",
            "seconds": 123.4,
            "complete": True,
            "ceilings": (
                Ceiling("matmul bf16", "TFLOP/s", (801.0, 790.5)),
                Ceiling("copy", "TB/s", (4.29, 4.3)),
            ),
            "cases": tuple(cases),
            **more,
        }
    )


def case(case_id: str, group: str, results: list[Result], **more: object) -> CaseRecord:
    shape = {"batch": 2, "q_heads": 16, "kv_heads": 16, "q_len": 8192, "kv_len": 8192}
    return CaseRecord(
        id=case_id,
        group=group,
        spec=group,
        shape=shape,
        dtype="bf16",
        visible_pairs=2 * 16 * 8192 * 8193 // 2,
        matmul_flops=4 * 128 * 2 * 16 * 8192 * 8193 // 2,
        dram_bytes=4 * 2 * 8192 * 2048 * 2,
        results=tuple(results),
        **more,
    )


def flex_record() -> Record:
    plain = case(
        "plain/d128/n8192/causal",
        "plain",
        [
            timed("flashgen", 1.2),
            timed("flex", 1.4),
            timed("sdpa_flash", 1.75),
            Result("sdpa_cudnn", error="RuntimeError: No available kernel."),
        ],
    )
    window = case(
        "window512/d128/n8192/causal",
        "window",
        [
            timed("flashgen", 0.2),
            timed("flex", 0.3),
            timed("flashgen_call", 0.25),
            timed("flex_call_eager_mask", 12.0),
            timed("flex_call_compiled_mask", 1.0),
        ],
    )
    missing = case(
        "softcap/d128/n4096/causal",
        "softcap",
        [
            Result("flashgen", error="wrong: the output holds NaN or infinity"),
            timed("flex", 0.9),
            Result("flashgen_call", error="wrong: the output holds NaN or infinity"),
            timed("flex_call_eager_mask", 3.0),
            timed("flex_call_compiled_mask", 2.0),
        ],
    )
    reason = "documents/d64/n16384/causal: the budget of 480 s was spent"
    return record_of("flex", [plain, window, missing], not_run=(reason,), complete=False)


def specs_record() -> Record:
    facts = {
        "built kernels": 3,
        "verified": True,
        "verification": "llama3_8b: verified, 2 cases on NVIDIA H200",
        "schedule": "loop flash2 128x64 8 warps 3 stages",
        "catalogue floor us": 556.0,
        "bytes beyond output": 0,
    }
    good = case(
        "llama3_8b/b1/h32:8/q8192/k8192", "llama3_8b", [timed("flashgen", 1.3)], facts=facts
    )
    wrong = {"verified": False, "verification": "llama3_8b: WRONG in 1 of 2 cases on NVIDIA H200"}
    bad = replace(
        good,
        id="llama3_8b/b16/h32:8/q1/k8192",
        results=(
            timed(
                "flashgen", 0.2, accuracy=Accuracy(0.02, 0.004, 0.0017, 256, True, poisoned=False)
            ),
        ),
        matmul_flops=10**9,
        dram_bytes=5 * 10**8,
        facts={**facts, "bytes beyond output": None, **wrong},
    )
    reason = "qwen_27b/b1/h24:4/q262144/k262144: needs 15.0 GB, of which 9.0 GB are free"
    one_run = {"run": "0f3a9c21", "suites": ("specs", "flex"), "preparation": "all, in 100 s"}
    return record_of("specs", [good, bad], not_run=(reason,), **one_run)


def dispatch_record() -> Record:
    names = {"launch": 0.011, "run": 0.014, "callable": 0.031, "sdpa": 0.012}
    results = [
        replace(timed(name, ms), accuracy=None, how="100 calls, host time")
        for name, ms in names.items()
    ]
    calls = replace(case("dispatch/llama3_8b", "dispatch", results), matmul_flops=0)
    steps = {
        "import torch": 3.1,
        "import triton": 0.4,
        "import flashgen": 0.05,
        "first result": 2.2,
    }
    warm = {**steps, "first result": 0.2}
    start = replace(
        case("startup/llama3_8b", "startup", []),
        spec="llama3_8b",
        facts={
            "cold": {"steps_s": steps, "heavy_modules": ["jinja2", "networkx", "sympy"]},
            "warm": {"steps_s": warm, "heavy_modules": []},
            "bytecode": "of all packages on disk, as an installer leaves it",
        },
    )
    return record_of("dispatch", [calls, start], ceilings=())


RECORDS = {"flex": flex_record, "specs": specs_record, "dispatch": dispatch_record}


@pytest.mark.parametrize("suite", RECORDS)
def test_table_is_made_from_the_json_alone(suite: str, golden: Callable[[str, str], None]) -> None:
    record = RECORDS[suite]()
    text = record.to_json()
    again = Record.from_json(text)
    assert again == record
    assert again.to_json() == text
    assert render(again) == render(record)
    golden(f"bench/{suite}.md", render(record))


def test_records_from_before_runs_of_several_suites_are_read() -> None:
    data = json.loads(flex_record().to_json())
    for name in ("run", "suites", "preparation"):
        del data[name]
    assert Record.from_json(json.dumps(data)) == flex_record()


def test_ratio_with_the_mask_is_that_of_the_faster_way_to_make_it() -> None:
    assert with_mask_ratio(flex_record().cases[1]) == pytest.approx(4.0)
    assert with_mask_ratio(flex_record().cases[2]) is None


def test_an_empty_record_renders() -> None:
    for suite in RECORDS:
        assert render(record_of(suite, [])).startswith("# ")


def test_progress_says_how_a_case_went() -> None:
    first, _, last = flex_record().cases
    assert progress_line(first).startswith(
        "plain/d128/n8192/causal: flashgen 1200 us 458 TFLOP/s; flex 1400 us"
    )
    assert "sdpa_cudnn RuntimeError: No available kernel." in progress_line(first)
    assert "flashgen wrong: the output holds NaN" in progress_line(last)
    start = dispatch_record().cases[1]
    assert (
        progress_line(start)
        == "startup/llama3_8b: cold first result 2.200 s, warm first result 0.200 s"
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "cases": 3}', "null"]
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"file\.json"):
        load(path)
    with pytest.raises(RecordError, match=r"absent\.json"):
        load(tmp_path / "absent.json")


def test_a_run_saves_after_every_case_and_says_what_it_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    empty = record_of("flex", [], complete=False, ceilings=(), seconds=0.0)
    run = Run(empty, said.append, out=tmp_path, only=("window", "plain"), budget_s=1000)
    folder = tmp_path / "nvidia-h200"
    for number, each in enumerate(flex_record().cases[:2], start=1):
        assert run.wants(each.id)
        assert run.has_time_for(each.id)
        run.add(each)
        saved = load(folder / "flex.json")
        assert len(saved.cases) == number
        assert not saved.complete
        assert (folder / "flex.md").read_text() == render(saved)
    assert not run.wants("softcap/d128/n4096/causal")

    run.budget_s = 0
    assert not run.has_time_for("window4096/d128/n8192/causal")
    run.add_ceilings((Ceiling("copy", "TB/s", (4.2,)),))
    run.add_ceilings((Ceiling("copy", "TB/s", (4.3,)),))
    run.finish()
    saved = load(folder / "flex.json")
    assert saved.complete
    assert saved.not_run == ("window4096/d128/n8192/causal: the budget of 0 s was spent",)
    assert saved.ceiling("copy") == 4.3
    assert sorted(path.name for path in folder.iterdir()) == ["flex.json", "flex.md"]
    assert any("not run: the budget" in line for line in said)


def test_numbers_in_json_are_plain() -> None:
    """No NaN or infinity, which JSON does not have."""
    for make in RECORDS.values():
        json.loads(make().to_json(), parse_constant=pytest.fail)


def test_every_case_of_the_grid_has_a_group_with_a_mean() -> None:
    from flashgen.bench.cases import GROUPS

    assert {each.group for each in flex_cases()} == set(GROUPS)


def test_a_record_knows_where_flashgen_was_wrong() -> None:
    assert flex_record().wrong == ("softcap/d128/n4096/causal",)
    assert specs_record().wrong == ("llama3_8b/b16/h32:8/q1/k8192",)
    assert dispatch_record().wrong == ()
