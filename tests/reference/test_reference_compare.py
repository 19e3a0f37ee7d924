"""The judge: its bound, and that it sees every way in which a result can be wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashgen.reference import attention, compare, eager, error_bound, ulp
from flashgen.spec.model import AttentionSpec

INF = math.inf
NAN = math.nan


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "tf32"])
@pytest.mark.parametrize("value", [1.0, 1.5, 1.999, 2.0, 0.3, 777.0, 1e-3, -5.0])
def test_ulp_is_the_distance_to_the_next_number(name: str, value: float) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
    stored = torch.tensor(abs(value)).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    upper = (stored.view(bits) + 1).view(dtype)
    assert ulp(stored.item(), name) == upper.double().item() - stored.double().item()


def test_ulp_of_zero_is_that_of_the_smallest_normal_number() -> None:
    assert ulp(0.0, "fp32") == 2.0**-149
    assert ulp(0.0, torch.float16) == 2.0**-24


def test_bound_by_hand() -> None:
    exact = torch.tensor([1.0, -3.0], dtype=torch.float64)
    usual = torch.tensor([1.25, -3.0])
    assert error_bound(exact, usual, "bf16") == 2 * 0.25 + 2.0**-6  # bf16 has 2**-6 at 3
    assert error_bound(exact, exact, "fp32") == 2.0**-22
    assert error_bound(exact[:0], usual[:0], "fp16") == 2.0**-24


class Case:
    """Causal; the first two rows see no key, and only the last one sees a value that is NaN."""

    def __init__(self, sink: bool = False, layout: str = "bhsd") -> None:
        self.layout = layout
        self.spec = AttentionSpec(
            head_dim=8,
            dtype="bf16",
            mask="causal",
            layout=layout,
            sink="per_head" if sink else "none",
        )
        generator = torch.Generator().manual_seed(3)
        shapes = [(2, 4, 8, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
        q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        v[:, :, 5] = NAN
        self.sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sink else None
        qkv = [t.transpose(1, 2) if layout == "bshd" else t for t in (q, k, v)]
        self.ref_out, self.ref_lse = attention(self.spec, *qkv, sink=self.sink)
        self.eager_out, self.eager_lse = eager(self.spec, *qkv, sink=self.sink)
        self.out, self.lse = self.eager_out.clone(), self.eager_lse.clone()

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self.layout == "bshd" else tensor

    def judge(self):  # type: ignore[no-untyped-def]
        return compare(
            self.out,
            self.lse,
            self.ref_out,
            self.ref_lse,
            self.eager_out,
            eager_lse=self.eager_lse,
            sink=self.sink,
            layout=self.layout,
        )


@pytest.fixture(params=[(False, "bhsd"), (True, "bhsd"), (False, "bshd"), (True, "bshd")])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_eager_itself_is_right(case: Case) -> None:
    result = case.judge()
    assert result.ok, str(result)
    assert 0 < result.max_error < result.bound
    assert 0 < result.lse_error < result.lse_bound
    assert bool(case.rows(case.ref_out)[0, 0, 7].isnan().all())


def test_an_error_beyond_the_bound(case: Case) -> None:
    bound = case.judge().bound
    case.out = case.ref_out.float()
    case.rows(case.out)[1, 3, 4, 2] += 1.01 * bound
    result = case.judge()
    assert not result.ok
    assert result.max_error == pytest.approx(1.01 * bound, rel=1e-3)
    assert "max error" in str(result)


def test_an_lse_beyond_the_bound(case: Case) -> None:
    case.lse[0, 1, 5] += 1.01 * case.judge().lse_bound + float(case.judge().lse_error)
    assert not case.judge().ok


def test_an_lse_in_base_two(case: Case) -> None:
    case.lse = case.lse * math.log2(math.e)
    assert not case.judge().ok


@pytest.mark.parametrize("value", [NAN, INF])
def test_not_finite_where_the_oracle_is(case: Case, value: float) -> None:
    case.rows(case.out)[0, 0, 3, 0] = value
    result = case.judge()
    assert (result.ok, result.misplaced) == (False, 1)
    assert "1 elements finite on one side only" in str(result)


def test_finite_where_the_oracle_is_not(case: Case) -> None:
    case.rows(case.out)[0, 0, 7, 0] = 0.0
    assert (case.judge().ok, case.judge().misplaced) == (False, 1)


def test_nan_in_lse(case: Case) -> None:
    case.lse[1, 2, 4] = NAN
    assert (case.judge().ok, case.judge().misplaced) == (False, 1)


@pytest.mark.parametrize("value", [NAN, 1e-30])
def test_a_row_without_a_key_is_exactly_zero(case: Case, value: float) -> None:
    case.rows(case.out)[0, 2, 1, 5] = value
    assert (case.judge().ok, case.judge().unclean) == (False, 1)


@pytest.mark.parametrize("value", [NAN, INF, -1e30, 0.25])
def test_a_row_without_a_key_has_an_exact_lse(case: Case, value: float) -> None:
    case.lse[0, 2, 1] = value
    assert (case.judge().ok, case.judge().unclean) == (False, 1)
    assert "1 rows without a key" in str(case.judge())


def test_without_lse_and_without_eager_lse(case: Case) -> None:
    given = (case.ref_out, case.ref_lse, case.eager_out)
    more = {"sink": case.sink, "layout": case.layout}
    assert compare(case.out, None, *given, **more).ok
    assert compare(case.out, case.ref_lse.float(), *given, **more).ok
    assert not compare(case.out, case.ref_lse.float() + 0.5, *given, **more).ok


def test_empty_results_are_right() -> None:
    out, lse = torch.zeros(0, 2, 3, 8), torch.zeros(0, 2, 3)
    assert compare(out, lse, out.double(), lse.double(), out).ok
