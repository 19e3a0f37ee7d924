"""How many variants a kernel compiles to: two at most, whatever the lengths, strides and offsets.

On the CPU the arguments of a launch are caught and specialised as Triton's launcher would; on a GPU
its own cache is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flashgen import AttentionSpec
from flashgen.codegen.options import options
from flashgen.compiler import choose
from flashgen.compiler import compile as compile_spec
from flashgen.runtime.artifact import Plan
from flashgen.runtime.load import load_module
from flashgen.schedule.model import KV_LEN_LIMITS, Q_LEN_LIMITS, bucket_of
from flashgen.target import get_target

SPEC = AttentionSpec(
    name="counted",
    head_dim=64,
    dtype="bf16",
    mask=["causal", {"expr": "k < limit"}, {"same": "doc"}],
    score=[{"bias": {"tensor": "rel"}}],
    inputs={
        "limit": {"shape": [], "dtype": "int32"},
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int64"},
        "rel": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "bf16"},
    },
    kv_lens="per_batch",
    sink="per_head",
)


class Recorder:
    """Stands in for a kernel: keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


@pytest.fixture(scope="module")
def loaded() -> tuple[Plan, ModuleType]:
    plan, path = choose.plan(SPEC, get_target("nvidia-h200"), has_lse=True)
    return plan, load_module(path, interpreted=False)


def variants(loaded: tuple[Plan, ModuleType], calls: Sequence[Mapping[str, Any]]) -> set[str]:
    """The distinct keys under which Triton would compile the launches of `calls`."""
    plan, module = loaded
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys = set()
    for tensors in calls:
        lengths = tensors["q"].shape[2], tensors["k"].shape[2]
        schedule = dict(plan.choices)[bucket_of(*lengths)]
        kernel = getattr(module, dict(plan.entries)[schedule.kernel])
        recorder = Recorder()
        others = [tensors[name] for name in plan.arguments]
        module.run(
            recorder,
            options(schedule),
            *(tensors[name] for name in "qkv"),
            *others,
            tensors["out"],
            tensors["lse"],
        )
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        args, kwargs = recorder.calls[0]
        params, specialization, rest = bind(*args, **kwargs)
        constants = [params[p.name] for p in kernel.params if p.is_constexpr]
        keys.add(f"{schedule.kernel} {specialization} {constants} {sorted(rest.items())}")
    return keys


def call(q_len: int, kv_len: int, batch: int = 1, heads: int = 1, **changed: Any) -> dict[str, Any]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    # The meta device has no memory, and every tensor of it is at address 0, which is aligned.
    return {
        "q": empty(batch, heads, q_len, 64),
        "k": empty(batch, heads, kv_len, 64),
        "v": empty(batch, heads, kv_len, 64),
        "limit": 5,
        "doc": torch.empty(batch, kv_len, dtype=torch.int64, device="meta"),
        "rel": torch.empty(
            heads, q_len, 8 * max(1, -(-kv_len // 8)), dtype=torch.bfloat16, device="meta"
        )[..., :kv_len],
        "sink": torch.empty(heads, device="meta"),
        "kv_lens": torch.empty(batch, dtype=torch.int32, device="meta"),
        "out": empty(batch, heads, q_len, 64),
        "lse": torch.empty(batch, heads, q_len, device="meta"),
        **changed,
    }


def test_twenty_lengths_in_one_bucket(loaded: tuple[Plan, ModuleType]) -> None:
    lengths = [*range(1025, 1042), 1536, 1600, 2048]
    assert len(lengths) == 20
    assert len({bucket_of(n, n) for n in lengths}) == 1
    assert len(variants(loaded, [call(n, n) for n in lengths])) == 1


def test_batches_heads_and_scalars(loaded: tuple[Plan, ModuleType]) -> None:
    calls = [
        call(100, 300, batch=batch, heads=heads, limit=limit)
        for batch, heads, limit in [
            (1, 1, 1),
            (2, 16, 0),
            (16, 1, 16),
            (70_000, 3, -1),
            (3, 40, 2**30),
        ]
    ]
    assert len(variants(loaded, calls)) == 1


def test_no_more_variants_than_schedules(loaded: tuple[Plan, ModuleType]) -> None:
    plan, _ = loaded
    q_lens = [1, *(n + d for n in Q_LEN_LIMITS for d in (0, 1)), 1000, 8192]
    kv_lens = [0, 1, *(n + d for n in KV_LEN_LIMITS for d in (0, 1)), 100_000]
    calls = [call(q, k) for q in q_lens for k in kv_lens]
    schedules = {schedule for _, schedule in plan.choices}
    assert len(variants(loaded, calls)) == len(schedules)


def strided(shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")


ODD_KEYS = {
    "odd rows": strided((1, 1, 300, 64), (1, 1, 65, 1)),
    "element strides": strided((1, 1, 300, 64), (1, 1, 128, 2)),
    "transposed": strided((1, 1, 300, 64), (1, 1, 1, 300)),
    "offset": strided((1, 1, 301 * 64 + 1, 1), (1, 1, 1, 1)).as_strided(
        (1, 1, 300, 64), (19200, 19200, 64, 1), 1
    ),
    "rows 2**31 elements apart": strided((1, 1, 300, 64), (2**40, 1, 2**31, 1)),
    "huge and odd": strided((1, 1, 300, 64), (2**33 + 1, 1, 2**31 + 1, 1)),
}


def test_two_variants_by_alignment(loaded: tuple[Plan, ModuleType]) -> None:
    aligned = [
        call(100, 300),
        call(100, 300, k=strided((1, 1, 300, 64), (2**40, 2**35, 2**20 + 8, 1))),
        call(100, 300, k=strided((1, 1, 300, 64), (0, 0, 0, 1))),
        call(100, 300, k=strided((1, 1, 300, 64), (16, 24, 64 * 8, 1))),
    ]
    assert len(variants(loaded, aligned)) == 1
    odd = [call(100, 300, k=keys) for keys in ODD_KEYS.values()]
    odd += [call(100, 300, doc=torch.empty(1, 600, dtype=torch.int64, device="meta")[:, ::2])]
    both = variants(loaded, [*aligned, *odd])
    assert len(both) == 2


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    attention = compile_spec(SPEC)

    def run(q_len: int, kv_len: int) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        wide = -(-kv_len // 8) * 8
        attention(
            draw(2, 2, q_len, 64),
            draw(2, 2, kv_len, 64),
            draw(2, 2, kv_len, 64),
            limit=kv_len,
            doc=torch.zeros(2, kv_len, dtype=torch.int64, device=device),
            rel=draw(2, q_len, wide)[..., :kv_len],
            sink=torch.zeros(2, device=device),
            kv_lens=torch.full((2,), kv_len, dtype=torch.int32, device=device),
        )

    def compiled() -> int:
        loaded = attention._loaded[device]
        kernels = {id(kernel): kernel for _, kernel, _ in loaded.launches.values()}
        return sum(len(kernel.device_caches[device.index][0]) for kernel in kernels.values())  # type: ignore[attr-defined]

    for length in [*range(1025, 1042), 1536, 1600, 2048]:
        run(length, length)
    assert compiled() == 1
    for q_len in (1, 16, 17, 32, 33, 64, 65, 500):
        for kv_len in (1, *(n + d for n in KV_LEN_LIMITS[:8] for d in (0, 1))):
            run(q_len, kv_len)
    schedules = {schedule for _, schedule in attention._loaded[device].plan.choices}
    assert compiled() <= len(schedules)
