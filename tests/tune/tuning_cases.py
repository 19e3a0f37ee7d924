"""A case, its space and its trials, for tests."""

from __future__ import annotations

from entries import FAST, OTHER, SPEC, TARGET

from flashgen.problem import Problem
from flashgen.schedule.model import bucket_of
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.tune.search import Space
from flashgen.tune.storage import place_of
from flashgen.tune.study import Case, Trials
from flashgen.tune.toolchain import Device, Toolchain

BUCKET = bucket_of(2048, 2048)
PROBLEM = Problem(SPEC, TARGET)
DEFAULT = default_schedule(PROBLEM, BUCKET)
ALL_FEASIBLE = enumerate_space(PROBLEM, BUCKET).feasible
PORTABLE = enumerate_space(PROBLEM, BUCKET, ("triton",)).feasible
# A fifth of a family's: enough to search in, little enough to measure each in every test.
FEASIBLE = tuple(sorted({DEFAULT, FAST, OTHER, *PORTABLE[::5]}))
SPACE = Space(FEASIBLE, DEFAULT)
CASE = Case(
    spec=SPEC.display_name,
    fingerprint=SPEC.fingerprint,
    gpu=TARGET.id,
    device=Device.of_target(TARGET),
    toolchain=Toolchain("0.1.0", "2.11.0", "3.6.0"),
    kernel_digest="0" * 16,
    direction="forward",
    bucket=BUCKET,
    shape=SPEC.shapes[0],
)


def trials(storage: str | None = None, *, retry_failed: bool = False) -> Trials:
    return Trials(CASE, place_of(storage), retry_failed=retry_failed)
