"""Contestants of suite `fa-paper` from outside, and its goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fa_played import RECORD, a_run, answer
from fake_clock import FakeClock

from flashgen.bench import fa_goals
from flashgen.bench.fa_cases import FA3, FA3_PLAIN, FLEX_TUNED, GRID, VARIANT, find, variants
from flashgen.bench.fa_figures import best_of, is_peer, outside_names, peer_ratio, ratio_to
from flashgen.bench.fa_outside import ContestantError, Outside, contestants_of, facts_of
from flashgen.bench.fa_report import fa_parts
from flashgen.bench.fa_tasks import CompileTask, TimeTask
from flashgen.bench.fa_worker import Work
from flashgen.bench.record import CaseRecord, Ceiling, Result
from flashgen.bench.suites import Request, command_line, run_suites
from flashgen.spec.parts import Shape
from flashgen.tune.summary import summarise

CASE_ID = "grid/d128/n8192/causal"
FILE = """
import torch

calls = []

def attention(case):
    calls.append(case["id"])
    if case["kind"]:
        return None
    def attend(q, k, v):
        assert q.shape == (case["batch"], case["q_heads"], case["q_len"], case["head_dim"])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case["causal"])
    return attend

def wrong(case):
    return lambda q, k, v: q

def broken(case):
    raise RuntimeError("no such GPU")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "other.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spelling", "other.py:attention"),
        ("name", "My Kernel=other.py:attention"),
        ("no-file", "one=missing.py:attention"),
        ("no-python", "one=broken.py:attention"),
        ("no-function", "one=other.py:atention"),
        ("twice", "one=other.py:wrong"),
    ],
)
def test_what_is_no_contestant_is_said(
    name: str,
    text: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.chdir(file.parent)
    Path("broken.py").write_text("this is no Python\n")
    with pytest.raises(ContestantError) as caught:
        contestants_of(["one=other.py:attention", text])
    golden(f"errors/bench-contestant-{name}.txt", str(caught.value))


def test_contestants_are_for_one_suite(file: Path, golden: Callable[[str, str], None]) -> None:
    (one,) = contestants_of([f"one={file}:attention"])
    with pytest.raises(ContestantError) as caught:
        run_suites(Request(("flex",), contestants=(one,)), print)
    golden("errors/bench-contestant-suite.txt", str(caught.value))


def test_a_record_says_who_took_part_but_not_from_where(file: Path) -> None:
    contestants = contestants_of([f"one={file}:attention", f"other-2={file}:wrong"])
    text = command_line(Request(("fa-paper",), contestants=contestants))
    assert text.endswith("--contestant one=other.py:attention --contestant other-2=other.py:wrong")
    before = contestants[0].version
    assert before.startswith("other.py:attention ")
    file.write_text(FILE + "\n# changed\n")
    assert contestants[0].version != before


def test_a_function_is_told_all_of_a_case() -> None:
    facts = facts_of(find("variant/gqa24:4/d256/n16384/causal"))
    assert facts | {"id": ""} == {
        "id": "",
        "kind": "gqa24:4",
        "head_dim": 256,
        "causal": True,
        "window": None,
        "softcap": None,
        "alibi": False,
        "bias": False,
        "sink": False,
        "documents": [],
        **asdict(Shape(1, 24, 4, 16384, 16384)),
    }
    assert facts_of(find("variant/window512/d128/n8192/causal"))["window"] == 512


def small() -> Any:
    return replace(find(CASE_ID), head_dim=32, hidden=64, length=96, tokens=192)


def played() -> Work:
    work = Work(lambda text, limit_s: None)
    work.begin(torch.device("cpu"), FakeClock(default=25.0))
    return work


def test_an_outside_contestant_is_checked_and_timed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    names = ("attention", "wrong", "broken")
    outside = tuple(Outside(name, str(file), name) for name in names)
    record = played().do(TimeTask(small(), (), outside=outside, tuned_flex=False))
    found = {each.name: each for each in record.results}
    right = found["outside attention"]
    assert right.ms is not None and right.error is None
    assert right.accuracy is not None and right.accuracy.relative_error < 1e-2
    assert (found["outside wrong"].error or "").startswith("wrong: relative error")
    assert found["outside broken"].error == "RuntimeError: no such GPU"
    skipped = played().do(
        TimeTask(small(), (), outside=outside, skip=("outside attention",), tuned_flex=False)
    )
    assert "outside attention" not in {each.name for each in skipped.results}


def test_who_does_not_serve_a_case_takes_no_part(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = replace(small(), group=VARIANT, kind="gqa32:8", heads=(4, 2))
    outside = (Outside("none", str(file), "attention"),)
    record = played().do(TimeTask(case, (), outside=outside, tuned_flex=False))
    assert not outside_names([record])


def test_what_outside_contestants_compile_is_compiled_beforehand(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    said: list[str] = []
    work = Work(lambda text, limit_s: said.append(text))
    work.begin(torch.device("cpu"), FakeClock())
    outside = (Outside("ahead", str(file), "attention"), Outside("bad", str(file), "broken"))
    assert work.do(CompileTask((small(),), {}, outside)) == 1  # FlexAttention's
    assert f"compiling outside ahead of {small().id}" in said
    said.clear()
    assert work.do(CompileTask((small(),), {small().id: ("flex", "outside ahead")}, outside)) == 0
    assert not [text for text in said if "outside ahead of" in text or "flex" in text]


def test_a_run_has_ratios_to_outside_contestants(tmp_path: Path, file: Path) -> None:
    outside = contestants_of([f"one={file}:attention"])
    run, _ = a_run(tmp_path, answer, outside=outside, only=("d128/n8192",))
    assert all("outside one" in {r.name for r in case.results} for case in run.record.cases)
    text = "\n".join(fa_parts(run.record))
    assert "| grid: best / outside one, lowest |" in text
    assert "| best / outside one | **" in text
    assert "| best / outside one | of matmul |" in text


# ---- figures and goals


def a_case(kind: str, results: dict[str, float], **facts: Any) -> CaseRecord:
    group = VARIANT if kind else GRID
    return CaseRecord(
        id="/".join(part for part in (group, kind, "d128/n8192/causal") if part),
        group=group,
        spec="a",
        shape=asdict(Shape(2, 16, 16, 8192, 8192)),
        dtype="bf16",
        matmul_flops=10**12,
        results=tuple(Result(name, ms=summarise([ms])) for name, ms in results.items()),
        facts={"plain flops": 10**12, **facts},
    )


def test_an_outside_contestant_is_no_peer() -> None:
    case = a_case("", {"flashgen a": 1.0, "outside one": 0.8, FA3: 1.25})
    assert best_of(case, is_peer) == FA3
    assert peer_ratio(case) == pytest.approx(1.25)
    assert ratio_to(case, "outside one") == pytest.approx(0.8)


def test_every_variant_with_a_goal_is_a_case() -> None:
    kinds = {case.kind for case in variants()}
    assert fa_goals.LOST_MOST.keys() <= kinds
    assert fa_goals.FA3_LEVELS.keys() <= kinds


def row(text: str, beginning: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_goals_of_the_whole() -> None:
    cases = (
        a_case("", {"flashgen a": 1.0, FA3: 1.04, "outside one": 0.99}),
        a_case("softcap50", {"flashgen a": 1.0, "plain a": 0.9, FLEX_TUNED: 1.7}),
    )
    ceiling = Ceiling("matmul bf16", "TFLOP/s", (1200.0,))
    found = fa_goals.goals(replace(RECORD, cases=cases, ceilings=(ceiling,)))
    assert row(found, "grid: best / fastest peer, geo")[1:4] == ["1.040", "≥ 1.03", "met"]
    assert row(found, "grid: best / fastest peer, low")[1:4] == ["1.040", "≥ 0.95", "met"]
    assert row(found, "grid: of an 8192³")[1:4] == ["0.833", "≥ 0.85", "**missed**"]
    assert row(found, "grid: best / outside one")[1:4] == ["0.990", "≥ 1.00", "**missed**"]
    assert row(found, "variants: best / Flex")[1:] == [
        "1.700", "≥ 1.60", "met", "variant/softcap50/d128/n8192/causal", "1",
    ]  # fmt: skip
    empty = fa_goals.goals(RECORD)
    assert row(empty, "grid: best / fastest peer, geo")[1:] == ["", "≥ 1.03", "", "", "0"]


def test_goals_of_the_variants() -> None:
    schedules = {"flashgen a": {"family": "gluon_sm90"}, "flashgen b": {"family": "triton"}}
    met = {"flashgen a": 1.0, "flashgen b": 2.0, "plain a": 0.9, FA3: 1.1, FA3_PLAIN: 1.0}
    missed = {"flashgen a": 3.0, "flashgen b": 2.0, "plain a": 1.0}
    found = fa_goals.variant_goals(
        [
            a_case("softcap50", met, schedules=schedules),
            a_case("window512", missed, schedules=schedules, scaled={"fa3 (scaled)": 600.0}),
            a_case("gqa32:8", {"flashgen a": 1.0}, schedules=schedules),
        ]
    )
    assert row(found, "variant/softcap50")[1:] == [
        "gluon_sm90", "10.0%", "≤ 12%", "met", "1000", "562", "met", "909", "met",
    ]  # fmt: skip
    assert row(found, "variant/window512")[1:] == [
        "triton", "50.0%", "≤ 35%", "**missed**", "500", "426", "met", "~600", "**missed**",
    ]  # fmt: skip
    assert row(found, "variant/gqa32:8")[1:] == ["gluon_sm90", "", "", "", "1000", "", "", "", ""]
