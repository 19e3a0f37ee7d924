"""Run a spec's Hopper kernel in the emulator and hold it against the fp64 oracle."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flashgen import reference
from flashgen.codegen.render import render
from flashgen.emulator import emulated
from flashgen.problem import Problem
from flashgen.reference import Comparison
from flashgen.runtime.interpret import interpreting
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

TARGET = get_target("nvidia-h200")


@dataclass(frozen=True)
class Sizes:
    """Of a call."""

    q_len: int
    kv_len: int
    q_heads: int = 2
    kv_heads: int = 1
    batch: int = 1


def call_arguments(spec: AttentionSpec, sizes: Sizes, seed: int) -> dict[str, Any]:
    """q, k, v in the spec's layout, its inputs by name, and a sink where it has one."""
    torch.manual_seed(seed)
    dtype = reference.torch_dtype(spec.dtype.q)
    shapes = {
        "q": (sizes.q_heads, sizes.q_len, spec.head_dim.qk),
        "k": (sizes.kv_heads, sizes.kv_len, spec.head_dim.qk),
        "v": (sizes.kv_heads, sizes.kv_len, spec.head_dim.v),
    }
    given: dict[str, Any] = {}
    for name, shape in shapes.items():
        tensor = torch.randn(sizes.batch, *shape, dtype=dtype)
        given[name] = tensor.transpose(1, 2).contiguous() if spec.layout == "bshd" else tensor
    extents = vars(sizes)
    for declared in spec.inputs:
        shape = [extents.get(str(extent), extent) for extent in declared.shape]
        if declared.name == "doc":
            given["doc"] = (torch.arange(sizes.kv_len) // 50).int().expand(shape).contiguous()
        elif declared.dtype in {"int32", "int64"}:
            dtype = reference.torch_dtype(declared.dtype)
            given[declared.name] = torch.randint(0, sizes.kv_len, shape, dtype=dtype)
        else:
            given[declared.name] = torch.randn(shape).to(reference.torch_dtype(declared.dtype))
    if spec.sink != "none":
        given["sink"] = torch.randn(sizes.q_heads)
    return given


@lru_cache(maxsize=64)
def generated(spec: AttentionSpec, schedule: Schedule, has_lse: bool) -> str:
    """The module's text."""
    return render(Problem(spec, TARGET), [(Bucket(None, None), schedule)], has_lse=has_lse).text


def written(tmp_path: Path, text: str) -> Path:
    """The module, in a file that all tests with this text share: `emulated` reads it once."""
    folder = tmp_path.parent / f"module_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    path = folder / "module.py"
    if not path.is_file():
        path.write_text(text, "utf-8")
    return path


def run(
    path: Path, spec: AttentionSpec, given: dict[str, Any], *, has_lse: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse by the module's Hopper kernel, both NaN before."""
    q, v = given["q"], given["v"]
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    heads_first = out.transpose(1, 2) if spec.layout == "bshd" else out
    lse = torch.full(heads_first.shape[:3], float("nan")) if has_lse else None
    with interpreting():
        module = emulated(path, seed=seed)
        kernel, options = module.SCHEDULES[-1][2:]
        names = inspect.signature(module.run).parameters
        have = {**given, "kernel": kernel, "options": options, "out": out, "lse": lse}
        module.run(**{name: have[name] for name in names})
    return out, lse


def compared(
    tmp_path: Path,
    spec: AttentionSpec,
    schedule: Schedule,
    sizes: Sizes,
    *,
    seed: int = 0,
    has_lse: bool = True,
    spoil: Callable[[dict[str, Any]], None] = lambda given: None,
    text: Callable[[str], str] = lambda text: text,
) -> Comparison:
    """spoil: changes what the call is given; text: changes what is run."""
    path = written(tmp_path, text(generated(spec, schedule, has_lse)))
    given = call_arguments(spec, sizes, seed)
    spoil(given)
    out, lse = run(path, spec, given, has_lse=has_lse, seed=seed)
    others = {"inputs": {d.name: given[d.name] for d in spec.inputs}, "sink": given.get("sink")}
    qkv = given["q"], given["k"], given["v"]
    exact, exact_lse = reference.attention(spec, *qkv, **others)
    usual, usual_lse = reference.eager(spec, *qkv, **others)
    return reference.compare(
        out,
        lse,
        exact,
        exact_lse,
        usual,
        eager_lse=usual_lse,
        sink=given.get("sink"),
        layout=spec.layout,
    )
