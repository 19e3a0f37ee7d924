"""The record of a benchmark run: every number of it, as frozen data and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.tune.summary import Summary

RECORD_VERSION = 1
WRONG = "wrong: "  # how the error of a contestant with a wrong output begins
COPY = "copy"  # the ceiling of memory traffic


def matmul_name(dtype: str) -> str:
    """The name of the ceiling of matmuls in `dtype`."""
    return f"matmul {dtype}"


class RecordError(FlashgenError, ValueError):
    """A file that is not the record of a benchmark run."""


@dataclass(frozen=True)
class Accuracy:
    """An output held against fp64 on some query rows of every batch and head.

    `max_error` is absolute, `bound` what the project allows (twice the error of plain torch in the
    same dtype, and one ulp); `relative_error` is |out - fp64| / |fp64| in the Frobenius norm.
    `finite` covers the whole output; `poisoned`: its memory was known to hold NaN beforehand.
    """

    max_error: float
    bound: float
    relative_error: float
    rows: int
    finite: bool
    poisoned: bool


@dataclass(frozen=True)
class Result:
    """One contestant in one case: times of a call in ms, or the error that left it without."""

    name: str
    how: str = ""
    ms: Summary | None = None
    samples_ms: tuple[float, ...] = ()
    first_result_s: float | None = None
    accuracy: Accuracy | None = None
    error: str | None = None


@dataclass(frozen=True)
class CaseRecord:
    """One case: what was computed, the work it takes, and how each contestant did.

    `facts` holds what only some suites know, by name, as JSON values.
    """

    id: str
    group: str
    spec: str
    shape: Mapping[str, int]
    dtype: str = ""
    visible_pairs: int = 0
    matmul_flops: int = 0
    dram_bytes: int = 0
    results: tuple[Result, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def result(self, name: str) -> Result | None:
        """The contestant's result; None where it did not take part."""
        return next((result for result in self.results if result.name == name), None)

    def median_ms(self, name: str) -> float | None:
        """The contestant's median; None without one."""
        found = self.result(name)
        return found.ms.median if found is not None and found.ms is not None else None

    def tflops(self, name: str) -> float | None:
        """TFLOP/s of the matmuls, on visible pairs."""
        median = self.median_ms(name)
        return self.matmul_flops / median / 1e9 if median else None


@dataclass(frozen=True)
class Ceiling:
    """A rate measured in the same run, in the same bursts: a matmul's or a copy's."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def best(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Part:
    """An earlier command that a record goes on from, and what it prepared."""

    command: str
    started: str
    seconds: float
    preparation: str = ""


@dataclass(frozen=True)
class Record:
    """A suite's part of a run.

    `not_run`: what was left out, and why; `complete`: it came to its end. `run`: the same in the
    records of all `suites` of one run; `preparation`: what was compiled before anything was timed.
    `parts`: the commands before this one whose results are here too, with this one's GPU and
    versions.
    """

    suite: str
    target: str
    environment: Mapping[str, str]
    command: str
    started: str
    seconds: float = 0.0
    complete: bool = False
    ceilings: tuple[Ceiling, ...] = ()
    cases: tuple[CaseRecord, ...] = ()
    not_run: tuple[str, ...] = ()
    run: str = ""
    suites: tuple[str, ...] = ()
    preparation: str = ""
    parts: tuple[Part, ...] = ()
    version: int = RECORD_VERSION

    def ceiling(self, name: str) -> float | None:
        """The best reading of a ceiling; None where it was not measured."""
        return next((c.best for c in self.ceilings if c.name == name and c.values), None)

    def case(self, case_id: str) -> CaseRecord | None:
        """The case of this id; None where it has no results."""
        return next((case for case in self.cases if case.id == case_id), None)

    @property
    def wrong(self) -> tuple[str, ...]:
        """Cases in which flashgen itself was wrong: over its bound, or not verified."""
        return tuple(case.id for case in self.cases if _is_wrong(case))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of `to_json`; RecordError for anything else."""
        try:
            data = json.loads(text)
            if data["version"] != RECORD_VERSION:
                raise RecordError(f"a record of version {data['version']}, not {RECORD_VERSION}")
            return cls(
                **{
                    **data,
                    "ceilings": tuple(_ceiling(each) for each in data["ceilings"]),
                    "cases": tuple(_case(each) for each in data["cases"]),
                    "not_run": tuple(data["not_run"]),
                    "suites": tuple(data.get("suites", ())),  # not in records of one suite, once
                    "parts": tuple(Part(**each) for each in data.get("parts", ())),
                }
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise RecordError(f"not a benchmark record: {type(error).__name__}: {error}") from None


def _is_wrong(case: CaseRecord) -> bool:
    ours = [result for result in case.results if result.name.startswith("flashgen")]
    return case.facts.get("verified") is False or any(
        (result.error or "").startswith(WRONG)
        or (result.accuracy is not None and result.accuracy.max_error > result.accuracy.bound)
        for result in ours
    )


def _ceiling(data: dict[str, Any]) -> Ceiling:
    return Ceiling(**{**data, "values": tuple(data["values"])})


def _case(data: dict[str, Any]) -> CaseRecord:
    return CaseRecord(**{**data, "results": tuple(_result(each) for each in data["results"])})


def _result(data: dict[str, Any]) -> Result:
    ms, accuracy = data["ms"], data["accuracy"]
    return Result(
        **{
            **data,
            "ms": None if ms is None else Summary(**ms),
            "samples_ms": tuple(data["samples_ms"]),
            "accuracy": None if accuracy is None else Accuracy(**accuracy),
        }
    )


def load(path: Path) -> Record:
    """The record in `path`; RecordError names the file."""
    try:
        return Record.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecordError) as error:
        raise RecordError(f"{path}: {error}") from None
