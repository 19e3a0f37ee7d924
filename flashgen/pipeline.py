"""(Problem, schedules) -> Plan: the tile graph is lowered and checked, the module rendered.

From there `runtime.load` makes a module of it, and `runtime.ahead` or a launch machine code.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.codegen.render import render
from flashgen.ir.verify import verify
from flashgen.passes.lower import lower
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import Bucket, Schedule

Choices = Sequence[tuple[Bucket, Schedule]]


def generate(
    problem: Problem,
    choices: Choices,
    *,
    has_lse: bool,
    origin: str,
    origins: Sequence[str] = (),
) -> Plan:
    """Write the module for `choices`; `origin` says who chose them, `origins` who each of them."""
    verify(lower(problem))  # Problem -> TileGraph, checked
    # Problem, choices -> KernelSource
    source = render(problem, choices, has_lse=has_lse, origins=origins)
    return Plan(
        name=source.name,
        text=source.text,
        entries=source.entries,
        arguments=source.arguments,
        has_lse=has_lse,
        choices=tuple(choices),
        origin=origin,
    )
