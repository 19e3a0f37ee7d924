"""Group 14 on the GPU: compiles counted, threads, streams, graphs, devices, starting times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from flashgen.compiler.choose import compile as compile_spec
from flashgen.compiler.choose import plan, target_of
from flashgen.errors import FlashgenError
from flashgen.runtime.launch import Attention
from flashgen.schedule.model import KV_LEN_LIMITS, Q_LEN_LIMITS
from flashgen.spec.model import AttentionSpec


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or fetches from its disk, inside the block."""
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield compiled
    finally:
        knobs.runtime.jit_post_compile_hook = before


def qkv(
    q_len: int, kv_len: int, batch: int = 1, heads: int = 2, head_dim: int = 64
) -> list[torch.Tensor]:
    lengths = (q_len, kv_len, kv_len)
    return [torch.randn(batch, heads, n, head_dim, device="cuda").bfloat16() for n in lengths]


def causal(**fields: Any) -> Attention:
    return compile_spec(
        AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"], **fields), return_lse=True
    )


def test_c16_twenty_lengths_of_one_bucket_are_one_compile() -> None:
    kernel = causal(scale=0.11)
    with counted() as compiled:
        for length in range(2049, 4097, 103):
            kernel(*qkv(length, length))
        kernel(*qkv(3000, 2500, batch=5, heads=7))
        kernel(*qkv(2304, 2304, batch=2, heads=1))
    assert len(compiled) == 1, compiled


def test_c16_lengths_of_all_buckets_compile_each_schedule_once() -> None:
    kernel = causal(scale=0.12)
    choices, _ = plan(kernel.spec, target_of(torch.device("cuda:0")), has_lse=True)
    schedules = {schedule for _, schedule in choices.choices}
    with counted() as compiled:
        for q_len in (*Q_LEN_LIMITS, 100):
            for kv_len in (*KV_LEN_LIMITS, 20_000):
                for off in (0, -1, -7):
                    kernel(*qkv(max(1, q_len + off), max(1, kv_len + off)))
    assert len(compiled) <= len(schedules), (len(compiled), len(schedules))


def test_row_alignment_is_the_only_other_variant() -> None:
    kernel = causal(scale=0.13)
    with counted() as compiled:
        aligned = torch.randn(1, 2, 300, 64, device="cuda").bfloat16()
        unaligned = torch.randn(1, 2, 300, 65, device="cuda").bfloat16()[..., :64]
        shifted = torch.randn(1 + 2 * 300 * 64, device="cuda").bfloat16()[1:].view(1, 2, 300, 64)
        transposed = torch.randn(1, 300, 2, 64, device="cuda").bfloat16().transpose(1, 2)
        for tensor in (aligned, unaligned, shifted, transposed, aligned.expand(3, 2, 300, 64)):
            kernel(tensor, tensor, tensor)
    assert len(compiled) == 2, compiled


def test_c3_threads_of_a_first_call() -> None:
    kernel = causal(scale=0.14)
    tensors = qkv(500, 500)
    with counted() as compiled, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: kernel(*tensors), range(8)))
    torch.cuda.synchronize()
    assert len(compiled) == 1, compiled
    assert all(torch.equal(out, results[0][0]) for out, _ in results)


def test_c13_a_first_call_inside_a_capture_says_what_to_do() -> None:
    """Nothing is compiled there, the capture ends in order; after one call outside all works."""
    kernel = causal(scale=0.17)
    q, k, v = qkv(100, 100)
    torch.cuda.synchronize()
    with (
        pytest.raises(FlashgenError, match="make one call with these lengths before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        kernel(q, k, v)
    kernel(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(q, k, v)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_lse = kernel(q, k, v)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_c13_other_lengths_inside_a_capture() -> None:
    """A warm callable whose schedule for these lengths is not compiled yet."""
    kernel = causal(scale=0.18)
    kernel(*qkv(1, 1))
    tensors = qkv(5000, 5000)
    torch.cuda.synchronize()
    with (
        pytest.raises(FlashgenError, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        kernel(*tensors)
    assert bool(torch.isfinite(kernel(*tensors)[0]).all())


def test_c14_capture_on_a_side_stream_and_replay() -> None:
    kernel = causal()
    q, k, v = qkv(300, 300)
    kernel(q, k, v)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = kernel(q, k, v)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_lse = kernel(q, k, v)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_c14_the_current_stream_is_used() -> None:
    kernel = causal()
    q, k, v = qkv(300, 300)
    expected, _ = kernel(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(t) for t in (q, k, v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for to, of in zip(late, (q, k, v), strict=True):
            to.copy_(of)
        out, _ = kernel(*late)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_c15_tensors_on_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = causal()
    tensors = qkv(200, 200)
    expected, _ = kernel(*tensors)
    assert torch.cuda.current_device() == 0
    out, lse = kernel(*(t.to("cuda:1") for t in tensors))
    assert out.device == lse.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


def run_fresh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with caches in `folder`."""
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "FLASHGEN_CACHE_DIR": str(folder / "flashgen"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


FIRST_CALL = """
import sys
import torch
from flashgen import load_spec
from flashgen.compiler.choose import compile as compile_spec

generator = torch.Generator("cuda").manual_seed(1)
size = (1, 8, int(sys.argv[2]), 128)
q, k, v = (torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in "qkv")
print(compile_spec(load_spec(sys.argv[1]))(q, k[:, :2], v[:, :2]).double().sum().item())
"""


@pytest.mark.parametrize("length", [100, 4096])  # family triton; gluon_sm90 on Hopper GPUs
@pytest.mark.parametrize("size", [0, 1000, -1])
def test_a_first_call_compiles_again_what_is_cut_short(
    size: int, length: int, tmp_path: Path
) -> None:
    spec = str(Path(__file__).resolve().parents[2] / "specs" / "llama3_8b.yaml")
    sound = run_fresh(tmp_path, "-c", FIRST_CALL, spec, str(length))
    assert "damaged" not in sound.stderr
    for binary in (tmp_path / "triton").rglob("*.cubin"):
        os.truncate(binary, size if size >= 0 else binary.stat().st_size + size)
    mended = run_fresh(tmp_path, "-c", FIRST_CALL, spec, str(length))
    assert mended.stdout == sound.stdout
    assert "is damaged or incomplete; it is compiled again" in mended.stderr
    assert "damaged" not in run_fresh(tmp_path, "-c", FIRST_CALL, spec, str(length)).stderr


def test_cold_and_warm_starts(tmp_path: Path) -> None:
    """Seconds of a fresh process, printed: aims are 3 s cold and 0.3 s from the disk cache."""
    for start in ("cold", "warm"):
        run = run_fresh(tmp_path, "-m", "flashgen.bench.startup", "llama3_8b")
        found = json.loads(run.stdout.splitlines()[-1])
        steps = found["steps_s"]
        after = sum(steps[step] for step in ("import flashgen", "load the spec", "first result"))
        print(f"\n{start} start: first result {after:.2f} s after torch and triton; {found}")
        if start == "warm":
            assert not {"sympy", "networkx", "jinja2"} & set(found["heavy_modules"])
