"""The suites themselves, on the CPU with small shapes and a made-up clock."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import typer
from fake_clock import FakeClock
from triton.compiler import CompiledKernel
from typer.testing import CliRunner

from flashgen import settings
from flashgen.bench import dispatch_suite, specs_suite, suites
from flashgen.bench.dispatch_suite import Launch, first_result, host_ms
from flashgen.bench.preparation import Outcome, Task
from flashgen.bench.record import CaseRecord, Ceiling, Record, Result, load
from flashgen.bench.report import render
from flashgen.bench.run import Run
from flashgen.bench.suites import Request, command_line, new_runs, run_all
from flashgen.cli.bench import bench
from flashgen.compiler.choose import plan
from flashgen.errors import FlashgenError, TargetError, VerificationError
from flashgen.runtime.load import load_module
from flashgen.schedule.model import bucket_of
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import tensors
from flashgen.tune.tensors import argument_bytes, draw, sets_needed

CPU = torch.device("cpu")
SPECS = {path.stem: path for path in sorted(settings.specs_dir().glob("*.yaml"))}


def a_run(suite: str, **more: object) -> tuple[Run, list[str]]:
    said: list[str] = []
    record = Record(suite, "nvidia-h200", {"gpu": "none"}, "flashgen bench", "2026-11-29")
    return Run(record, said.append, **more), said


# ---- arguments


@pytest.mark.parametrize("name", SPECS)
def test_arguments_fit_the_spec(name: str) -> None:
    from flashgen.runtime.check import check_call

    spec = load_spec(SPECS[name])
    group = spec.heads.group or 2
    shape = Shape(2, 2 * group, 2, 24, 40)
    arguments = draw(spec, shape, seed=3, device="cpu")
    sizes = check_call(spec, arguments.q, arguments.k, arguments.v, arguments.others)
    assert (sizes.batch, sizes.num_q_heads, sizes.q_len, sizes.kv_len) == (2, 2 * group, 24, 40)
    out = 2 * 2 * group * 24 * spec.head_dim.v * 2
    held = [arguments.q, arguments.k, arguments.v, *arguments.inputs.values()]
    assert argument_bytes(spec, shape) == out + sum(t.numel() * t.element_size() for t in held)
    again = draw(spec, shape, seed=3, device="cpu")
    assert torch.equal(again.q, arguments.q)
    assert not torch.equal(draw(spec, shape, seed=4, device="cpu").q, arguments.q)


def test_documents_are_sorted_and_start_at_random() -> None:
    spec = load_spec(SPECS["modernbert_global"])
    doc = draw(spec, Shape(4, 2, 2, 8192, 8192), seed=0, device="cpu").inputs["doc"]
    assert bool((doc.diff(dim=1) >= 0).all())
    assert doc.dtype == torch.int32
    number = (doc[:, -1] - doc[:, 0] + 1).tolist()
    assert all(4 < each < 40 for each in number)
    assert len(set(number)) > 1


def test_enough_tensor_sets_that_the_cache_cannot_help() -> None:
    assert sets_needed(10 * 2**30, l2_bytes=60 * 2**20) == 1
    assert sets_needed(50 * 2**20, l2_bytes=60 * 2**20) == 3
    assert sets_needed(1, l2_bytes=60 * 2**20) == tensors.MAX_SETS


# ---- suite specs


SMALL_SPEC = """
flashgen: 1
name: small
head_dim: 16
dtype: bf16
heads: {group: 2}
mask: causal
shapes:
  - {batch: 1, q_heads: 2, kv_heads: 1, q_len: 20, kv_len: 20}
  - {batch: 1, q_heads: 2, kv_heads: 1, q_len: 1, kv_len: 20}
