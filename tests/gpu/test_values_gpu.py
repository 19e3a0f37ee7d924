"""Random calls on the GPU against the oracle, and the conformance cases that are about hardware."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner
from property.drawn import Call, Drawn, built, judge, kernel_of, verdict
from property.kept import KEPT
from property.strategies_calls import calls

from flashgen.compiler.choose import compile as compile_spec
from flashgen.errors import FlashgenError
from flashgen.runtime.interpret import check_interpreter
from flashgen.spec.model import AttentionSpec

EXAMPLES = int(os.environ.get("FLASHGEN_PROPERTY_EXAMPLES", "60"))
SEED = int(os.environ.get("FLASHGEN_PROPERTY_SEED", "0"))
LENGTHS = st.one_of(st.integers(1, 1000), st.sampled_from((16, 64, 128, 255, 256, 257, 512, 1000)))


@pytest.fixture(scope="module", autouse=True)
def _no_mutations() -> Iterator[None]:
    """As in tests/property: every example costs a compile, so each had better be a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConjectureRunner, "generate_mutations_from", lambda _runner, _data: None)
        yield


@st.composite
def large_calls(draw: st.DrawFn) -> Drawn:
    """The CPU's specs with lengths up to 1000, any head dim, through the default schedules."""
    drawn = draw(calls())
    _, q_heads, kv_heads, q_len, _ = drawn.sizes
    spec = dict(drawn.spec)
    head_dim = draw(st.integers(1, 256))
    spec["head_dim"] = head_dim
    if draw(st.integers(0, 4)) == 0:
        spec["head_dim"] = {"qk": head_dim, "v": draw(st.integers(1, 256))}
    q_len = draw(st.one_of(LENGTHS, st.just(q_len)))
    sizes = (draw(st.integers(1, 3)), q_heads, kv_heads, q_len, draw(LENGTHS))
    return replace(drawn, spec=spec, sizes=sizes, tile=None)


@seed(SEED)
@settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(large_calls())
def test_random_calls(drawn: Drawn) -> None:
    comparison = verdict(drawn, "cuda")
    assert comparison.ok, f"{comparison}\n{drawn!r}"


@pytest.mark.parametrize("drawn", KEPT, ids=lambda drawn: str(drawn.seed))
def test_kept_calls(drawn: Drawn) -> None:
    comparison = verdict(drawn, "cuda")
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32"])
def test_every_seventh_length_up_to_a_thousand(dtype: str) -> None:
    """One callable for all of them, through the kernels of all shape buckets."""
    spec = {"head_dim": 64, "dtype": dtype, "mask": ["causal"]}
    kernel = kernel_of(AttentionSpec(**spec))
    for length in range(1, 1001, 7):
        call = built(
            Drawn(spec=spec, sizes=(1, 2, 1, length, 1 + length * 3 % 1000), seed=length), "cuda"
        )
        comparison = _judged(kernel, call)
        assert comparison.ok, f"{length}: {comparison}"


def _judged(kernel: Any, call: Call) -> Any:
    from property.drawn import held_against_oracle

    return held_against_oracle(
        call, *kernel(call.q, call.k, call.v, **call.inputs, **call.reserved)
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("head_dim", [1, 16, 31, 72, 80, 96, 100, 128, 160, 192, 255, 256])
def test_d1_d9_head_dims(head_dim: int, dtype: str) -> None:
    spec = {"head_dim": head_dim, "dtype": dtype, "mask": ["causal"]}
    comparison = verdict(Drawn(spec=spec, sizes=(1, 2, 2, 300, 300)), "cuda")
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize(
    ("head_dim", "queries"), [(192, 256), (512, 256), ({"qk": 192, "v": 128}, 256)]
)
def test_d7_d9_wide_heads(head_dim: Any, queries: int) -> None:
    for dtype in ("bf16", "fp16"):
        spec = {"head_dim": head_dim, "dtype": dtype}
        comparison = verdict(Drawn(spec=spec, sizes=(1, 2, 2, queries, queries)), "cuda")
        assert comparison.ok, str(comparison)


def test_d3_x1_runs_are_bit_equal() -> None:
    """Head dim 72 in layout bshd, 30 runs, the allocator full of NaN before each."""
    kernel = compile_spec(AttentionSpec(head_dim=72, dtype="fp16", layout="bshd"), return_lse=True)
    q, k, v = (torch.randn(1, 512, 16, 72, device="cuda").half() for _ in range(3))
    first, first_lse = kernel(q, k, v)
    for _ in range(30):
        poison = [torch.full_like(first, torch.nan), torch.full_like(first_lse, torch.nan)]
        del poison
        out, lse = kernel(q, k, v)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)
    assert bool(torch.isfinite(first).all())


