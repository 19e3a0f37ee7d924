"""Suite `fa-paper` on the CPU: small shapes, a made-up clock, processes that are played."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fa_played import a_run, answer
from fake_clock import FakeClock

from flashgen import reference
from flashgen.bench import fa_cases, fa_peers, fa_process, fa_worker
from flashgen.bench.cases import HEAD_DIMS
from flashgen.bench.fa_cases import FA3, FLEX, FLEX_TUNED, GRID, VARIANT, FaCase, grid, variants
from flashgen.bench.fa_entrants import Group, groups_of
from flashgen.bench.fa_figures import lost, peer_ratio, rate_of
from flashgen.bench.fa_peers import FaFlex, fa3, peers_of, scaled_rates, sdpa
from flashgen.bench.fa_process import LostError, Worker, visible_gpus
from flashgen.bench.fa_report import fa_parts
from flashgen.bench.fa_schedules import WIDE_CASES, schedules_for
from flashgen.bench.fa_tasks import (
    ROUNDS,
    SLOW_ROUNDS,
    CheckTask,
    CompileTask,
    SettleTask,
    TimeTask,
)
from flashgen.bench.fa_worker import Work, draw_sets
from flashgen.bench.record import CaseRecord, Record, Result, load
from flashgen.bench.report import render
from flashgen.problem import Problem
from flashgen.schedule.space import check
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune.summary import summarise

CPU = torch.device("cpu")
H200 = get_target("nvidia-h200")
LENGTH = 96


def small(case: FaCase) -> FaCase:
    """The same with two rows of 96 tokens (documents fill one) and few heads."""
    return replace(
        case,
        head_dim=32,
        hidden=64,
        length=LENGTH,
        tokens=LENGTH if case.documents else 2 * LENGTH,
        window=None if case.window is None else 20,
        documents=(31, 2, 40, 23) if case.documents else (),
        softcap=None if case.softcap is None else 1.5,  # low enough to bend these scores
        heads=None if case.heads is None else (4, 2),
    )


KINDS = {case.kind: small(case) for case in variants()} | {
    "causal": small(grid()[0]),
    "full": small(next(case for case in grid() if not case.causal)),
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs uncompiled on the CPU; what it computes is the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def exact(case: FaCase) -> tuple[Any, torch.Tensor]:
    (arguments,) = draw_sets(case, 0, CPU)
    out, _ = reference.attention(
        case.spec,
        arguments.q,
        arguments.k,
        arguments.v,
        inputs=arguments.inputs,
        sink=arguments.sink,
        kv_lens=None,
    )
    return arguments, out


# ---- cases and schedules


def test_the_grid_and_the_variants_are_those_of_the_goal() -> None:
    cases = fa_cases.fa_cases()
    assert len({case.id for case in cases}) == len(cases) == 36 + 11
    assert {case.head_dim for case in grid()} == set(HEAD_DIMS)
    assert {case.length for case in grid()} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all(case.shape.batch * case.length == 16384 for case in cases)
    assert all(case.shape.q_heads * case.head_dim == 2048 for case in grid())
    assert sum(fa_cases.DOCUMENTS) == 16384
    assert [case.kind for case in variants() if case.is_plain] == ["gqa32:8", "gqa24:4"]
    assert all(case.is_plain for case in grid())
    assert fa_cases.find("variant/bias/d128/n4096/causal").bias


def test_every_case_has_schedules_that_fit() -> None:
    for case in fa_cases.fa_cases():
        fitting = [s for s in schedules_for(case) if check(s, Problem(case.spec, H200)) is None]
        assert fitting, case.id
    for case_id in WIDE_CASES:
        assert len(schedules_for(fa_cases.find(case_id))) >= 5


# ---- peers compute the case


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_computes_the_case(kind: str) -> None:
    arguments, wanted = exact(KINDS[kind])
    out = FaFlex(KINDS[kind], arguments, None).kernel()(arguments)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("kind", ["causal", "full", "gqa32:8"])
def test_sdpa_computes_the_case(kind: str) -> None:
    arguments, wanted = exact(KINDS[kind])
    out = sdpa(KINDS[kind], torch.nn.attention.SDPBackend.MATH)(arguments)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-2


FAKE_FA3 = """
import torch

