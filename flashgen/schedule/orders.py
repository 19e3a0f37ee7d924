"""`loop_order: auto`: for each shape bucket the order whose default schedule is predicted faster.

A bucket has no batch and no heads, which a prediction needs. It is judged by the first of the
spec's shapes that lies in it, else by one batch of `ASSUMED_KV_HEADS` K/V heads, as long as the
bucket allows. The choice is part of a plan, so that a call does not have to make it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashgen.errors import ScheduleError
from flashgen.passes.count import visible_pairs, visits
from flashgen.passes.lower import Order
from flashgen.problem import Problem
from flashgen.schedule.budget import budget_for
from flashgen.schedule.dram import dram_bytes_model, for_shape
from flashgen.schedule.model import KV_LEN_LIMITS, Bucket, Schedule, bucket_of
from flashgen.schedule.predict import predict
from flashgen.schedule.space import ORDERS, default_schedule, in_order
from flashgen.spec.model import Shape

ASSUMED_KV_HEADS = 8
# A longer prediction by this much counts as equal: the model ranks no finer, and flash2 needs no
# workspace.
MARGIN = 1.05


@dataclass(frozen=True)
class OrderEstimate:
    """What the model says of one order's default schedule, with the splits that the shape gets."""

    schedule: Schedule
    time_us: float
    tile_traffic_bytes: int
    dram_bytes: int
    programs: int


@dataclass(frozen=True)
class OrderChoice:
    """The order of a bucket, the shape that it was judged by, and both estimates.

    assumed: whether the shape is none of the spec's. `estimates` lacks an order that fits no tile,
    and is empty where one tile holds all keys and the orders are one.
    """

    bucket: Bucket
    shape: Shape
    assumed: bool
    schedule: Schedule
    estimates: tuple[tuple[Order, OrderEstimate], ...]

    @property
    def order(self) -> Order:
        return self.schedule.loop_order

    @property
    def reason(self) -> str:
        """Why this order, in a clause."""
        found = dict(self.estimates)
        if not found:
            return "one tile holds all keys: the orders are one"
        if len(found) == 1:
            return f"only {self.order} fits"
        other: Order = "flash2" if self.order == "flash1" else "flash1"
        ours, theirs = found[self.order], found[other]
        text = f"predicted {ours.time_us:.3g} µs against {theirs.time_us:.3g} µs of {other}"
        return text if ours.time_us <= theirs.time_us else f"{text}, too near to tell apart"


@cache
def choose_order(problem: Problem, bucket: Bucket) -> OrderChoice:
    """The order for a bucket of a spec that leaves it open. ScheduleError where neither fits."""
    shape, assumed = judged_by(problem, bucket)
    if bucket.kernel == "single_tile":
        schedule = default_schedule(in_order(problem, "flash2"), bucket)
        if schedule.kernel == "single_tile":
            return OrderChoice(bucket, shape, assumed, schedule, ())
    found: dict[Order, tuple[Schedule, OrderEstimate]] = {}
    refusal: ScheduleError | None = None
    for order in ORDERS:
        try:
            schedule = default_schedule(in_order(problem, order), bucket)
        except ScheduleError as error:
            refusal = refusal or error
            continue
        found[order] = schedule, estimate(in_order(problem, order), schedule, shape)
    if refusal is not None and not found:
        raise refusal
    best = faster({order: each for order, (_, each) in found.items()})
    estimates = tuple((order, each) for order, (_, each) in found.items())
    return OrderChoice(bucket, shape, assumed, found[best][0], estimates)


def faster(estimates: dict[Order, OrderEstimate]) -> Order:
    """The order with the lower predicted time; flash2 where flash1 is not ahead by `MARGIN`."""
    if len(estimates) == 1:
        return next(iter(estimates))
    ahead = estimates["flash1"].time_us * MARGIN < estimates["flash2"].time_us
    return "flash1" if ahead else "flash2"


@cache
def estimate(problem: Problem, schedule: Schedule, shape: Shape) -> OrderEstimate:
    """The model's figures of a schedule on a shape; what inputs hide counts as visible."""
    schedule = for_shape(problem, schedule, shape)
    tile = schedule.block_m, schedule.block_n
    splits = schedule.splits_for(shape.kv_len)
    seen = visits(problem.spec, shape, *tile, num_kv_splits=splits, kernel=schedule.kernel)
    figures = budget_for(problem, schedule).figures(
        schedule,
        shape,
        visited_tiles=seen.tiles,
        visible_pairs=visible_pairs(problem.spec, shape),
        first_visits=seen.first_visits,
        visited_keys=seen.keys,
        key_tiles=seen.key_tiles,
    )
    predicted = predict(problem, schedule, shape)
    dram = dram_bytes_model(problem, schedule, shape, figures, seen)
    return OrderEstimate(
        schedule=schedule,
        time_us=predicted.time_us,
        tile_traffic_bytes=figures.tile_traffic_bytes,
        dram_bytes=dram.total_bytes,
        programs=predicted.programs,
    )


def judged_by(problem: Problem, bucket: Bucket) -> tuple[Shape, bool]:
    """The shape that stands for a bucket, and whether it is none of the spec's."""
    for shape in problem.spec.shapes:
        if bucket_of(shape.q_len, shape.kv_len) == bucket:
            return shape, False
    kv_len = bucket.kv_len_max or 2 * KV_LEN_LIMITS[-1]
    q_len = bucket.q_len_max or kv_len
    q_heads = ASSUMED_KV_HEADS * (problem.spec.heads.group or 1)
    return Shape(1, q_heads, ASSUMED_KV_HEADS, q_len, kv_len), True
