"""Every error ends with its documented exit code and its text, without a traceback."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import MINIMAL, run

import flashgen.compiler
from flashgen import errors
from flashgen.compiler.verification import Verification
from flashgen.errors import FlashgenWarning, SpecProblem

RAISED = {
    1: errors.FlashgenError("out: cannot be written"),
    3: errors.SpecError([SpecProblem("x.yaml", 3, 1, "head_dmi", "unknown field", "a hint")]),
    4: errors.NotServedError("x", ["dropout"]),
    5: errors.ScheduleError("x: no schedule fits"),
    6: errors.VerificationError("x: WRONG in 1 of 2 cases"),
    7: errors.CompileError("attention_fwd: refused"),
    8: errors.TargetError("target: unknown GPU 'x'"),
    9: errors.TensorError("q", "fp32", "fp16"),
    10: errors.TuningError("x: no schedule is feasible"),
}


@pytest.fixture
def build_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def install(error: BaseException) -> None:
        def build(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(flashgen.compiler, "build", build)

    return install


@pytest.mark.parametrize("code", RAISED)
def test_each_error_has_its_code(code: int, build_raises: Callable[[BaseException], None]) -> None:
    error = RAISED[code]
    build_raises(error)
    result = run("build", "gpt2", "--json")
    assert result.exit_code == code == error.exit_code
    assert result.stdout == ""
    place_first = code == 3  # editors find `file:line:column:` at the start of a line
    assert result.stderr == (f"{error}\n" if place_first else f"error: {error}\n")


def test_the_list_of_codes_is_whole() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.FlashgenError)
    ]
    assert {kind.exit_code for kind in kinds} == set(RAISED)


def test_interrupt(build_raises: Callable[[BaseException], None]) -> None:
    build_raises(KeyboardInterrupt())
    result = run("build", "gpt2")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_defect_of_ours_is_not_dressed_up(
    build_raises: Callable[[BaseException], None],
) -> None:
    build_raises(AssertionError("impossible"))
    with pytest.raises(AssertionError, match="impossible"):
        run("build", "gpt2")


def test_wrong_usage() -> None:
    assert run("build").exit_code == 2
    assert run("frobnicate").exit_code == 2
    assert run("list", "--frobnicate").exit_code == 2


def test_a_spec_that_is_not_there(tmp_path: Path) -> None:
    result = run("show", "gemma2_locl")
    assert result.exit_code == 3
    assert result.stderr == (
        "gemma2_locl: no such file, and no shipped spec has this name\n"
        "  hint: did you mean 'gemma2_local'? `flashgen list` shows the shipped specs.\n"
    )
    path = tmp_path / "Llama3-8B.yaml"
    assert "did you mean 'llama3_8b'?" in run("build", str(path)).stderr
    assert "did you mean" not in run("verify", "zzzzzzzz").stderr


def test_a_folder_is_not_a_spec(tmp_path: Path) -> None:
    result = run("show", str(tmp_path))
    assert result.exit_code == 3
    assert "a folder, not a spec file" in result.stderr


@pytest.mark.parametrize("command", ["show", "build", "verify", "explain"])
def test_names_that_no_file_can_have(command: str) -> None:
    result = run(command, "a" * 5000)
    assert result.exit_code == 3
    assert result.stderr.startswith("a" * 200 + "…: no such file, and no shipped spec has this")
    assert run(command, "").exit_code == 2
    assert run(command, "a\0b").exit_code == 3


LONG = "x" * 300
TOO_LONG = {
    "build": ("build", "{spec}", "-o", f"{{folder}}/{LONG}"),
    "build-deep": ("build", "{spec}", "-o", f"{{folder}}/{LONG}/out"),
    "explain-html": ("explain", "{spec}", "--html", f"{{folder}}/{LONG}.html"),
    "explain-plot": ("explain", "{spec}", "--plot", f"{{folder}}/{LONG}.png"),
    "tune-diff": (
        "tune",
        "{spec}",
        "--target",
        "nvidia-h200",
        "--diff",
        "-o",
        f"{{folder}}/{LONG}",
    ),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_path_that_is_too_long(name: str, tmp_path: Path) -> None:
    spec, folder = tmp_path / "tiny.yaml", tmp_path / "folder"
    spec.write_text(MINIMAL, "utf-8")
    folder.mkdir()
    result = run(*(part.format(spec=spec, folder=folder) for part in TOO_LONG[name]))
    assert result.exit_code == 1
    assert LONG in result.stderr
    assert "(File name too long)" in result.stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", [("show", "llama3_8b"), ("doctor",)], ids=" ".join)
def test_a_folder_of_the_environment_that_is_too_long(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASHGEN_CONFIG_DIR", "FLASHGEN_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / LONG))
    result = run(*command)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / LONG}")
    assert "cannot be used (File name too long)\n  hint: choose a shorter path" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("build", "gpt2", "-o", ""),
        ("explain", "gpt2", "--plot", ""),
        ("explain", "gpt2", "--html", ""),
    ],
)
def test_an_empty_path_is_wrong_usage(command: tuple[str, ...]) -> None:
    result = run(*command)
    assert result.exit_code == 2
    assert "got nothing, expected a path" in result.stderr


def test_all_faults_of_a_spec_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("flashgen: 1\nname: bad\nhead_dmi: 64\ndtype: bf17\n", "utf-8")
    result = run("show", str(path))
    assert result.exit_code == 3
    assert f"{path}:3:1: head_dmi: unknown field" in result.stderr
    assert f"{path}:4:1: dtype: " in result.stderr


def test_a_valid_spec_that_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "dropped.yaml"
    path.write_text(MINIMAL + "dropout: 0.1\n", "utf-8")
    for command in ("show", "build", "verify"):
        result = run(command, str(path))
        assert result.exit_code == 4
        assert "no kernel family serves dropout yet" in result.stderr


def test_nothing_fits(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text(MINIMAL.replace("head_dim: 16", "head_dim: 1024"), "utf-8")
    result = run("show", str(path))
    assert result.exit_code == 5
    assert "no schedule fits nvidia-h200" in result.stderr


def test_an_unknown_gpu() -> None:
    result = run("show", "gpt2", "--target", "h200")
    assert result.exit_code == 8
    assert "did you mean 'nvidia-h200'?" in result.stderr


def test_a_kernel_that_differs_is_printed_and_ends_with_6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verify(*_: object, **__: object) -> Verification:
        return Verification("gpt2", "0" * 64, "nvidia-h200", "nowhere", (), ())

    monkeypatch.setattr(flashgen.compiler, "verify", verify)
    result = run("verify", "gpt2", "--json")
    assert result.exit_code == 6
    assert json.loads(result.stdout)["ok"] is False
    assert result.stderr.startswith("error: gpt2: WRONG")


def test_warnings_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*_: object, **__: object) -> Any:
        warnings.warn("the cache cannot be written", FlashgenWarning, stacklevel=1)
        raise errors.VerificationError("stop here")

    monkeypatch.setattr(flashgen.compiler, "verify", verify)
    result = run("verify", "gpt2")
    assert result.stderr == "warning: the cache cannot be written\nerror: stop here\n"