def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None):
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    if causal:
        scores = scores.masked_fill(distance < 0, float("-inf"))
    if window_size[0] >= 0:
        scores = scores.masked_fill(distance > window_size[0], float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16
        lse = torch.logaddexp(lse, sinks.double()[None, :, None, None])
    out = (torch.exp(scores - lse) @ v).transpose(1, 2)
    return out.to(torch.bfloat16)

def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    ends = cu_q.tolist()
    parts = [(a, b) for a, b in zip(ends, ends[1:])]
    assert max(b - a for a, b in parts) == max_q == max_k
    cut = [[x[None, a:b] for x in (q, k, v)] for a, b in parts]
    return torch.cat([flash_attn_func(*part, **options)[0] for part in cut])
"""


@pytest.fixture
def with_fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the calls that are made of FlashAttention-3, built without soft capping."""
    (tmp_path / "flash_attn_interface.py").write_text(FAKE_FA3)
    flags = '{"build_flags": {"FLASHATTENTION_DISABLE_SOFTCAP": True}}'
    (tmp_path / "flash_attn_config.py").write_text(f"CONFIG = {flags}\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("with_fa3")
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in {"alibi", "bias"}])
def test_fa3_computes_the_case(kind: str) -> None:
    arguments, wanted = exact(KINDS[kind])
    out = fa3(KINDS[kind], arguments)(arguments)
    assert out.shape == wanted.shape
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-2


def test_who_takes_part(with_fa3: None) -> None:
    def names(case_id: str) -> list[str]:
        case = fa_cases.find(case_id)
        return [each.name for each in peers_of(case, draw_sets(small(case), 0, CPU)[0])]

    sdpa_names = ["sdpa_flash", "sdpa_cudnn"]
    assert names("grid/d64/n512/full") == [*sdpa_names, FA3, FLEX]
    assert names("grid/d128/n8192/causal") == [*sdpa_names, FA3, FLEX, FLEX_TUNED]
    assert names("variant/gqa32:8/d128/n8192/causal") == [*sdpa_names, FA3, FLEX, FLEX_TUNED]
    beside = "fa3 plain causal"
    window = "variant/window512/d128/n8192/causal"
    assert names(window) == [FA3, beside, FLEX, FLEX_TUNED]
    for lacking in ("softcap50", "alibi", "bias"):
        assert names(f"variant/{lacking}/d128/n4096/causal") == [beside, FLEX, FLEX_TUNED]


def test_who_is_not_here_is_scaled_from_who_is() -> None:
    case = fa_cases.find("grid/d128/n16384/causal")
    assert scaled_rates(case, 762.0, None) == {"fa4 (scaled)": pytest.approx(727.0)}
    assert scaled_rates(case, None, None) == {}
    assert scaled_rates(fa_cases.find("grid/d128/n1024/causal"), 600.0, None) == {}
    softcap = fa_cases.find("variant/softcap50/d128/n4096/causal")
    found = scaled_rates(softcap, None, 348.0)
    assert found == {"fa3 (scaled)": pytest.approx(281), "fa4 (scaled)": pytest.approx(138.5)}
    assert scaled_rates(fa_cases.find("variant/alibi/d128/n4096/causal"), None, 696.0) == {
        "fa4 (scaled)": pytest.approx(554.0)
    }


# ---- a process, played here


def a_group(case: FaCase) -> Group:
    (group,) = groups_of([case], H200)
    return group


def portable_only(group: Group) -> tuple[Any, ...]:
    (of_case,) = group.entrants.values()
    return tuple(each for each in of_case if each.schedule.family == "triton")


def played(said: list[str]) -> Work:
    work = Work(lambda text, limit_s: said.append(text))
    work.begin(CPU, FakeClock(default=25.0))
    return work


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["causal", "sinks-window128"])
def test_a_case_is_checked_timed_and_settled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa_worker, "LOAD_S", 0.0)
    said: list[str] = []
    work, case = played(said), KINDS[kind]
    group = a_group(case)
    ours = portable_only(group)
    record = work.do(TimeTask(case, ours, tuned_flex=False))
    timed = {each.name for each in record.results if each.ms is not None}
    assert {each.name for each in ours} | {FLEX} <= timed
    assert FLEX_TUNED not in {each.name for each in record.results}
    mine = next(each for each in record.results if each.name == ours[0].name)
    assert mine.accuracy is not None and mine.accuracy.max_error <= mine.accuracy.bound
    assert said.index(f"checking {ours[0].name}") < said.index("timing")
    assert record.facts["plain flops"] >= record.matmul_flops
    assert work.do(SettleTask((ours[0].name, "nobody"))) == {ours[0].name: 25.0}
    assert work.do(CheckTask((case,), ours[:1])) == {}


@pytest.mark.usefixtures("uncompiled")
def test_a_wrong_schedule_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = KINDS["causal"]
    (mine,) = portable_only(a_group(case))
    monkeypatch.setattr(
        fa_worker, "entrant_builder", lambda entrant: lambda: lambda a: torch.zeros_like(a.q)
    )
    work = played([])
    record = work.do(TimeTask(case, (mine,)))
    wrong = next(each for each in record.results if each.name == mine.name)
    assert wrong.ms is None and (wrong.error or "").startswith("wrong: ")
    (reason,) = work.do(CheckTask((case,), (mine,))).values()
    assert reason.startswith(f"{case.id}: wrong: ")


