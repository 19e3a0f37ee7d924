"""Modules of the family gluon_sm90: their golden text, and what the text may hold.

`tests/compile_golden.py` compiles each of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest
import torch
from hopper_cases import GOLDEN, problem_of, rendered

from flashgen import reference
from flashgen.codegen.dialect import gluon_text
from flashgen.codegen.gluon import api_of
from flashgen.codegen.host import identifier
from flashgen.compiler.choose import compile as compile_spec
from flashgen.schedule.space import check
from flashgen.spec.model import AttentionSpec


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    assert check(GOLDEN[case][1], problem_of(case)) is None
    golden(f"render_sm90/{case}.py", rendered(case).text)


@pytest.mark.parametrize("case", GOLDEN)
def test_a_module_imports_torch_and_triton_only(case: str) -> None:
    tree = ast.parse(rendered(case).text)
    imported = {
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {
        "torch",
        "triton",
        "triton.language",
        "triton.experimental",
        "triton.experimental.gluon",
        "triton.experimental.gluon.language.nvidia.ampere",
        "triton.experimental.gluon.language.nvidia.hopper",
        "triton.experimental.gluon.nvidia.hopper",
    }


@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize("case", GOLDEN)
def test_nothing_is_assigned_and_left_unused(case: str, *, has_lse: bool) -> None:
    """A name that begins with _ says that a result of several is not wanted."""
    for function in ast.parse(rendered(case, has_lse=has_lse).text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        bound |= {a.arg for a in function.args.args}
        unused = {name for name in bound - read if not name.startswith("_")}
        assert unused <= UNUSED, (function.name, sorted(unused))


# Unpacked on the host from shapes; parameters of helpers that some specs do without; ids, whose
# address another kernel leaves.
UNUSED = {"doc_ptr", "num_kv_heads", "Q_BUFFERS", "NUM_ROWS", "BLOCK_N", "n_start"}


@pytest.mark.parametrize("case", GOLDEN)
def test_a_spec_may_be_named_like_a_part_of_its_module(case: str) -> None:
    *parts, own = [
        node.name
        for node in ast.parse(rendered(case).text).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert own == identifier(problem_of(case).spec)
    for name in parts:
        assert identifier(problem_of(case).spec.replace(name=name)) == f"attention_{name}"


@pytest.mark.parametrize("case", GOLDEN)
def test_lines_are_tidy(case: str) -> None:
    text = rendered(case).text
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert "\n\n\n\n" not in text
    assert text.endswith("\n")


def test_lse_is_left_out_where_nobody_wants_it() -> None:
    assert "lse_ptr" not in rendered("causal-d128", has_lse=False).text


@pytest.mark.parametrize("version", [(3, 6), (3, 7), (3, 8)])
def test_names_are_those_of_the_triton_that_is_here(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.codegen.context.installed_triton", lambda: version)
    used = set(re.findall(r"tma\.(async_\w+)", rendered("causal-d128").text))
    api = api_of(version)
    assert used == {api.tma_load, api.tma_store}
    assert (api.tma_load == "async_load") == (version >= (3, 8))


def test_a_name_without_a_counterpart_is_refused() -> None:
    assert gluon_text("x = tl.where(a, tl.exp2(b), 0.0)") == "x = gl.where(a, gl.exp2(b), 0.0)"
    with pytest.raises(LookupError, match=re.escape("tl.dot has no counterpart in the Gluon")):
        gluon_text("tl.dot(a, b)")


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_the_portable_kernel_serves_the_cpu() -> None:
    """Gluon has no interpreter, and TMA no CPU tensors."""
    torch.manual_seed(0)
    spec = AttentionSpec(name="served", **GOLDEN["sinks-window-d64"][0])
    q, k, v = (torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3))
    sink = torch.tensor([0.5, -1.0])
    attention = compile_spec(spec, schedule=GOLDEN["sinks-window-d64"][1], return_lse=True)
    out, lse = attention(q, k, v, sink=sink)
    expected, expected_lse = reference.attention(spec, q, k, v, sink=sink)
    assert torch.allclose(out.double(), expected, atol=0.02)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-3)