def test_n1_huge_bf16_inputs() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device="cuda")
    out, _ = kernel_of(AttentionSpec(head_dim=64, dtype="bf16"))(x, x, x)
    assert torch.equal(out, x)
    x = torch.full((1, 1, 700, 64), 133120.0, dtype=torch.bfloat16, device="cuda")
    out, _ = kernel_of(AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"]))(x, x, x)
    assert torch.equal(out, x)


CAUSAL = {"head_dim": 64, "mask": ["causal"]}
LATE = {"sink": "per_head", "mask": [{"expr": "row >= 14 and k >= 300"}]}


@pytest.mark.parametrize(
    ("fields", "sizes", "magnitude"),
    [
        ({**CAUSAL, "score": [{"expr": "s + (q - k)"}]}, (1, 1, 1, 1025, 1025), 1.0),
        ({"head_dim": 128, "mask": ["causal"]}, (1, 4, 4, 1024, 1024), 3.0),
        ({"head_dim": 64, "score": [{"softcap": 15.0}]}, (1, 2, 2, 128, 128), 10.0),
        ({"head_dim": 16}, (1, 12, 2, 1, 4096), 1.0),
        ({"head_dim": 32, "scale": 1 / 32}, (1, 1, 1, 1, 257), 1.0),
        ({"head_dim": 256, "mask": ["causal"]}, (2, 16, 2, 300, 300), 1.0),
        ({"head_dim": 512, **LATE}, (1, 2, 1, 40, 700), 1.0),
    ],
    ids=["t1", "n5", "n3", "g1", "t11", "g6", "m2"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_points_of_the_cases(
    fields: dict[str, Any], sizes: Any, magnitude: float, dtype: str
) -> None:
    drawn = Drawn(spec={**fields, "dtype": dtype}, sizes=sizes, magnitude=magnitude)
    comparison = verdict(drawn, "cuda")
    assert comparison.ok, str(comparison)


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_u1_interpreter_and_gpu_agree(dtype: str) -> None:
    try:
        check_interpreter()
    except FlashgenError as error:
        pytest.skip(str(error))
    spec = {"head_dim": 40, "dtype": dtype, "mask": ["causal"], "score": [{"softcap": 10.0}]}
    drawn = Drawn(spec=spec, sizes=(1, 2, 1, 33, 70))
    for device in ("cpu", "cuda"):
        comparison = judge(built(drawn, device))
        assert comparison.ok, f"{device}: {comparison}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_s6_masked_and_unused_keys_hold_anything(value: float) -> None:
    for fields in (
        {"mask": ["causal"]},
        {"mask": [{"window": {"left": 40}}]},
        {"kv_lens": "per_batch"},
    ):
        spec = AttentionSpec(head_dim=64, dtype="bf16", align="top_left", **fields)
        q, k, v = (torch.randn(2, 2, 300, 64, device="cuda").bfloat16() for _ in range(3))
        lengths = None
        v[:, :, 250] = value
        k[:, :, 240] = value
        if spec.kv_lens != "none":
            lengths = torch.tensor([200, 255], device="cuda")
        comparison = judge(Call(spec, q, k, v, kv_lens=lengths))
        assert comparison.ok, f"{fields}: {comparison}"