@pytest.mark.usefixtures("uncompiled")
def test_flex_is_compiled_beforehand() -> None:
    assert played([]).do(CompileTask((KINDS["causal"], KINDS["bias"]))) == 3


def test_who_is_far_behind_is_timed_in_fewer_rounds() -> None:
    from flashgen.bench.contest import Field, _Ready
    from flashgen.tune.timing import Burst

    calls: dict[str, int] = {"quick": 0, "slow": 0}

    def count(name: str) -> Callable[[], None]:
        def call() -> None:
            calls[name] += 1

        return call

    bursts = {
        name: Burst(count(name), 1, 1, ms, "eager") for name, ms in (("quick", 1.0), ("slow", 2.0))
    }
    ready = {name: _Ready(lambda a: a.q, 0.0, None) for name in bursts}  # type: ignore[arg-type]
    results = fa_worker.race(Field(ready, bursts), FakeClock())
    assert calls == {"quick": ROUNDS, "slow": SLOW_ROUNDS}
    assert [each.name for each in results] == ["quick", "slow"]


# ---- the run, with processes that are played


def test_a_whole_run_has_every_case_once_and_its_tables(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, gpus=["0", "3"])
    ids = [case.id for case in run.record.cases]
    assert sorted(ids) == sorted(c.id for c in fa_cases.fa_cases() if "d128/n8192" in c.id)
    assert {case.facts["gpu"] for case in run.record.cases} <= {"0", "3"}
    assert run.record.not_run == ()
    text = (tmp_path / "nvidia-h200" / "fa-paper.md").read_text()
    assert text == render(load(tmp_path / "nvidia-h200" / "fa-paper.json"))
    assert "## Grid: how far ahead" in text
    assert "the 5 best schedules" in text
    assert "## Variants" in text
    assert (tmp_path / "nvidia-h200" / "fa-paper.png").stat().st_size > 10_000
    assert len(run.record.ceilings[0].values) == 4  # at the start and the end, of both GPUs


def test_a_schedule_that_hangs_is_left_out_and_its_case_timed_without_it(tmp_path: Path) -> None:
    case_id = "grid/d128/n8192/causal"
    case = fa_cases.find(case_id)
    hung = a_group(case).entrants[case_id][0].name

    def behaviour(task: object) -> Any:
        if isinstance(task, TimeTask) and any(each.name == hung for each in task.ours):
            raise LostError(f"checking {hung}", "ended: nothing for 30 s")
        return answer(task)

    run, _ = a_run(tmp_path, behaviour, only=(case_id,))
    (record,) = run.record.cases
    assert record.result(hung) == Result(hung, error="ended: nothing for 30 s")
    assert sum(each.ms is not None for each in record.results) > 5
    assert f"{case_id}, {hung}: ended" in render(run.record)


def test_a_schedule_that_hangs_before_timing_is_run_no_more(tmp_path: Path) -> None:
    case_id = "grid/d128/n8192/causal"
    hung = a_group(fa_cases.find(case_id)).entrants[case_id][1].name
    checked: list[int] = []

    def behaviour(task: object) -> Any:
        if isinstance(task, CheckTask):
            checked.append(len(task.ours))
            if any(each.name == hung for each in task.ours):
                raise LostError(f"checking {hung}", "ended: nothing for 30 s")
        assert not isinstance(task, TimeTask) or hung not in {e.name for e in task.ours}
        return answer(task)

    run, _ = a_run(tmp_path, behaviour, only=(case_id,))
    assert checked == [checked[0], checked[0] - 1]
    (record,) = run.record.cases
    assert (record.result(hung) or Result("")).error == "ended: nothing for 30 s"


def test_a_schedule_that_does_not_compile_is_a_result(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, bad=" dynamic ", only=("grid/d128/n8192/causal",))
    (record,) = run.record.cases
    failed = {each.name for each in record.results if each.error == "spills"}
    assert failed and all(" dynamic " in name for name in failed)


def test_a_peer_that_crashes_is_left_out(tmp_path: Path) -> None:
    def behaviour(task: object) -> Any:
        if isinstance(task, TimeTask) and FA3 not in task.skip:
            raise LostError(f"checking {FA3}", "the process ended by SIGSEGV")
        return answer(task)

    run, _ = a_run(tmp_path, behaviour, only=("grid/d128/n8192/causal",))
    (record,) = run.record.cases
    assert (record.result(FA3) or Result("")).error == "the process ended by SIGSEGV"


