"""What the processes of suite `fa-paper` are asked for: plain data, sent by pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashgen.bench.fa_cases import FaCase
from flashgen.bench.fa_outside import Outside
from flashgen.schedule.model import Schedule
from flashgen.tune.candidates import Candidates

ROUNDS, SLOW_ROUNDS = 6, 2


@dataclass(frozen=True)
class Entrant:
    """A schedule of ours in a case, by the name in its record."""

    name: str
    candidates: Candidates
    schedule: Schedule


@dataclass(frozen=True)
class TimeTask:
    """Check everybody, then time who is right. skip: names of those that are to be left out;
    flex, tuned_flex: whether there is time to have FlexAttention compiled, and tuned; rounds: in
    which all take turns."""

    case: FaCase
    ours: tuple[Entrant, ...]
    skip: tuple[str, ...] = ()
    flex: bool = True
    tuned_flex: bool = True
    outside: tuple[Outside, ...] = ()
    rounds: int = ROUNDS


@dataclass(frozen=True)
class CheckTask:
    """Run each schedule once on each case."""

    cases: tuple[FaCase, ...]
    ours: tuple[Entrant, ...]


@dataclass(frozen=True)
class CompileTask:
    """Have FlexAttention's kernels of these cases compiled, and those from outside."""

    cases: tuple[FaCase, ...]
    skip: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by case id
    outside: tuple[Outside, ...] = ()


@dataclass(frozen=True)
class SettleTask:
    """Time two of the case that was timed last under lasting load."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class CeilingsTask:
    """Measure what the GPU can do."""
