"""Generated modules: their golden text, and that nothing but the spec decides it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashgen import reference, settings
from flashgen.codegen.render import KernelSource, render
from flashgen.compiler.choose import compile as compile_spec
from flashgen.problem import Problem
from flashgen.runtime.interpret import interpreting
from flashgen.runtime.load import load_module
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.target import get_target

SHORT = Schedule(kernel="single_tile", block_m=64, block_n=64, num_warps=4, num_stages=1)
LONG = Schedule(block_m=128, block_n=64, num_warps=8, num_stages=2)
NARROW = Schedule(block_m=64, block_n=32, num_warps=4, num_stages=1)

PREFIX = {"prefix": {"shape": ["batch"], "dtype": "int32"}}
DOC = {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}}
# One module for each thing that changes the text; the rest of a spec is as plain as it can be.
GOLDEN: dict[str, dict[str, Any] | str] = {
    "plain": {"head_dim": 64, "dtype": "fp16"},
    "causal-gqa": {"head_dim": 128, "dtype": "bf16", "heads": {"group": 4}, "mask": "causal"},
    "window": {"head_dim": 64, "dtype": "bf16", "mask": {"window": {"left": 128, "right": 64}}},
    "gemma2-local": "gemma2_local",
    "alibi": {
        "head_dim": 64,
        "dtype": "fp16",
        "mask": "causal",
        "score": {"alibi": "slopes"},
        "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
    },
    "bias": {
        "head_dim": 64,
        "dtype": "bf16",
        "score": {"bias": {"tensor": "rel"}},
        "inputs": {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}},
    },
    "documents": {
        "head_dim": 64,
        "dtype": "bf16",
        "mask": ["causal", {"same": "doc"}],
        "inputs": DOC,
    },
    "prefix": {
        "head_dim": 256,
        "dtype": "bf16",
        "mask": {"expr": "k < prefix[b] or k <= q"},
        "inputs": PREFIX,
    },
    "chunked": {
        "head_dim": 128,
        "dtype": "bf16",
        "mask": ["causal", {"expr": "k // 8192 == q // 8192"}],
    },
    "dilated": {
        "head_dim": 64,
        "dtype": "fp16",
        "mask": ["causal", {"expr": "(k // 64) % 4 == (q // 64) % 4"}],
    },
    "gpt-oss-local": "gpt_oss_local",
    "mla": "deepseek_v3_prefill",
    "head-dim-72": {"head_dim": 72, "dtype": "fp16"},
    "kv-lens": {"head_dim": 128, "dtype": "bf16", "mask": "causal", "kv_lens": "per_batch"},
    "fp32": {"head_dim": 64, "dtype": "fp32", "mask": "causal", "score": {"softcap": 30.0}},
    "two-ranges": {"head_dim": 64, "dtype": "fp16", "mask": {"expr": "k < 4 or abs(q - k) < 128"}},
    "dense-mask": {
        "head_dim": 64,
        "dtype": "fp16",
        "layout": "bshd",
        "mask": {"expr": "m[b, h, row, k]"},
        "inputs": {"m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}},
    },
    "flash1-causal-gqa": {
        "head_dim": 128,
        "dtype": "bf16",
        "heads": {"group": 4},
        "mask": "causal",
        "loop_order": "flash1",
    },
    "flash1-two-ranges": {
        "head_dim": 64,
        "dtype": "fp16",
        "mask": {"expr": "k < 4 or abs(q - k) < 128"},
        "loop_order": "flash1",
    },
    "flash1-documents-fp32": {
        "head_dim": 64,
        "dtype": "fp32",
        "mask": ["causal", {"same": "doc"}],
        "inputs": DOC,
        "sink": "per_head",
        "loop_order": "flash1",
    },
}
# Splits of a flash1 case: one kernel, or the others, or all with a choice at each call.
SPLITS: dict[str, int | None] = {"flash1-causal-gqa": None, "flash1-two-ranges": 1}


def spec_of(case: str) -> AttentionSpec:
    fields = GOLDEN[case]
    if isinstance(fields, str):
        return load_spec(settings.specs_dir() / f"{fields}.yaml")
    return AttentionSpec(name=case, **fields)


def rendered(spec: AttentionSpec, *, has_lse: bool = True) -> KernelSource:
    long = NARROW if spec.dtype.q == "fp32" or spec.head_dim.qk > 128 else LONG
    short = SHORT
    if spec.loop_order == "flash1":
        splits = SPLITS.get(spec.display_name, 4)
        long = replace(long, loop_order="flash1", num_stages=1, num_kv_splits=splits)
        short = replace(SHORT, loop_order="flash1")
    choices = [(Bucket(None, 64), short), (Bucket(None, None), long)]
    if spec.head_dim.qk > 128:
        choices = choices[1:]
    return render(Problem(spec, get_target("nvidia-h200")), choices, has_lse=has_lse)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    golden(f"render/{case}.py", rendered(spec_of(case)).text)


@pytest.mark.slow
def test_the_hash_seed_plays_no_part() -> None:
    """Two processes with different orders of sets and dicts write the same text."""
    tests = Path(__file__).parent
    program = (
        "import hashlib, test_render as t\n"
        "for case in t.GOLDEN:\n"
        "    print(case, hashlib.sha256(t.rendered(t.spec_of(case)).text.encode()).hexdigest())\n"
    )
    printed = []
    for seed in ("1", "20"):
        path = os.pathsep.join([str(tests), str(tests.parent.parent)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        printed.append(run.stdout)
    assert printed[0] == printed[1]
    assert printed[0].count("\n") == len(GOLDEN)


@pytest.mark.parametrize("case", GOLDEN)
def test_a_module_imports_torch_and_triton_only(case: str) -> None:
    tree = ast.parse(rendered(spec_of(case)).text)
    imported = {
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"torch", "triton", "triton.language"}


@pytest.mark.parametrize("case", GOLDEN)
def test_nothing_is_assigned_and_left_unused(case: str) -> None:
    """No dead code: each name that a kernel binds is read somewhere in it."""
    for function in ast.parse(rendered(spec_of(case)).text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        bound |= {a.arg for a in function.args.args}
        assert bound <= read | UNUSED, (function.name, sorted(bound - read))


# Unpacked on the host from shapes that hold more than one kernel needs; `part` counts two passes.
UNUSED = {"part", "num_kv_heads"}


# A load with its address and its mask stays one line; docs would break others long before.
LONGEST_LINE = 210


@pytest.mark.parametrize("case", GOLDEN)
def test_lines_are_tidy(case: str) -> None:
    text = rendered(spec_of(case)).text
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert "\n\n\n\n" not in text
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) <= LONGEST_LINE


def test_lse_is_left_out_where_nobody_wants_it() -> None:
    text = rendered(spec_of("causal-gqa"), has_lse=False).text
    assert "lse_ptr" not in text


@pytest.mark.parametrize(
    "name",
    ["kernel", "options", "align", "grid", "batch", "torch", "tl", "triton", "acc", "scores", "lo",
     "m_i", "float", "int", "range", "has_aligned_rows", "BLOCK_M", "visible", "sink_ptr", "next",
     "gqa_group", "inputs", "num_kv_heads", "aligned", "q_row", "t", "row_idx"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_inputs_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input's name never meets one of the module's own, in `flashgen.compile` or alone."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    spec = AttentionSpec(
        name="named",
        head_dim=16,
        dtype="bf16",
        mask=[{"expr": f"{name}[b, k] > 0"}],
        inputs={name: {"shape": ["batch", "kv_len"], "dtype": "int32"}},
    )
    q, k, v = (torch.randn(1, 2, 5, 16).bfloat16() for _ in range(3))
    shown = torch.tensor([[1, 0, 1, 0, 0]], dtype=torch.int32)
    expected, _ = reference.attention(spec, q, k, v, inputs={name: shown})
    kernel = compile_spec(spec, schedule=LONG)
    assert torch.allclose(kernel(q, k, v, **{name: shown}).double(), expected, atol=0.02)

    (path,) = tmp_path.glob("kernels/*/kernel.py")
    module = load_module(path, interpreted=True)
    with interpreting():
        alone = module.named(q, k, v, **{name: shown})
    assert torch.allclose(alone.double(), expected, atol=0.02)


def test_the_exponential_of_fp32_is_exact_to_an_ulp() -> None:
    """The helper's own text, on numpy's fp32, which rounds every step (a GPU fuses some)."""
    _, start, rest = rendered(spec_of("fp32")).text.partition("def exp_fp32")
    text = start + rest.partition("@triton.jit")[0]

    def where(condition: Any, a: float, b: Any) -> Any:
        return np.where(condition, np.float32(a), b)

    known: dict[str, Any] = {
        "tl": SimpleNamespace(where=where, floor=np.floor, exp2=np.exp2),
        "LOG2_E": np.float32(1.4426950408889634),
    }
    exec(text, known)
    x = np.concatenate([np.linspace(-103, 0, 200_001), -np.logspace(-20, 0, 20_000)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found = known["exp_fp32"](x)
    assert found.dtype == np.float32
    assert (np.abs(found - exact) / np.spacing(exact.astype(np.float32))).max() < 1.1
    ends = known["exp_fp32"](np.array([-np.inf, -1e30, -104, 0, np.nan], np.float32))
    assert ends.tolist()[:4] == [0, 0, 0, 1]
    assert np.isnan(ends[4])
