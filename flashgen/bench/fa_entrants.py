"""What of ours takes part in each case of suite `fa-paper`: the table's schedules, and others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashgen.bench.fa_cases import FaCase
from flashgen.bench.fa_figures import OURS, PLAIN, is_ours
from flashgen.bench.fa_schedules import baselines_for, schedules_for
from flashgen.bench.fa_tasks import Entrant
from flashgen.compiler.chosen import chosen_for, portable
from flashgen.problem import Problem
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import check
from flashgen.target import Target
from flashgen.tune.ahead import Job
from flashgen.tune.candidates import Candidates, has_aligned_rows


@dataclass(frozen=True)
class Group:
    """Cases of one spec, and what of ours takes part in each: by case id."""

    cases: tuple[FaCase, ...]
    entrants: Mapping[str, tuple[Entrant, ...]] = field(hash=False)
    facts: Mapping[str, Mapping[str, Any]] = field(hash=False)

    @property
    def name(self) -> str:
        return self.cases[0].spec.display_name

    @property
    def all(self) -> tuple[Entrant, ...]:
        """Everybody of the spec itself, each once."""
        found = (each for of_case in self.entrants.values() for each in of_case)
        return tuple({each.name: each for each in found if is_ours(each.name)}.values())

    def left(self, resting: Mapping[str, Container[str]], bad: Container[tuple[str, str]]) -> Group:
        """Without those that rest, by case id, and those that are known to be bad."""
        entrants = {
            case_id: tuple(
                each
                for each in of_case
                if each.name not in resting[case_id] and (self.name, each.name) not in bad
            )
            for case_id, of_case in self.entrants.items()
        }
        return replace(self, entrants=entrants)

    def jobs(self) -> dict[str, Job]:
        """What is to be compiled, by name."""
        length = self.cases[0].length
        return {
            each.name: Job(
                each.candidates,
                each.schedule,
                has_aligned_rows(each.candidates.problem, length),
            )
            for of_case in self.entrants.values()
            for each in of_case
        }


def groups_of(cases: Iterable[FaCase], target: Target) -> list[Group]:
    """Cases of one spec together, in the order in which they are to be timed."""
    by_spec: dict[str, list[FaCase]] = {}
    for case in cases:
        by_spec.setdefault(case.spec.display_name, []).append(case)
    return [_group(tuple(each), target) for each in by_spec.values()]


def _group(cases: tuple[FaCase, ...], target: Target) -> Group:
    schedules: dict[str, list[Schedule]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    problem = Problem(cases[0].spec, target)
    for case in cases:
        schedules[case.id], facts[case.id] = _schedules_of(case, problem)
    beside = _baselines(cases[0], target)
    union = list(dict.fromkeys(each for found in schedules.values() for each in found))
    candidates = Candidates.of(problem, union, has_lse=False)
    entrants = {
        case.id: (
            *(Entrant(f"{OURS}{each}", candidates, each) for each in schedules[case.id]),
            *beside,
        )
        for case in cases
    }
    return Group(cases, entrants, facts)


def _schedules_of(case: FaCase, problem: Problem) -> tuple[list[Schedule], dict[str, Any]]:
    """The table's that can be used, the default's and the portable family's."""
    bucket = bucket_of(case.length, case.length)
    default, simple = chosen_for(problem, bucket).schedule, portable(problem, bucket)
    usable, rejected = [], {}
    for each in schedules_for(case):
        rejection = check(each, problem)
        if rejection is None:
            usable.append(each)
        else:
            rejected[f"{OURS}{each}"] = str(rejection)
    found = list(dict.fromkeys((*usable, default, simple)))
    return found, {
        "default": f"{OURS}{default}",
        "portable": f"{OURS}{simple}",
        "rejected": rejected,
    }


def _baselines(case: FaCase, target: Target) -> list[Entrant]:
    if case.is_plain:
        return []
    problem = Problem(case.baseline.spec, target)
    fitting = [each for each in baselines_for(case) if check(each, problem) is None]
    if not fitting:
        fitting = [portable(problem, bucket_of(case.length, case.length))]
    candidates = Candidates.of(problem, fitting, has_lse=False)
    return [Entrant(f"{PLAIN}{each}", candidates, each) for each in fitting]
