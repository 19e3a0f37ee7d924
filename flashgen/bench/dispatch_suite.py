"""Suite `dispatch`: what a call costs on the host, and how long the first one takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from triton.compiler import CompiledKernel

from flashgen import settings
from flashgen.bench.record import CaseRecord, Result
from flashgen.bench.run import Run
from flashgen.codegen.options import Option, kernel_kinds, options
from flashgen.compiler.choose import compile as compile_spec
from flashgen.compiler.choose import plan, target_of
from flashgen.runtime.load import load_module
from flashgen.runtime.repeat import Seen, signature
from flashgen.schedule.model import bucket_of
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.tune.summary import rounded, summarise
from flashgen.tune.tensors import Arguments, draw
from flashgen.tune.timing import Call, describe, rotated

# Little work, so that the device is always done before the host asks for more.
SHAPE = Shape(batch=1, q_heads=4, kv_heads=1, q_len=16, kv_len=256)
SPECS = ("llama3_8b", "gpt_oss_local", "bloom_7b1")
BATCH_CALLS = 100
ROUNDS = 30
STARTUP_SPEC = "llama3_8b"
STARTUP_LIMIT_S = 180
BYTECODE = "of all packages on disk, as an installer leaves it"


def run_dispatch(run: Run, device: torch.device) -> None:
    """Host times of repeated calls, then cold and warm starts."""
    for name in SPECS:
        case_id = f"dispatch/{name}"
        if run.wants(case_id) and run.has_time_for(case_id):
            spec = load_spec(settings.specs_dir() / f"{name}.yaml")
            run.add(measure_dispatch(case_id, spec, dispatch_shape(spec), device))
    case_id = f"startup/{STARTUP_SPEC}"
    if run.wants(case_id) and run.has_time_for(case_id):
        run.add(measure_startup(case_id, STARTUP_SPEC))


def dispatch_shape(spec: AttentionSpec) -> Shape:
    """A small shape that fits the spec's head group."""
    heads = SHAPE.kv_heads * (spec.heads.group or 4)
    return Shape(SHAPE.batch, heads, SHAPE.kv_heads, SHAPE.q_len, SHAPE.kv_len)


def measure_dispatch(
    case_id: str,
    spec: AttentionSpec,
    shape: Shape,
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    batch_calls: int = BATCH_CALLS,
) -> CaseRecord:
    """Host time of a call through each layer, with the same tensors, taking turns."""
    arguments = draw(spec, shape, seed=0, device=device)
    with torch.no_grad():
        samples = host_ms(
            layers(spec, shape, arguments), device, rounds=rounds, batch_calls=batch_calls
        )
    results = tuple(
        Result(
            name,
            how=f"{batch_calls} calls, host time",
            ms=summarise(times),
            samples_ms=tuple(rounded(time_ms) for time_ms in times),
        )
        for name, times in samples.items()
    )
    return CaseRecord(
        id=case_id, group="dispatch", spec=spec.display_name, shape=asdict(shape), results=results
    )


def layers(spec: AttentionSpec, shape: Shape, a: Arguments) -> dict[str, Call]:
    """The same launch from several heights, and torch's attention for comparison.

    launch: `kernel[grid](...)` with its arguments at hand; compiled: `compiled[grid](...)`, which
    a repeated call makes; run: the generated module's `run`, which works out grid, strides and
    alignment, and is given its output; config: by which a call with new lengths finds its schedule
    (a repeated call does without); look-up: by which a repeated call finds what to launch;
    callable: everything, checks and a new output included; sdpa: scaled_dot_product_attention on
    the same q, k, v, without the mask.
    """
    attention = compile_spec(spec)
    attention(a.q, a.k, a.v, **a.others)
    found, path = plan(spec, target_of(a.q.device), has_lse=False)
    module = load_module(path, interpreted=a.q.device.type == "cpu")
    configs = dict(found.choices)
    schedule = configs[bucket_of(shape.q_len, shape.kv_len)]
    kernel = getattr(module, dict(found.entries)[kernel_kinds(schedule)[0]])
    launch_options = options(schedule)
    out = torch.empty_like(attention(a.q, a.k, a.v, **a.others))
    others = a.others
    run_arguments = (a.q, a.k, a.v, *(others[name] for name in found.arguments), out)
    recorded = Launch.of(module.run, launch_options, run_arguments)
    grid_kernel = kernel[recorded.grid]
    kept = {signature(a.q, a.k, a.v, others): "what to launch"}
    return {
        "launch": lambda: grid_kernel(*recorded.positional, **recorded.named),
        **_compiled(kernel, recorded),
        "config": lambda: configs[bucket_of(shape.q_len, shape.kv_len)],
        "look-up": lambda: kept[signature(a.q, a.k, a.v, others)],
        "run": lambda: module.run(kernel, launch_options, *run_arguments),
        "callable": lambda: attention(a.q, a.k, a.v, **others),
        "sdpa": lambda: scaled_dot_product_attention(a.q, a.k, a.v, enable_gqa=True),
    }


