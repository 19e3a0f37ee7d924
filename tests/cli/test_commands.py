"""`list`, `show`, `schema`: what they print, and that standard output is pure."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from runs import MINIMAL, run

from flashgen import load_spec, parse_spec
from flashgen.cli.arguments import shipped_specs
from flashgen.schedule.model import Schedule, Sm90
from flashgen.spec.schema import json_schema
from flashgen.target import TARGETS
from flashgen.tune import verdicts
from flashgen.tune.verdicts import Machine, Subject


def test_list_names_every_shipped_spec() -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(shipped_specs())
    assert len(lines) > 20


def test_list_as_json_has_each_spec_whole() -> None:
    rows = json.loads(run("list", "--json").stdout)
    for row, path in zip(rows, shipped_specs().values(), strict=True):
        spec = load_spec(path)
        assert (row["name"], row["fingerprint"]) == (spec.display_name, spec.fingerprint)
        assert row["spec"] == spec.canonical()
        assert len(row["shapes"]) == len(spec.shapes)


def test_list_of_targets() -> None:
    lines = run("list", "--targets").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(TARGETS)
    rows = json.loads(run("list", "--targets", "--json").stdout)
    h200 = next(row for row in rows if row["id"] == "nvidia-h200")
    assert h200["smem_per_block_bytes"] == 232448
    assert h200["matmul_flops_per_s"]["bf16"] == TARGETS["nvidia-h200"].matmul_flops_per_s["bf16"]
    assert all(row["sources"] for row in rows)


def verdict(schedule: Schedule) -> Subject:
    machine = Machine("NVIDIA H200", "570.86.15", "2.11.0", "3.6.0", "of triton")
    return Subject("llama3_8b", "0123456789abcdef", schedule, machine)


def test_list_of_kernels_that_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    verdicts.forget_here()
    assert run("list", "--hung").stdout.startswith("no kernel hung or was refused here (")
    assert json.loads(run("list", "--hung", "--json").stdout) == []
    tile = Schedule(
        family="gluon_sm90", block_m=128, block_n=64, num_warps=12, num_stages=2, sm90=Sm90()
    )
    verdicts.remember(verdict(tile), "hung", "no answer within 30 s, running b2 h4:2 q129 k131")
    verdicts.remember(verdict(replace(tile, num_stages=3)), "proven")
    verdicts.remember(
        verdict(replace(tile, block_n=128)), "refused", "spill_bytes: must be at most 0 (got 208)"
    )
    dated = re.compile(r"20\d\d-\S+")
    golden(
        "explain/list-hung.txt",
        dated.sub("2026-01-01T00:00:00+00:00", run("list", "--hung").stdout),
    )
    rows = json.loads(run("list", "--hung", "--json").stdout)
    assert [row["state"] for row in rows] == ["hung", "refused"]
    assert rows[0]["schedule"] == tile.to_dict()
    forgotten = run("list", "--hung", "--forget")
    assert "hung" in forgotten.stdout
    assert forgotten.stderr == "2 forgotten: they are tried again, in a process of their own\n"
    assert json.loads(run("list", "--hung", "--json").stdout) == []
    assert [v.state for v in verdicts.known()] == ["proven"]


@pytest.mark.parametrize("options", [("--forget",), ("--hung", "--targets")])
def test_list_of_one_kind(options: tuple[str, ...]) -> None:
    assert run("list", *options).exit_code == 2


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_schema_is_the_published_one(arguments: tuple[str, ...]) -> None:
    assert json.loads(run("schema", *arguments).stdout) == json_schema()


def test_show_prints_a_module_that_parses() -> None:
    shown = run("show", "gemma2_local").stdout
    tree = ast.parse(shown)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"attention_fwd", "attention_fwd_single_tile", "run", "gemma2_local"} <= names
    assert "NVIDIA H200" in (ast.get_docstring(tree) or "")


def test_show_for_another_gpu_takes_its_schedules() -> None:
    facts = json.loads(run("show", "gemma2_local", "--target", "nvidia-l4", "--json").stdout)
    other = json.loads(run("show", "gemma2_local", "--json").stdout)
    assert facts["target"] == "nvidia-l4"
    assert facts["schedules"] != other["schedules"]
    assert "NVIDIA L4" in facts["source"]


def test_show_the_tile_graph() -> None:
    text = run("show", "gemma2_local", "--graph").stdout
    assert "for each key tile: visited_tiles times" in text
    facts = json.loads(run("show", "gemma2_local", "--graph", "--json").stdout)
    names = {operation["name"] for operation in facts["operations"]}
    assert all({edge["from"], edge["to"]} <= names for edge in facts["edges"])
    assert [loop["name"] for loop in facts["loops"]] == ["query tile", "key tile"]
    assert facts["digest"][:12] in text


def test_show_loop_bounds() -> None:
    text = run("show", "gemma2_local", "--bounds").stdout
    assert "q_first - 4095 ≤ k < q_last + 1" in text
    facts = json.loads(run("show", "gemma2_local", "--bounds", "--json").stdout)
    (span,) = facts["spans"]
    assert span["some_row"] == {"start": "q_first - 4095", "stop": "q_last + 1"}
    assert span["every_row"] == {"start": "q_last - 4095", "stop": "q_first + 1"}


def test_loop_bounds_of_every_shipped_spec_are_json_types() -> None:
    for name in shipped_specs():
        facts = json.loads(run("show", name, "--bounds", "--json").stdout)
        assert facts["name"] == name
        assert facts["spans"]
    periodic = json.loads(run("show", "block_dilated", "--bounds", "--json").stdout)
    assert periodic["spans"][0]["period"]["period"] == "256"
    documents = json.loads(run("show", "modernbert_local", "--bounds", "--json").stdout)
    assert documents["spans"][0]["scan"] == {"input": "doc"}
    assert documents["spans"][0]["some_row"]["stop"] == "q_last + 65"


def test_show_the_canonical_spec(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL + "mask: causal  # a comment\n", "utf-8")
    text = run("show", str(path), "--spec").stdout
    assert parse_spec(text) == load_spec(path)
    assert "comment" not in text
    facts = json.loads(run("show", str(path), "--spec", "--json").stdout)
    assert facts["spec"] == load_spec(path).canonical()


def test_show_takes_one_view() -> None:
    result = run("show", "gpt2", "--graph", "--bounds")
    assert result.exit_code == 2
    assert "--graph and --bounds: choose one" in result.stderr


def test_a_file_comes_before_a_shipped_name_and_a_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert json.loads(run("show", "gpt2", "--spec", "--json").stdout)["name"] == "gpt2"
    Path("gpt2").rmdir()
    Path("gpt2").write_text(MINIMAL, "utf-8")
    assert json.loads(run("show", "gpt2", "--spec", "--json").stdout)["name"] == "tiny"


def test_warnings_of_a_spec_go_to_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL + "mask: [causal, {window: {left: 3, right: 2}}]\n", "utf-8")
    result = run("show", str(path), "--spec", "--json")
    assert json.loads(result.stdout)["name"] == "tiny"
    assert result.stderr.startswith("warning: tiny.yaml: mask[1].window.right: 2 has no effect")


@pytest.mark.parametrize("command", ["build", "verify"])
@pytest.mark.parametrize(("given", "taken"), [(None, "1"), ("3", "3")])
def test_one_thread_unless_told(
    command: str, given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert run(command, "no_such_spec").exit_code == 3
    assert os.environ["OMP_NUM_THREADS"] == taken


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("flashgen ")
    help_text = run("--help").stdout
    for command in ("build", "verify", "list", "show", "schema", "doctor"):
        line = next(line for line in help_text.splitlines() if line.startswith(f"  {command} "))
        assert not line.endswith("...")  # the first sentence fits
