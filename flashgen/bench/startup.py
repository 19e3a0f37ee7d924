"""Waiting times of a fresh process, for suite `dispatch`: `python -m flashgen.bench.startup NAME`.

Prints one line of JSON: the seconds of each step from torch's import to the first result, and which
heavy modules flashgen itself brought in. Whether the start is cold or warm is decided by the caches
that the environment points to (FLASHGEN_CACHE_DIR, TRITON_CACHE_DIR), and whether Python compiles
what it imports by PYTHONPYCACHEPREFIX.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

HEAVY = ("sympy", "networkx", "jinja2", "yaml", "numpy")
LENGTH = 1024


def main(name: str) -> None:
    """Load the shipped spec `name`, compile it, and wait for its first result."""
    marks: list[tuple[str, float]] = [("start", time.perf_counter())]

    def mark(step: str) -> None:
        marks.append((step, time.perf_counter()))

    import torch

    mark("import torch")
    import triton  # noqa: F401 -- timed on its own: what flashgen needs of it is not flashgen's time

    mark("import triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = LENGTH if device.type == "cuda" else 16  # the interpreter on the CPU is slow
    heads = 8
    sizes = (1, heads, length, 128)
    q, k, v = (torch.randn(sizes, dtype=torch.bfloat16, device=device) for _ in "qkv")
    _wait(device)
    mark("CUDA context and tensors")
    before = set(sys.modules)

    from flashgen import settings
    from flashgen.compiler.choose import compile as compile_spec
    from flashgen.spec.parse import load_spec

    mark("import flashgen")
    attention = compile_spec(load_spec(Path(settings.specs_dir()) / f"{name}.yaml"))
    mark("load the spec")
    attention(q, k[:, : heads // 4], v[:, : heads // 4])
    _wait(device)
    mark("first result")
    attention(q, k[:, : heads // 4], v[:, : heads // 4])
    _wait(device)
    mark("second result")
    steps = {step: round(end - start, 4) for (_, start), (step, end) in pairwise(marks)}
    brought = sorted(set(HEAVY) & (set(sys.modules) - before))
    print(json.dumps({"steps_s": steps, "heavy_modules": brought}))


def _wait(device: object) -> None:
    import torch

    if str(device).startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
