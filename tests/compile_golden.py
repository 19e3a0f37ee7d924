"""Compile the golden kernels under whichever triton is imported: `python tests/compile_golden.py`.

CI runs this with several versions of triton in front of the path. Each kernel of every module of
tests/golden/render is compiled for sm_90, with the schedule of the longest lengths and rows aligned
to 16 bytes; those of the first module also for sm_80, and for rows of any alignment. (That covers
what differs between versions of triton, and takes two minutes; all combinations take twenty.)

Modules of tests/golden/render_sm90 are rendered anew, since their text follows the version of
triton, those of plain attention also without lse: none may spill or have matrix
instructions that wait for each other, and each takes the shared memory of its budget to the byte.
Ends with a line that counts, and 1 if any failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import triton

from flashgen.errors import CompileError, ScheduleError
from flashgen.pipeline import generate
from flashgen.problem import Problem
from flashgen.runtime.ahead import compile_ahead, compile_schedule, pointer_types
from flashgen.schedule import sm90
from flashgen.schedule.model import Bucket, Schedule, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import parse_spec
from flashgen.target import get_target

GOLDEN = Path(__file__).parent / "golden" / "render"
GOLDEN_SM90 = Path(__file__).parent / "golden" / "render_sm90"
TARGET = "nvidia-h200"
OTHER_TARGET = "nvidia-a100-80gb"


def main() -> int:
    """Compile all modules, or those named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", type=Path, help="default: all of tests/golden/render")
    paths = parser.parse_args().modules or [
        path for folder in (GOLDEN, GOLDEN_SM90) for path in sorted(folder.glob("*.py"))
    ]
    start, passed, failures = time.monotonic(), 0, []
    jobs = [(path, TARGET, True) for path in paths]
    portable = [path for path in paths if path.parent.name != GOLDEN_SM90.name]
    jobs += [(path, OTHER_TARGET, True) for path in portable[:1]]
    jobs += [(path, TARGET, False) for path in portable[:1]]
    for path, target, aligned in jobs:
        problem = Problem(_spec_of(path), get_target(target))
        try:
            passed += (
                _compile_anew(_load(path), problem)
                if path.parent.name == GOLDEN_SM90.name
                else _compile(_load(path), problem, aligned=aligned)
            )
        except (CompileError, ScheduleError) as error:
            failures.append(f"{path.name} for {target}: {error}")
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    print(
        f"triton {triton.__version__}: {passed} kernels of {len(paths)} golden modules compiled in "
        f"{time.monotonic() - start:.0f} s, {len(failures)} failed"
    )
    return 1 if failures or not passed else 0


def _load(path: Path) -> ModuleType:
    name = f"golden_{re.sub(r'[^a-z0-9]', '_', path.stem)}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _spec_of(path: Path) -> AttentionSpec:
    """The spec that a module was generated from, which its docstring repeats."""
    text = path.read_text("utf-8")
    found = re.search(r"^spec\n((?:  .*\n)+)", text, re.MULTILINE)
    assert found is not None, f"{path}: no spec in its docstring"
    body = re.sub(r"^  ", "", found[1].replace("\\\\", "\\"), flags=re.MULTILINE)
    return parse_spec(f"flashgen: 1\nname: {path.stem}\n{body}", str(path))


def _compile(module: ModuleType, problem: Problem, *, aligned: bool) -> int:
    """Compile each kernel of `module`; returns how many those are."""
    kernels: dict[str, dict[str, int]] = {}
    for _, _, kernel, options in module.SCHEDULES:
        given = {name: value for name, value in options.items() if name != "num_kv_splits"}
        kernels[kernel.fn.__name__] = given
        if "num_kv_splits" in options:  # flash1, whose other kernels the module launches beside it
            merge = {name: given[name] for name in ("BLOCK_M", "num_warps")}
            others = {"attention_fwd_flash1_split": given, "attention_merge": merge}
            kernels |= {name: made for name, made in others.items() if hasattr(module, name)}
    smallest = min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes)
    align = 16 // smallest if aligned else 1
    for name, options in kernels.items():
        pointers = dict(pointer_types(problem))
        made = compile_ahead(module, name, pointers, options, align, problem.target)
        assert made.binary, f"{name}: no machine code"
    return len(kernels)


def _compile_anew(module: ModuleType, problem: Problem) -> int:
    """Render and compile the Hopper kernel of `module` again; ScheduleError if it is a slow one."""
    [(_, _, _, options)] = module.SCHEDULES
    schedule = Schedule(
        family="gluon_sm90",
        block_m=64 * options["CONSUMERS"],
        block_n=options["BLOCK_N"],
        num_warps=4 * (options["CONSUMERS"] + 1),
        num_stages=options["STAGES"],
        sm90=Sm90(
            scheduler=options["SCHEDULER"],
            q_buffers=options["Q_BUFFERS"],
            separate_out=options["SEPARATE_OUT"],
            group_mb=options["group_mb"],
            packed_heads=options.get("PACKED_HEADS", 1),
        ),
    )
    is_plain = not (problem.spec.mask or problem.spec.score)
    for has_lse in (True, False) if is_plain else (True,):
        plan = generate(problem, [(Bucket(None, None), schedule)], has_lse=has_lse, origin="golden")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{plan.name}.py"
            path.write_text(plan.text, encoding="utf-8")
            anew = _load(path)
            made = compile_schedule(problem, plan, anew, schedule, aligned=True)
            if hasattr(anew, "document_keys"):  # which the module launches before it
                given = {"BLOCK_M": 64, "num_warps": 8}
                pointers = pointer_types(problem)
                compile_ahead(anew, "document_keys", pointers, given, 1, problem.target)
        needs = sm90.smem_bytes(schedule, problem)
        if made.smem_bytes != needs:
            raise CompileError(f"{schedule}: {made.smem_bytes} B shared, the budget says {needs} B")
    return 2 if is_plain else 1


if __name__ == "__main__":
    sys.exit(main())
