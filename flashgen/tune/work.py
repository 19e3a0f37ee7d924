"""What one launch of a shape has to do: the work that rates are of, the roofline, predictions.

Where the mask reads data, the work is that of the data which is timed (`tensors.draw`, seed 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from flashgen.passes.count import all_visible_pairs, visits
from flashgen.problem import Problem
from flashgen.schedule.budget import budget_for
from flashgen.schedule.dram import for_shape
from flashgen.schedule.model import Schedule
from flashgen.schedule.predict import predicted_time_us
from flashgen.schedule.roofline import roofline
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape


@dataclass(frozen=True)
class Work:
    """FLOPs of visible matmuls, the least bytes from device memory, and the roofline's time."""

    matmul_flops: float
    dram_bytes: float
    bound_us: float
    compute_bound: bool

    def rate(self, time_us: float) -> tuple[float, str]:
        """What limits the work, per second: TFLOP/s or GB/s."""
        if self.compute_bound:
            return self.matmul_flops / time_us / 1e6, "TFLOP/s"
        return self.dram_bytes / time_us / 1e3, "GB/s"


def work_of(problem: Problem, schedule: Schedule, shape: Shape) -> Work:
    """The same for every schedule, but where bytes depend on the order of loops."""
    whole = with_splits(problem, schedule, shape)
    seen = visits(problem.spec, shape, whole.positions, whole.block_n)
    figures = budget_for(problem, whole).figures(
        whole,
        shape,
        visited_tiles=seen.tiles,
        visible_pairs=_visible_pairs(problem.spec, shape),
        visited_keys=seen.keys,
    )
    floor = roofline(figures.matmul_flops, figures.dram_bytes, problem.target, problem.spec.dtype.q)
    return Work(figures.matmul_flops, figures.dram_bytes, floor.time_us, floor.bound == "compute")


@cache
def _visible_pairs(spec: AttentionSpec, shape: Shape) -> int:
    """Of a batch and query head, the mean; counted once, as data can take seconds."""
    inputs = None
    if spec.inputs or spec.kv_lens != "none":
        from flashgen.tune.tensors import mask_inputs

        inputs = mask_inputs(spec, shape, seed=0)
    places = shape.batch * shape.q_heads
    return round(all_visible_pairs(spec, shape, inputs or None) / max(1, places))


def predictions(
    problem: Problem, schedules: Sequence[Schedule], shape: Shape
) -> Mapping[Schedule, float]:
    """Predicted microseconds of a launch, by schedule."""
    return {
        schedule: predicted_time_us(problem, with_splits(problem, schedule, shape), shape)
        for schedule in schedules
    }


def with_splits(problem: Problem, schedule: Schedule, shape: Shape) -> Schedule:
    """`schedule` as a call of `shape` runs it, which decides about the number of splits."""
    return for_shape(problem, schedule, shape)
