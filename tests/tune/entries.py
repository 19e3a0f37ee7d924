"""Entries and tables of tuned configs for tests."""

from __future__ import annotations

from dataclasses import replace

from flashgen import AttentionSpec, Schedule
from flashgen.schedule.model import Bucket, bucket_of
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune.table import Entry, Table
from flashgen.tune.toolchain import Device, Toolchain

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(
    name="tuned",
    head_dim=64,
    dtype="fp16",
    heads={"group": 1},
    mask="causal",
    shapes=[{"batch": 2, "q_heads": 4, "kv_heads": 4, "q_len": 2048, "kv_len": 2048}],
)
FAST = Schedule(block_m=128, block_n=32, num_warps=8, num_stages=2)
OTHER = Schedule(block_m=64, block_n=32, num_warps=4, num_stages=2)
TOO_LARGE = Schedule(block_m=256, block_n=256, num_warps=4, num_stages=4)


def entry(schedule: Schedule = FAST, bucket: Bucket | None = None, **changes: object) -> Entry:
    shape = Shape(batch=2, q_heads=4, kv_heads=4, q_len=2048, kv_len=2048)
    made = Entry(
        direction="forward",
        bucket=bucket or bucket_of(2048, 2048),
        shape=shape,
        schedule=schedule,
        time_us=12.3456789,
        low_us=12.0,
        high_us=13.5,
        rate=345.6,
        unit="TFLOP/s",
        bound_us=4.4,
        default=OTHER,
        default_us=15.0,
        trials=20,
        feasible=100,
        kernel_digest="0123456789abcdef",
        device=Device.of_target(TARGET),
        toolchain=Toolchain("0.1.0", "2.11.0", "3.6.0"),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def table(*entries: Entry, spec: AttentionSpec = SPEC, gpu: str = TARGET.id) -> Table:
    return Table(spec.display_name, spec.fingerprint, gpu, entries or (entry(),))
