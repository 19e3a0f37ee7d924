"""`merge` of partial results is what one call over all keys gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import AttentionSpec, reference
from flashgen.errors import TensorError

SPEC = AttentionSpec(head_dim=16, dtype="fp32")


def parts_of(
    *lengths: int, layout: str = "bhsd"
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Partial (outs, lses) over keys split at `lengths`, and the result over all of them."""
    torch.manual_seed(sum(lengths))
    spec = SPEC.replace(layout=layout) if layout != "bhsd" else SPEC
    total = sum(lengths)
    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.float64) for n in (5, total, total))
    by_layout = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    outs, lses, start = [], [], 0
    for length in lengths:
        keys = slice(start, start + length)
        out, lse = reference.attention(
            spec, by_layout(q), by_layout(k[:, :, keys]), by_layout(v[:, :, keys])
        )
        outs.append(out.float())
        lses.append(lse.float())
        start += length
    out, lse = reference.attention(spec, by_layout(q), by_layout(k), by_layout(v))
    return outs, lses, out, lse


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("lengths", [(7,), (96, 32), (1, 1, 1), (5, 0, 9), (0, 4)])
def test_merged_is_one_shot(lengths: tuple[int, ...], layout: str) -> None:
    outs, lses, out, lse = parts_of(*lengths, layout=layout)
    merged, merged_lse = flashgen.merge(outs, lses, layout=layout)
    torch.testing.assert_close(merged.double(), out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged_lse.double(), lse, atol=1e-6, rtol=1e-6)


def test_a_base_2_lse_would_be_noticed() -> None:
    outs, lses, out, _ = parts_of(96, 32)
    merged, _ = flashgen.merge(outs, [lse / math.log(2) for lse in lses])
    assert float((merged - out).abs().max()) > 1e-3


def test_both_empty() -> None:
    outs = [torch.full((1, 1, 2, 4), math.nan), torch.full((1, 1, 2, 4), math.inf)]
    lses = [torch.full((1, 1, 2), -math.inf)] * 2
    out, lse = flashgen.merge(outs, lses)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_nan_in_an_empty_part_does_not_reach_the_result() -> None:
    full, empty = torch.randn(1, 1, 2, 4), torch.full((1, 1, 2, 4), math.nan)
    seen, unseen = torch.tensor([[[3.0, -5e5]]]), torch.full((1, 1, 2), -math.inf)
    for outs, lses in (([full, empty], [seen, unseen]), ([empty, full], [unseen, seen])):
        out, lse = flashgen.merge(outs, lses)
        assert torch.equal(out, full)
        assert torch.equal(lse, seen)


def test_nan_in_a_part_that_counts_is_kept() -> None:
    outs = [torch.full((1, 1, 1, 4), math.nan), torch.ones(1, 1, 1, 4)]
    out, _ = flashgen.merge(outs, [torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)])
    assert bool(out.isnan().all())


def test_huge_and_tiny_lse() -> None:
    outs = [torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)]
    out, lse = flashgen.merge(outs, [torch.full((1, 1, 1), -1e30), torch.full((1, 1, 1), 1e30)])
    assert torch.equal(out, outs[1])
    assert float(lse) == pytest.approx(1e30)


def test_dtype_is_that_of_the_first_part() -> None:
    out, lse = flashgen.merge([torch.ones(1, 1, 1, 4).bfloat16()] * 2, [torch.zeros(1, 1, 1)] * 2)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert float(lse) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("outs", "lses", "layout", "message"),
    [
        ([], [], "bhsd", "lses: got 0 parts"),
        ([(1, 1, 2, 4)], [(1, 1, 2), (1, 1, 2)], "bhsd", "as many as outs, which has 1"),
        (
            [(1, 1, 2, 4), (1, 1, 3, 4)],
            [(1, 1, 2)] * 2,
            "bhsd",
            r"outs\[1\]: got shape \[1, 1, 3, 4\]",
        ),
        ([(1, 3, 2, 4)], [(1, 3, 2)], "bshd", r"lses\[0\]: got shape \[1, 3, 2\]"),
        ([(1, 1, 2, 4)], [(1, 1, 2)], "sbhd", "layout: got 'sbhd'"),
    ],
)
def test_parts_that_do_not_fit(
    outs: list[tuple[int, ...]], lses: list[tuple[int, ...]], layout: str, message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        flashgen.merge(
            [torch.zeros(shape) for shape in outs],
            [torch.zeros(shape) for shape in lses],
            layout=layout,
        )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_stacked_parts_are_as_a_list(layout: str) -> None:
    shape = (2, 3, 5, 8) if layout == "bhsd" else (2, 5, 3, 8)
    outs, lses = [torch.randn(shape) for _ in range(3)], [torch.randn(2, 3, 5) for _ in range(3)]
    wanted = flashgen.merge(outs, lses, layout=layout)
    for parts in ((torch.stack(outs), torch.stack(lses)), (tuple(outs), torch.stack(lses))):
        found = flashgen.merge(*parts, layout=layout)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


PART, LSE = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2)
MISTAKEN = {
    "one-part-alone": (PART, [LSE], "bhsd"),
    "lse-alone": ([PART], LSE, "bhsd"),
    "layout-of-one-alone": (PART, [LSE], "bshd"),
    "number": (3, [LSE], "bhsd"),
    "none-inside": ([PART, None], [LSE, LSE], "bhsd"),
    "nested": ([[PART]], [LSE], "bhsd"),
    "rank": ([PART, PART], [LSE, LSE[0]], "bhsd"),
    "empty-stack": (torch.zeros(0, 1, 1, 2, 4), torch.zeros(0, 1, 1, 2), "bhsd"),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_no_list_of_parts(name: str, golden: Callable[[str, str], None]) -> None:
    outs, lses, layout = MISTAKEN[name]
    with pytest.raises(TensorError) as caught:
        flashgen.merge(outs, lses, layout=layout)  # type: ignore[arg-type]
    golden(f"errors/merge-{name}.txt", f"{caught.value}\n")
