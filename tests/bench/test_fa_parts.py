"""Suite `fa-paper` in several commands, and several runs of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fa_played import H200, RECORD, a_run, answer, made_up_ms

from flashgen.bench import fa_suite
from flashgen.bench import run as run_module
from flashgen.bench.fa_cases import FA3, FA3_PLAIN, FLEX, GRID, VARIANT, fa_cases, find
from flashgen.bench.fa_entrants import groups_of
from flashgen.bench.fa_figures import is_ours
from flashgen.bench.fa_process import LostError
from flashgen.bench.fa_report import BEST, fa_parts
from flashgen.bench.fa_runs import joined_case, medians_us
from flashgen.bench.fa_schedules import WIDE_CASES
from flashgen.bench.fa_tasks import CeilingsTask, SettleTask, TimeTask
from flashgen.bench.fa_turns import REPEATS, known_bad, resting, turns_of
from flashgen.bench.record import Accuracy, CaseRecord, Record, RecordError, Result, load
from flashgen.bench.resume import resumed
from flashgen.bench.run import Run
from flashgen.tune.ahead import LATE
from flashgen.tune.summary import summarise

PLACE = Path("nvidia-h200") / "fa-paper.json"
WIDE = WIDE_CASES[1]


TAKES: dict[type, float] = {TimeTask: 6.0, SettleTask: 1.5, CeilingsTask: 3.0}


class Watch:
    """A clock that stands still but for what tasks take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[object] = []

    def monotonic(self) -> float:
        return self.now

    def behaviour(self, task: object) -> Any:
        self.asked.append(task)
        self.now += TAKES.get(type(task), 0.0)
        return answer(task)

    @property
    def timed(self) -> list[tuple[str, int, frozenset[str]]]:
        """What was timed: case, rounds, and our schedules in it."""
        return [
            (task.case.id, task.rounds, frozenset(each.name for each in task.ours))
            for task in self.asked
            if isinstance(task, TimeTask)
        ]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(fa_suite, "time", found)
    monkeypatch.setattr(run_module, "time", found)
    return found


def go_on(folder: Path, watch: Watch, budget_s: float, **more: Any) -> Record:
    """One command."""
    record = resumed(replace(RECORD, command=f"--seconds {budget_s:g}"), folder / PLACE)
    found, _ = a_run(
        folder, watch.behaviour, record=record, budget_s=budget_s, began=watch.now, **more
    )
    return found.record


def test_what_tells_most_is_measured_first() -> None:
    turns = turns_of(groups_of(fa_cases(), H200), RECORD)
    order = [(case.id, turn.number) for turn in turns for case in turn.cases]
    assert [case_id.split("/")[0] for case_id, _ in order[:47]] == [GRID] * 36 + [VARIANT] * 11
    assert {number for _, number in order[:47]} == {1}
    repeated = order[47 : 47 + 3 * (REPEATS - 1)]
    assert {case_id for case_id, _ in repeated} == set(WIDE_CASES)
    assert order[47 + len(repeated) :] == [
        (case_id, 2) for case_id, _ in order[:47] if case_id not in WIDE_CASES
    ]
    assert len(order) == len(set(order)) == 2 * 47 + 3 * (REPEATS - 2)
    alone = [turn for turn in turns if turn.number > 1 and turn.cases[0].id in WIDE_CASES]
    assert [len(turn.cases) for turn in alone] == [1] * len(repeated)
    first = {turn.cases[0].group: turn.rounds for turn in reversed(turns) if turn.number == 1}
    assert first[GRID] < max(turn.rounds for turn in turns)


@pytest.mark.slow  # many short parts do the same in every run
def test_two_parts_make_the_whole(tmp_path: Path, watch: Watch) -> None:
    whole = go_on(tmp_path / "whole", watch, 1e5, only=("d128/n",))
    asked = watch.timed
    watch.asked.clear()
    first = go_on(tmp_path / "parts", watch, 100.0, only=("d128/n",))
    assert 0 < len(first.cases) < len(whole.cases)
    *cases, repeated = (text.split(": ")[0] for text in first.not_run)
    assert set(cases) == {case.id for case in whole.cases} - {case.id for case in first.cases}
    assert repeated.endswith(" repeated runs")
    second = go_on(tmp_path / "parts", watch, 1e5, only=("d128/n",))
    assert watch.timed == asked
    assert second.not_run == ()
    assert figures(second) == figures(whole)
    assert load(tmp_path / "parts" / PLACE) == second
    assert [part.command for part in second.parts] == ["--seconds 100"]
    assert [len(each.values) for each in second.ceilings] == [4, 4]  # twice in each command
    text = (tmp_path / "parts" / PLACE).with_suffix(".md").read_text()
    assert "goes on from 2026-11-30, " in text


