"""Hopper kernels, as generated, on the CPU: right against the fp64 oracle in whatever order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_runs import Sizes, compared
from hopper_cases import GOLDEN, hopper, problem_of

from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

GROUP = {"full-d256": 4, "packed-heads": 6}  # query heads per K/V head where the spec says them
CAUSAL = AttentionSpec(name="causal", head_dim=64, dtype="fp16", mask="causal")


@pytest.mark.parametrize("case", GOLDEN)
def test_every_golden_kernel(case: str, tmp_path: Path) -> None:
    """Rows and keys that are no multiple of a tile, more keys than rows; then one short tile."""
    spec, schedule = problem_of(case).spec, GOLDEN[case][1]
    heads = GROUP.get(case, 2)
    keys = {"window": (800, 5), "bias": (336, 8)}.get(case, (333, 5))  # of bias what TMA takes
    for seed, lengths in enumerate(zip((130, 77), keys, strict=True)):
        found = compared(tmp_path, spec, schedule, Sizes(*lengths, q_heads=heads), seed=seed)
        assert found.ok, found


SCHEDULES = [
    hopper(consumers, 64, 2, scheduler=scheduler, separate_out=separate_out, q_buffers=q)
    for consumers in (2, 3)
    for scheduler in ("grid", "static", "dynamic")
    for separate_out in (False, True)
    for q in (1, 2)
    if q == 1 or (separate_out and scheduler != "grid")
]
SCHEDULES += [
    hopper(3, 128, 2, overlapped=False),
    hopper(2, 64, 2, scheduler="dynamic", separate_out=True, overlapped=False, programs_per_sm=2),
    hopper(2, 64, 3, scheduler="static", programs_per_sm=2),
    hopper(2, 64, 2, direct_out=True),
    hopper(2, 128, 2, scheduler="dynamic", direct_out=True),
    hopper(2, 64, 2, scheduler="static", q_buffers=2, direct_out=True),
]
ONE_STAGE = hopper(2, 64, 1, scheduler="static", separate_out=True, q_buffers=2)


@pytest.mark.parametrize("schedule", [*SCHEDULES, ONE_STAGE], ids=str)
def test_every_kind_of_schedule(schedule: Schedule, tmp_path: Path) -> None:
    """Three programs share 4 query tiles; each schedule sees another order of roles."""
    found = compared(tmp_path, CAUSAL, schedule, Sizes(200, 150), seed=schedule.num_warps)
    assert found.ok, found


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_softcap_of_small_and_of_large_scores(dtype: str, tmp_path: Path) -> None:
    """Warps whose scores are all small take the polynomial, those of the last rows do not."""

    def spoil(given: dict[str, Any]) -> None:
        given["q"][:, :, 40:] *= 20

    spec = AttentionSpec(name="capped", head_dim=64, dtype=dtype, score=[{"softcap": 10.0}])
    found = compared(tmp_path, spec, hopper(2, 128, 2), Sizes(90, 140), spoil=spoil)
    assert found.ok, found


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [["q_len", "kv_len"], ["batch", "q_heads", "q_len", "kv_len"]])
def test_tiles_of_a_bias(consumers: int, dtype: str, shape: list[str], tmp_path: Path) -> None:
    """Of tiles that only other warpgroups see, of rows past the end, and in a second walk, which
    only the second batch needs."""
    spec = CAUSAL.replace(
        score=[{"bias": {"tensor": "rel"}}], inputs={"rel": {"shape": shape, "dtype": dtype}}
    )
    schedule = hopper(consumers, 64, 2, scheduler="dynamic")

    def spoil_second(given: dict[str, Any]) -> None:
        _nan_in_a_later_key({name: given[name][1:] for name in "kv"})

    for spoil in (spoil_second, lambda given: None):
        found = compared(tmp_path, spec, schedule, Sizes(150, 152, batch=2), spoil=spoil)
        assert found.ok, found


def test_a_bias_that_tma_cannot_take(tmp_path: Path) -> None:
    """Rows of 75 numbers: the portable kernel serves."""
    spec = CAUSAL.replace(
        score=[{"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": ["q_len", "kv_len"], "dtype": "bf16"}},
    )
    found = compared(tmp_path, spec, hopper(2, 64, 2), Sizes(70, 75))
    assert found.ok, found


@pytest.mark.parametrize("index", ["h // 2, row, k", "(h + 1) % 2, row // 2, k"])
def test_a_table_of_other_heads(index: str, tmp_path: Path) -> None:
    """In the score and in the mask, and in a second walk."""
    spec = CAUSAL.replace(
        mask=["causal", {"expr": f"rel[{index}] > -1"}],
        score=[{"expr": f"s + rel[{index}]"}],
        inputs={"rel": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "fp32"}},
    )
    sizes = Sizes(70, 88, q_heads=4, kv_heads=2)
    for spoil in (_nan_in_a_later_key, lambda given: None):
        found = compared(tmp_path, spec, hopper(2, 64, 2), sizes, spoil=spoil)
        assert found.ok, found


@pytest.mark.parametrize(
    "field",
    [
        {"score": [{"expr": "where(k <= where(3 > row, 13, q), s, 0.0)"}]},
        {"mask": [{"expr": "where(k <= where(h < 1, 13, q), 1, 0) == 1"}]},
    ],
)
def test_conditions_that_compare_conditional_values(field: dict[str, Any], tmp_path: Path) -> None:
    found = compared(tmp_path, CAUSAL.replace(**field), hopper(2, 64, 2), Sizes(70, 90))
    assert found.ok, found


def test_without_lse(tmp_path: Path) -> None:
    found = compared(tmp_path, CAUSAL, hopper(2, 128, 2), Sizes(70, 90), has_lse=False)
    assert found.ok, found


def _nan_in_a_later_key(given: dict[str, Any]) -> None:
    given["v"][:, :, 60] = float("nan")
    given["k"][:, :, 70] = float("inf")


def _scores_beyond_1e9(given: dict[str, Any]) -> None:
    given["q"] *= 3e4
    given["k"] *= 3e4


@pytest.mark.parametrize("spoil", [_nan_in_a_later_key, _scores_beyond_1e9])
@pytest.mark.parametrize("q_buffers", [1, 2])
def test_rare_values_are_walked_over_again(spoil: Any, q_buffers: int, tmp_path: Path) -> None:
    """Only rows that see a NaN have one; scores too large for their own rounded maximum are right.

    fp16 holds no such numbers: they are bf16.
    """
    spec = CAUSAL.replace(dtype="bf16")
    schedule = hopper(2, 64, 2, scheduler="static", separate_out=True, q_buffers=q_buffers)
    found = compared(tmp_path, spec, schedule, Sizes(80, 80), spoil=spoil)
    assert found.ok, found


@pytest.mark.parametrize(
    ("dtype", "ends"), [("int32", (-(2**31), 2**31 - 1)), ("int64", (-(2**62), 2**62))]
)
def test_limits_at_the_ends_of_their_format(
    dtype: str, ends: tuple[int, int], tmp_path: Path
) -> None:
    """Of two batches one sees all before its query, the other everything."""
    spec = AttentionSpec(
        name="prefix",
        head_dim=64,
        dtype="bf16",
        mask=[{"expr": "k < prefix[b] or k <= q"}],
        inputs={"prefix": {"shape": ["batch"], "dtype": dtype}},
    )

    def spoil(given: dict[str, Any]) -> None:
        given["prefix"] = torch.tensor(ends, dtype=given["prefix"].dtype)

    sizes = Sizes(90, 150, batch=2)
    found = compared(tmp_path, spec, hopper(2, 64, 2), sizes, spoil=spoil)
    assert found.ok, found


def test_rows_that_see_nothing(tmp_path: Path) -> None:
    """40 queries, 10 keys: output 0 and lse -inf, exactly, for the first 30."""
    found = compared(tmp_path, CAUSAL, hopper(2, 64, 2), Sizes(40, 10))
    assert found.ok, found
    assert found.unclean == 0


def test_strided_tensors(tmp_path: Path) -> None:
    """K and V of one buffer, q transposed in memory: the same tensor maps as on a GPU."""

    def spoil(given: dict[str, Any]) -> None:
        kv = torch.cat([given["k"], given["v"]], dim=3)
        given["k"], given["v"] = kv.split(64, dim=3)
        given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)

    found = compared(tmp_path, CAUSAL, hopper(2, 64, 2), Sizes(100, 100), spoil=spoil)
    assert found.ok, found
