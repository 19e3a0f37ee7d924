"""Reads of inputs whose indices are computed: a kernel has each name before it reads it."""

from __future__ import annotations

import ast
import builtins
from dataclasses import replace
from typing import Any

import pytest
from hopper_cases import hopper

from flashgen.codegen.render import render
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

# Indices along heads, or batches, that neither the row nor the key moves, and others beside them.
INDICES = [
    "h // 2, row, k",
    "h % 2, q, k",
    "hk + 1, row // 2, k",
    "floor(h * 0.5), row, k",
    "perm[h], row, k",
    "perm[h // 2] + 1, row, k",
    "h // 2, row, max(k - q, 0)",
    "h // 2, k // 2, k",
]
USES: dict[str, dict[str, Any]] = {
    "score": {"score": {"expr": "s + t[{}]"}},
    "mask": {"mask": {"expr": "t[{}] > 0"}},
    "both": {"mask": {"expr": "t[{}] > 0"}, "score": {"expr": "s * t[{}] + t[h, row, k]"}},
}
PORTABLE = Schedule(block_m=64, block_n=32, num_warps=4, num_stages=1)
SCHEDULES = {
    "loop": PORTABLE,
    "single tile": replace(PORTABLE, kernel="single_tile"),
    "flash1": replace(PORTABLE, loop_order="flash1", num_kv_splits=1),
    "flash1 split": replace(PORTABLE, loop_order="flash1", num_kv_splits=4),
    "Hopper": hopper(2, 64, 2),
}


def spec_of(index: str, use: str, schedule: Schedule) -> AttentionSpec:
    return AttentionSpec(
        name="reads",
        head_dim=64,
        dtype="bf16",
        inputs={
            "t": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "fp32"},
            "perm": {"shape": ["q_heads"], "dtype": "int32"},
        },
        loop_order=schedule.loop_order,
        **{field: {"expr": item["expr"].format(index)} for field, item in USES[use].items()},
    )


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("index", INDICES)
def test_a_kernel_has_each_name_before_it_reads_it(index: str, use: str, schedule: str) -> None:
    chosen = SCHEDULES[schedule]
    problem = Problem(spec_of(index, use, chosen), get_target("nvidia-h200"))
    module = ast.parse(render(problem, [(Bucket(None, None), chosen)], has_lse=True).text)
    of_module = Names(set(dir(builtins)))
    for node in module.body:
        of_module.visit(node)
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            names = Names(of_module.known | {a.arg for a in function.args.args})
            for statement in function.body:
                names.visit(statement)
            assert names.unknown == [], function.name


class Names(ast.NodeVisitor):
    """Which names are read before, in the order of the text, they are bound."""

    def __init__(self, known: set[str]) -> None:
        self.known = set(known)
        self.unknown: list[str] = []

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.known.add(node.id)
        elif node.id not in self.known:
            self.unknown.append(f"{node.id}, line {node.lineno}")

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        for name in (n for n in ast.walk(node.target) if isinstance(n, ast.Name)):
            self.visit_Name(ast.Name(name.id, ast.Load(), lineno=node.lineno))

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, node.target, *node.body):
            self.visit(part)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for generator in node.generators:
            for part in (generator.iter, generator.target, *generator.ifs):
                self.visit(part)
        self.visit(node.elt)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.known.add(node.name)

    def visit_Import(self, node: ast.Import) -> None:
        self.known |= {alias.asname or alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.known |= {alias.asname or alias.name for alias in node.names}