def figures(record: Record) -> dict[str, Any]:
    """What was measured, without when."""
    return {
        case.id: (
            sorted((each.name, each.samples_ms, each.error) for each in case.results),
            [{**each, "started": ""} for each in case.facts["runs"]],
            case.facts["scaled"],
            sorted(case.facts["schedules"]),
            sorted(case.facts["settled ms"]),
        )
        for case in record.cases
    }


def test_many_short_parts_make_the_whole(tmp_path: Path, watch: Watch) -> None:
    only = ("d256/n8192", "softcap50")
    whole = go_on(tmp_path / "whole", watch, 1e5, only=only)
    found = go_on(tmp_path / "parts", watch, 30.0, only=only)
    parts = 1
    while found.not_run:
        assert all("the budget of 30 s was spent" in text for text in found.not_run)
        found = go_on(tmp_path / "parts", watch, 30.0, only=only)
        parts += 1
    assert parts >= 3
    names = lambda record: {c.id: {r.name for r in c.results} for c in record.cases}  # noqa: E731
    runs = lambda record: {c.id: len(c.facts["runs"]) for c in record.cases}  # noqa: E731
    assert (names(found), runs(found)) == (names(whole), runs(whole))


def test_nothing_begins_where_nothing_is_missing(tmp_path: Path, watch: Watch) -> None:
    whole = go_on(tmp_path, watch, 1e5)
    watch.asked.clear()
    again = go_on(tmp_path, watch, 1e5)
    assert watch.asked == []
    assert again.cases == whole.cases
    assert len(again.parts) == 1


def test_cases_that_nobody_asks_for_now_stay_as_they_are(tmp_path: Path, watch: Watch) -> None:
    first = go_on(tmp_path, watch, 1.0, only=("softcap", "alibi"))
    assert len(first.not_run) == 2
    second = go_on(tmp_path, watch, 1e5, only=("softcap",))
    (left,) = second.not_run
    assert left.startswith("variant/alibi/d128/n4096/causal: ")


def test_schedules_that_failed_before_are_not_tried_again(tmp_path: Path, watch: Watch) -> None:
    (group,) = groups_of([find("grid/d128/n8192/full"), find("grid/d128/n512/full")], H200)
    hung = group.all[0].name

    def behaviour(task: object) -> Any:
        if isinstance(task, TimeTask) and any(each.name == hung for each in task.ours):
            raise LostError(f"checking {hung}", "ended: nothing for 30 s")
        return answer(task)

    a_run(tmp_path, behaviour, only=("grid/d128/n8192/full",))
    record = resumed(RECORD, tmp_path / PLACE)
    seen: list[object] = []

    def later(task: object) -> Any:
        seen.append(task)
        return answer(task)

    run, _ = a_run(tmp_path, later, record=record, only=("grid/d128/n512/full",))
    assert all(hung not in {each.name for each in getattr(task, "ours", ())} for task in seen)
    found = run.record.case("grid/d128/n512/full")
    assert found is not None and found.result(hung) == Result(hung, error="ended: nothing for 30 s")