"""
PAGED_SPEC = SMALL_SPEC.replace("small", "paged") + "kv_cache: {paged: {page_size: 16}}\n"


@pytest.fixture
def two_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL_SPEC)
    (folder / "paged.yaml").write_text(PAGED_SPEC)
    monkeypatch.setattr(settings, "specs_dir", lambda: folder)


@pytest.mark.usefixtures("two_specs")
def test_every_shape_of_every_spec_is_timed_and_what_is_not_served_is_said() -> None:
    run, said = a_run("specs")
    specs_suite.run_specs(run, FakeClock(default=25.0), CPU, l2_bytes=1, verify=False)
    assert [case.id for case in run.record.cases] == [
        "small/b1/h2:1/q20/k20",
        "small/b1/h2:1/q1/k20",
    ]
    square, decode = run.record.cases
    assert square.visible_pairs == 2 * 20 * 21 // 2
    assert decode.visible_pairs == 2 * 20
    assert square.median_ms("flashgen") == pytest.approx(25.0)
    assert square.results[0].accuracy is not None
    assert square.results[0].accuracy.max_error <= square.results[0].accuracy.bound
    assert "single_tile" in square.facts["schedule"]
    assert run.record.not_run == ("paged: not served yet: kv_cache: paged",)
    assert "not asked" in render(run.record)
    assert any("small/b1/h2:1/q20/k20" in line for line in said)


@pytest.mark.usefixtures("two_specs")
def test_a_spec_is_verified_before_its_first_shape_is_timed() -> None:
    run, said = a_run("specs", only=("small/b1/h2:1/q20",))
    specs_suite.run_specs(run, FakeClock(default=25.0), CPU, l2_bytes=1, verify=True)
    (case,) = run.record.cases
    assert case.facts["verified"] is True
    assert case.facts["verification"].startswith("small: verified, ")
    assert case.facts["built kernels"] > 0
    assert any("small: building and verifying" in line for line in said)


@pytest.mark.usefixtures("two_specs")
def test_a_shape_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs_suite, "free_bytes", lambda device: 1000.0)
    run, _ = a_run("specs", only=("small/b1/h2:1/q20",))
    specs_suite.run_specs(run, FakeClock(default=25.0), CPU, l2_bytes=1, verify=False)
    assert run.record.cases == ()
    assert run.record.not_run == ("small/b1/h2:1/q20/k20: needs 0.0 GB, of which 0.0 GB are free",)


@pytest.mark.usefixtures("two_specs")
def test_nothing_begins_when_the_budget_is_spent() -> None:
    run, _ = a_run("specs", budget_s=0)
    specs_suite.run_specs(run, FakeClock(default=25.0), CPU, l2_bytes=1, verify=False)
    assert run.record.cases == ()
    assert len(run.record.not_run) == 3


@pytest.mark.parametrize("name", ["llama3_8b", "qwen_27b", "gpt_oss_local", "whisper_cross"])
def test_each_schedule_that_serves_a_shape_is_proved_on_a_small_one(name: str) -> None:
    spec = load_spec(SPECS[name])
    chosen = dict(plan(spec, get_target("nvidia-h200"), has_lse=False)[0].choices)
    shapes = specs_suite.proof_shapes(spec, CPU)

    def schedules(of: list[Shape]) -> set[object]:
        return {chosen[bucket_of(shape.q_len, shape.kv_len)] for shape in of}

    assert schedules(shapes) == schedules(list(spec.shapes))
    assert all(shape.q_heads == shape.kv_heads * (spec.heads.group or 2) for shape in shapes)


@pytest.mark.usefixtures("two_specs")
def test_what_a_worker_has_proved_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs_suite, "prove", pytest.fail)
    facts = {"built kernels": 2, "verified": True, "verification": "small: verified, 2 cases"}
    run, _ = a_run("specs", only=("small/b1/h2:1/q20",))
    done = (Outcome("mask", "window", error="no"), Outcome("spec", "small", facts))
    specs_suite.run_specs(run, FakeClock(default=25.0), CPU, l2_bytes=1, verify=True, prepared=done)
    (case,) = run.record.cases
    assert facts.items() <= case.facts.items()
    assert "2 kernels | yes" in render(run.record)


@pytest.mark.usefixtures("two_specs")
def test_only_served_specs_are_prepared() -> None:
    run, _ = a_run("specs")
    assert specs_suite.spec_tasks(run) == [Task("spec", ("small",))]
    run, _ = a_run("specs", only=("paged",))
    assert specs_suite.spec_tasks(run) == []


# ---- several suites


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def measure(dtypes: Iterable[str], clock: object, device: object) -> tuple[Ceiling, ...]:
        asked.append(tuple(dtypes))
        return (Ceiling("matmul bf16", "TFLOP/s", (800.0 + len(asked),)),)

    monkeypatch.setattr(suites, "measure_ceilings", measure)
    return asked


def test_several_suites_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ceilings: list[tuple[str, ...]]
) -> None:
    steps: list[str] = []

    def prepare(tasks: list[Task], say: object, *, limit_s: float) -> tuple[Outcome, ...]:
        steps.append(f"prepare {len(tasks)} in {limit_s:g} s")
        return (Outcome("spec", "small"), Outcome("mask", "window", error="no"))

    def suite(name: str) -> Callable[..., None]:
        return lambda run, *_, **__: steps.append(f"{name} {len(run.record.ceilings[0].values)}")

    monkeypatch.setattr(suites, "prepare", prepare)
    monkeypatch.setattr(suites, "tasks_of", lambda runs, verify: [Task("spec", ("small",))])
    monkeypatch.setattr(suites, "run_specs", suite("specs"))
    monkeypatch.setattr(suites, "run_flex", suite("flex"))
    request = Request(("specs", "flex"), tmp_path, seconds=500)
    said: list[str] = []
    runs = new_runs(request, said.append, "nvidia-h200", {"gpu": "none"})
    run_all(runs, request, FakeClock(), CPU, l2_bytes=1)
    assert steps == ["prepare 1 in 225 s", "specs 1", "flex 1"]
    assert ceilings == [("bf16", "fp16")] * 2
    specs, flex = (load(tmp_path / "nvidia-h200" / f"{name}.json") for name in ("specs", "flex"))
    assert specs.run == flex.run != ""
    assert specs.started == flex.started
    assert specs.suites == flex.suites == ("specs", "flex")
    assert specs.ceilings == flex.ceilings
    assert specs.complete and flex.complete
    assert specs.preparation.startswith("1 of 2 specs, kernels and masks built")
    for record in (specs, flex):
        assert f"run {flex.run}: suites specs and flex in one process" in render(record)
        assert record.command == "flashgen bench --suite specs --suite flex --seconds 500"


def test_a_run_without_work_prepares_nothing(ceilings: list[tuple[str, ...]]) -> None:
    request = Request(("specs", "flex"), only=("no such case",), verify=False)
    runs = new_runs(request, lambda line: None, "nvidia-h200", {"gpu": "none"})
    run_all(runs, request, FakeClock(), CPU, l2_bytes=1)
    assert [run.record.preparation for run in runs.values()] == ["", ""]
    assert len(ceilings) == 2


def test_a_run_prepares_the_masks_first_and_specs_only_to_verify_them() -> None:
    request = Request(("specs", "flex"))
    runs = new_runs(request, lambda line: None, "nvidia-h200", {"gpu": "none"})
    kinds = [task.kind for task in suites.tasks_of(runs, verify=True)]
    assert kinds == sorted(kinds, key=["mask", "spec", "kernels"].index)
    assert set(kinds) == {"mask", "spec", "kernels"}
    assert {t.kind for t in suites.tasks_of(runs, verify=False)} == {"mask", "kernels"}


# ---- suite dispatch


class AKernel:
    """Launches nothing; `compiled` is what Triton would have returned."""

    arg_names = ("q_ptr", "q_len", "BLOCK_M")

    def __init__(self, compiled: object) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *positional, **named: self.compiled


class ACompiledKernel(CompiledKernel):
    def __init__(self) -> None:
        self.module = None
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: self.launched.append((grid, *values))


def test_the_compiled_kernel_is_launched_with_every_argument_in_order() -> None:
    compiled = ACompiledKernel()
    recorded = Launch((7,), ("q",), {"BLOCK_M": 16, "num_warps": 4, "q_len": 100})
    dispatch_suite._compiled(AKernel(compiled), recorded)["compiled"]()
    assert compiled.launched == [((7, 1, 1), "q", 100, 16)]
    assert dispatch_suite._compiled(AKernel(None), recorded) == {}


def test_the_bare_launch_is_the_one_that_run_makes() -> None:
    spec = load_spec(SPECS["gpt_oss_local"])
    shape = dispatch_suite.dispatch_shape(spec)
    found, path = plan(spec, get_target("nvidia-h200"), has_lse=False)
    module = load_module(path, interpreted=False)
    a = draw(spec, shape, seed=0, device="cpu")
    out = torch.empty_like(a.q)
    launch = Launch.of(module.run, {"BLOCK_M": 16, "num_warps": 4}, (a.q, a.k, a.v, a.sink, out))
    assert found.arguments == ("sink",)
    assert launch.grid == (shape.q_heads,)
    assert launch.positional[:3] == (a.q, a.k, a.v)
    assert any(argument is out for argument in launch.positional)
    assert launch.named["num_warps"] == 4


def test_host_times_take_turns_and_leave_the_first_round_out() -> None:
    order: list[str] = []
    calls = {name: (lambda n=name: order.append(n)) for name in "ab"}
    samples = host_ms(calls, CPU, rounds=2, batch_calls=3)
    assert order == [*"aaabbb", *"bbbaaa", *"aaabbb"]
    assert {name: len(times) for name, times in samples.items()} == {"a": 2, "b": 2}
    assert all(ms > 0 for times in samples.values() for ms in times)


def test_a_start_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(3, command, stderr="Traceback\nValueError: no\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert first_result("llama3_8b", {}) == {"error": "exit code 3: ValueError: no"}


def test_a_start_has_its_caches_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []
    steps = {"steps_s": {"first result": 1.0}, "heavy_modules": []}

    def answer(
        command: list[str], *, env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        seen.append((command, env))
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(steps), "")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    case = dispatch_suite.measure_startup("startup/llama3_8b", "llama3_8b")
    assert case.facts == {"cold": steps, "warm": steps, "bytecode": dispatch_suite.BYTECODE}
    (untimed, first_env), (cold, cold_env), (warm, warm_env) = seen
    assert untimed == cold == warm
    assert cold[-1] == "llama3_8b"
    for name in ("FLASHGEN_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert first_env[name] != cold_env[name] == warm_env[name]
        assert not Path(cold_env[name]).exists()  # gone with the run
    assert len({env["PYTHONPYCACHEPREFIX"] for env in (first_env, cold_env, warm_env)}) == 1
    assert not any("PYTHONDONTWRITEBYTECODE" in env for env in (first_env, cold_env, warm_env))


# ---- the command


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench)
    return app


def test_the_table_can_be_made_again_from_the_record(tmp_path: Path) -> None:
    run, _ = a_run("flex", out=tmp_path)
    run.finish()
    path = tmp_path / "nvidia-h200" / "flex.json"
    done = CliRunner().invoke(command(), ["--render", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout == render(load(path)) == path.with_suffix(".md").read_text()
    done = CliRunner().invoke(command(), ["--render", str(path), "--json"])
    assert done.stdout == path.read_text()


def test_a_wrong_result_ends_in_its_exit_code(tmp_path: Path) -> None:
    bad = CaseRecord("a/b", "plain", "a", {}, results=(Result("flashgen", error="wrong: NaN"),))
    run, _ = a_run("flex", out=tmp_path)
    run.add(bad)
    path = tmp_path / "nvidia-h200" / "flex.json"
    done = CliRunner().invoke(command(), ["--render", str(path)])
    assert isinstance(done.exception, VerificationError)
    assert "wrong in a/b" in str(done.exception)
    assert "wrong: NaN" in done.stdout


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(command(), ["--suite", "flex"])
    assert isinstance(done.exception, TargetError)
    assert "no GPU here" in str(done.exception)


def test_unknown_suites_are_refused() -> None:
    done = CliRunner().invoke(command(), ["--suite", "nothing"])
    assert done.exit_code == 2


def test_spec_names_of_the_suites_exist() -> None:
    assert {*dispatch_suite.SPECS, dispatch_suite.STARTUP_SPEC} <= set(SPECS)
    for name in dispatch_suite.SPECS:
        spec = load_spec(SPECS[name])
        shape = dispatch_suite.dispatch_shape(spec)
        assert isinstance(spec, AttentionSpec)
        assert shape.q_heads == shape.kv_heads * (spec.heads.group or 4)


def test_the_command_in_a_record_names_no_place() -> None:
    request = Request(("specs",), Path("/somewhere"), ("qwen 27b", "gpt2"), 60.0, verify=False)
    assert command_line(request) == (
        "flashgen bench --suite specs --only 'qwen 27b' --only gpt2 --seconds 60 --no-verify"
    )
    both = Request(("specs", "flex"))
    assert command_line(both) == "flashgen bench --suite specs --suite flex"
    assert both.budget_s == suites.BUDGETS_S["specs"] + suites.BUDGETS_S["flex"]


@pytest.mark.parametrize("name", ["x" * 300, "file/below", "file"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    request = Request(("specs",), tmp_path / name)
    with pytest.raises(FlashgenError, match="nvidia-h200: cannot be written"):
        new_runs(request, print, "nvidia-h200", {})
    new_runs(Request(("specs",), tmp_path / "new" / "deep"), print, "nvidia-h200", {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_can_no_longer_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (run,) = new_runs(Request(("specs",), tmp_path / "out"), print, "nvidia-h200", {}).values()
    (tmp_path / "out").touch()
    with pytest.raises(FlashgenError, match=r"specs\.json: cannot be written"):
        run.save()
