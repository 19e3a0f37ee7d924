"""Specs and schedules of gluon_sm90, one for each thing that changes a module's text."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.render import KernelSource, render
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

WINDOW = ["causal", {"window": {"left": 511}}]


def hopper(consumers: int, block_n: int, num_stages: int, **own: Any) -> Schedule:
    return Schedule(
        family="gluon_sm90",
        block_m=64 * consumers,
        block_n=block_n,
        num_warps=4 * (consumers + 1),
        num_stages=num_stages,
        sm90=Sm90(**own),
    )


DYNAMIC = {"scheduler": "dynamic", "separate_out": True}
STATIC = {"scheduler": "static", "separate_out": True, "group_mb": 4}
LONG = hopper(2, 128, 2, **DYNAMIC)
# One module for each thing that changes the text, with a schedule that compiles without spilling.
GOLDEN: dict[str, tuple[dict[str, Any], Schedule]] = {
    "causal-d128": ({"head_dim": 128, "dtype": "bf16", "mask": "causal"}, LONG),
    "full-d64": ({"head_dim": 64, "dtype": "bf16"}, hopper(3, 128, 4)),
    "full-d256": ({"head_dim": 256, "dtype": "fp16", "heads": {"group": 4}}, hopper(2, 64, 2)),
    "softcap": (
        {"head_dim": 128, "dtype": "bf16", "mask": "causal", "score": {"softcap": 50.0}},
        LONG,
    ),
    "alibi": (
        {
            "head_dim": 128,
            "dtype": "bf16",
            "mask": "causal",
            "score": {"alibi": "slopes"},
            "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
        },
        hopper(2, 128, 2, **DYNAMIC),
    ),
    "window": (
        {"head_dim": 128, "dtype": "bf16", "mask": WINDOW},
        hopper(2, 128, 2, **STATIC),
    ),
    "sinks-window-d64": (
        {
            "head_dim": 64,
            "dtype": "bf16",
            "mask": ["causal", {"window": {"left": 127}}],
            "sink": "per_head",
        },
        hopper(2, 128, 4, **DYNAMIC),
    ),
    "bias": (
        {
            "head_dim": 128,
            "dtype": "bf16",
            "score": {"bias": {"tensor": "rel"}},
            "inputs": {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}},
        },
        hopper(2, 64, 2, **DYNAMIC),
    ),
    "documents": (
        {
            "head_dim": 128,
            "dtype": "bf16",
            "mask": ["causal", {"same": "doc"}],
            "inputs": {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
        },
        LONG,
    ),
    "prefix": (
        {
            "head_dim": 128,
            "dtype": "bf16",
            "layout": "bshd",
            "mask": {"expr": "k < prefix[b] or k <= q"},
            "inputs": {"prefix": {"shape": ["batch"], "dtype": "int32"}},
        },
        LONG,
    ),
    "d192-v128": (
        {"head_dim": {"qk": 192, "v": 128}, "dtype": "bf16", "mask": "causal"},
        hopper(2, 64, 2, **DYNAMIC),
    ),
    "packed-heads": (
        {
            "head_dim": 128,
            "dtype": "bf16",
            "heads": {"group": 6},
            "mask": ["causal", {"window": {"left": 4095}}],
            "score": {"alibi": "slopes"},
            "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
            "sink": "per_head",
        },
        hopper(2, 128, 2, **DYNAMIC, packed_heads=8),
    ),
    "piped-d128": (
        {"head_dim": 128, "dtype": "bf16", "mask": "causal"},
        hopper(2, 128, 2, **STATIC, q_buffers=2),
    ),
}


def problem_of(case: str) -> Problem:
    return Problem(AttentionSpec(name=case, **GOLDEN[case][0]), get_target("nvidia-h200"))


def rendered(case: str, *, has_lse: bool = True) -> KernelSource:
    return render(problem_of(case), [(Bucket(None, None), GOLDEN[case][1])], has_lse=has_lse)
