"""`loop_order: auto`: which order a bucket gets, and why."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.errors import ScheduleError
from flashgen.problem import Problem
from flashgen.schedule import orders
from flashgen.schedule.model import Bucket, Schedule, all_buckets, bucket_of
from flashgen.schedule.orders import OrderEstimate, choose_order, faster
from flashgen.schedule.space import check, default_schedule, enumerate_space, in_order
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import get_target


def problem_of(**fields: Any) -> Problem:
    defaults: dict[str, Any] = {"head_dim": 128, "dtype": "bf16", "loop_order": "auto"}
    return Problem(AttentionSpec(**{**defaults, **fields}), get_target("nvidia-h200"))


def estimate_of(time_us: float) -> OrderEstimate:
    return OrderEstimate(
        schedule=Schedule(block_m=64, block_n=64, num_warps=4, num_stages=1),
        time_us=time_us,
        tile_traffic_bytes=1,
        dram_bytes=1,
        programs=1,
    )


@pytest.mark.parametrize(
    ("flash2", "flash1", "order"),
    [(10.0, 20.0, "flash2"), (20.0, 10.0, "flash1"), (10.0, 9.8, "flash2"), (10.0, 10.0, "flash2")],
)
def test_flash1_has_to_be_clearly_ahead(flash2: float, flash1: float, order: str) -> None:
    found = {"flash2": estimate_of(flash2), "flash1": estimate_of(flash1)}
    assert faster(found) == order  # type: ignore[arg-type]


def test_the_only_order_that_fits_is_taken() -> None:
    assert faster({"flash1": estimate_of(5.0)}) == "flash1"


def test_long_squares_go_query_by_query_and_few_queries_share_their_keys() -> None:
    """Prefill fills the GPU by its query tiles; one query tile and long keys do not."""
    problem = problem_of(mask="causal")
    assert choose_order(problem, bucket_of(8192, 8192)).order == "flash2"
    decode = choose_order(problem, bucket_of(1, 16384))
    assert decode.order == "flash1"
    assert decode.schedule.num_kv_splits is None
    estimates = dict(decode.estimates)
    assert estimates["flash1"].schedule.splits > 1
    assert estimates["flash1"].programs > estimates["flash2"].programs
    assert decode.reason.startswith("predicted ")
    assert "of flash2" in decode.reason


def test_one_tile_of_keys_has_one_order() -> None:
    found = choose_order(problem_of(), bucket_of(100, 64))
    assert found.order == "flash2"
    assert found.schedule.kernel == "single_tile"
    assert found.reason == "one tile holds all keys: the orders are one"


def test_a_bucket_is_judged_by_the_specs_own_shape() -> None:
    shape = {"batch": 64, "q_heads": 8, "kv_heads": 8, "q_len": 1, "kv_len": 16384}
    many = choose_order(problem_of(shapes=[shape]), bucket_of(1, 16384))
    assert not many.assumed
    assert many.shape == Shape(64, 8, 8, 1, 16384)
    assert many.order == "flash2"  # 512 programs fill the GPU as they are
    few = choose_order(problem_of(), bucket_of(1, 16384))
    assert few.assumed
    assert few.order == "flash1"


def test_auto_is_the_default_of_the_order_that_was_chosen() -> None:
    problem = problem_of(mask="causal")
    for bucket in all_buckets():
        choice = choose_order(problem, bucket)
        assert default_schedule(problem, bucket) == choice.schedule
        assert choice.schedule == default_schedule(in_order(problem, choice.order), bucket)
        assert check(choice.schedule, problem, bucket) is None


def test_the_space_of_auto_has_both_orders() -> None:
    space = enumerate_space(problem_of(), bucket_of(4096, 4096))
    assert {schedule.loop_order for schedule in space.feasible} == {"flash1", "flash2"}
    short = enumerate_space(problem_of(), bucket_of(64, 64))
    assert {schedule.loop_order for schedule in short.feasible} == {"flash2"}


def test_where_neither_order_fits_flash2s_refusal_is_raised() -> None:
    with pytest.raises(ScheduleError, match="no schedule fits"):
        choose_order(problem_of(head_dim=520), Bucket(None, None))


def test_where_one_order_fits_no_tile_the_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_flash1(problem: Problem, bucket: Bucket) -> Schedule:
        if problem.spec.loop_order == "flash2":
            raise ScheduleError("nothing fits")
        return default_schedule(problem, bucket)

    monkeypatch.setattr(orders, "default_schedule", only_flash1)
    found = orders.choose_order.__wrapped__(problem_of(), bucket_of(4096, 4096))
    assert found.order == "flash1"
    assert found.reason == "only flash1 fits"