def test_a_process_that_dies_while_timing_costs_its_case_only(tmp_path: Path) -> None:
    def behaviour(task: object) -> Any:
        if isinstance(task, TimeTask) and not task.case.causal:
            raise LostError("timing", "ended: nothing for 60 s while timing")
        return answer(task)

    run, _ = a_run(tmp_path, behaviour, only=("grid/d128/n8192",))
    assert [case.id for case in run.record.cases] == ["grid/d128/n8192/causal"]
    assert run.record.not_run == ("grid/d128/n8192/full: ended: nothing for 60 s while timing",)


def test_no_case_begins_when_the_budget_is_spent(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, budget_s=5.0)
    assert run.record.cases == ()
    assert len(run.record.not_run) == 5  # and no repeated runs of what has no first one
    assert "the budget of 5 s was spent" in render(run.record)


def test_time_is_kept_for_cases_not_for_load(tmp_path: Path) -> None:
    seen: list[object] = []

    def behaviour(task: object) -> Any:
        seen.append(task)
        return answer(task)

    a_run(tmp_path, behaviour, budget_s=40.0)  # 12 s for each case that has no results
    timed = [task for task in seen if isinstance(task, TimeTask | SettleTask)]
    first = next(i for i, task in enumerate(timed) if isinstance(task, SettleTask))
    assert first == 3
    assert sum(isinstance(task, SettleTask) for task in timed) == 5  # in repeated runs, the rest


# ---- processes that are real


def hang(channel: Any) -> None:
    """A process that says what it does and then nothing more."""
    channel.recv()
    channel.send(("step", "checking a", 0.2))
    time.sleep(60)


def lose(channel: Any) -> None:
    channel.recv()
    channel.send(("lost", "checking b", "an illegal memory access"))


def find(channel: Any) -> None:
    channel.send(("found", channel.recv()))
    time.sleep(60)


@pytest.mark.parametrize(
    ("main", "step", "reason"),
    [
        (hang, "checking a", "ended: nothing for 0 s while checking a"),
        (lose, "checking b", "an illegal memory access"),
    ],
)
def test_a_process_that_does_not_answer_is_lost(
    monkeypatch: pytest.MonkeyPatch, main: Callable[..., None], step: str, reason: str
) -> None:
    monkeypatch.setattr(fa_process, "MAIN", f"{__name__}:{main.__name__}")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    worker = Worker("0")
    try:
        with pytest.raises(LostError, match=reason) as caught:
            worker.ask("task", time.monotonic() + 60)
        assert caught.value.step == step
    finally:
        worker.close()


def test_a_process_is_ended_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa_process, "MAIN", f"{__name__}:{find.__name__}")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    worker = Worker("0")
    try:
        assert worker.ask("an answer", time.monotonic() + 60) == "an answer"
        with pytest.raises(LostError, match="the time was over"):
            worker.ask("task", time.monotonic() - 1)
    finally:
        worker.close()


def test_gpus_are_those_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus(2) == ["3", "5"]


# ---- the report's figures


def a_case(group: str, results: Mapping[str, float], **facts: Any) -> CaseRecord:
    return CaseRecord(
        id=f"{group}/d128/n8192/causal",
        group=group,
        spec="a",
        shape=asdict(Shape(2, 16, 16, 8192, 8192)),
        dtype="bf16",
        matmul_flops=10**12,
        results=tuple(Result(name, ms=summarise([ms])) for name, ms in results.items()),
        facts={"plain flops": 2 * 10**12, **facts},
    )


def test_ratios_are_of_our_best_over_the_fastest_peer() -> None:
    times = {"flashgen a": 2.0, "flashgen b": 1.6, "fa3": 2.0, "flex": 4.0, "fa3 plain causal": 1.0}
    case = a_case(GRID, times, scaled={"fa4 (scaled)": 1250.0})
    assert peer_ratio(case) == pytest.approx(1.25)
    assert peer_ratio(case, scaled=True) == pytest.approx(0.5)
    assert rate_of(case, "fa3 plain causal") == pytest.approx(2000.0)


def test_what_a_variant_costs_is_per_visible_pair() -> None:
    case = a_case(VARIANT, {"flashgen a": 1.0, "plain b": 1.6, "plain c": 2.0, "flex": 2.0})
    assert lost(case) == pytest.approx(0.2)  # 1000 against 1250 TFLOP/s
    assert lost(a_case(VARIANT, {"flashgen a": 1.0, "flex": 2.0})) is None
    record = Record("fa-paper", "nvidia-h200", {}, "", "", cases=(case,))
    cost, rates = (part for part in fa_parts(record) if part.startswith("## Variants"))
    assert "| 20.0% |" in cost
    assert "| **1000** |" in rates and "| 1250 |" in rates


def test_peers_are_looked_up_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa_peers, "FA3_MODULE", "no_such_module")
    assert not fa_peers.has_fa3()
