"""`flashgen explain`: output, options, errors, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import CHECKOUT, MINIMAL, environment, run

from flashgen.target import TARGETS

SECTIONS = (
    "What limits the kernel",
    "Loop orders side by side",
    "Mask",
    "Formulas",
    "On chip",
    "Rejected tile shapes",
    "Largest tiles that fit",
)


def test_every_section_is_there() -> None:
    result = run("explain", "gemma2_local")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "gemma2_local on NVIDIA H200 SXM (nvidia-h200, sm_90)"
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)


def test_a_gpu_that_is_not_here_and_a_shape() -> None:
    shown = run(
        "explain", "llama3_8b", "--target", "nvidia-rtx-4090", "--shape", "16,32,8,1,8192"
    ).stdout
    assert "NVIDIA GeForce RTX 4090" in shown
    assert "batch 16, heads 32:8, q_len 1, kv_len 8192" in shown
    assert "roofline: memory bandwidth" in shown


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL)
    assert "(assumed: the spec names none)" in run("explain", str(path)).stdout


def test_json_is_pure() -> None:
    facts = json.loads(run("explain", "gpt2", "--json").stdout)
    assert facts["target"] == "nvidia-h200"
    assert {"formulas", "tiles", "rejections", "frontier", "algorithms", "mask"} <= facts.keys()


def test_all_targets() -> None:
    lines = run("explain", "llama3_8b", "--target", "all").stdout.splitlines()
    assert [line.split()[0] for line in lines[4:]] == list(TARGETS)
    rows = json.loads(run("explain", "llama3_8b", "--target", "all", "--json").stdout)["targets"]
    assert [row["target"] for row in rows] == list(TARGETS)


@pytest.mark.slow
def test_all_targets_over_all_specs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flashgen", "explain", "specs", "--target", "all"],
        cwd=CHECKOUT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.count("nvidia-h200 ") == len(list((CHECKOUT / "specs").glob("*.yaml")))


def test_neither_torch_nor_triton_nor_matplotlib() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from flashgen.cli.main import app; "
        "assert CliRunner().invoke(app, ['explain', 'gpt2']).exit_code == 0; "
        "print(sorted({'torch', 'triton', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "out.png", tmp_path / "out.html"
    result = run("explain", "gpt2", "--plot", str(plot), "--html", str(html))
    assert result.exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert result.stderr.splitlines()[-2:] == [f"wrote {plot}", f"wrote {html}"]
    assert "wrote" not in result.stdout


@pytest.mark.parametrize("option", ["--plot", "--html"])
@pytest.mark.parametrize("place", ["folder.png", "no/such/folder/out.png", "file.png/out.png"])
def test_what_cannot_be_written_is_said_before_all_else(
    option: str, place: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file.png").touch()
    result = run("explain", "gpt2", option, str(tmp_path / place))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{place}: cannot be written (" in result.stderr


def test_a_name_that_is_too_long_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("explain", "gpt2", "--html", str(tmp_path / ("x" * 4000)))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("gpt2", "--target", "rtx-4090"), 8, "did you mean 'nvidia-rtx-4090'"),
        (("gpt2", "--shape", "1,2,3"), 2, "expected five whole numbers"),
        (("gpt2", "--shape", "1,x,3,4,5"), 2, "expected five whole numbers"),
        (("gpt2", "--shape", "1,12,5,64,64"), 2, "--shape: gpt2: kv_heads: 5 does not divide"),
        (("gpt2", "--shape", "-1,12,12,0,64"), 2, "--shape: gpt2: batch: got -1, expected an int"),
        (("gpt2", "--shape", "9000000,12,12,8192,8192"), 2, "--shape: inputs and output take"),
        (("gpt3",), 3, "did you mean 'gpt2'"),
        (("gpt2", "--plot", "out.bmp2"), 1, "a picture ends in .png, .svg, .pdf"),
        (("gpt2", "--plot", "no/such/folder/out.png"), 1, "cannot be written"),
        (("gpt2", "--target", "all", "--plot", "out.png"), 2, "show one target"),
        (("gpt2", "llama3_8b", "--html", "out.html"), 2, "show one spec"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == code
    assert said in " ".join(result.stderr.split())


def test_a_folder_without_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "gpt2"):  # a build of gpt2 has no spec in it, and its name is one
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("no spec")
    result = run("explain", "empty")
    assert result.exit_code == 3
    golden("errors/explain-folder-empty.txt", result.stderr)
    assert run("explain", "gpt2").exit_code == 0


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_without_the_extra(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ending = option.removeprefix("--").replace("plot", "png")
    result = run("explain", "gpt2", option, str(tmp_path / f"out.{ending}"))
    assert result.exit_code == 1
    assert "hint: pip install -c constraints.txt '.[plot]', in a checkout" in result.stderr


UNSERVED = {
    "layout: packed": "layout: packed",
    "dropout: 0.1": "dropout",
    "dtype: fp8_e4m3": "dtype: fp8_e4m3",
    "kv_cache: {paged: {page_size: 16}}": "kv_cache: paged",
}


@pytest.mark.parametrize("field", UNSERVED)
@pytest.mark.parametrize(
    "command",
    [("explain",), ("explain", "--target", "all"), ("show", "--bounds"), ("show", "--graph")],
    ids=" ".join,
)
def test_what_no_kernel_serves_is_said_first(
    command: tuple[str, ...], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "unserved.yaml"
    name = field.partition(":")[0]
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(name)]
    path.write_text("\n".join([*lines, field, ""]))
    sentence = f"no kernel family serves {UNSERVED[field]} yet"
    shown = run(*command, str(path)).stdout
    assert any(f"not served: {sentence}" in line for line in shown.splitlines()[:2])
    facts = json.loads(run(*command, str(path), "--json").stdout)
    assert [said.partition(":")[0] for said in facts["not_served"]] == [sentence.partition(":")[0]]
    assert sentence in facts["not_served"][0]
    refused = run("show", str(path)) if command[0] == "show" else run("build", str(path))
    assert refused.exit_code == 4
    assert sentence in refused.stderr


@pytest.mark.parametrize("command", [("explain",), ("show", "--bounds")], ids=" ".join)
def test_gradients_that_are_asked_for_are_said_not_to_be_served(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "trained.yaml"
    path.write_text(MINIMAL + "backward: true\n")
    assert "not served: backward: the spec asks for gradients" in run(*command, str(path)).stdout
    (said,) = json.loads(run(*command, str(path), "--json").stdout)["not_served"]
    assert said.startswith("backward: ")
    served = json.loads(run(*command, "gpt2", "--json").stdout)
    assert served["not_served"] == []


def test_a_page_says_what_is_not_served(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "packed.yaml"
    path.write_text(MINIMAL + "layout: packed\n")
    page = tmp_path / "page.html"
    run("explain", str(path), "--html", str(page))
    assert "<b>Not served:</b> no kernel family serves layout: packed yet" in page.read_text()
