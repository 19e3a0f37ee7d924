"""Suite `tuner`, read: the pick against the best of all schedules, and what was left out why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flashgen.bench.markdown import number, table
from flashgen.bench.record import CaseRecord, Record

WITHIN = 1.02  # times the best of all: as good as the best
SHARE, SECONDS = 0.2, 60.0  # of the space's schedules, and of a cold run's whole process


def tuner_line(case: CaseRecord) -> str:
    """A finished case in one line."""
    row = _Row(case)
    pick = f"pick {row.pick_ratio:.3f} of the best" if row.pick_ratio else f"no pick: {row.error}"
    return f"{case.id}: {row.timed} schedules timed, {pick}, {row.trials} trials"


def tuner_parts(record: Record) -> list[str]:
    """The sections of the suite's report."""
    rows = [_Row(case) for case in record.cases if case.group == "tuner"]
    if not rows:
        return []
    note = (
        "Every feasible schedule was timed once. `flashgen tune` then ran with empty caches, in "
        "processes of its own. Its pick, the untuned schedule and the best of all were timed "
        "again, taking turns; ratios are of that race, over the fastest in it. Trials are "
        "schedules that the tuner timed; seconds are of its search, and of its whole process."
    )
    return [
        f"## The tuner's pick against the best of all\n\n{note}\n\n{_picks(rows)}",
        "\n".join(f"- {line}" for line in _findings(rows)),
        f"## The spaces\n\n{_spaces(rows)}",
    ]


class _Row:
    """One case, read."""

    def __init__(self, case: CaseRecord) -> None:
        self.case = case
        facts: Mapping[str, Any] = case.facts
        self.picked: Mapping[str, Any] = facts["picked"]
        self.states: Mapping[str, int] = facts["states"]
        self.discarded: Mapping[str, int] = facts["discarded"]
        self.grid, self.feasible = facts["grid"], facts["feasible"]
        self.trials, self.error = self.picked["trials"], self.picked["error"]
        self._raced = {r.name: r.ms.median for r in case.results if r.ms is not None}

    @property
    def timed(self) -> int:
        return len(self.case.facts["times_us"])

    @property
    def best(self) -> str:
        return min(self._raced, key=lambda name: (self._raced[name], name), default="")

    @property
    def pick_ratio(self) -> float | None:
        return self._ratio(self.picked["schedule"])

    @property
    def default_ratio(self) -> float | None:
        return self._ratio(self.case.facts["default"])

    @property
    def share(self) -> float:
        return self.trials / self.feasible if self.feasible else 0.0

    @property
    def is_reached(self) -> bool:
        """Whether the pick is as good as the best, with few trials and soon."""
        near = self.pick_ratio is not None and self.pick_ratio <= WITHIN
        return near and self.share <= SHARE and self.picked["process_s"] <= SECONDS

    def _ratio(self, name: str | None) -> float | None:
        if name not in self._raced or not self._raced:
            return None
        return self._raced[name] / min(self._raced.values())


def _picks(rows: list[_Row]) -> str:
    header = ["case", "best of all", "us", "untuned / best", "pick / best"]
    header += ["trials", "of feasible", "search, s", "process, s"]
    return table(
        header,
        [
            [
                row.case.id,
                row.best,
                number(1e3 * (row.case.median_ms(row.best) or 0.0)),
                _ratio_text(row.default_ratio),
                _ratio_text(row.pick_ratio) if not row.error else row.error,
                str(row.trials),
                f"{row.share:.0%}",
                number(row.picked["seconds"]),
                number(row.picked["process_s"]),
            ]
            for row in rows
        ],
    )


def _spaces(rows: list[_Row]) -> str:
    header = ["case", "grid", "rejected by the model", "feasible", "discarded when compiled"]
    return table(
        [*header, "timed", "failed"],
        [
            [
                row.case.id,
                str(row.grid),
                str(row.grid - row.feasible),
                str(row.feasible),
                _counts(row.discarded),
                str(row.timed),
                _counts({state: n for state, n in row.states.items() if state != "measured"}),
            ]
            for row in rows
        ],
    )


def _findings(rows: list[_Row]) -> Iterator[str]:
    near = sum(row.pick_ratio is not None and row.pick_ratio <= WITHIN for row in rows)
    yield f"within {WITHIN - 1:.0%} of the best: {near} of {len(rows)}"
    reached = sum(row.is_reached for row in rows)
    yield (
        f"so with at most {SHARE:.0%} of the feasible schedules tried, in at most {SECONDS:g} s: "
        f"{reached} of {len(rows)}"
    )
    refused = sum(row.states.get("does_not_fit", 0) for row in rows)
    yield f"schedules that were launched and did not fit: {refused}"
    rejected = sum(row.grid - row.feasible for row in rows)
    missed = sum(row.discarded.get("needs", 0) for row in rows) + refused
    if rejected + missed:
        yield (
            f"of the schedules that do not fit, {rejected / (rejected + missed):.1%} were rejected "
            "before they were compiled"
        )


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "0"
