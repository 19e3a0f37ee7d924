"""Variants and schedules with which the gluon_sm90 family is first tried on a GPU, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen.schedule.model import Schedule, Scheduler, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape


def schedule(
    consumers: int,
    block_n: int,
    stages: int,
    scheduler: Scheduler,
    *,
    separate_out: bool = False,
    q_buffers: int = 1,
    group_mb: int = 32,
    direct_out: bool = False,
    overlapped: bool = True,
    programs_per_sm: int = 1,
) -> Schedule:
    """A schedule of the family."""
    return Schedule(
        family="gluon_sm90",
        block_m=64 * consumers,
        block_n=block_n,
        num_warps=4 * (consumers + 1),
        num_stages=stages,
        sm90=Sm90(
            scheduler=scheduler,
            q_buffers=q_buffers,
            separate_out=separate_out,
            group_mb=group_mb,
            overlapped=overlapped,
            direct_out=direct_out,
            programs_per_sm=programs_per_sm,
        ),
    )


def shared(scheduler: Scheduler, group_mb: int) -> Schedule:
    """Two programs on each SM: while one begins or ends a query tile the other multiplies."""
    return schedule(
        *(2, 64, 4, scheduler),
        direct_out=True,
        group_mb=group_mb,
        overlapped=False,
        programs_per_sm=2,
    )


# Head dim up to -> schedules to check and to time; the first serves long sequences best.
SCHEDULES: Mapping[int, tuple[Schedule, ...]] = {
    64: (
        schedule(3, 128, 4, "dynamic", direct_out=True),
        schedule(3, 128, 4, "grid", direct_out=True),  # does not spill if causal
        shared("dynamic", 32),
        shared("dynamic", 4),
        shared("static", 4),
        schedule(4, 64, 4, "dynamic", direct_out=True, group_mb=4),
        schedule(2, 128, 4, "static", separate_out=True, q_buffers=2, group_mb=4),
    ),
    128: (
        schedule(3, 64, 3, "dynamic", separate_out=True),
        schedule(3, 64, 4, "dynamic", direct_out=True),
        schedule(3, 64, 3, "static", separate_out=True, group_mb=4),
        schedule(2, 128, 2, "dynamic", separate_out=True),
        schedule(2, 128, 2, "static", separate_out=True, q_buffers=2, group_mb=4),
    ),
    256: (
        schedule(2, 64, 2, "dynamic", direct_out=True),
        schedule(2, 64, 2, "dynamic", direct_out=True, group_mb=4),
        schedule(2, 64, 2, "static", direct_out=True, group_mb=4),
        schedule(2, 64, 2, "grid"),
    ),
}


@dataclass(frozen=True)
class Variant:
    """A spec of the family to be checked, and whether it is timed as plain attention.

    own: its schedule, where the one for its head dim spills or does not fit.
    """

    name: str
    fields: Mapping[str, Any] = field(hash=False)
    plain: bool = False
    only_first: bool = True
    own: Schedule | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(name=self.name.replace("-", "_"), **self.fields)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        if self.own is not None:
            return (self.own,)
        dims = self.spec.head_dim
        found = next(each for limit, each in SCHEDULES.items() if max(dims.qk, dims.v) <= limit)
        return found[:1] if self.only_first else found


HEAD_DIMS = (64, 128, 256)
TWO_64 = schedule(2, 128, 4, "dynamic", separate_out=True)  # 3 consumers spill there

VARIANTS: tuple[Variant, ...] = (
    *(
        Variant(
            f"plain-d{dim}{'-causal' if mask else ''}",
            {"head_dim": dim, "dtype": "bf16", "mask": mask},
            plain=True,
            only_first=False,
        )
        for dim in (128, 64, 256)
        for mask in ([], ["causal"])
    ),
    Variant("fp16-d128-causal", {"head_dim": 128, "dtype": "fp16", "mask": "causal"}),
    *(
        Variant(f"padded-d{dim}", {"head_dim": dim, "dtype": "bf16", "mask": "causal"})
        for dim in (80, 96, 192, 32)
    ),
    Variant(
        "d192-v128",
        {"head_dim": {"qk": 192, "v": 128}, "dtype": "bf16", "mask": "causal"},
        own=schedule(2, 64, 2, "dynamic", separate_out=True),
    ),
    Variant("bshd", {"head_dim": 128, "dtype": "bf16", "layout": "bshd"}),
    Variant(
        "window-d128",
        {"head_dim": 128, "dtype": "bf16", "mask": ["causal", {"window": {"left": 511}}]},
    ),
    Variant(
        "two-sided-window-d64",
        {"head_dim": 64, "dtype": "bf16", "mask": {"window": {"left": 100, "right": 30}}},
        own=TWO_64,
    ),
    Variant(
        "sinks-window-d64",
        {
            "head_dim": 64,
            "dtype": "bf16",
            "mask": ["causal", {"window": {"left": 127}}],
            "sink": "per_head",
        },
        own=TWO_64,
    ),
    Variant(
        "softcap-d128",
        {"head_dim": 128, "dtype": "bf16", "mask": "causal", "score": {"softcap": 50.0}},
    ),
    Variant(
        "alibi-d128",
        {
            "head_dim": 128,
            "dtype": "bf16",
            "mask": "causal",
            "score": {"alibi": "slopes"},
            "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
        },
    ),
    Variant(
        "bias-d128",
        {
            "head_dim": 128,
            "dtype": "bf16",
            "score": {"bias": {"tensor": "rel"}},
            "inputs": {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}},
        },
        own=schedule(2, 64, 3, "dynamic", separate_out=True),
    ),
    Variant(
        "documents-d128",
        {
            "head_dim": 128,
            "dtype": "bf16",
            "mask": ["causal", {"same": "doc"}],
            "inputs": {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
        },
        own=schedule(2, 128, 2, "dynamic", separate_out=True),
    ),
    Variant(
        "prefix-d128",
        {
            "head_dim": 128,
            "dtype": "bf16",
            "mask": {"expr": "k < prefix[b] or k <= q"},
            "inputs": {"prefix": {"shape": ["batch"], "dtype": "int32"}},
        },
    ),
    Variant(
        "dense-mask-d64",
        {
            "head_dim": 64,
            "dtype": "bf16",
            "mask": {"expr": "m[b, h, row, k]"},
            "inputs": {"m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}},
        },
        own=TWO_64,
    ),
)

# Batch, query heads, K/V heads, q_len, kv_len: none a multiple of a tile, rows without a key, GQA,
# fewer tiles than SMs and many more.
SHAPES: tuple[Shape, ...] = (
    Shape(2, 4, 4, 128, 128),
    Shape(1, 2, 1, 77, 77),
    Shape(2, 6, 2, 1000, 1000),
    Shape(1, 4, 4, 300, 1234),
    Shape(1, 3, 3, 700, 260),
    Shape(3, 16, 2, 1025, 1279),
    Shape(1, 1, 1, 1, 513),
)
