"""How the oracle reads expressions: meaning of operators, and of reads outside an input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashgen.errors import TensorError
from flashgen.reference import Reader, attention, mask
from flashgen.spec.expr import parse_expression
from flashgen.spec.model import AttentionSpec

X = torch.tensor([5, 6, 7])
TABLES: dict[str, tuple[Tensor, tuple[int | str, ...]]] = {
    "x": (X, ("kv_len",)),
    "flag": (torch.tensor([True, False, True]), ("kv_len",)),
    "one": (torch.tensor([[9], [8]]), ("batch", 1)),
    "half": (torch.tensor(0.5), ()),
    "step": (torch.tensor(2), ()),
    "none": (torch.zeros(0), ("kv_len",)),
}


def reader(in_mask: bool) -> Reader:
    positions = torch.arange(-2, 5)  # k runs past both ends of x
    symbols = {"k": positions, "q": torch.tensor(1), "b": torch.tensor(1), "s": positions * 0.5}
    return Reader(symbols, TABLES, torch.float64, in_mask)


def condition(text: str, in_mask: bool = True) -> list[int]:
    """The values of k from -2 to 4 for which the condition holds."""
    result = reader(in_mask).condition(parse_expression(text)).expand(7)
    return (result.nonzero().flatten() - 2).tolist()


def number(text: str) -> list[float]:
    """The values of a number for k from -2 to 4."""
    return reader(in_mask=False).number(parse_expression(text)).expand(7).tolist()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k // 2", lambda k: k // 2),
        ("k % 3", lambda k: k % 3),
        ("k % -3", lambda k: k % -3),
        ("k // -2", lambda k: k // -2),
        ("k / 2", lambda k: k / 2),
        ("1 - k * 2", lambda k: 1 - k * 2),
        ("-k", lambda k: -k),
        ("abs(k)", abs),
        ("min(k, 2, q)", lambda k: min(k, 1)),
        ("max(k, half)", lambda k: max(k, 0.5)),
        ("floor(k / 2)", lambda k: math.floor(k / 2)),
        ("k // half", lambda k: math.floor(k / 0.5)),
        ("k // step", lambda k: k // 2),
        ("s % 1", lambda k: (k * 0.5) % 1),
        ("exp(k)", math.exp),
        ("tanh(k)", math.tanh),
        ("log(k + 3)", lambda k: math.log(k + 3)),
        ("sigmoid(k)", lambda k: 1 / (1 + math.exp(-k))),
        ("where(k < q, k, 10)", lambda k: k if k < 1 else 10),
        ("where(k < q and not k == 0, 1.5, s)", lambda k: 1.5 if k < 1 and k != 0 else k * 0.5),
    ],
)
def test_numbers(text: str, value: object) -> None:
    assert callable(value)
    assert number(text) == pytest.approx([value(k) for k in range(-2, 5)], abs=1e-15)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("k < 1", lambda k: k < 1),
        ("0 <= k < q + 2", lambda k: 0 <= k < 3),
        ("not 0 <= k < 3", lambda k: not 0 <= k < 3),
        ("k == 0 or k != 1 and k >= 3", lambda k: k == 0 or (k != 1 and k >= 3)),
        ("not (k == 0 or k > 2)", lambda k: not (k == 0 or k > 2)),
        ("not (k > 0 and not k > 2)", lambda k: not (k > 0 and not k > 2)),
        ("half < k", lambda k: k > 0.5),
    ],
)
def test_conditions(text: str, holds: object) -> None:
    assert callable(holds)
    assert condition(text) == [k for k in range(-2, 5) if holds(k)]


def test_reads() -> None:
    assert number("x[k]") == [0, 0, 5, 6, 7, 0, 0]
    assert number("x[1] + half") == [6.5] * 7
    assert number("one[b, k + 100]") == [8] * 7  # an axis of extent 1 broadcasts at any index
    assert number("x[x[k] - 5]") == [0, 0, 5, 6, 7, 0, 0]
    assert number("none[k]") == [0] * 7


def test_a_read_outside_hides_in_a_mask() -> None:
    assert condition("x[k] >= 5") == [0, 1, 2]
    assert condition("x[k] < 100") == [0, 1, 2]
    assert condition("x[k - 1] == x[k] - 1") == [1, 2]
    assert condition("x[k] >= 5 or k == 4") == [0, 1, 2, 4]
    assert condition("none[k] == 0") == []


def test_a_read_outside_hides_under_not_as_well() -> None:
    assert condition("x[k] != 6") == [0, 2]
    assert condition("not x[k] == 6") == [0, 2]
    assert condition("not (x[k] == 6 or k == 0)") == [2]
    assert condition("not (x[k] == 6 and k == 1)") == [-2, -1, 0, 2, 3, 4]  # k != 1 shows them


def test_a_boolean_input() -> None:
    assert condition("flag[k]") == [0, 2]
    assert condition("not flag[k]") == [1]
    assert condition("flag[k] or k == 1") == [0, 1, 2]


def test_every_read_in_a_comparison_counts() -> None:
    # The branch that is not taken is part of the comparison too: such a read can only hide a key.
    assert condition("where(k < 2, 1, x[k + 1]) == 1") == [-1, 0, 1]
    assert condition("x[x[k] - 5] == 5") == [0]


def test_a_read_outside_is_zero_in_a_score() -> None:
    assert condition("x[k] < 6", in_mask=False) == [-2, -1, 0, 3, 4]
    assert condition("flag[k]", in_mask=False) == [0, 2]
    assert number("where(flag[k], 1, 2)") == [2, 2, 1, 2, 1, 2, 2]


def test_reads_in_a_call() -> None:
    spec = AttentionSpec(
        head_dim=1,
        dtype="fp32",
        mask=["causal", {"expr": "k >= q - reach"}],
        score=[{"expr": "s + t[h, q - k + 1]"}],
        inputs={
            "t": {"shape": ["q_heads", 3], "dtype": "bf16"},
            "reach": {"shape": [], "dtype": "int32"},
        },
    )
    given = {"t": torch.tensor([[1.0, 2.0, 4.0]]).bfloat16(), "reach": 2}
    zero = torch.zeros(1, 1, 4, 1)
    weights = []
    for key in torch.eye(4):
        out, _ = attention(spec, zero, zero, key.view(1, 1, 4, 1), inputs=given)
        weights.append(out[0, 0, 3, 0].item())
    # Row 3 sees keys 1 to 3; distance 2 lies outside the table, 1 reads 4, 0 reads 2.
    total = math.exp(0) + math.exp(4) + math.exp(2)
    assert weights == pytest.approx([0, 1 / total, math.exp(4) / total, math.exp(2) / total])


def test_lengths_and_heads_are_symbols() -> None:
    fields = {
        "head_dim": 1,
        "dtype": "fp32",
        "mask": [{"expr": "k == kv_len - 1 - hk and h < q_len"}],
    }
    sizes = {"batch": 1, "q_heads": 6, "kv_heads": 2, "q_len": 4, "kv_len": 5}
    visible = mask(AttentionSpec(**fields), **sizes)
    assert visible[0, :, 0].int().argmax(dim=1)[:4].tolist() == [4, 4, 4, 3]
    assert visible[0, :, 0].sum(dim=1).tolist() == [1, 1, 1, 1, 0, 0]


def test_a_number_is_passed_in_its_declared_format() -> None:
    spec = AttentionSpec(
        head_dim=1,
        dtype="fp32",
        score=[{"expr": "s + x"}],
        inputs={"x": {"shape": [], "dtype": "fp32"}},
    )
    zero = torch.zeros(1, 1, 1, 1)
    for given in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        _, lse = attention(spec, zero, zero, zero, inputs={"x": given})
        assert lse.item() == torch.tensor(0.1).double().item() != 0.1
    with pytest.raises(TensorError, match=r"^x: got shape \[2\], expected shape \[\]"):
        attention(spec, zero, zero, zero, inputs={"x": torch.zeros(2)})
