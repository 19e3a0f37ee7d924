"""Suite `loop-orders`: flash1, whole and split, against flash2, with the model's figures beside.

A case is timed as in suite `schedules`: all its schedules are compiled ahead, held against fp64,
and take turns. Specs leave the order open, so that one module holds the kernels of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashgen.bench.schedules_suite import Plan
from flashgen.problem import Problem
from flashgen.schedule.dram import splits_that_fill
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import ORDERS, default_schedule, in_order
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target

TOKENS = 16384
WINDOW = 1024
MASKS: Mapping[str, list[Any]] = {
    "full": [],
    "causal": ["causal"],
    "window": ["causal", {"window": {"left": WINDOW - 1, "right": 0}}],
}
# Mask, head_dim, dtype, and the shape: lengths of 1k to 16k, then few heads and a single query.
CASES: tuple[tuple[str, int, str, Shape], ...] = (
    ("causal", 128, "bf16", Shape(TOKENS // 4096, 16, 16, 4096, 4096)),
    ("full", 128, "bf16", Shape(TOKENS // 4096, 16, 16, 4096, 4096)),
    ("causal", 64, "fp16", Shape(TOKENS // 4096, 16, 16, 4096, 4096)),
    ("window", 128, "bf16", Shape(1, 16, 16, 16384, 16384)),
    ("causal", 128, "bf16", Shape(TOKENS // 1024, 16, 16, 1024, 1024)),
    ("causal", 128, "bf16", Shape(1, 16, 16, 16384, 16384)),
    ("full", 64, "fp16", Shape(TOKENS // 1024, 16, 16, 1024, 1024)),
    ("full", 64, "fp16", Shape(1, 16, 16, 16384, 16384)),
    ("full", 128, "bf16", Shape(1, 4, 4, 4096, 4096)),
    ("causal", 128, "bf16", Shape(1, 32, 32, 1, 16384)),
)


def order_plans(target: Target) -> list[Plan]:
    """Every case with its schedules, those that show most first."""
    return [order_plan(spec_of(*case[:3]), case[3], target) for case in CASES]


def spec_of(mask: str, head_dim: int, dtype: str) -> AttentionSpec:
    return AttentionSpec(
        name=f"orders_{mask}_d{head_dim}",
        head_dim=head_dim,
        dtype=dtype,
        heads={"group": 1},
        mask=MASKS[mask],
        loop_order="auto",
    )


def order_plan(spec: AttentionSpec, shape: Shape, target: Target) -> Plan:
    """flash2's default; flash1's with one program a head, as many as fill the GPU, and twice."""
    bucket = bucket_of(shape.q_len, shape.kv_len)
    problems = [in_order(Problem(spec, target), order) for order in ORDERS]
    flash2, flash1 = (default_schedule(problem, bucket) for problem in problems)
    found: list[Schedule] = [flash2]
    if flash1.kernel == "loop":
        fill = splits_that_fill(problems[1], flash1, shape)
        most = -(-shape.kv_len // flash1.block_n)
        numbers = (1, fill, min(2 * fill, most))
        found += [replace(flash1, num_kv_splits=splits) for splits in numbers]
    return Plan(spec, shape, tuple(dict.fromkeys(found)))
