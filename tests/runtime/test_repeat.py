"""Repeated calls: the launch is the one that the first call made, for other tensors.

A kernel of Triton's is replaced by one that counts and lets the interpreter compute, so that a
wrong argument of a repeated launch is a wrong result.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel

from flashgen import compile as compile_spec
from flashgen import freeze
from flashgen.compiler.choose import plan
from flashgen.errors import CaptureError, FlashgenError, FrozenError, TensorError
from flashgen.runtime import launch as launch_module
from flashgen.runtime.frozen import is_capturing, not_compiling, refuse_if_frozen, thaw
from flashgen.runtime.interpret import check_interpreter, interpreting
from flashgen.runtime.launch import Attention, Loaded
from flashgen.runtime.load import load_module
from flashgen.runtime.repeat import signature
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

TARGET = get_target("nvidia-h200")
TILE = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=2)
PLAIN = AttentionSpec(name="plain", head_dim=16, dtype="fp16", mask=["causal"])


class Compiled(CompiledKernel):
    """A compiled kernel whose launch is counted and interpreted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel_ = kernel
        self.module = None
        self.calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert len(grid) == 3

        def launch(*values: Any) -> None:
            self.calls += 1
            with interpreting():
                self.kernel_[grid](**dict(zip(self.kernel_.arg_names, values, strict=True)))

        return launch


class Kernel:
    """Triton's function: `kernel[grid](…)` launches and returns what it compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel_ = kernel
        self.arg_names = kernel.arg_names
        self.compiled = Compiled(kernel)
        self.calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*positional: Any, **named: Any) -> Compiled:
            self.calls += 1
            known = {name: value for name, value in named.items() if name in self.arg_names}
            with interpreting():
                self.kernel_[grid](*positional, **known)
            return self.compiled

        return launch


class OnFakeGpu(Attention):
    """An attention that takes the CPU for a GPU."""

    kernel: Kernel

    @staticmethod
    def _on_gpu(device: torch.device) -> bool:
        return True

    def _load(self, device: torch.device) -> Loaded:
        from flashgen.codegen.options import kernel_kinds, options

        check_interpreter()
        found, path = self._plan_for(device)
        module = load_module(path, interpreted=True)
        entries = dict(found.entries)
        self.kernel = Kernel(getattr(module, entries[kernel_kinds(found.choices[0][1])[0]]))
        return Loaded(found, module, {b: (s, self.kernel, options(s)) for b, s in found.choices})


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's number
    with torch.no_grad():
        yield


def on_fake_gpu(spec: AttentionSpec, *, return_lse: bool = False) -> OnFakeGpu:
    made = plan(spec, TARGET, schedule=TILE, has_lse=return_lse)
    return OnFakeGpu(spec, lambda _: made, return_lse=return_lse)


def counts(attention: OnFakeGpu) -> tuple[int, int]:
    """Launches by Triton's function, and of the compiled kernel itself."""
    return attention.kernel.calls, attention.kernel.compiled.calls


def qkv(
    seed: int, *, q_len: int = 5, kv_len: int = 21, kv_heads: int = 2, layout: str = "bhsd"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(2, 4, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 16)]
    if layout == "bshd":
        shapes = [(b, n, h, d) for b, h, n, d in shapes]
    q, k, v = (torch.randn(shape).half() for shape in shapes)
    return q, k, v


def others_of(spec: AttentionSpec, seed: int) -> dict[str, Any]:
    """Arguments by what the tests' specs declare."""
    torch.manual_seed(100 + seed)
    known: dict[str, Any] = {
        "doc": torch.randint(0, 2, (2, 21), dtype=torch.int32),
        "rel": torch.randn(1, 4, 5, 21).half(),
        "limit": 3 + seed,
        "gain": 0.5 + seed,
        "sink": torch.randn(4),
        "kv_lens": torch.tensor([20 - seed, 7], dtype=torch.int32),
        "q_len": torch.randn(4),
    }
    names = [declared.name for declared in spec.inputs]
    names += ["sink"] if spec.sink == "per_head" else []
    names += ["kv_lens"] if spec.kv_lens == "per_batch" else []
    return {name: known[name] for name in names}


