"""Workers: what they are given, what becomes of those that fail, hang or print, and the order."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashgen
from flashgen.bench import preparation, worker
from flashgen.bench.cases import PLAIN, flex_cases
from flashgen.bench.flex_suite import flex_tasks, unprepared
from flashgen.bench.peers import Contestant
from flashgen.bench.preparation import Outcome, Task, prepare, work_through
from flashgen.spec.parts import Shape

WORKER = """
import json, os, sys, time
kind, *names = sys.argv[1:]
for name in names:
    if name == "dies":
        sys.exit("out of memory")
    if name == "hangs":
        time.sleep(600)
    facts = {name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",)}
    facts["threads"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    facts["bytecode"] = "PYTHONDONTWRITEBYTECODE" not in os.environ
    print("a warning")
    print(json.dumps({"name": name, "facts": facts}), flush=True)
"""


@pytest.fixture(autouse=True)
def made_up_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(preparation, "MODULE", "made_up_worker")


def test_every_name_has_an_outcome() -> None:
    said: list[str] = []
    tasks = [
        Task("mask", ("a",), threads=4),
        Task("kernels", ("b", "dies", "c")),
        Task("kernels", ("d",)),
    ]
    found = {each.name: each for each in prepare(tasks, said.append, limit_s=60, slots=2)}
    assert set(found) == {"a", "b", "dies", "c", "d"}
    assert found["a"].kind == "mask"
    assert [found[name].facts["threads"] for name in "abd"] == ["4", "1", "1"]
    assert all(found[name].facts["bytecode"] for name in "abd")
    assert len({found[name].facts["PYTHONPYCACHEPREFIX"] for name in "abd"}) == 1
    assert found["dies"].error == found["c"].error == "the worker ended with 1: out of memory"
    assert sorted(line.split(",")[0] for line in said) == [
        "prepared kernels b …", "prepared kernels d", "prepared mask a",
    ]  # fmt: skip
    assert any("out of memory" in line for line in said)


def test_what_hangs_is_ended_and_the_rest_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = preparation._start
    monkeypatch.setattr(
        preparation, "_start", lambda *given: started.append(real(*given)) or started[-1]
    )
    tasks = [Task("mask", ("hangs",)), Task("spec", ("late",))]
    hanging, late = prepare(tasks, lambda line: None, limit_s=0.5, slots=1)
    assert hanging == Outcome("mask", "hangs", error="ended, the time for preparing was over")
    assert late == Outcome("spec", "late", error="not begun within 0.5 s")
    assert [process.poll() is not None for process in started] == [True]


def test_a_worker_reports_each_name_and_goes_on_after_an_error() -> None:
    def work(name: str) -> dict[str, object]:
        if name == "bad":
            raise ValueError("no such case")
        return {"seen": name}

    out = io.StringIO()
    work_through(["good", "bad", "last"], work, out)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"name": "good", "facts": {"seen": "good"}},
        {"name": "bad", "error": "ValueError: no such case"},
        {"name": "last", "facts": {"seen": "last"}},
    ]


@pytest.mark.slow
def test_the_worker_itself_speaks_this_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MODULE", "flashgen.bench.worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(flashgen.__file__).parents[1]))
    (found,) = prepare([Task("spec", ("no_such_spec",))], lambda line: None, limit_s=120)
    assert found.name == "no_such_spec"
    assert found.error is not None
    assert found.error.startswith("SpecError: ")
    assert "no_such_spec.yaml" in found.error


def test_the_worker_works_on_kernels_and_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = replace(flex_cases()[-1], tokens=32, length=32, hidden=32, head_dim=32)
    monkeypatch.setattr(worker, "flex_cases", lambda: [case])
    made: list[str] = []
    monkeypatch.setattr(
        worker,
        "Flex",
        lambda case, arguments: SimpleNamespace(block_mask=lambda compiled: made.append(case.id)),
    )
    contestants = [
        Contestant(name, lambda name=name: lambda arguments: made.append(name))
        for name in ("flashgen", "flex", "flashgen_call", "flex_call_eager_mask", "sdpa_cudnn")
    ]
    monkeypatch.setattr(worker, "contestants_of", lambda case, arguments: contestants)
    device = torch.device("cpu")
    assert worker.KINDS["mask"](case.id, device) == {}
    assert worker.KINDS["kernels"](case.id, device) == {}
    assert made == [case.id, "flashgen", "flex"]


def test_the_worker_runs_what_will_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []
    shapes = [Shape(1, 8, 2, 16, 32), Shape(1, 8, 2, 1, 48)]
    monkeypatch.setattr(worker, "prove", lambda spec, device: {"verified": True})
    monkeypatch.setattr(worker, "proof_shapes", lambda spec, device: shapes)
    monkeypatch.setattr(
        worker,
        "flashgen_attention",
        lambda spec: lambda a: ran.append((a.q.shape[2], a.k.shape[2])),
    )
    assert worker.KINDS["spec"]("llama3_8b", torch.device("cpu")) == {"verified": True}
    assert ran == [(16, 32), (1, 48)]


def test_the_grid_is_prepared_slowest_first_each_kernel_once() -> None:
    cases = flex_cases()
    tasks = flex_tasks(cases)
    masks = [task for task in tasks if task.kind == "mask"]
    by_id = {case.id: case for case in cases}
    assert tasks[: len(masks)] == masks
    lengths = [by_id[task.names[0]].length for task in masks]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) < len(lengths) < 10  # a batch of masks has kernels of its own
    assert all(by_id[task.names[0]].group != PLAIN for task in masks)
    kernels = [name for task in tasks if task.kind == "kernels" for name in task.names]
    assert sorted(kernels) == sorted(by_id)


def test_cases_of_a_length_whose_mask_is_missing_come_last() -> None:
    cases = flex_cases()
    longest = flex_tasks(cases)[0].names[0]
    assert "/n16384/" in longest
    late = unprepared(cases, [Outcome("mask", longest, error="ended")])
    assert {name for name in late if "/n16384/" not in name} == set()
    assert late == {c.id for c in cases if c.group != PLAIN and c.length == 16384}
    assert unprepared(cases, [Outcome("mask", longest)]) == set()


def test_alibi_has_no_goal_and_comes_last() -> None:
    groups = [case.group for case in flex_cases()]
    assert groups[-3:] == ["alibi"] * 3
    assert groups[:24] == [PLAIN] * 24
    assert set(groups[24:28]) == {"window", "prefix", "documents", "softcap"}
