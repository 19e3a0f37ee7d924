"""In which order suite `fa-paper` measures, what is missing in a record, and who takes part again.

What tells most comes first: every case of the grid in few rounds, then the variants; then the cases
whose best schedules are shown, in as many processes as `REPEATS` says; then every case once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashgen.bench.fa_cases import FA3_PLAIN, GRID, VARIANT, FaCase
from flashgen.bench.fa_entrants import Group
from flashgen.bench.fa_figures import Choice, goes_on, is_baseline, is_ours, is_outside, is_peer
from flashgen.bench.fa_report import BEST
from flashgen.bench.fa_schedules import WIDE_CASES
from flashgen.bench.fa_tasks import ROUNDS
from flashgen.bench.record import CaseRecord, Record
from flashgen.tune.ahead import LATE

REPEATS = 5  # runs of the cases whose best schedules are shown, each in a process of its own
FIRST_ROUNDS, REPEAT_ROUNDS = 3, 4
CLOSE = 1.25  # of the fastest of its kind: who takes longer is not timed again


@dataclass(frozen=True)
class Pass:
    """One run of each of some cases: which run of a case it is, and its rounds."""

    number: int
    rounds: int
    has: Callable[[FaCase], bool]
    alone: bool = False  # each case has a process of its own


def _of(group: str) -> Callable[[FaCase], bool]:
    return lambda case: case.group == group


PASSES: tuple[Pass, ...] = (
    Pass(1, FIRST_ROUNDS, _of(GRID)),
    Pass(1, ROUNDS, _of(VARIANT)),
    *(
        Pass(number, REPEAT_ROUNDS, lambda case: case.id in WIDE_CASES, alone=True)
        for number in range(2, REPEATS + 1)
    ),
    Pass(2, ROUNDS, _of(GRID)),
    Pass(2, ROUNDS, _of(VARIANT)),
)


@dataclass(frozen=True)
class Turn:
    """What one process measures: cases of a spec, one after the other."""

    group: Group
    cases: tuple[FaCase, ...]
    number: int
    rounds: int


def turns_of(groups: Sequence[Group], record: Record) -> list[Turn]:
    """What is missing in the record, in the order in which it is to be measured."""
    runs = {case.id: runs_of(case) for case in record.cases}
    found = []
    for each in PASSES:
        for group in groups:
            cases = [c for c in group.cases if each.has(c) and runs.get(c.id, 0) < each.number]
            runs |= {case.id: each.number for case in cases}
            parts = [[case] for case in cases] if each.alone else [cases] if cases else []
            found += [Turn(group, tuple(part), each.number, each.rounds) for part in parts]
    return found


def runs_of(case: CaseRecord) -> int:
    """How often a case was measured."""
    return len(case.facts.get("runs", ())) or 1


def known_bad(record: Record) -> dict[tuple[str, str], str]:
    """Spec and name of ours -> why it is not tried again, also in other cases of the spec."""
    return {
        (case.spec, result.name): result.error
        for case in record.cases
        for result in case.results
        if result.error is not None and result.error != LATE
        if is_ours(result.name) or is_baseline(result.name)
    }


def resting(case: CaseRecord | None) -> set[str]:
    """Who was in an earlier run of the case and is left out of the next ones: it failed, or is far
    behind. Of our schedules the best ones go on, so that they and the fastest peers have more
    rounds."""
    if case is None:
        return set()
    known = {each.name for each in case.results if each.error != LATE}
    staying = {
        *_close(case, is_ours)[:BEST],
        *_close(case, is_baseline)[:1],
        *_close(case, is_peer),
        *_close(case, is_outside),
        *_close(case, lambda name: name == FA3_PLAIN),
    }
    return known - staying


def _close(case: CaseRecord, which: Choice) -> list[str]:
    """The fastest first."""
    times = {
        each.name: each.ms.median
        for each in case.results
        if each.ms and which(each.name) and goes_on(case, each.name)
    }
    limit = CLOSE * min(times.values(), default=0.0)
    return [name for name in sorted(times, key=times.__getitem__) if times[name] <= limit]
