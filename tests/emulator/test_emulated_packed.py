"""Query heads of a group that share tiles, on the CPU against the oracle: few rows, many keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_runs import TARGET, Sizes, compared
from hopper_cases import DYNAMIC, STATIC, hopper

from flashgen.codegen.render import render
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec

SLOPES = {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}}
WINDOW = ["causal", {"window": {"left": 37}}]
SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal", "layout": "bshd"},
    "window": {"mask": WINDOW, "sink": "per_head"},
    "alibi": {"mask": "causal", "score": {"alibi": "slopes"}, "inputs": SLOPES},
    "softcap": {"mask": "causal", "score": {"softcap": 5.0}, "align": "top_left"},
    "each": {"mask": WINDOW, "score": {"alibi": "slopes"}, "inputs": SLOPES, "sink": "per_head"},
}
LAST = hopper(2, 64, 2, **DYNAMIC, packed_heads=8)
# Group -> heads that share a tile, as many as the spec's group allows; 1: known to the call alone.
GROUPS = {4: 4, 8: 8, 6: 8, 1: 4}
LENGTHS = ((1, 300), (5, 140), (8, 200), (17, 130), (64, 140), (130, 140))


def spec_of(name: str, group: int | None) -> AttentionSpec:
    fields = {"head_dim": 64, "dtype": "fp16", **SPECS[name]}
    return AttentionSpec(name=name, **fields, heads={"group": group} if group else "any")


@pytest.mark.parametrize(
    "group", [4, 6, *(pytest.param(each, marks=pytest.mark.slow) for each in (8, 1))]
)
@pytest.mark.parametrize("name", SPECS)
def test_few_rows_and_many_keys(name: str, group: int, tmp_path: Path) -> None:
    """Fewer positions than a warpgroup has, as many, and more than a tile has; lse or not."""
    spec = spec_of(name, group if group > 1 else None)
    schedule = hopper(2, 64, 2, **DYNAMIC, packed_heads=GROUPS[group])
    for seed, (q_len, kv_len) in enumerate(LENGTHS):
        kv_heads = 2 if q_len < 64 else 1
        sizes = Sizes(q_len, kv_len, q_heads=group * kv_heads, kv_heads=kv_heads)
        found = compared(tmp_path, spec, schedule, sizes, seed=seed, has_lse=seed % 3 != 1)
        assert found.ok, f"q_len {q_len}: {found}"


SCHEDULES = [
    hopper(3, 64, 2, packed_heads=2),
    hopper(2, 64, 1, packed_heads=16, scheduler="dynamic"),
    hopper(3, 128, 1, packed_heads=8, **STATIC),
    hopper(2, 64, 2, packed_heads=4, **STATIC, q_buffers=2),
    hopper(2, 64, 1, packed_heads=8, **DYNAMIC, q_buffers=2),
    hopper(2, 64, 2, packed_heads=32, **DYNAMIC),
    hopper(2, 64, 1, packed_heads=4, scheduler="dynamic", overlapped=False, programs_per_sm=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("group", [12, pytest.param(3, marks=pytest.mark.slow)])
def test_every_kind_of_schedule(schedule: Schedule, group: int, tmp_path: Path) -> None:
    """Groups of several packs, the last one not full, and packs of more heads than there are."""
    for name in ("each", "causal"):
        sizes = Sizes(21, 100, q_heads=2 * group, kv_heads=2, batch=2)
        found = compared(tmp_path, spec_of(name, None), schedule, sizes, seed=group)
        assert found.ok, found


def _nan_in_a_later_key_of_the_second_group(given: dict[str, Any]) -> None:
    given["v"][:, 1, 60] = float("nan")
    given["k"][:, 1, 70] = float("inf")


def _scores_beyond_1e9(given: dict[str, Any]) -> None:
    given["q"] *= 3e4
    given["k"] *= 3e4


@pytest.mark.parametrize("spoil", [_nan_in_a_later_key_of_the_second_group, _scores_beyond_1e9])
@pytest.mark.parametrize("group", [6, None])
def test_rare_values_are_walked_over_again(spoil: Any, group: int | None, tmp_path: Path) -> None:
    """Only rows that see a NaN have one, those of heads past the group are not written."""
    spec = spec_of("each", group).replace(dtype="bf16")
    for q_len in (21, 70):
        sizes = Sizes(q_len, 80, q_heads=12, kv_heads=2)
        found = compared(tmp_path, spec, LAST, sizes, spoil=spoil)
        assert found.ok, found


INPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head and row": (
        {"score": {"expr": "s + 0.1 * h - 0.01 * row * table[b, h, row]"}},
        {"table": {"shape": ["batch", "q_heads", "q_len"], "dtype": "fp32"}},
    ),
    "dense mask": (
        {"mask": {"expr": "seen[b, h, row, k]"}},
        {"seen": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "bool"}},
    ),
    "key ranges of a key head": (
        {"mask": [{"expr": "k >= first[hk]"}, "causal"]},
        {"first": {"shape": ["kv_heads"], "dtype": "int32"}},
    ),
    "keys of a row and head": (
        {"mask": {"expr": "k < stop[h, row]"}},
        {"stop": {"shape": ["q_heads", "q_len"], "dtype": "int32"}},
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_each_head(name: str, tmp_path: Path) -> None:
    fields, inputs = INPUTS[name]
    spec = AttentionSpec(name="inputs", head_dim=64, dtype="fp16", **fields, inputs=inputs)
    sizes = Sizes(19, 200, q_heads=12, kv_heads=2, batch=2)
    found = compared(tmp_path, spec, LAST, sizes)
    assert found.ok, found


def test_rows_that_see_nothing(tmp_path: Path) -> None:
    """40 queries, 10 keys: output 0 and lse -inf, exactly, for the first 30 of each head."""
    found = compared(tmp_path, spec_of("causal", 6), LAST, Sizes(40, 10, q_heads=12, kv_heads=2))
    assert found.ok, found
    assert found.unclean == 0


def test_strided_tensors(tmp_path: Path) -> None:
    """q transposed in memory, K and V of one buffer."""

    def spoil(given: dict[str, Any]) -> None:
        kv = torch.cat([given["k"], given["v"]], dim=3)
        given["k"], given["v"] = kv.split(64, dim=3)
        given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)

    sizes = Sizes(9, 100, q_heads=12, kv_heads=2)
    found = compared(tmp_path, spec_of("alibi", 6), LAST, sizes, spoil=spoil)
    assert found.ok, found


def test_beside_a_schedule_whose_tiles_are_of_one_head(tmp_path: Path) -> None:
    """A module with both; the host leaves no parameter of the kernel to a default."""
    spec, apart = spec_of("each", 6), hopper(2, 64, 2, **DYNAMIC)
    choices = [(Bucket(16, None), LAST), (Bucket(None, None), apart)]
    for has_lse in (True, False):
        both = render(Problem(spec, TARGET), choices, has_lse=has_lse).text
        sizes = Sizes(150, 200, q_heads=6)
        found = compared(tmp_path, spec, apart, sizes, has_lse=has_lse, text=lambda _, t=both: t)
        assert found.ok, found
    assert "PACKED_HEADS: gl.constexpr,\n):" in both
