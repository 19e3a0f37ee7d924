"""The family gluon_sm90: shared memory to the byte, rejections with their reasons, its part of the
space, that nothing chooses it untuned, and what serves beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.compiler.choose import choose
from flashgen.errors import ScheduleError
from flashgen.problem import Problem
from flashgen.schedule import families, sm90, space
from flashgen.schedule.budget import budget_for
from flashgen.schedule.model import Bucket, Schedule, Scheduler, Sm90, all_buckets, bucket_of
from flashgen.schedule.space import (
    check,
    default_schedule,
    enumerate_space,
    portable_schedule,
    unserved,
)
from flashgen.spec.model import AttentionSpec
from flashgen.target import get_target

ANY = Bucket(None, None)
DOC = {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}}


def problem(target: str = "nvidia-h200", **fields: Any) -> Problem:
    return Problem(
        AttentionSpec(**{"head_dim": 128, "dtype": "bf16", **fields}), get_target(target)
    )


def hopper(
    consumers: int, block_n: int, stages: int, scheduler: Scheduler = "grid", **own: Any
) -> Schedule:
    return Schedule(
        family="gluon_sm90",
        block_m=64 * consumers,
        block_n=block_n,
        num_warps=4 * (consumers + 1),
        num_stages=stages,
        sm90=Sm90(scheduler=scheduler, **own),
    )


# As Triton 3.6.0 and 3.7.1 report it: head dim, schedule, whether lse is written, bytes.
COMPILED: tuple[tuple[int, Schedule, int], ...] = (
    (128, hopper(2, 128, 2, "dynamic", separate_out=True), 197896),
    (128, hopper(2, 128, 2, "static", separate_out=True), 197880),
    (128, hopper(2, 128, 2), 165080),
    (64, hopper(3, 128, 4), 156996),
    (64, hopper(4, 64, 4, "dynamic", direct_out=True), 99680),
    (
        64,
        hopper(2, 64, 4, "dynamic", direct_out=True, programs_per_sm=2, overlapped=False),
        83224,
    ),
    (64, hopper(2, 128, 4, "dynamic", separate_out=True), 165192),
    (64, hopper(2, 128, 2, "dynamic", separate_out=True, q_buffers=2), 116008),
    (256, hopper(2, 64, 2), 197848),
    (256, hopper(2, 64, 2, "dynamic"), 197864),
    (32, hopper(3, 128, 4), 79172),
)


@pytest.mark.parametrize(("head_dim", "schedule", "smem"), COMPILED)
def test_shared_memory_is_what_the_compiler_reports(
    head_dim: int, schedule: Schedule, smem: int
) -> None:
    assert sm90.smem_bytes(schedule, problem(head_dim=head_dim)) == smem


def test_inputs_and_sinks_are_handed_to_the_roles() -> None:
    slopes = {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}}
    alibi = problem(score={"alibi": "slopes"}, inputs=slopes)
    dynamic = hopper(2, 128, 2, "dynamic", separate_out=True)
    assert sm90.smem_bytes(dynamic, alibi) == 197912
    bias = problem(score={"bias": {"tensor": "rel"}}, inputs=REL)
    assert sm90.smem_bytes(hopper(2, 64, 2, "dynamic", separate_out=True), bias) == 165272
    documents = problem(mask=["causal", {"same": "doc"}], inputs=DOC)
    assert sm90.smem_bytes(dynamic, documents) == 197896
    scored = documents.spec.replace(score=[{"expr": "s + doc[b, k]"}])
    assert sm90.smem_bytes(dynamic, Problem(scored, documents.target)) == 197928
    sinks = problem(head_dim=64, sink="per_head")
    assert sm90.smem_bytes(hopper(2, 128, 2), sinks) == 83176


# Of a group of 8 whose heads share tiles: q's and the output's have an axis more.
PACKED: tuple[tuple[int, Schedule, int], ...] = (
    (128, hopper(2, 128, 2, "dynamic", separate_out=True, packed_heads=8), 197896),
    (64, hopper(3, 128, 4, packed_heads=8), 156996),
    (256, hopper(2, 64, 2, packed_heads=4), 197848),
    (
        128,
        hopper(2, 128, 2, "static", separate_out=True, q_buffers=2, packed_heads=8),
        230680,
    ),
)


@pytest.mark.parametrize(("head_dim", "schedule", "smem"), PACKED)
def test_shared_memory_where_heads_share_tiles(
    head_dim: int, schedule: Schedule, smem: int
) -> None:
    grouped = problem(head_dim=head_dim, heads={"group": 8})
    assert sm90.smem_bytes(schedule, grouped) == smem


def test_shared_memory_where_heads_share_tiles_of_a_causal_mask() -> None:
    schedule = hopper(2, 128, 2, "dynamic", separate_out=True, packed_heads=8)
    causal = problem(mask="causal", heads={"group": 8})
    assert sm90.smem_bytes(schedule, causal) == 197896


def test_the_budget_asks_the_family() -> None:
    schedule = hopper(2, 128, 2)
    needs = budget_for(problem(), schedule)
    assert needs.smem_bytes_of(schedule) == 165080
    assert needs.least_smem_bytes_of(schedule) == 165080
    assert needs.regs_per_thread_of(schedule) == 64 + 64 + 32


GOOD = hopper(2, 64, 2)
REL = {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}}
REJECTED: tuple[tuple[Schedule, dict[str, Any], str], ...] = (
    (GOOD, {"target": "nvidia-a100-80gb"}, "family gluon_sm90 on sm_80: not served"),
    (GOOD, {"dtype": "fp32"}, "dtype fp32 of gluon_sm90: not served"),
    (GOOD, {"head_dim": 320}, "head_dim of gluon_sm90: must be at most 256 (got 320)"),
    (GOOD, {"kv_lens": "per_batch"}, "kv_lens of gluon_sm90: not served"),
    (GOOD, {"loop_order": "flash1"}, "loop_order flash1 of gluon_sm90: not served"),
    (GOOD, {"mask": {"same": "doc"}, "inputs": DOC}, ""),
    (
        GOOD,
        {"mask": [{"same": "doc"}, {"expr": "q * k % 7 < 5"}], "inputs": DOC},
        "documents beside a mask of elements in gluon_sm90: not served",
    ),
    (
        GOOD,
        {"mask": {"expr": "k // 64 % 4 == q // 64 % 4"}},
        "chunks of keys in gluon_sm90: not served",
    ),
    (
        GOOD,
        {"mask": {"expr": "k < 4 or abs(q - k) < 128"}},
        "key ranges of a query tile in gluon_sm90: must be exactly 1 (got 2)",
    ),
    (replace(GOOD, block_m=64), {}, "block_m of gluon_sm90: must be 128, 192 or 256 (got 64)"),
    (replace(GOOD, block_n=256), {}, "block_n of gluon_sm90: must be 64 or 128 (got 256)"),
    (replace(GOOD, num_warps=8), {}, "num_warps of gluon_sm90: must be exactly 12 (got 8)"),
    (replace(GOOD, num_stages=5), {}, "num_stages: must be at most 4 (got 5)"),
    (replace(GOOD, maxnreg=128), {}, "maxnreg of gluon_sm90: not served"),
    (replace(GOOD, num_kv_splits=2), {}, "num_kv_splits of gluon_sm90: must be exactly 1 (got 2)"),
    (replace(GOOD, kernel="single_tile"), {}, "kernel of gluon_sm90: single_tile: not served"),
    (
        hopper(3, 64, 2, programs_per_sm=2),
        {},
        "programs_per_sm of gluon_sm90: must be at most 1 (got 2)",
    ),
    (
        hopper(2, 64, 4, programs_per_sm=2, overlapped=False),
        {},
        "smem_bytes of an SM: needs 332336 B, target has 233472 B",
    ),
    (
        hopper(2, 64, 2, separate_out=True, direct_out=True),
        {},
        "separate_out beside direct_out: must be at most 0 (got 1)",
    ),
    (
        hopper(2, 64, 2, direct_out=True),
        {"head_dim": 16},
        "head_dim_v of direct_out: must be at least 32 (got 16)",
    ),
    (
        hopper(2, 64, 2, "static", separate_out=True, q_buffers=2, overlapped=False),
        {},
        "overlapped of more than one q buffer: must be at least 1 (got 0)",
    ),
    (
        hopper(2, 64, 2, q_buffers=2),
        {},
        "q_buffers of scheduler grid: must be at most 1 (got 2)",
    ),
    (
        hopper(2, 64, 2, "static", separate_out=True, q_buffers=2),
        {"score": {"bias": {"tensor": "rel"}}, "inputs": REL},
        "q_buffers where tiles of the score are loaded: must be at most 1 (got 2)",
    ),
    (
        GOOD,
        {"head_dim": {"qk": 192, "v": 128}},
        "separate_out or direct_out where head dims differ: must be at least 1 (got 0)",
    ),
    (hopper(2, 128, 4), {"head_dim": 128}, "smem_bytes: needs 296216 B, target has 232448 B"),
    (hopper(3, 128, 1), {"head_dim": 128}, ""),
    (hopper(2, 64, 2, packed_heads=8), {"heads": {"group": 6}}, ""),
    (hopper(2, 64, 2, packed_heads=64), {}, ""),
    (
        hopper(2, 64, 2, packed_heads=8),
        {"heads": {"group": 4}},
        "packed_heads: must be at most 4 (got 8)",
    ),
    (hopper(2, 64, 2, packed_heads=128), {}, "packed_heads: must be at most 64 (got 128)"),
    (hopper(2, 64, 2, packed_heads=6), {}, "packed_heads: must be a power of two (got 6)"),
    (
        hopper(2, 64, 2, packed_heads=2),
        {"score": {"bias": {"tensor": "rel"}}, "inputs": REL},
        "packed_heads where tiles of the score are loaded: not served",
    ),
    (
        hopper(2, 64, 2, direct_out=True, packed_heads=2),
        {},
        "packed_heads of direct_out: not served",
    ),
    (
        hopper(2, 64, 2, packed_heads=2),
        {"mask": {"same": "doc"}, "inputs": DOC},
        "packed_heads of documents: not served",
    ),
    (
        hopper(2, 64, 2, packed_heads=2),
        {
            "mask": {"expr": "k >= q - reach[h]"},
            "inputs": {"reach": {"shape": ["q_heads"], "dtype": "int32"}},
        },
        "packed_heads of key ranges for each head: not served",
    ),
    (
        hopper(2, 64, 2, packed_heads=2),
        {
            "mask": {"expr": "k >= q - reach[hk]"},
            "inputs": {"reach": {"shape": ["kv_heads"], "dtype": "int32"}},
        },
        "",
    ),
    (
        hopper(3, 64, 1),
        {"head_dim": 256},
        "regs_per_thread: needs 176 registers, target has 160 registers",
    ),
)


@pytest.mark.parametrize(("schedule", "fields", "message"), REJECTED)
def test_rejections_say_why(schedule: Schedule, fields: dict[str, Any], message: str) -> None:
    found = check(schedule, problem(**fields))
    assert str(found or "") == message


def test_a_schedule_that_cannot_be_used_is_refused_with_its_reason() -> None:
    with pytest.raises(ScheduleError, match="regs_per_thread: needs 176 registers"):
        choose(problem(head_dim=256), hopper(3, 64, 1))


def test_nothing_chooses_the_family_untuned() -> None:
    assert {s.family for _, s in choose(problem(), None)} == {"triton"}
    assert {default_schedule(problem(), bucket).family for bucket in all_buckets()} == {"triton"}


def test_the_space_has_both_families() -> None:
    both = enumerate_space(problem(), ANY)
    portable = enumerate_space(problem(), ANY, ("triton",))
    alone = enumerate_space(problem(), ANY, ("gluon_sm90",))
    assert set(both.feasible) == {*portable.feasible, *alone.feasible}
    assert list(both.feasible) == sorted(both.feasible)
    assert {s.family for s in portable.feasible} == {"triton"}
    assert {s.consumers for s in alone.feasible} == {2, 3, 4}
    assert len(alone.feasible) + len(alone.rejections) == len(list(sm90.grid(problem(), ANY)))
    reasons = {r.reason for _, r in alone.rejections}
    assert reasons == {"smem_bytes", "smem_bytes of an SM", "regs_per_thread"}


def test_what_a_program_that_stays_may_choose() -> None:
    found = enumerate_space(problem(), ANY, ("gluon_sm90",)).feasible
    own = {s.sm90 for s in found if s.sm90}
    assert {o.scheduler for o in own if o.q_buffers == 2} == {"static", "dynamic"}
    assert all(o.separate_out or o.direct_out for o in own if o.q_buffers == 2)
    assert {o.q_buffers for o in own if o.scheduler == "grid"} == {1}
    assert len({*sm90.grid(problem(), ANY)}) == len([*sm90.grid(problem(), ANY)])


SERVED_NOT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp32"}, "dtype fp32 of gluon_sm90"),
    "kv_lens": ({"kv_lens": "per_batch"}, "kv_lens of gluon_sm90"),
    "rows": ({"head_dim": 20}, "output rows of 40 B in gluon_sm90"),
    "rows of q": ({"head_dim": {"qk": 36, "v": 64}}, "q and k rows of 72 B in gluon_sm90"),
}


NUMBER = 2 * 4 * (3 * 26 + 6)  # keys and stages of a tile; consumers; two programs on an SM


@pytest.mark.parametrize("name", SERVED_NOT)
def test_specs_that_it_does_not_serve_are_rejected_with_one_reason(name: str) -> None:
    fields, reason = SERVED_NOT[name]
    found = enumerate_space(problem(**fields), ANY, ("gluon_sm90",))
    assert not found.feasible
    assert {key: len(group) for key, group in found.grouped().items()} == {reason: NUMBER}
    assert enumerate_space(problem(**fields), ANY).feasible
    assert (unserved("gluon_sm90", problem(**fields), ANY) or "").startswith(reason)
    assert unserved("triton", problem(**fields), ANY) is None


def test_other_gpus_and_short_lengths_have_none_of_it() -> None:
    elsewhere = enumerate_space(problem("nvidia-a100-80gb"), ANY, ("gluon_sm90",))
    assert elsewhere.feasible == elsewhere.rejections == ()
    short = [b for b in all_buckets() if b.q_len_max is not None or b.kernel == "single_tile"]
    assert not any(list(sm90.grid(problem(), bucket)) for bucket in short)
    assert str(check(GOOD, problem(), bucket_of(16, 4096))) == (
        "short lengths of gluon_sm90: not served"
    )
    assert check(GOOD, problem(), bucket_of(4096, 4096)) is None


SHAPES = [{"batch": 1, "q_heads": 12, "kv_heads": 2, "q_len": 9, "kv_len": 4000}]
# Fields of a spec, and the numbers of heads that share tiles where rows are few.
PACKINGS: tuple[tuple[dict[str, Any], set[int]], ...] = (
    ({"heads": {"group": 8}}, {2, 4, 8}),
    ({"heads": {"group": 6}}, {2, 4, 8}),
    ({"heads": {"group": 128}}, {2, 4, 8, 16, 32, 64}),
    ({"heads": {"group": 1}}, set()),
    ({"shapes": SHAPES}, {2, 4, 8}),
    ({"heads": {"group": 8}, "mask": {"same": "doc"}, "inputs": DOC}, set()),
)


@pytest.mark.parametrize(("fields", "expected"), PACKINGS)
def test_few_rows_are_served_by_heads_that_share_tiles(
    fields: dict[str, Any], expected: set[int]
) -> None:
    grouped, short = problem(**fields), bucket_of(9, 4000)
    found = enumerate_space(grouped, short, ("gluon_sm90",))
    assert {s.packed_heads for s in found.feasible} == expected
    assert len(found.feasible) + len(found.rejections) == len([*sm90.grid(grouped, short)])
    assert not any(s.sm90 and s.sm90.direct_out for s in found.feasible)
    why = unserved("gluon_sm90", grouped, short)
    assert why == (None if expected else "short lengths of gluon_sm90: not served")
    many = enumerate_space(grouped, ANY, ("gluon_sm90",)).feasible
    assert {s.packed_heads for s in many} == {1}
    assert not [*sm90.grid(grouped, bucket_of(9, 100))]


def test_few_rows_need_heads_that_share_tiles() -> None:
    """A group that the spec leaves to the call is served: the number of heads is the schedule's."""
    packed, short = hopper(2, 64, 2, packed_heads=4), bucket_of(9, 4000)
    assert check(packed, problem(), short) is None
    assert str(check(GOOD, problem(), short)) == "short lengths of gluon_sm90: not served"
    in_one_tile = str(check(packed, problem(), bucket_of(9, 100)))
    assert in_one_tile == "short lengths of gluon_sm90: not served"
    assert dict(choose(problem(), packed))[short] == packed


def test_a_triton_without_gluon_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "gluon_missing", lambda: "triton 3.5.1 has no Gluon")
    assert {s.family for s in enumerate_space(problem(), ANY).feasible} == {"triton"}
    assert enumerate_space(problem(), ANY, ("gluon_sm90",)) == space.Space((), ())
    assert unserved("gluon_sm90", problem(), ANY) == "triton 3.5.1 has no Gluon"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_beside_a_hopper_kernel_is_the_untuned_one(head_dim: int) -> None:
    """In every bucket that Hopper kernels serve the same, so that a module needs one."""
    beside = portable_schedule(problem(head_dim=head_dim))
    served = [bucket for bucket in all_buckets() if not sm90.is_short(bucket)]
    assert {default_schedule(problem(head_dim=head_dim), bucket) for bucket in served} == {beside}
    auto = portable_schedule(problem(head_dim=head_dim, loop_order="auto"))
    assert auto == beside
