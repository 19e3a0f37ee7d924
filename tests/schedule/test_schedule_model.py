from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import ScheduleError
from flashgen.schedule.model import (
    KV_LEN_LIMITS,
    Bucket,
    Rejection,
    Schedule,
    Sm90,
    all_buckets,
    bucket_of,
)

SCHEDULE = Schedule(block_m=128, block_n=64, num_warps=8, num_stages=3)


HOPPER = Schedule(
    family="gluon_sm90",
    block_m=192,
    block_n=128,
    num_warps=16,
    num_stages=4,
    sm90=Sm90(scheduler="dynamic", q_buffers=2, separate_out=True, group_mb=4),
)


PACKED = dataclasses.replace(HOPPER, sm90=Sm90(scheduler="dynamic", packed_heads=8))


def test_schedule_round_trips_through_json() -> None:
    capped = dataclasses.replace(SCHEDULE, maxnreg=128, kernel="single_tile")
    for schedule in (SCHEDULE, capped, HOPPER, PACKED):
        assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
        assert pickle.loads(pickle.dumps(schedule)) == schedule
    names = [field.name for field in dataclasses.fields(Schedule)]
    assert list(HOPPER.to_dict()) == names
    assert list(SCHEDULE.to_dict()) == [name for name in names if name != "sm90"]
    assert PACKED.to_dict()["sm90"] == {**Sm90(scheduler="dynamic").to_dict(), "packed_heads": 8}
    assert "packed_heads" not in HOPPER.to_dict()["sm90"]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (None, "schedule.sm90: family gluon_sm90 needs it"),
        (3, "schedule.sm90: must be a mapping (got 3)"),
        ({"depth": 2}, "schedule.sm90.depth: unknown field, known: scheduler, q_buffers, "),
        (
            {"scheduler": "random"},
            "schedule.sm90.scheduler: must be one of grid, static, dynamic (got 'random')",
        ),
        ({"q_buffers": 0}, "schedule.sm90.q_buffers: must be a positive integer (got 0)"),
        ({"packed_heads": 0}, "schedule.sm90.packed_heads: must be a positive integer (got 0)"),
        ({"group_mb": 2.5}, "schedule.sm90.group_mb: must be a positive integer (got 2.5)"),
        ({"separate_out": 1}, "schedule.sm90.separate_out: must be true or false (got 1)"),
    ],
)
def test_what_the_hopper_family_chooses_is_checked(own: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.from_dict({**HOPPER.to_dict(), "sm90": own})


def test_schedule_prints_on_one_line() -> None:
    assert str(SCHEDULE) == "loop flash2 128x64 8 warps 3 stages"
    capped = dataclasses.replace(SCHEDULE, maxnreg=128)
    assert str(capped) == "loop flash2 128x64 8 warps 3 stages maxnreg 128"
    assert str(HOPPER) == (
        "gluon_sm90 192x128 16 warps 4 stages dynamic 2 q buffers own output buffer 4 MiB abreast"
    )
    assert str(PACKED) == (
        "gluon_sm90 192x128 16 warps 4 stages dynamic output through q's buffer 32 MiB abreast "
        "8 heads a tile"
    )


def test_heads_that_share_tiles_have_fewer_positions_in_each() -> None:
    assert (SCHEDULE.positions, HOPPER.positions, PACKED.positions) == (128, 192, 24)
    assert SCHEDULE.tile_heads(12, 2) == HOPPER.tile_heads(12, 2) == 12
    assert PACKED.tile_heads(12, 2) == 2
    assert PACKED.tile_heads(40, 2) == 6  # groups of 20 are 8, 8 and 4
    assert PACKED.tile_heads(0, 0) == 0


def test_schedules_sort_also_with_and_without_a_register_cap() -> None:
    capped = dataclasses.replace(SCHEDULE, maxnreg=128)
    wider = dataclasses.replace(SCHEDULE, block_m=256)
    assert sorted([wider, capped, SCHEDULE]) == [SCHEDULE, capped, wider]
    assert max(SCHEDULE, capped) is capped
    assert len({SCHEDULE, capped, dataclasses.replace(SCHEDULE)}) == 2
    assert sorted([SCHEDULE, HOPPER]) == [HOPPER, SCHEDULE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_k": 3}, "schedule.block_k: unknown field, known: family, kernel"),
        ({"kernel": "split"}, "schedule.kernel: must be one of loop, single_tile (got 'split')"),
        ({"block_m": "128"}, "schedule.block_m: must be a positive integer (got '128')"),
        ({"block_n": None}, "schedule.block_n: must be a positive integer (got None)"),
        ({"num_warps": 0}, "schedule.num_warps: must be a positive integer (got 0)"),
        ({"num_stages": True}, "schedule.num_stages: must be a positive integer (got True)"),
        ({"maxnreg": 1.5}, "schedule.maxnreg: must be a positive integer (got 1.5)"),
    ],
)
def test_a_wrong_schedule_names_its_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_dict({**SCHEDULE.to_dict(), **change})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("rejection", "text"),
    [
        (
            Rejection("smem_bytes", 294912, 232448),
            "smem_bytes: needs 294912 B, target has 232448 B",
        ),
        (
            Rejection("regs_per_thread", 272, 255),
            "regs_per_thread: needs 272 registers, target has 255 registers",
        ),
        (Rejection("num_stages", 9, 4), "num_stages: must be at most 4 (got 9)"),
        (Rejection("block_n", 8, 16, "at least"), "block_n: must be at least 16 (got 8)"),
        (Rejection("block_m", 48, 0, "power of two"), "block_m: must be a power of two (got 48)"),
        (Rejection("loop_order", 0, 0, "as in the spec"), "loop_order: the spec asks for another"),
    ],
)
def test_rejections_print_what_was_needed(rejection: Rejection, text: str) -> None:
    assert str(rejection).startswith(text)