OTHERS = {
    "gpu": lambda r: replace(r, environment={"gpu": "another"}),
    "version": lambda r: replace(r, environment={"gpu": "none", "triton": "3.6.0"}),
    "target": lambda r: replace(r, target="nvidia-h100-sxm"),
    "suite": lambda r: replace(r, suite="flex"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_gpu_or_version_is_refused(
    kind: str,
    tmp_path: Path,
    golden: Callable[[str, str], None],
) -> None:
    path = tmp_path / "fa-paper.json"
    path.write_text(RECORD.to_json())
    with pytest.raises(RecordError) as caught:
        resumed(OTHERS[kind](RECORD), path)
    golden(f"errors/bench-resume-{kind}.txt", str(caught.value).replace(str(tmp_path), "DIR"))


def test_a_file_that_is_no_record_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "fa-paper.json"
    path.write_text("{}")
    with pytest.raises(RecordError, match=r"fa-paper\.json: not a benchmark record"):
        resumed(RECORD, path)
    assert path.read_text() == "{}"


# ---- who takes part again


def a_case(results: dict[str, float | str], **more: Any) -> CaseRecord:
    return CaseRecord(
        id=WIDE,
        group=GRID,
        spec="a",
        shape={},
        matmul_flops=10**12,
        results=tuple(
            Result(name, error=value)
            if isinstance(value, str)
            else Result(name, ms=summarise([value]), samples_ms=(value,))
            for name, value in results.items()
        ),
        facts={"plain flops": 10**12, **more},
    )


def test_the_close_ones_take_part_again() -> None:
    ours = {f"flashgen {n}": 1.0 + 0.01 * n for n in range(8)} | {"flashgen far": 1.3}
    failed = {"flashgen hung": "ended", "flashgen late": LATE, FLEX: "wrong: NaN"}
    others = {"plain a": 1.0, "plain b": 1.1, FA3: 1.5, "sdpa_cudnn": 1.8, "sdpa_flash": 2.0}
    beside = {FA3_PLAIN: 3.0, "outside one": 9.0}
    case = a_case({**ours, **failed, **others, **beside})
    staying = {each.name for each in case.results} - resting(case)
    assert staying == {
        *(f"flashgen {n}" for n in range(BEST)),
        "flashgen late",
        "plain a",
        FA3,
        "sdpa_cudnn",
        FA3_PLAIN,
        "outside one",
    }
    assert resting(None) == set()
    record = replace(RECORD, cases=(case,))
    assert known_bad(record) == {("a", "flashgen hung"): "ended"}


def test_runs_of_a_case_are_one_record() -> None:
    one = joined_case(None, a_case({"flashgen a": 1.0, FA3: 2.0, FLEX: 5.0}), {"gpu": "0"})
    two = joined_case(one, a_case({"flashgen a": 3.0, FA3: "lost"}), {"gpu": "1"})
    assert [each["gpu"] for each in two.facts["runs"]] == ["0", "1"]
    assert two.facts["runs"][1]["failed"] == {FA3: "lost"}
    assert medians_us(two, "flashgen a") == [1000.0, 3000.0]
    assert medians_us(two, FLEX) == [5000.0]
    mine = two.result("flashgen a")
    assert mine is not None and mine.samples_ms == (1.0, 3.0)
    assert two.median_ms("flashgen a") == 2.0
    assert two.median_ms(FA3) == 2.0  # a peer keeps what it had
    three = joined_case(two, a_case({"flashgen a": "wrong: NaN"}), {"gpu": "0"})
    assert three.result("flashgen a") == Result("flashgen a", error="wrong: NaN")
    four = joined_case(three, a_case({"flashgen b": 1.5}), {"gpu": "0"})
    assert {each.name for each in four.results} == {"flashgen a", "flashgen b", FA3, FLEX}


def test_the_worst_error_of_all_runs_counts() -> None:
    def accurate(error: float) -> CaseRecord:
        case = a_case({FA3: 1.0})
        (result,) = case.results
        accuracy = Accuracy(error, 1.0, error, 1, finite=True, poisoned=True)
        return replace(case, results=(replace(result, accuracy=accuracy),))

    found = joined_case(joined_case(None, accurate(0.2), {}), accurate(0.1), {}).result(FA3)
    assert found is not None and found.accuracy is not None
    assert found.accuracy.relative_error == 0.2


def test_the_five_best_schedules_and_their_spread_over_runs(tmp_path: Path) -> None:
    runs: dict[str, int] = {}

    def behaviour(task: object) -> Any:
        found = answer(task)
        if isinstance(task, TimeTask):  # from run to run 1% slower
            runs[found.id] = runs.get(found.id, -1) + 1
            factor = 1 + 0.01 * runs[found.id]
            slower = [summarise([made_up_ms(each.name) * factor]) for each in found.results]
            timed = zip(found.results, slower, strict=True)
            results = tuple(replace(r, ms=s, samples_ms=(s.median,)) for r, s in timed)
            return replace(found, results=results)
        return found

    run, _ = a_run(tmp_path, behaviour, only=(WIDE,))
    (case,) = load(tmp_path / PLACE).cases
    assert len(case.facts["runs"]) == REPEATS == 5
    ours = [each for each in case.facts["runs"][-1]["ms"] if is_ours(each)]
    assert len(ours) == BEST
    (part,) = [part for part in fa_parts(run.record) if f"{WIDE}: the 5 best" in part]
    rows = [line for line in part.splitlines() if line.startswith(("| gluon", "| loop"))]
    assert len(rows) == BEST
    assert [row.split(" | ")[-1] for row in rows] == ["4.0% |"] * BEST
    best = case.results[[each.name for each in case.results].index(min(ours, key=made_up_ms))]
    medians = ", ".join(f"{1e3 * made_up_ms(best.name) * (1 + 0.01 * n):.0f}" for n in range(5))
    assert f"| 5 | {medians} | 4.0% |" in rows[0]


# ---- the command


def test_only_this_suite_goes_on(tmp_path: Path) -> None:
    from flashgen.bench.suites import Request, new_runs

    known = {"gpu": "none"}
    for suite in ("fa-paper", "flex"):
        place = tmp_path / "nvidia-h200" / f"{suite}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(replace(RECORD, suite=suite, cases=(a_case({FA3: 1.0}),)).to_json())
    request = Request(("fa-paper", "flex"), tmp_path)
    runs = new_runs(request, print, "nvidia-h200", known)
    assert [case.id for case in runs["fa-paper"].record.cases] == [WIDE]
    assert runs["flex"].record.cases == ()
    assert (
        new_runs(replace(request, out=None), print, "nvidia-h200", known)["fa-paper"].record.cases
        == ()
    )
    with pytest.raises(RecordError, match=r"gpu none \(now another\)"):
        new_runs(request, print, "nvidia-h200", {"gpu": "another"})


def test_other_contestants_are_refused(tmp_path: Path) -> None:
    from flashgen.bench.fa_outside import Outside
    from flashgen.bench.suites import Request, new_runs

    file = tmp_path / "other.py"
    file.write_text("def attention(case): ...\n")
    request = Request(
        ("fa-paper",), tmp_path, contestants=(Outside("one", str(file), "attention"),)
    )
    (first,) = new_runs(request, print, "nvidia-h200", {}).values()
    first.save()
    new_runs(request, print, "nvidia-h200", {})
    with pytest.raises(RecordError, match=r"contestant one other\.py:attention \w+ \(now none\)"):
        new_runs(replace(request, contestants=()), print, "nvidia-h200", {})


def test_an_error_of_a_gpus_thread_ends_the_run(tmp_path: Path) -> None:
    def behaviour(task: object) -> Any:
        if isinstance(task, CeilingsTask):
            raise OSError("no clock")
        return answer(task)

    with pytest.raises(OSError, match="no clock"):
        a_run(tmp_path, behaviour, only=(WIDE,))


def test_a_repeated_run_that_fails_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    def behaviour(task: object) -> Any:
        if isinstance(task, TimeTask) and runs.append(task.case.id) is None and len(runs) == 3:
            raise LostError("timing", "ended: nothing for 60 s while timing")
        return answer(task)

    runs: list[str] = []
    run, _ = a_run(tmp_path, behaviour, only=(WIDE,))
    (case,) = run.record.cases
    assert len(case.facts["runs"]) == REPEATS - 1
    assert run.record.not_run == (f"{WIDE}, run 3: ended: nothing for 60 s while timing",)
    again, _ = a_run(tmp_path, record=resumed(RECORD, tmp_path / PLACE), only=(WIDE,))
    assert len(again.record.cases[0].facts["runs"]) == REPEATS
    assert again.record.not_run == ()


def test_a_case_waits_for_schedules_that_were_not_compiled_in_time(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, bad=" dynamic ", error=LATE, only=("grid/d128/n8192/",))
    assert run.record.cases == ()
    assert len(run.record.not_run) == 2
    assert all(": not compiled in time: " in text for text in run.record.not_run)
    again, _ = a_run(tmp_path, record=resumed(RECORD, tmp_path / PLACE), only=("grid/d128/n8192/",))
    assert len(again.record.cases) == 2
    assert again.record.not_run == ()


def test_a_repeated_run_goes_without_schedules_that_are_late(tmp_path: Path) -> None:
    only = ("grid/d128/n8192/full",)
    a_run(tmp_path, only=only, budget_s=20.0, began=run_module.time.monotonic())
    record = replace(resumed(RECORD, tmp_path / PLACE))
    (case,) = record.cases
    first = replace(case, facts={**case.facts, "runs": case.facts["runs"][:1]})
    record = replace(record, cases=(first,))
    found, _ = a_run(tmp_path, record=record, bad=" dynamic ", error=LATE, only=only)
    (joined,) = found.record.cases
    last = joined.facts["runs"][-1]
    assert len(joined.facts["runs"]) == 2
    assert not any(" dynamic " in name for name in last["ms"])
    assert any(is_ours(name) for name in last["ms"])


def test_a_table_that_cannot_be_made_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(record: Record) -> str:
        raise KeyError("a column")

    monkeypatch.setattr(run_module, "render", broken)
    said: list[str] = []
    kept = Run(RECORD, said.append, out=tmp_path)
    kept.add(a_case({FA3: 1.0}))
    assert load(tmp_path / PLACE).cases == kept.record.cases
    assert said[-1].endswith("no table: KeyError: 'a column'")
    with pytest.raises(KeyError):
        kept.finish()
    assert load(tmp_path / PLACE).complete
