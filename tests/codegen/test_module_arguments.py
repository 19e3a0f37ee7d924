"""The callable of a module that stands alone refuses what its kernels were not made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import reference
from flashgen.codegen.render import render
from flashgen.compiler.choose import compile as compile_spec
from flashgen.problem import Problem
from flashgen.runtime.interpret import interpreting
from flashgen.runtime.load import load_module
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

SCHEDULE = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
FIELDS: dict[str, Any] = {
    "head_dim": {"qk": 32, "v": 16},
    "dtype": "fp16",
    "heads": {"group": 2},
    "score": {"bias": {"tensor": "rel"}},
    "inputs": {
        "rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "fp32"},
        "grid": {"shape": ["batch", "kv_heads"], "dtype": "int32"},  # a name of the host code's
        "gain": {"shape": [], "dtype": "fp32"},
    },
    "mask": {"expr": "k < grid[b, hk] + gain"},
    "sink": "per_head",
    "kv_lens": "per_batch",
}
ORDERED = {**FIELDS, "layout": "bshd"}
GROUPS = {"head_dim": 16, "dtype": "bf16"}


@pytest.fixture
def module_of(tmp_path: Path) -> Callable[[dict[str, Any]], ModuleType]:
    def made(fields: dict[str, Any]) -> ModuleType:
        problem = Problem(AttentionSpec(name="alone", **fields), get_target("nvidia-h200"))
        path = tmp_path / "alone" / "kernel.py"
        path.parent.mkdir(exist_ok=True)
        source = render(problem, [(Bucket(None, None), SCHEDULE)], has_lse=True)
        path.write_text(source.text, "utf-8")
        return load_module(path, interpreted=True)

    return made


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Of 2 batches, 4 query heads for 2 of keys, 20 queries and 40 keys."""
    spec = AttentionSpec(name="alone", **fields)
    dtype = reference.torch_dtype(spec.dtype.q)
    shapes = {
        "q": (2, 4, 20, spec.head_dim.qk),
        "k": (2, 2, 40, spec.head_dim.qk),
        "v": (2, 2, 40, spec.head_dim.v),
    }
    made: dict[str, Any] = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    if spec.layout == "bshd":
        made = {name: t.transpose(1, 2) for name, t in made.items()}
    if fields is GROUPS:
        return made
    return made | {
        "rel": torch.randn(1, 4, 20, 40),
        "grid": torch.full((2, 2), 30, dtype=torch.int32),
        "gain": 1.5,
        "sink": torch.randn(4),
        "kv_lens": torch.tensor([40, 35]),
    }


def test_what_fits_is_computed(module_of: Callable[[dict[str, Any]], ModuleType]) -> None:
    """Also an input whose elements are all one in memory, and a sink in 16 bits."""
    for fields in (FIELDS, ORDERED, GROUPS):
        given, spec = arguments(fields), AttentionSpec(name="alone", **fields)
        if fields is not GROUPS:
            given["rel"] = torch.tensor(0.5).expand(1, 4, 20, 40)
            given["sink"] = given["sink"].half()
        with interpreting():
            out, lse = module_of(fields).alone(**given)
        reserved = {n: given[n] for n in ("sink", "kv_lens") if n in given}
        inputs = {i.name: given[i.name] for i in spec.inputs}
        qkv = (given[n] for n in "qkv")
        expected, expected_lse = reference.attention(spec, *qkv, inputs=inputs, **reserved)
        assert out.dtype == given["q"].dtype
        torch.testing.assert_close(out.double(), expected.double(), atol=5e-3, rtol=1e-2)
        torch.testing.assert_close(lse.double(), expected_lse.double(), atol=5e-3, rtol=1e-2)


# Of each argument everything that would be read as if it were right, or beyond its end.
FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "head dim of q": lambda given: {"q": given["q"][..., :16]},
    "head dim of k": lambda given: {"k": torch.cat([given["k"]] * 2, -1)},
    "head dim of v": lambda given: {"v": given["k"]},
    "dtype of q": lambda given: {"q": given["q"].float()},
    "dtype of v": lambda given: {"v": given["v"].bfloat16()},
    "no batch": lambda given: {name: given[name][0] for name in "qkv"},
    "batch of k": lambda given: {"k": given["k"][:1]},
    "batch of v": lambda given: {"v": given["v"].repeat(2, 1, 1, 1)},
    "length of v": lambda given: {"v": given["v"][:, :, :39]},
    "heads of v": lambda given: {"v": given["v"][:, :1]},
    "heads of k": lambda given: {name: given[name].repeat(1, 2, 1, 1) for name in "kv"},
    "no heads of k": lambda given: {name: given[name][:, :0] for name in "kv"},
    "order of axes": lambda given: {name: given[name].transpose(1, 2) for name in "qkv"},
    "shorter input": lambda given: {"rel": given["rel"][..., :30]},
    "input of one batch each": lambda given: {"rel": given["rel"].repeat(2, 1, 1, 1)},
    "input with fewer axes": lambda given: {"rel": given["rel"][0]},
    "dtype of an input": lambda given: {"rel": given["rel"].half()},
    "heads of an input": lambda given: {"grid": given["grid"].repeat(1, 2)},
    "device of an input": lambda given: {"grid": given["grid"].to("meta")},
    "heads of sink": lambda given: {"sink": given["sink"][:2]},
    "dtype of kv_lens": lambda given: {"kv_lens": given["kv_lens"].float()},
}


def test_what_does_not_fit_is_refused(
    module_of: Callable[[dict[str, Any]], ModuleType], golden: Callable[[str, str], None]
) -> None:
    module, given = module_of(FIELDS), arguments(FIELDS)
    said = []
    for what, fault in FAULTS.items():
        with interpreting(), pytest.raises(ValueError, match=r"^alone: ") as refusal:
            module.alone(**given | fault(given))
        said.append(f"{what}\n  {refusal.value}\n")
    module, given = module_of(GROUPS), arguments(GROUPS)
    given["q"] = given["q"][:, :3]
    with interpreting(), pytest.raises(ValueError, match=r"^alone: ") as refusal:
        module.alone(**given)
    said.append(f"heads that k's do not divide\n  {refusal.value}\n")
    golden("errors/module_arguments.txt", "".join(said))


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_flashgen_itself_checks_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it launches, by the spec: the module's own check takes no time of a call."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    kernel = compile_spec(AttentionSpec(**GROUPS), schedule=SCHEDULE)
    given = arguments(GROUPS)
    expected = kernel(**given)
    ((_, loaded),) = kernel._loaded.items()
    del loaded.module.check_arguments
    assert torch.equal(kernel(**given), expected)
