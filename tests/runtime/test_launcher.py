"""The launcher that is built ahead is the one that the launch asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import AttentionSpec
from flashgen.runtime import launcher

# Builds the launchers of a module, then compiles its kernel as a launch on an H200 does.
ASKED = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
sys.path.insert(0, {folder!r})
from test_ahead import SPEC, TARGET, TILE
from flashgen.codegen.options import options
from flashgen.compiler import choose
from flashgen.runtime.launcher import start_preparing_launch
from flashgen.runtime.load import load_module

asked = []

class Here:
    get_current_device = get_current_stream = lambda self, *_: 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def launcher_cls(self, source, metadata):
        asked.append(list(source.signature.items()))
        metadata.num_stages  # not known yet: nothing after the C function is

driver.set_active(Here())
plan, path = choose.plan(SPEC, TARGET, schedule=TILE, has_lse=True)
module = load_module(path, interpreted=False)
kernel = getattr(module, dict(plan.entries)["loop"])
for thread in start_preparing_launch([kernel], SPEC):
    thread.join()
compiled = []

class Warm:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: compiled.append(kernel.warmup(*args, grid=grid, **kwargs))

q = torch.zeros(1, 1, 3, 16, dtype=torch.float16)
limit, sink = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
module.run(Warm(), options(TILE), q, q, q, limit, sink, q.clone(), torch.zeros(1, 1, 3))
launched = list(compiled[0].src.signature.items())
print(json.dumps([asked, launched]))
"""


def test_the_signature_is_that_of_the_launch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(folder=str(Path(__file__).parent))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked, launched = json.loads(done.stdout.splitlines()[-1])
    assert asked == [launched]
    assert ["q_ptr", "*fp16"] in launched


def test_what_goes_wrong_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        params = ()

        def is_gluon(self) -> bool:
            return False

    class Broken:
        @property
        def active(self) -> object:
            raise RuntimeError("no driver")

    monkeypatch.setattr(launcher, "driver", Broken())
    spec = AttentionSpec(name="broken", head_dim=16, dtype="fp16")
    for thread in launcher.start_preparing_launch([Kernel()], spec):
        thread.join()
        assert not thread.is_alive()
