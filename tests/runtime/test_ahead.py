"""Compiling without the GPU gives the kernel that a launch on it would look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import AttentionSpec
from flashgen.compiler import choose
from flashgen.errors import CompileError
from flashgen.problem import Problem
from flashgen.runtime.ahead import compile_schedule
from flashgen.runtime.load import load_module
from flashgen.schedule.budget import budget
from flashgen.schedule.model import Schedule
from flashgen.target import get_target

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(
    name="ahead",
    head_dim=16,
    dtype="fp16",
    mask=["causal", {"expr": "k < limit[b]"}],
    score=[{"softcap": 3.0}],
    inputs={"limit": {"shape": ["batch"], "dtype": "int32"}},
    sink="per_head",
)
TILE = Schedule(block_m=16, block_n=32, num_warps=4, num_stages=2)

# Compiles ahead, then asks Triton's launcher, told that an H200 is here, for the same kernel.
TWICE = """
import sys
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
sys.path.insert(0, {folder!r})
from test_ahead import SPEC, TARGET, TILE
from flashgen.codegen.options import options
from flashgen.compiler import choose
from flashgen.runtime.ahead import compile_schedule
from flashgen.problem import Problem
from flashgen.runtime.load import load_module

class Here:
    get_current_device = get_current_stream = lambda self, *_: 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

plan, path = choose.plan(SPEC, TARGET, schedule=TILE, has_lse=True)
module = load_module(path, interpreted=False)
cache = Path({cache!r})
compile_schedule(Problem(SPEC, TARGET), plan, module, TILE, aligned=True)
before = {{entry.name for entry in cache.iterdir()}}
driver.set_active(Here())
kernel = getattr(module, dict(plan.entries)["loop"])

class Warm:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: kernel.warmup(*args, grid=grid, **kwargs)

q = torch.zeros(1, 1, 3, 16, dtype=torch.float16)
limit, sink = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
module.run(Warm(), options(TILE), q, q, q, limit, sink, q.clone(), torch.zeros(1, 1, 3))
print(len(before), len({{entry.name for entry in cache.iterdir()}} - before))
"""


def test_a_launch_finds_what_was_compiled_ahead(tmp_path: Path) -> None:
    program = TWICE.format(folder=str(Path(__file__).parent), cache=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


@pytest.mark.parametrize("aligned", [True, False])
def test_what_the_compiler_reports(aligned: bool) -> None:
    problem = Problem(SPEC, TARGET)
    plan, path = choose.plan(SPEC, TARGET, schedule=TILE, has_lse=True)
    module = load_module(path, interpreted=False)
    found = compile_schedule(problem, plan, module, TILE, aligned=aligned)
    assert found.entry == dict(plan.entries)["loop"]
    assert (found.assembly_kind, found.binary_kind) == ("ptx", "cubin")
    assert found.binary.startswith(b"\x7fELF")
    assert found.spill_bytes == 0
    assert found.regs_per_thread is not None
    assert 16 <= found.regs_per_thread <= 255
    if aligned:
        assert found.smem_bytes == budget(problem).smem_bytes_of(TILE)
        assert "cp.async" in found.assembly


def test_a_refused_source_is_shown(tmp_path: Path) -> None:
    plan, _ = choose.plan(SPEC, TARGET, schedule=TILE, has_lse=True)
    path = tmp_path / "refused" / "kernel.py"
    path.parent.mkdir()
    path.write_text(
        plan.text.replace("tl.zeros([BLOCK_M], tl.float32)", "tl.zeros([BLOCK_M, 3], 1)")
    )
    module = load_module(path, interpreted=False)
    with pytest.raises(CompileError) as found:
        compile_schedule(Problem(SPEC, TARGET), plan, module, TILE, aligned=True)
    assert f"hint: the source is {path}" in str(found.value)
    assert found.value.exit_code == 7
