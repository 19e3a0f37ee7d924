"""Suite `fa-paper`: Hopper schedules against the fastest peers, as far as a budget of time goes.

First everything is compiled and tried (`fa_prepare`). Then each GPU that is visible takes one case
after the other, in the order of `fa_turns`; nothing else runs on it. A process that does not answer
is ended, and its case begun anew without the contestant that it was busy with. A record that is
there already goes on: what it has is not measured again.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from flashgen.bench.fa_cases import FA3, FA3_PLAIN, FaCase, fa_cases
from flashgen.bench.fa_entrants import Group, groups_of
from flashgen.bench.fa_figures import best_of, is_ours, is_peer, rate_of
from flashgen.bench.fa_outside import Outside
from flashgen.bench.fa_peers import scaled_rates
from flashgen.bench.fa_plot import draw
from flashgen.bench.fa_prepare import Preparation
from flashgen.bench.fa_process import Lane, LostError, Start, Worker
from flashgen.bench.fa_runs import joined_case
from flashgen.bench.fa_tasks import CeilingsTask, SettleTask, TimeTask
from flashgen.bench.fa_turns import Turn, known_bad, resting, turns_of
from flashgen.bench.record import CaseRecord, Result
from flashgen.bench.run import Run, now
from flashgen.target import Target
from flashgen.tune.ahead import LATE, Compiling

PREPARATION_SHARE = 0.35  # of the budget, at most
CASE_S = 12.0  # of a case with all contestants: less left means that none is begun
TUNED_S = 40.0  # ahead of a case: less left, and FlexAttention is not tuned in it
SETTLE_S = 12.0  # for each case without results, or nothing is timed under lasting load
TRIES = 4  # of a case whose process ends
REPEATED, BUDGET = "repeated runs", "the budget"


def run_fa(
    run: Run,
    target: Target,
    gpus: Sequence[str],
    *,
    outside: Sequence[Outside] = (),
    start: Start = Worker,
    compiling: Callable[[], Compiling] = Compiling,
) -> None:
    """Every wanted case that the record lacks, as far as the budget goes."""
    wanted = [case for case in fa_cases() if run.wants(case.id)]
    turns = turns_of(groups_of(wanted, target), run.record)
    _forget_not_run(run, wanted)
    if turns:
        limit = run.began + run.seconds + PREPARATION_SHARE * (run.budget_s - run.seconds)
        bad = known_bad(run.record)
        preparation = Preparation(run, gpus, start, bad, outside)
        with compiling() as helper:
            preparation.prepare(*_missing(run, turns, bad), helper, limit)
        _Timing(run, gpus, start, outside, preparation).time(turns)
    else:
        run.say(f"{run.seconds:6.1f} s  nothing is missing in the record")
    if run.out is not None and importlib.util.find_spec("matplotlib") is not None:
        draw(run.record, run.out / run.record.target / "fa-paper.png")


def _forget_not_run(run: Run, wanted: Sequence[FaCase]) -> None:
    """What an earlier command did not reach is to be measured now, but what nobody asks for."""
    known = {case.id for case in fa_cases()} - {case.id for case in wanted}
    left = [text for text in run.record.not_run if text.split(": ")[0] in known]
    run.record = replace(run.record, not_run=tuple(left))


def _missing(
    run: Run, turns: Sequence[Turn], bad: Mapping[tuple[str, str], str]
) -> tuple[list[Group], dict[str, set[str]]]:
    """What is to be prepared: of each spec the cases that will be measured, and who rests."""
    cases: dict[str, dict[str, FaCase]] = {}
    for turn in turns:
        cases.setdefault(turn.group.name, {}).update({case.id: case for case in turn.cases})
    rests = {each: resting(run.record.case(each)) for ids in cases.values() for each in ids}
    groups = {turn.group.name: turn.group for turn in turns}
    return [
        replace(
            group,
            cases=tuple(cases[name].values()),
            entrants={each: group.entrants[each] for each in cases[name]},
        ).left(rests, bad)
        for name, group in groups.items()
    ], rests


class _Timing:
    """What the threads of a run share: one for each GPU, which takes turn after turn."""

    def __init__(
        self,
        run: Run,
        gpus: Sequence[str],
        start: Start,
        outside: Sequence[Outside],
        preparation: Preparation,
    ) -> None:
        self._run, self._gpus, self._start = run, list(gpus), start
        self._outside = tuple(outside)
        self._bad, self._facts = preparation.bad, preparation.facts
        self._lock = threading.Lock()
        self._waiting: list[Turn] = []
        self._first = 0  # cases that have no results yet
        self._late = 0  # repeated runs that the budget did not reach
        self._end = run.began + run.budget_s

    def time(self, turns: Sequence[Turn]) -> None:
        """All turns, as far as the budget goes."""
        self._waiting = list(turns)
        self._first = sum(len(turn.cases) for turn in turns if turn.number == 1)
        with ThreadPoolExecutor(len(self._gpus), thread_name_prefix="gpu") as pool:
            lanes = [pool.submit(self._lane, gpu) for gpu in self._gpus]
        for lane in lanes:
            lane.result()
        if self._late:
            text = f"{BUDGET} of {self._run.budget_s:g} s was spent; the same command goes on"
            self._run.leave_out(f"{self._late} {REPEATED}", text)

    def _lane(self, gpu: str) -> None:
        lane = Lane(gpu, self._start)
        try:
            self._read_ceilings(lane)
            while True:
                with self._lock:
                    if not self._waiting:
                        break
                    turn = self._waiting.pop(0)
                for case in turn.cases:
                    self._case(lane, turn, case)
                lane.next()
            self._read_ceilings(lane)
        finally:
            lane.close()

    def _read_ceilings(self, lane: Lane) -> None:
        try:
            found = lane.ask(CeilingsTask(), self._end + CASE_S)
        except LostError as error:
            self._say(f"ceilings: {error}")
            return
        with self._lock:
            self._run.add_ceilings(found)

    def _case(self, lane: Lane, turn: Turn, case: FaCase) -> None:
        """Time a case, again without whoever ended the process; then under lasting load."""
        with self._lock:
            self._first -= turn.number == 1
            known = self._run.record.case(case.id)
        rests, entrants = resting(known), turn.group.entrants[case.id]
        bad = {name: why for (spec, name), why in self._bad.items() if spec == turn.group.name}
        late = sum(bad.get(each.name) == LATE for each in entrants)
        reason = f"{LATE}: {late} of its schedules" if late and known is None else ""
        for _ in range(0 if reason else TRIES):
            left = self._end - time.monotonic()
            if left < CASE_S:
                reason = reason or f"{BUDGET} of {self._run.budget_s:g} s was spent"
                break
            task = TimeTask(
                case,
                tuple(each for each in entrants if each.name not in {*bad, *rests}),
                skip=(*bad, *sorted(rests)),
                tuned_flex=left > TUNED_S,
                outside=self._outside,
                rounds=turn.rounds,
            )
            try:
                record = lane.ask(task, self._end + CASE_S)
            except LostError as error:
                reason = str(error)
                name = error.step.removeprefix("checking ")
                if not error.step.startswith("checking ") or name in bad:
                    lane.next()
                    break
                bad[name] = reason
                self._say(f"{case.id}: {reason}")
                lane.next()
                continue
            except Exception as error:  # an answer that cannot be had is this case's alone
                reason = f"{type(error).__name__}: {error}"
                lane.next()
                break
            self._keep(lane, turn, known, record, bad)
            return
        with self._lock:
            if known is None:
                if turn.number == 1:
                    self._run.leave_out(case.id, reason)
            elif reason.startswith(BUDGET):
                self._late += 1
            else:
                self._run.leave_out(f"{case.id}, run {turn.number}", reason)

    def _keep(
        self,
        lane: Lane,
        turn: Turn,
        known: CaseRecord | None,
        record: CaseRecord,
        bad: Mapping[str, str],
    ) -> None:
        timed = {each.name for each in record.results}
        refused = tuple(Result(name, error=why) for name, why in bad.items() if name not in timed)
        ours = [each.name for each in turn.group.entrants[record.id]]
        said = {name: self._facts.get(f"{turn.group.name}: {name}") for name in ours}
        facts = {
            **record.facts,
            **turn.group.facts[record.id],
            "compiled": {name: facts for name, facts in said.items() if facts is not None},
            "gpu": lane.gpu,
        }
        found = replace(record, results=(*record.results, *refused), facts=facts)
        about = {"started": now(), "gpu": lane.gpu, "rounds": turn.rounds}
        found = joined_case(known, found, about)
        settled = self._settled(lane, found)
        scaled = scaled_rates(_case_of(turn, found), found.tflops(FA3), rate_of(found, FA3_PLAIN))
        more = {"settled ms": settled, "scaled": scaled}
        with self._lock:
            self._run.put(replace(found, facts={**found.facts, **more}))

    def _settled(self, lane: Lane, record: CaseRecord) -> Mapping[str, float]:
        """ms of our best and of the best peer under lasting load, once there is time for it."""
        known: Mapping[str, float] = record.facts.get("settled ms", {})
        names = tuple(
            name
            for name in (best_of(record, which) for which in (is_ours, is_peer))
            if name is not None
        )
        left = self._end - time.monotonic()
        if set(names) <= known.keys() or left <= SETTLE_S * (1 + self._first / len(self._gpus)):
            return known
        try:
            return {**known, **lane.ask(SettleTask(names), self._end + CASE_S)}
        except LostError as error:
            self._say(f"{record.id}: {error}")
            lane.next()
            return known

    def _say(self, text: str) -> None:
        self._run.say(f"{self._run.seconds:6.1f} s  {text}")


def _case_of(turn: Turn, record: CaseRecord) -> FaCase:
    return next(case for case in turn.cases if case.id == record.id)