@pytest.mark.parametrize(
    ("lengths", "bucket", "kernel"),
    [
        ((0, 0), Bucket(16, 16), "single_tile"),
        ((1, 16), Bucket(16, 16), "single_tile"),
        ((17, 17), Bucket(32, 32), "single_tile"),
        ((64, 128), Bucket(64, 128), "single_tile"),
        ((65, 129), Bucket(None, 256), "loop"),
        ((1, 16384), Bucket(16, 16384), "loop"),
        ((262144, 262144), Bucket(None, None), "loop"),
    ],
)
def test_buckets(lengths: tuple[int, int], bucket: Bucket, kernel: str) -> None:
    assert bucket_of(*lengths) == bucket
    assert bucket_of(*lengths).kernel == kernel


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_every_shape_lies_in_its_bucket_and_in_no_smaller_one(q_len: int, kv_len: int) -> None:
    bucket = bucket_of(q_len, kv_len)
    assert bucket in all_buckets()
    for length, limit in ((q_len, bucket.q_len_max), (kv_len, bucket.kv_len_max)):
        assert limit is None or length <= limit
    smaller = [limit for limit in KV_LEN_LIMITS if limit < (bucket.kv_len_max or 2**31)]
    assert all(kv_len > limit for limit in smaller)


def test_buckets_are_shared_and_round_trip() -> None:
    assert bucket_of(100, 1000) is bucket_of(70, 513)
    for bucket in all_buckets():
        assert Bucket.from_dict(json.loads(json.dumps(bucket.to_dict()))) is bucket
    with pytest.raises(ScheduleError, match="unknown shape bucket"):
        Bucket.from_dict({"q_len_max": 17, "kv_len_max": None})
    assert str(Bucket(16, None)) == "q_len <= 16, kv_len any"


def test_the_warm_path_imports_nothing_heavy() -> None:
    code = (
        "import sys, flashgen.schedule.model; "
        "print([m for m in ('sympy', 'networkx', 'jinja2', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_splits_are_said_only_where_there_are_some() -> None:
    split = dataclasses.replace(SCHEDULE, loop_order="flash1", num_kv_splits=8)
    assert str(split) == "loop flash1 128x64 8 warps 3 stages 8 splits"
    assert "splits" not in str(SCHEDULE)
    assert Schedule.from_dict(split.to_dict()) == split
    without = {k: v for k, v in SCHEDULE.to_dict().items() if k != "num_kv_splits"}
    assert Schedule.from_dict(without) == SCHEDULE
    assert split > dataclasses.replace(split, num_kv_splits=1)
    with pytest.raises(ScheduleError, match=r"num_kv_splits: must be a positive integer \(got 0\)"):
        Schedule.from_dict({**SCHEDULE.to_dict(), "num_kv_splits": 0})
