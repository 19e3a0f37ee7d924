"""`flashgen doctor`: what it finds wrong on machines that are not this one, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import run

from flashgen.cli import environment
from flashgen.cli.environment import COMPILE, DESCRIBE, INTERPRET, RUN_ON_GPU, Report, report

Machine = Callable[..., None]

GOOD = {
    "torch": "2.13.0+cu130",
    "triton": "3.7.1",
    "numpy": "2.4.6",
    **dict.fromkeys(("sympy", "networkx", "jinja2", "pyyaml", "typer", "rich"), "9.9"),
    **dict.fromkeys(("optuna", "matplotlib", "plotly"), "9.9"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with an H200 where all is well, but for what the test changes."""

    def install(*, gpus: list[str], torch_cuda: str | None, **versions: str | None) -> None:
        packages = {**GOOD, **versions}
        site = tmp_path / "torch"
        site.mkdir(exist_ok=True)
        cuda = f"'{torch_cuda}'" if torch_cuda else "None"
        (site / "version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip = None\n", "utf-8")
        (site / "__init__.py").touch()
        ptxas = tmp_path / "ptxas"
        ptxas.touch(mode=0o755)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(environment, "_version_text", packages.get)
        monkeypatch.setattr(environment, "_gpu_names", lambda: gpus)

    return install


def works(found: Report) -> dict[str, bool]:
    return {ability.name: ability.works for ability in found.abilities}


def state(found: Report, name: str) -> tuple[str, str, str | None]:
    finding = next(finding for finding in found.findings if finding.name == name)
    return finding.state, finding.detail, finding.remedy


def test_all_well(machine: Machine) -> None:
    machine(gpus=["NVIDIA H200"], torch_cuda="13.0")
    found = report()
    assert all(works(found).values())
    assert state(found, "GPU") == ("ok", "NVIDIA H200 (nvidia-h200)", None)
    assert state(found, "torch build") == ("ok", "for CUDA 13.0", None)
    assert not [finding.name for finding in found.findings if finding.remedy]


def test_no_gpu_is_no_failure(machine: Machine) -> None:
    machine(gpus=[], torch_cuda=None, torch="2.13.0+cpu")
    found = report()
    assert works(found) == {DESCRIBE: True, COMPILE: True, INTERPRET: True, RUN_ON_GPU: False}
    assert found.can_build
    assert state(found, "torch build")[0] == "warning"


def test_a_gpu_and_a_torch_for_the_cpu(machine: Machine) -> None:
    machine(gpus=["NVIDIA H200"], torch_cuda=None, torch="2.13.0+cpu")
    found = report()
    assert not works(found)[RUN_ON_GPU]
    assert state(found, "torch build") == (
        "failed",
        "for the CPU only",
        "install torch's CUDA or ROCm build to run on a GPU",
    )


def test_triton_36_with_a_new_numpy(machine: Machine) -> None:
    machine(gpus=["NVIDIA H200"], torch_cuda="12.8", torch="2.11.0", triton="3.6.0")
    found = report()
    assert works(found) == {DESCRIBE: True, COMPILE: True, INTERPRET: False, RUN_ON_GPU: True}
    assert state(found, "interpreter") == (
        "failed",
        "triton 3.6.0 with numpy 2.4.6: its loops fail",
        "pip install 'numpy<2.4', or use triton >= 3.7",
    )
    machine(gpus=[], torch_cuda=None, torch="2.11.0", triton="3.6.0", numpy="2.3.5")
    assert works(report())[INTERPRET]


def test_versions_that_do_not_belong_together(machine: Machine) -> None:
    machine(gpus=[], torch_cuda=None, torch="2.13.0", triton="3.8.0")
    found = report()
    assert state(found, "torch with triton") == (
        "warning",
        "torch 2.13 with triton 3.8: torch brings triton 3.7",
        "pip install 'triton==3.7.*'",
    )
    machine(gpus=[], torch_cuda=None, torch="2.99.0", triton="3.99.0")
    assert "not a version that was tried" in state(report(), "torch with triton")[1]


def test_too_old_or_missing(machine: Machine) -> None:
    machine(gpus=[], torch_cuda=None, torch="2.10.0", triton=None, sympy=None)
    found = report()
    assert state(found, "torch") == ("failed", "2.10.0, too old", "pip install 'torch>=2.11'")
    assert state(found, "triton") == ("failed", "not installed", "pip install triton")
    assert not any(works(found).values())
    obstacles = {ability.name: ability.obstacles for ability in found.abilities}
    assert obstacles[DESCRIBE] == ("sympy: not installed",)
    assert obstacles[COMPILE] == (
        "sympy: not installed",
        "torch: 2.10.0, too old",
        "triton: not installed",
    )


def test_what_only_some_commands_need(machine: Machine) -> None:
    machine(gpus=["NVIDIA H200"], torch_cuda="13.0", optuna=None, matplotlib=None, plotly=None)
    found = report()
    assert all(works(found).values())
    extra = "pip install -c constraints.txt '.[plot]', in a checkout of flashgen"
    remedies = {
        "optuna": "to tune: pip install 'optuna>=4.2'",
        "matplotlib": f"to draw: {extra}",
        "plotly": f"for pages of `flashgen tune`: {extra}",
    }
    for name, remedy in remedies.items():
        assert state(found, name) == ("warning", "not installed", remedy)


def test_a_gpu_that_is_not_in_the_catalogue(machine: Machine) -> None:
    machine(gpus=["NVIDIA Riva 128"], torch_cuda="13.0")
    found = report()
    assert state(found, "GPU")[0] == "warning"
    assert works(found)[RUN_ON_GPU]


def test_no_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpus=["NVIDIA H200"], torch_cuda="13.0")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nonexistent/ptxas")
    assert works(report()) == {DESCRIBE: True, COMPILE: False, INTERPRET: True, RUN_ON_GPU: False}


def test_the_cache_is_counted(machine: Machine, tmp_path: Path) -> None:
    machine(gpus=[], torch_cuda=None)
    folder = tmp_path / "cache" / "kernels" / "gpt2-0123"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}" * 1024, "utf-8")
    assert state(report(), "cache") == ("ok", f"{tmp_path / 'cache'}, 1 kernels, 2 KiB", None)


def test_a_cache_that_cannot_be_written(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpus=[], torch_cuda=None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found, _, remedy = state(report(), "cache")
    assert found == "warning"
    assert remedy is not None
    assert "FLASHGEN_CACHE_DIR" in remedy
    assert report().can_build


def test_as_text_and_as_json(machine: Machine) -> None:
    machine(gpus=[], torch_cuda=None, triton=None)
    told = run("doctor", "--json")
    assert told.exit_code == 1
    data = json.loads(told.stdout)
    assert data["can_build"] is False
    assert [a["works"] for a in data["abilities"]] == [True, False, False, False]
    text = run("doctor")
    assert text.exit_code == 1
    assert f"  yes  {DESCRIBE}\n" in text.stdout
    assert f"  no   {COMPILE}\n         triton: not installed\n" in text.stdout


def test_driver_names_by_proc_and_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n", "utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment._names_by_nvidia_smi() == ["NVIDIA H200", "NVIDIA H200"]
    tool.write_text("#!/bin/sh\nexit 9\n", "utf-8")
    assert environment._names_by_nvidia_smi() == []