SPECS = {
    "plain": PLAIN,
    "bshd": PLAIN.replace(layout="bshd"),
    "group": PLAIN.replace(heads={"group": 2}),
    "documents": PLAIN.replace(
        mask=["causal", {"same": "doc"}],
        inputs={"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
    ),
    "numbers": PLAIN.replace(
        mask=[{"expr": "k < limit or k <= q"}],
        score=[{"expr": "s * gain"}],
        inputs={
            "limit": {"shape": [], "dtype": "int32"},
            "gain": {"shape": [], "dtype": "fp32"},
        },
    ),
    "sink": PLAIN.replace(sink="per_head"),
    "lengths": PLAIN.replace(kv_lens="per_batch"),
    "bias": PLAIN.replace(
        score=[{"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "fp16"}},
    ),
}


@pytest.mark.parametrize(
    ("name", "return_lse"),
    [*((name, False) for name in SPECS), ("plain", True), ("bshd", True), ("sink", True)],
)
def test_a_repeated_call_is_launched_at_once_and_gives_the_same(
    name: str, return_lse: bool
) -> None:
    spec = SPECS[name].replace(name=name)
    attention = on_fake_gpu(spec, return_lse=return_lse)
    plain = compile_spec(spec, target=TARGET, schedule=TILE, return_lse=return_lse)
    for seed in range(2):
        tensors, others = qkv(seed, layout=spec.layout), others_of(spec, seed)
        got, wanted = attention(*tensors, **others), plain(*tensors, **others)
        for one, other in zip(
            got if return_lse else [got], wanted if return_lse else [wanted], strict=True
        ):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert counts(attention) == (1, 1)


def test_q_and_k_that_are_one_tensor_at_first_need_not_stay_one() -> None:
    attention, plain = on_fake_gpu(PLAIN), compile_spec(PLAIN, target=TARGET, schedule=TILE)
    q, k, v = qkv(0, q_len=21, kv_heads=4)
    attention(q, q, q)
    assert torch.equal(attention(q, k, v), plain(q, k, v))
    assert counts(attention) == (1, 1)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1).half()[1:].view(tensor.shape).copy_(tensor)


CHANGES: dict[str, Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = {
    "longer": lambda t: qkv(1, q_len=6),
    "more keys": lambda t: qkv(1, kv_len=22),
    "fewer heads": lambda t: qkv(1, kv_heads=1),
    "strides": lambda t: (t[0].transpose(1, 2).contiguous().transpose(1, 2), *t[1:]),
    "strides of v": lambda t: (*t[:2], t[2].transpose(1, 2).contiguous().transpose(1, 2)),
    "alignment": lambda t: (t[0], unaligned(t[1]), t[2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_is_a_first_call_again(name: str) -> None:
    attention, plain = on_fake_gpu(PLAIN), compile_spec(PLAIN, target=TARGET, schedule=TILE)
    attention(*qkv(0))
    changed = CHANGES[name](qkv(1))
    assert torch.equal(attention(*changed), plain(*changed))
    assert counts(attention) == (2, 0)
    assert torch.equal(attention(*changed), plain(*changed))
    assert counts(attention) == (2, 1)


def test_everything_is_still_checked() -> None:
    spec = SPECS["numbers"]
    attention = on_fake_gpu(spec)
    q, k, v = qkv(0)
    attention(q, k, v, limit=3, gain=1.0)
    attention(q, k, v, limit=3, gain=1.0)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q.float(), k, v), {"limit": 3, "gain": 1.0}, "q: got float32"),
        ((q, k, v.transpose(1, 2)), {"limit": 3, "gain": 1.0}, "v: got heads"),
        ((q, k, None), {"limit": 3, "gain": 1.0}, "v: got NoneType"),
        ((q, k, v.to_sparse()), {"limit": 3, "gain": 1.0}, "v: got a tensor of layout"),
        ((q, k, v), {"limit": 2**40, "gain": 1.0}, "limit: got 1099511627776"),
        ((q, k, v), {"limit": 2.5, "gain": 1.0}, "limit: got float 2.5"),
        ((q, k, v), {"limit": True, "gain": 1.0}, "limit: got bool True"),
        ((q, k, v), {"limit": 3}, "gain: got nothing"),
        ((q, k, v), {"limit": 3, "gain": 1.0, "more": q}, "more: got an argument"),
        ((q, k, v), {"limit": torch.ones(2), "gain": 1.0}, "limit: got a tensor"),
    ]
    for tensors, others, text in wrong:
        with pytest.raises(TensorError, match=text):
            attention(*tensors, **others)
    with torch.enable_grad(), pytest.raises(TensorError, match="requires grad"):
        attention(q.requires_grad_(), k, v, limit=3, gain=1.0)
    with torch.no_grad():
        attention(q, k, v, limit=3, gain=1.0)
    assert counts(attention) == (1, 2)


def test_tensors_are_not_kept() -> None:
    spec = SPECS["documents"]
    attention = on_fake_gpu(spec, return_lse=True)
    tensors, others = qkv(0), others_of(spec, 0)
    results = attention(*tensors, **others)
    results = attention(*tensors, **others)
    watched = [weakref.ref(each) for each in (*tensors, *others.values(), *results)]
    del tensors, others, results
    gc.collect()
    assert [each() for each in watched] == [None] * len(watched)


def test_what_is_converted_for_each_call_is_not_repeated() -> None:
    spec = SPECS["sink"]
    attention, plain = on_fake_gpu(spec), compile_spec(spec, target=TARGET, schedule=TILE)
    tensors = qkv(0)
    for _ in range(2):
        sink = torch.randn(4).bfloat16()
        assert torch.equal(attention(*tensors, sink=sink), plain(*tensors, sink=sink))
    assert counts(attention) == (2, 0)


def test_nothing_to_compute_is_not_launched() -> None:
    attention = on_fake_gpu(PLAIN)
    q, k, v = qkv(0)
    attention(q, k, v)
    for _ in range(2):
        assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 16)
    assert counts(attention) == (1, 0)


@pytest.mark.slow
def test_threads_share_it() -> None:
    attention, plain = on_fake_gpu(PLAIN), compile_spec(PLAIN, target=TARGET, schedule=TILE)
    calls = [qkv(seed, q_len=5 + seed % 2) for seed in range(12)]
    wanted = [plain(*tensors) for tensors in calls]
    attention(*calls[0])
    with ThreadPoolExecutor(4) as threads, torch.no_grad():
        got = list(threads.map(lambda tensors: _without_grad(attention, tensors), calls))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert sum(counts(attention)) == 13


def _without_grad(attention: Attention, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():  # the mode belongs to the thread
        return attention(*tensors)


def test_lengths_that_grow_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "MAX_KEPT", 3)
    attention = on_fake_gpu(PLAIN)
    for kv_len in range(20, 25):
        attention(*qkv(0, kv_len=kv_len))
        assert len(attention._repeats) <= 3
    attention(*qkv(0, kv_len=24))
    assert counts(attention) == (5, 1)


def test_a_launch_that_is_not_final_is_not_repeated() -> None:
    attention = on_fake_gpu(PLAIN)
    attention._is_final = lambda sizes, device: False  # type: ignore[method-assign]
    attention(*qkv(0))
    attention(*qkv(0))
    assert counts(attention) == (2, 0)


def test_a_signature_tells_scalars_by_their_type_only() -> None:
    q, k, v = qkv(0)
    assert signature(q, k, v, {"limit": 3}) == signature(q, k, v, {"limit": 4})
    assert signature(q, k, v, {"limit": 3}) != signature(q, k, v, {"limit": 3.0})
    assert signature(q, k, v, {"limit": 3}) != signature(q, k, v, {"other": 3})


# ---- frozen, and while a graph is captured


OURS = SimpleNamespace(module="flashgen_generated.plain-0.compiled")
THEIRS = SimpleNamespace(module="torch._inductor")


def test_outside_a_freeze_triton_compiles() -> None:
    before = knobs.runtime.jit_cache_hook
    with not_compiling("compile plain"):
        assert knobs.runtime.jit_cache_hook is before


def test_a_frozen_launch_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **kwargs: asked.append(kwargs["fn"])
    )
    before = knobs.runtime.jit_cache_hook
    try:
        with freeze(), not_compiling("compile plain for cuda:0"):
            hook = knobs.runtime.jit_cache_hook
            assert hook is not None
            assert hook(fn=THEIRS) is None
            with pytest.raises(FrozenError, match="have to compile plain for cuda:0"):
                hook(fn=OURS)
    finally:
        thaw()
    assert asked == [THEIRS]
    assert knobs.runtime.jit_cache_hook is before


def test_while_a_graph_is_captured_nothing_slow_begins(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    assert not is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing()
    with pytest.raises(CaptureError) as error:
        refuse_if_frozen("compile plain for cuda:0, q_len any, kv_len any")
    assert isinstance(error.value, FrozenError)
    assert isinstance(error.value, FlashgenError)
    golden("errors/capture.txt", str(error.value))
    with not_compiling("compile plain"):
        hook = knobs.runtime.jit_cache_hook
        assert hook is not None
        with pytest.raises(CaptureError):
            hook(fn=OURS)


def test_what_is_compiled_is_launched_in_a_capture_too(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = on_fake_gpu(PLAIN)
    attention(*qkv(0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention(*qkv(1))
    attention(*qkv(1, kv_len=22))  # another signature, the same kernel
    assert counts(attention) == (2, 1)
