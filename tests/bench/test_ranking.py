"""Ranks and rank correlation, and the choice of what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.bench.ranking import rank, spearman
from flashgen.bench.sampling import NEIGHBOURS, sample
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target


def test_rank_correlation_is_that_of_ranks_without_ties() -> None:
    generator = np.random.default_rng(5)
    one, other = generator.normal(size=40), generator.normal(size=40)
    places = [np.argsort(np.argsort(values)) for values in (one, one + other)]
    expected = np.corrcoef(*places)[0, 1]
    assert spearman(list(one), list(one + other)) == pytest.approx(expected, abs=1e-6)
    assert spearman(list(one), list(np.exp(one))) == 1.0
    assert spearman(list(one), list(-one)) == -1.0


def test_equal_values_share_their_rank() -> None:
    assert spearman([1.0, 1.0, 2.0], [3.0, 3.0, 9.0]) == 1.0
    assert 0 < spearman([1.0, 1.0, 2.0], [3.0, 4.0, 9.0]) < 1
    assert spearman([1.0, 1.0, 1.0], [3.0, 4.0, 9.0]) == 0.0


def test_the_fastest_has_to_be_in_the_first_third_of_the_models_order() -> None:
    measured = {f"s{i}": 10.0 + i for i in range(9)}
    order = [3, 1, 0, 2, 4, 5, 6, 7, 8]
    found = rank(measured, {f"s{i}": float(place) for place, i in enumerate(order)})
    assert (found.place, found.fastest, found.first) == (3, "s0", "s3")
    assert found.loss == pytest.approx(0.3)
    assert found.top_third and found.good
    order = [3, 1, 2, 0, 4, 5, 6, 7, 8]
    found = rank(measured, {f"s{i}": float(place) for place, i in enumerate(order)})
    assert found.place == 4 and not found.top_third and not found.good
    order = [0, 8, 7, 6, 5, 4, 3, 2, 1]
    found = rank(measured, {f"s{i}": float(place) for place, i in enumerate(order)})
    assert found.top_third and not found.good  # the rest is upside down


def test_only_what_was_measured_and_predicted_is_ranked() -> None:
    assert rank({"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 6.0, "failed": 0.0}).count == 2
    with pytest.raises(ValueError, match="nothing to rank"):
        rank({"a": 1.0}, {"a": 2.0})


def test_a_sample_has_the_default_its_neighbours_and_all_tile_shapes() -> None:
    problem = Problem(
        AttentionSpec(head_dim=128, dtype="bf16", mask=["causal"]), get_target("nvidia-h200")
    )
    bucket = bucket_of(4096, 4096)
    feasible = enumerate_space(problem, bucket, ("triton",)).feasible
    default = default_schedule(problem, bucket)
    chosen = sample(feasible, default, 36)
    assert chosen[0] == default
    assert len(set(chosen)) == 36
    assert set(chosen) <= set(feasible)
    shapes = {(each.block_m, each.block_n) for each in feasible}
    assert {(each.block_m, each.block_n) for each in chosen} == shapes
    near = [each for each in chosen if _differing(each, default) == 1]
    assert len(near) >= NEIGHBOURS
    assert sample(tuple(reversed(feasible)), default, 36) == chosen


def _differing(one: Schedule, other: Schedule) -> int:
    return sum(a != b for a, b in zip(one.sort_key, other.sort_key, strict=True))


def test_a_small_space_is_measured_whole() -> None:
    tiles = [Schedule(block_m=m, block_n=32, num_warps=4, num_stages=2) for m in (16, 32, 64)]
    assert sorted(sample(tiles, tiles[1], 36)) == sorted(tiles)
    assert sample(tiles, tiles[1], 1) == (tiles[1],)