def _compiled(kernel: Any, recorded: Launch) -> dict[str, Call]:
    """The launch of the compiled kernel; nothing where the kernel is interpreted."""
    seen = Seen(kernel)
    seen[recorded.grid](*recorded.positional, **recorded.named)
    if not isinstance(seen.compiled, CompiledKernel):
        return {}
    launch = seen.compiled[(*recorded.grid, 1, 1)[:3]]
    values = tuple(seen.values.values())
    return {"compiled": lambda: launch(*values)}


@dataclass(frozen=True)
class Launch:
    """What a module's `run` hands to its kernel."""

    grid: tuple[int, ...]
    positional: tuple[object, ...]
    named: Mapping[str, object]

    @classmethod
    def of(
        cls,
        run: Callable[..., object],
        launch_options: Mapping[str, Option],
        arguments: tuple[object, ...],
    ) -> Launch:
        """Call `run` with a kernel that only writes down how it is launched."""
        recorder = _Recorder()
        run(recorder, launch_options, *arguments)
        return cls(recorder.grid, recorder.positional, recorder.named)


class _Recorder:
    """Stands in for a kernel: keeps the grid and the arguments of the launch."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.positional: tuple[object, ...] = ()
        self.named: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid

        def launch(*positional: object, **named: object) -> None:
            self.positional, self.named = positional, named

        return launch


def host_ms(
    calls: Mapping[str, Call], device: torch.device, *, rounds: int, batch_calls: int
) -> dict[str, list[float]]:
    """Host ms per call, a sample a round; the device is idle at the start of each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in rotated(list(calls), turn):
            _wait(device)
            start = time.perf_counter()
            for _ in range(batch_calls):
                calls[name]()
            elapsed = time.perf_counter() - start
            _wait(device)
            if turn:  # the first round warms up
                samples[name].append(1e3 * elapsed / batch_calls)
    return samples


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_startup(case_id: str, name: str) -> CaseRecord:
    """A process with empty caches, then one that finds them filled.

    Before both, one that is not timed compiles the bytecode of all packages that a start imports,
    as an installer does: where there is none, Python compiles SymPy anew in every process.
    """
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="flashgen-startup-") as folder:
        for start, caches in (("installed", "first"), ("cold", "second"), ("warm", "second")):
            facts[start] = first_result(name, startup_environment(Path(folder), caches))
    installed = facts.pop("installed")
    facts["bytecode"] = installed.get("error", BYTECODE)
    return CaseRecord(id=case_id, group="startup", spec=name, shape={}, facts=facts)


def startup_environment(folder: Path, caches: str) -> dict[str, str]:
    """This environment with the caches of one name, and bytecode that all processes share."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "FLASHGEN_CACHE_DIR": str(folder / caches / "flashgen"),
        "TRITON_CACHE_DIR": str(folder / caches / "triton"),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }


def first_result(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The steps of a new process up to its first result, or the error that ended it."""
    command = [sys.executable, "-m", "flashgen.bench.startup", name]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=STARTUP_LIMIT_S,
            check=True,
        )
        steps: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return {"error": f"exit code {error.returncode}: {lines[-1] if lines else ''}"}
    except (OSError, subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
        return {"error": describe(error)}
    return steps
