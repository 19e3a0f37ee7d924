"""The callable: which tensors it takes, which it names as wrong, and empty calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen import AttentionSpec, reference
from flashgen.compiler import choose
from flashgen.errors import FlashgenWarning, NotServedError, ScheduleError, TensorError
from flashgen.runtime.launch import Attention
from flashgen.schedule.model import Schedule

TARGET = "nvidia-h200"
TILE = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
SPEC = AttentionSpec(
    name="checked",
    head_dim=16,
    dtype="bf16",
    heads={"group": 2},
    mask=["causal", {"same": "doc"}, {"expr": "k < limit"}],
    inputs={
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
        "limit": {"shape": [], "dtype": "int32"},
    },
    sink="per_head",
    kv_lens="per_batch",
)
ANY = AttentionSpec(name="any", head_dim={"qk": 16, "v": 24}, dtype="fp16")


def compiled(spec: AttentionSpec, **options: Any) -> Attention:
    return flashgen.compile(spec, target=TARGET, schedule=TILE, return_lse=True, **options)


def arguments(batch: int = 2, q_len: int = 5, kv_len: int = 7) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(batch, 4, q_len, 16).bfloat16(),
        "k": torch.randn(batch, 2, kv_len, 16).bfloat16(),
        "v": torch.randn(batch, 2, kv_len, 16).bfloat16(),
        "doc": torch.zeros(batch, kv_len, dtype=torch.int32),
        "limit": 6,
        "sink": torch.tensor([0.5, 100.0, -100.0, 0.0]),
        "kv_lens": torch.full((batch,), kv_len, dtype=torch.int32),
    }


def q_like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# Name of the golden text -> what is changed in a call that fits; None takes the argument away.
WRONG: dict[str, dict[str, Any]] = {
    "q-no-tensor": {"q": [[1.0]]},
    "q-rank": {"q": q_like(2, 5, 16)},
    "q-dtype": {"q": q_like(2, 4, 5, 16, dtype=torch.float32)},
    "q-head-dim": {"q": q_like(2, 4, 5, 32)},
    "k-batch": {"k": q_like(3, 2, 7, 16)},
    "k-head-dim": {"k": q_like(2, 2, 7, 8)},
    "k-group": {"k": q_like(2, 4, 7, 16), "v": q_like(2, 4, 7, 16)},
    "k-device": {"k": q_like(2, 2, 7, 16).to("meta")},
    "v-length": {"v": q_like(2, 2, 6, 16)},
    "v-heads": {"v": q_like(2, 1, 7, 16)},
    "input-missing": {"doc": None},
    "input-unknown": {"docs": torch.zeros(2, 7)},
    "input-shape": {"doc": torch.zeros(2, 5, dtype=torch.int32)},
    "input-dtype": {"doc": torch.zeros(2, 7)},
    "input-no-tensor": {"doc": [0, 1]},
    "scalar-float": {"limit": 2.5},
    "scalar-boolean": {"limit": True},
    "scalar-tensor": {"limit": torch.zeros(2, dtype=torch.int32)},
    "sink-shape": {"sink": torch.zeros(2)},
    "sink-dtype": {"sink": torch.zeros(4, dtype=torch.int32)},
    "kv-lens-dtype": {"kv_lens": torch.zeros(2)},
    "kv-lens-missing": {"kv_lens": None},
    "gradient": {"q": q_like(2, 4, 5, 16).requires_grad_()},
    "gradient-of-an-input": {"sink": torch.zeros(4).requires_grad_()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str, golden: Callable[[str, str], None]) -> None:
    given = {key: value for key, value in (arguments() | WRONG[name]).items() if value is not None}
    with pytest.raises(TensorError) as found:
        compiled(SPEC)(**given)
    golden(f"errors/tensor-{name}.txt", str(found.value))
    assert found.value.exit_code == 9


@pytest.mark.parametrize(
    ("name", "heads"), [("heads-divide", (33, 2)), ("heads-few", (3, 2)), ("heads-none", (4, 0))]
)
def test_heads_that_do_not_divide(
    name: str, heads: tuple[int, int], golden: Callable[[str, str], None]
) -> None:
    q = q_like(1, heads[0], 3, 16, dtype=torch.float16)
    k, v = (q_like(1, heads[1], 4, dim, dtype=torch.float16) for dim in (16, 24))
    with pytest.raises(ValueError, match="heads") as found:
        compiled(ANY)(q, k, v)
    golden(f"errors/tensor-{name}.txt", str(found.value))


def test_nothing_is_generated_for_a_wrong_call() -> None:
    attention = compiled(SPEC)
    with pytest.raises(TensorError):
        attention(**arguments() | {"limit": 0.5})
    assert not attention._loaded


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_gradients_are_taken_as_none_under_no_grad() -> None:
    given = arguments() | {"q": arguments()["q"].requires_grad_()}
    with torch.no_grad():
        out, _ = compiled(SPEC)(**given)
    assert not out.requires_grad


def judge(spec: AttentionSpec, result: Any, given: dict[str, Any]) -> None:
    q, k, v = (given[name] for name in "qkv")
    inputs = {i.name: given[i.name] for i in spec.inputs}
    more = {name: given[name] for name in ("sink", "kv_lens") if name in given}
    exact = reference.attention(spec, q, k, v, inputs=inputs, **more)
    usual = reference.eager(spec, q, k, v, inputs=inputs, **more)
    verdict = reference.compare(
        *result, *exact, usual[0], eager_lse=usual[1], sink=given.get("sink"), layout=spec.layout
    )
    assert verdict.ok, str(verdict)


def test_a_call_that_fits_and_the_one_warning() -> None:
    given = arguments()
    attention = compiled(SPEC)
    with pytest.warns(FlashgenWarning, match="q is on the CPU") as said:
        result = attention(**given)
        attention(**given)
    assert len(said) == 1
    assert result[0].dtype == torch.bfloat16
    assert result[0].is_contiguous()
    assert result[1].dtype == torch.float32
    judge(SPEC, result, given)


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
class TestQuiet:
    """Calls that are interpreted, and not about that."""

    def test_lengths_beyond_the_cache_count_as_full(self) -> None:
        given = arguments()
        full = compiled(SPEC)(**given)
        more = compiled(SPEC)(**given | {"kv_lens": torch.tensor([99, 7])})
        assert torch.equal(full[0], more[0])

    def test_scalars_of_every_kind(self) -> None:
        given = arguments()
        for limit in (6, torch.tensor(6, dtype=torch.int32)):
            judge(SPEC, compiled(SPEC)(**given | {"limit": limit}), given)

    def test_one_tensor_for_all(self) -> None:
        spec = AttentionSpec(name="self", head_dim=16, dtype="fp16", heads={"group": 1})
        x = torch.randn(1, 2, 9, 16).half()
        judge(spec, compiled(spec)(x, x, x), {"q": x, "k": x, "v": x})

    def test_without_lse(self) -> None:
        given = arguments()
        both = compiled(SPEC)(**given)
        alone = flashgen.compile(SPEC, target=TARGET, schedule=TILE)(**given)
        assert torch.equal(alone, both[0])

    def test_the_other_layout_and_views(self) -> None:
        spec = AttentionSpec(name="bshd", head_dim=16, dtype="fp16", layout="bshd", mask="causal")
        fused = torch.randn(2, 9, 3, 4, 16).half()
        q, k, v = fused.unbind(2)
        result = compiled(spec)(q, k, v)
        assert result[0].shape == (2, 9, 4, 16)
        assert result[0].is_contiguous()
        judge(spec, result, {"q": q, "k": k, "v": v})

    @pytest.mark.parametrize(
        ("batch", "heads", "q_len", "kv_len"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)]
    )
    def test_empty_results(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        q = torch.randn(batch, heads, q_len, 16).half()
        k, v = (torch.randn(batch, heads, kv_len, dim).half() for dim in (16, 24))
        out, lse = compiled(ANY)(q, k, v)
        assert out.shape == (batch, heads, q_len, 24)
        assert lse.shape == (batch, heads, q_len)

    @pytest.mark.parametrize("schedule", [None, TILE])
    def test_no_keys(self, schedule: Schedule | None) -> None:
        attention = flashgen.compile(ANY, target=TARGET, schedule=schedule, return_lse=True)
        k, v = (torch.randn(2, 1, 0, dim).half() for dim in (16, 24))
        out, lse = attention(torch.randn(2, 2, 3, 16).half(), k, v)
        assert bool((out == 0).all())
        assert bool((lse == -math.inf).all())

    def test_no_keys_with_a_sink(self) -> None:
        given = arguments(kv_len=0)
        out, lse = compiled(SPEC)(**given)
        assert bool((out == 0).all())
        assert torch.equal(lse, given["sink"].view(1, 4, 1).expand(2, 4, 5))

    def test_threads_share_one_module(self) -> None:
        given = arguments()
        attention = compiled(SPEC)
        results: list[torch.Tensor] = []
        threads = [
            threading.Thread(target=lambda: results.append(attention(**given)[0])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(attention._loaded) == 1
        assert len(results) == 4
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_a_schedule_that_does_not_fit() -> None:
    large = Schedule(block_m=256, block_n=256, num_warps=8, num_stages=4)
    spec = AttentionSpec(name="large", head_dim=128, dtype="fp16")
    q = torch.zeros(1, 1, 2, 128).half()
    attention = flashgen.compile(spec, target=TARGET, schedule=large)
    with pytest.raises(ScheduleError, match="smem_bytes"):
        attention(q, q, q)


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@pytest.mark.parametrize(
    "name", ["any", "range", "torch", "tl", "run", "q", "doc", "attention_fwd"]
)
def test_a_name_that_means_something_in_the_module(name: str) -> None:
    spec = AttentionSpec(
        name=name,
        head_dim=16,
        dtype="bf16",
        mask=["causal", {"same": "doc"}],
        inputs={"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
    )
    x = torch.randn(1, 1, 4, 16).bfloat16()
    given = {"q": x, "k": x, "v": x, "doc": torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)}
    attention = compiled(spec)
    judge(spec, attention(**given), given)
    module = attention._loaded[x.device].module
    assert callable(getattr(module, f"attention_{name}"))


def test_what_is_not_served_is_refused_before_any_call() -> None:
    for fields in (
        {"dropout": 0.1},
        {"layout": "packed"},
        {"kv_cache": {"paged": {"page_size": 16}}},
        {"dtype": "fp8_e4m3"},
    ):
        spec = AttentionSpec(**{"head_dim": 64, "dtype": "bf16", **fields})
        with pytest.raises(NotServedError) as found:
            flashgen.compile(spec)
        assert found.value.features == choose.unserved_features(spec)
