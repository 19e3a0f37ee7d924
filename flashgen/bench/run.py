"""A run of a suite: which cases, until when, and its record, written after every case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from flashgen.bench.record import CaseRecord, Ceiling, Record
from flashgen.bench.report import progress_line, render
from flashgen.compiler.folder import write

Say = Callable[[str], None]


@dataclass
class Run:
    """A suite under way. Results are saved as they come, so that a killed run keeps its numbers."""

    record: Record
    say: Say
    out: Path | None = None  # gets <target>/<suite>.json and .md
    only: tuple[str, ...] = ()
    budget_s: float = float("inf")
    began: float = field(
        default_factory=time.monotonic
    )  # suites of one run share it, and the budget

    def wants(self, case_id: str) -> bool:
        """Whether the case was asked for: every case, or those whose id holds one of `only`."""
        return not self.only or any(part in case_id for part in self.only)

    def has_time_for(self, case_id: str) -> bool:
        """Whether the budget is not spent; if it is, the case is recorded as not run."""
        if self.seconds < self.budget_s:
            return True
        self.leave_out(case_id, f"the budget of {self.budget_s:g} s was spent")
        return False

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.monotonic() - self.began

    def add(self, case: CaseRecord) -> None:
        """Keep a case's results."""
        self._keep(case, (*self.record.cases, case))

    def put(self, case: CaseRecord) -> None:
        """Keep a case's results in the place of those that it had; it is one that was run now."""
        left = [text for text in self.record.not_run if not text.startswith(f"{case.id}: ")]
        self.record = replace(self.record, not_run=tuple(left))
        cases = [case if each.id == case.id else each for each in self.record.cases]
        if case not in cases:
            cases.append(case)
        self._keep(case, tuple(cases))

    def _keep(self, case: CaseRecord, cases: tuple[CaseRecord, ...]) -> None:
        self.record = replace(self.record, cases=cases)
        self.say(f"{self.seconds:6.1f} s  {progress_line(case)}")
        self.save()

    def leave_out(self, case_id: str, reason: str) -> None:
        """Record that a case has no results, and why."""
        self.record = replace(self.record, not_run=(*self.record.not_run, f"{case_id}: {reason}"))
        self.say(f"{self.seconds:6.1f} s  {case_id}: not run: {reason}")
        self.save()

    def add_ceilings(self, ceilings: tuple[Ceiling, ...]) -> None:
        """Keep another reading of what the machine can do."""
        known = {ceiling.name: ceiling for ceiling in self.record.ceilings}
        for ceiling in ceilings:
            before = known.get(ceiling.name)
            values = (*(before.values if before else ()), *ceiling.values)
            known[ceiling.name] = replace(ceiling, values=values)
            self.say(
                f"{self.seconds:6.1f} s  {ceiling.name}: {ceiling.values[-1]:.4g} {ceiling.unit}"
            )
        self.record = replace(self.record, ceilings=tuple(known.values()))
        self.save()

    def finish(self) -> None:
        """The suite came to its end; what was left out is in the record."""
        self.record = replace(self.record, complete=True, seconds=round(self.seconds, 1))
        self._write(".json", self.record.to_json())
        self._write(".md", render(self.record))

    def save(self) -> None:
        """Write the record, then its table, each whole or not at all.

        A table that cannot be made is said, and ends nothing: what is still to be measured counts
        for more. `finish` raises its error.
        """
        self.record = replace(self.record, seconds=round(self.seconds, 1))
        self._write(".json", self.record.to_json())
        try:
            text = render(self.record)
        except Exception as error:  # whatever it is, it is the report's
            self.say(f"{self.seconds:6.1f} s  no table: {type(error).__name__}: {error}")
        else:
            self._write(".md", text)

    def _write(self, suffix: str, text: str) -> None:
        if self.out is None:
            return
        path = self.out / self.record.target / f"{self.record.suite}{suffix}"
        write(path, text.encode())


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
