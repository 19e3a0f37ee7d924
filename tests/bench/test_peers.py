"""Every contestant computes the same function: FlexAttention's mask and score, and the spec's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_clock import FakeClock

from flashgen import reference
from flashgen.bench import peers
from flashgen.bench.accuracy import Oracle, fault
from flashgen.bench.cases import FlexCase, flex_cases
from flashgen.bench.contest import contest
from flashgen.bench.flex_suite import draw_sets, measure_case
from flashgen.bench.peers import Contestant, mask_mod, plain_contestants, variant_contestants
from flashgen.spec.parts import Shape
from flashgen.tune.oracle import slabs
from flashgen.tune.tensors import Arguments

CPU = torch.device("cpu")
LENGTH = 96


def small(case: FlexCase) -> FlexCase:
    """The same variant with two rows of 96 tokens (documents fill one) and two heads."""
    return replace(
        case,
        head_dim=32,
        hidden=64,
        length=LENGTH,
        tokens=LENGTH if case.documents else 2 * LENGTH,
        window=None if case.window is None else case.window // 64,
        prefix=(19, 53) if case.prefix else (),
        documents=(31, 2, 40, 23) if case.documents else (),
        softcap=None if case.softcap is None else 1.5,  # low enough to bend these scores
    )


KINDS = {}
for full_size in flex_cases():
    kind = f"{full_size.group}{full_size.window or ''}-{'causal' if full_size.causal else 'full'}"
    KINDS.setdefault(kind, small(full_size))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs uncompiled on the CPU; what it computes is the same."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_every_group_is_here() -> None:
    assert {case.group for case in KINDS.values()} == {
        "plain", "window", "prefix", "documents", "softcap", "alibi",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_flex_mask_is_that_of_the_spec(kind: str) -> None:
    case = KINDS[kind]
    (arguments,) = draw_sets(case, 1, CPU)
    shape = case.shape
    wanted = reference.mask(
        case.spec,
        batch=shape.batch,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        inputs=arguments.inputs,
    )
    found = mask_mod(case, arguments)
    places = torch.arange(LENGTH)
    for batch in range(shape.batch):
        if found is None:
            assert bool(wanted[batch].all())
            continue
        seen = found(torch.tensor(batch), torch.tensor(0), places[:, None], places[None, :])
        assert torch.equal(seen.expand(LENGTH, LENGTH), wanted[batch, 0])
        assert not bool(seen.all())


@pytest.mark.parametrize("kind", KINDS)
def test_contestants_agree_with_the_oracle(kind: str) -> None:
    case = KINDS[kind]
    (arguments,) = draw_sets(case, 1, CPU)
    arguments = in_fp32(arguments)
    spec = case.spec.replace(dtype="fp32")
    oracle = Oracle(spec, case.shape, arguments)
    make = plain_contestants if case.group == "plain" else variant_contestants
    judged = []
    for contestant in make(case, arguments):
        if contestant.name.startswith("flashgen") or contestant.name == "sdpa_cudnn":
            continue  # the kernels' tests; a GPU only
        if contestant.name == "sdpa_flash":
            continue  # has a test of its own
        accuracy = oracle.judge(contestant.build()(arguments), poisoned=False)
        assert accuracy.finite
        assert accuracy.relative_error < 1e-5, contestant.name
        judged.append(contestant.name)
    if case.group == "plain":
        assert judged == ["flex"]
    else:
        assert judged == ["flex", "flex_call_eager_mask", "flex_call_compiled_mask"]


def in_fp32(arguments: Arguments) -> Arguments:
    return replace(arguments, q=arguments.q.float(), k=arguments.k.float(), v=arguments.v.float())


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_agrees_with_the_oracle(causal: bool) -> None:
    case = small(FlexCase(group="plain", head_dim=64, length=512, causal=causal))
    (arguments,) = draw_sets(case, 1, CPU)
    arguments = in_fp32(arguments)
    oracle = Oracle(case.spec.replace(dtype="fp32"), case.shape, arguments)
    attend = peers.sdpa(peers.SDPBackend.MATH, causal=causal)
    assert oracle.judge(attend(arguments), poisoned=False).relative_error < 1e-5


def test_a_whole_case_on_the_cpu_with_the_interpreter() -> None:
    case = replace(KINDS["softcap-causal"], tokens=32, length=32, hidden=32)
    record = measure_case(case, FakeClock(default=25.0), CPU, l2_bytes=1, rounds=2)
    assert record.id == "softcap/d32/n32/causal"
    assert record.visible_pairs == 32 * 33 // 2
    assert [result.name for result in record.results] == [
        "flashgen", "flex", "flashgen_call", "flex_call_eager_mask", "flex_call_compiled_mask",
    ]  # fmt: skip
    for result in record.results:
        assert result.error is None
        assert result.accuracy is not None
        assert result.accuracy.max_error <= result.accuracy.bound
    assert record.median_ms("flashgen") == pytest.approx(25.0)


def test_wrong_and_failing_contestants_are_results_and_are_not_timed() -> None:
    case = replace(KINDS["plain-causal"], tokens=32, length=32, hidden=32)
    (arguments,) = draw_sets(case, 1, CPU)
    oracle = Oracle(case.spec, case.shape, arguments)
    flex = peers.Flex(case, arguments).kernel
    attempts: list[str] = []

    def ignores_the_mask(a: Arguments) -> torch.Tensor:
        attempts.append("mask")
        return torch.nn.functional.scaled_dot_product_attention(a.q, a.k, a.v)

    def forgets_a_row(a: Arguments) -> torch.Tensor:
        out = flex()(a).clone()
        out[:, :, -1] = float("nan")
        return out

    def refuse() -> peers.Attend:
        raise ValueError("head_dim 32 is not for me")

    results = contest(
        [
            Contestant("right", flex),
            Contestant("wrong", lambda: ignores_the_mask),
            Contestant("nan", lambda: forgets_a_row),
            Contestant("refuses", refuse),
        ],
        [arguments],
        oracle,
        FakeClock(default=25.0),
        rounds=1,
    )
    by_name = {result.name: result for result in results}
    assert by_name["right"].ms is not None
    assert str(by_name["wrong"].error).startswith("wrong: relative error")
    assert by_name["nan"].error == "wrong: the output holds NaN or infinity"
    assert by_name["refuses"].error == "ValueError: head_dim 32 is not for me"
    assert attempts == ["mask", "mask"]  # built and judged, never timed


def test_a_contestant_that_fails_later_keeps_the_others_numbers() -> None:
    case = replace(KINDS["plain-causal"], tokens=32, length=32, hidden=32)
    (arguments,) = draw_sets(case, 1, CPU)
    oracle = Oracle(case.spec, case.shape, arguments)
    attend = peers.Flex(case, arguments).kernel()
    calls = 0

    def tires(a: Arguments) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("out of breath")
        return attend(a)

    results = contest(
        [Contestant("tires", lambda: tires), Contestant("lasts", lambda: attend)],
        [arguments],
        oracle,
        FakeClock(default=25.0),
        rounds=2,
    )
    assert results[0].error == "RuntimeError: out of breath"
    assert results[0].ms is None
    assert results[1].ms is not None


def test_slabs_cover_both_ends_and_stay_within_the_budget() -> None:
    rows = slabs(Shape(1, 24, 4, 262144, 262144))
    assert rows[0].start == 0
    assert rows[-1].stop == 262144
    assert sum(map(len, rows)) * 24 * 262144 <= 5e8
    assert slabs(Shape(1, 1, 1, 1, 10**6)) == [range(1)]


def test_fault_needs_a_number() -> None:
    case = replace(KINDS["plain-full"], tokens=32, length=32, hidden=32)
    (arguments,) = draw_sets(case, 1, CPU)
    oracle = Oracle(case.spec, case.shape, arguments)
    exact = reference.attention(case.spec, arguments.q, arguments.k, arguments.v)[0]
    assert fault(oracle.judge(exact.to(torch.bfloat16), poisoned=False)) is None
    assert fault(oracle.judge(exact * 1.02, poisoned=False)) is not None
