"""The search on fake timings: what it asks for, when it stops, and what it does with bad luck."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from entries import FAST, OTHER, SPEC
from fakes import FakeMeasurer, smooth, timed
from tuning_cases import DEFAULT, FEASIBLE, PROBLEM, SPACE, trials

from flashgen.errors import TuningError
from flashgen.schedule.model import Schedule
from flashgen.schedule.space import check
from flashgen.tune.measurement import STATES, Measurement
from flashgen.tune.search import Limits, Outcome, Progress, Space, search
from flashgen.tune.strategies import SAMPLERS, ModelOrder, RandomOrder, TpeOrder, strategy
from flashgen.tune.study import Trials

ALL = Limits(seconds=600, trials=10**6, patience=10**6)
OPTIMUM = min(FEASIBLE, key=smooth)


def run(
    measurer: FakeMeasurer,
    limits: Limits = ALL,
    *,
    space: Space = SPACE,
    kept: Trials | None = None,
    **others: object,
) -> Outcome:
    return search(
        kept or trials("memory"),
        space,
        measurer,
        RandomOrder(),
        limits,
        **others,  # type: ignore[arg-type]
    )


def test_the_whole_space_is_measured_once_and_the_best_wins() -> None:
    measurer = FakeMeasurer()
    found = run(measurer)
    assert sorted(measurer.measured) == list(FEASIBLE)
    assert found.best is not None
    assert found.best.schedule == OPTIMUM
    assert found.default == timed(DEFAULT, smooth(DEFAULT))
    assert found.stopped == "nothing is left to measure"
    assert (found.new, len(found.known), found.failures) == (len(FEASIBLE), len(FEASIBLE), {})


def test_only_feasible_schedules_are_asked_for_default_and_seeds_first() -> None:
    measurer = FakeMeasurer()
    infeasible = Schedule(block_m=256, block_n=256, num_warps=4, num_stages=4)
    assert check(infeasible, PROBLEM) is not None
    run(
        measurer,
        replace(ALL, trials=5),
        space=replace(SPACE, seeds=(infeasible, FAST, DEFAULT, OTHER)),
    )
    assert measurer.measured[:3] == [DEFAULT, FAST, OTHER]
    assert len(measurer.measured) == 5
    assert set(measurer.measured + measurer.prepared) <= set(FEASIBLE)


LIMITS: dict[str, tuple[Limits, float, str]] = {
    "trials": (replace(ALL, trials=9), 0.0, "9 trials"),
    "seconds": (replace(ALL, seconds=0.0), 0.0, "0 s are over"),
    "patience": (replace(ALL, patience=7), 0.0, "converged: no progress in 7 trials"),
    "bound": (ALL, 99.0, "within 5% of the roofline's bound"),
    "default": (Limits(), 0.0, f"{max(12, math.ceil(len(FEASIBLE) / 5))} trials"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    limits, bound_us, why = LIMITS[name]
    found = run(FakeMeasurer(), limits, space=replace(SPACE, bound_us=bound_us))
    assert found.stopped == why or (name == "default" and found.stopped.startswith("converged"))
    assert found.best is None if name == "seconds" else found.best is not None


def test_being_told_to_stop() -> None:
    stop = threading.Event()
    measurer = FakeMeasurer(on_measure=lambda schedule: stop.set())
    found = run(measurer, stop=stop)
    assert (found.stopped, len(measurer.measured)) == ("told to stop", 1)


def test_nothing_feasible() -> None:
    with pytest.raises(TuningError, match="no schedule is feasible") as error:
        run(FakeMeasurer(), space=Space((), DEFAULT))
    assert error.value.exit_code == 10


def test_one_feasible_schedule_is_not_timed() -> None:
    measurer = FakeMeasurer()
    found = run(measurer, space=Space((DEFAULT,), DEFAULT))
    assert (measurer.measured, measurer.prepared, measurer.raced) == ([], [], [])
    assert found.only_one
    assert (found.best, found.stopped) == (None, "one feasible schedule")


def test_every_candidate_fails() -> None:
    states = [state for state in STATES if state != "measured"]
    fails = {each: states[i % len(states)] for i, each in enumerate(FEASIBLE)}
    measurer = FakeMeasurer(fails=fails)
    found = run(measurer)
    assert found.best is None
    assert found.default is not None
    assert not found.default.measured
    assert sum(found.failures.values()) == len(FEASIBLE)
    assert set(found.failures) == set(states)
    assert measurer.raced == []


def test_what_does_not_compile_is_no_trial_and_is_remembered() -> None:
    refuses = dict.fromkeys(FEASIBLE[::2], "ptxas: too many registers")
    kept = trials("memory")
    found = run(FakeMeasurer(refuses=refuses), kept=kept)
    assert set(found.known) == set(FEASIBLE[1::2])
    assert found.discarded == refuses == kept.discarded()
    again = FakeMeasurer()
    run(again, kept=kept)
    assert (again.prepared, again.measured) == ([], [])


def test_everything_is_discarded() -> None:
    found = run(FakeMeasurer(refuses=dict.fromkeys(FEASIBLE, "no")))
    assert (found.best, found.known) == (None, {})
    assert found.stopped == "nothing is left to measure"


def test_a_failed_winner_does_not_win() -> None:
    found = run(FakeMeasurer(fails={OPTIMUM: "wrong"}))
    second = min((each for each in FEASIBLE if each != OPTIMUM), key=smooth)
    assert found.best is not None
    assert found.best.schedule == second
    assert found.failures == {"wrong": 1}


# **** the race ****


def test_close_ones_race_with_the_default_and_the_race_decides() -> None:
    ranked = sorted(FEASIBLE, key=smooth)

    def close(schedule: Schedule) -> float:
        return 100.0 + 0.5 * ranked.index(schedule)

    measurer = FakeMeasurer(clock=close, race_clock=lambda s: 200.0 - close(s))
    kept = trials("memory")
    found = run(measurer, kept=kept)
    assert measurer.raced == [tuple(dict.fromkeys((*ranked[:4], DEFAULT)))]
    assert found.best is not None
    assert found.best.schedule == min(measurer.raced[0], key=lambda s: 200.0 - close(s))
    assert found.default == timed(DEFAULT, 200.0 - close(DEFAULT))
    again = FakeMeasurer()
    assert run(again, kept=kept).best == found.best
    assert again.raced == []  # the same field has raced


def test_the_untuned_choice_wins_where_it_is_fastest() -> None:
    measurer = FakeMeasurer(clock=lambda s: 10.0 if s == DEFAULT else 50.0)
    found = run(measurer)
    assert found.best == found.default == timed(DEFAULT, 10.0)
    assert measurer.raced == []


def test_a_racer_that_fails_does_not_win() -> None:
    measurer = FakeMeasurer(clock=lambda s: 10.0 if s in (FAST, OTHER) else 50.0)
    race = measurer.race

    def failing(schedules: tuple[Schedule, ...]) -> dict[Schedule, Measurement]:
        return {**race(schedules), FAST: Measurement(FAST, "crashed", reason="signal 11")}

    measurer.race = failing  # type: ignore[method-assign, assignment]
    found = run(measurer)
    assert found.best is not None
    assert found.best.schedule == OTHER


# **** earlier runs, interruptions, progress ****


def test_earlier_trials_are_used_whatever_changes() -> None:
    kept = trials("memory")
    run(FakeMeasurer(), replace(ALL, trials=10), kept=kept)
    known = set(kept.known())
    assert len(known) == 10
    again = FakeMeasurer()
    run(again, replace(ALL, trials=10, seconds=1000.0), kept=kept)
    assert again.measured == []
    other = Space(FEASIBLE[::3], DEFAULT)  # a changed space
    third = FakeMeasurer()
    found = run(third, kept=kept, space=other)
    assert set(third.measured) == set(other.feasible) - known
    assert set(found.known) == set(other.feasible)


def test_failed_ones_are_tried_again_only_when_asked() -> None:
    kept = trials()
    run(FakeMeasurer(fails=dict.fromkeys(FEASIBLE[:5], "hung")), kept=kept)
    again = FakeMeasurer()
    run(again, kept=trials())
    assert again.measured == []
    third = FakeMeasurer()
    found = run(third, kept=trials(retry_failed=True))
    assert sorted(third.measured) == list(FEASIBLE[:5])
    assert found.failures == {}
    assert all(each.measured for each in trials(retry_failed=True).known().values())


def test_discarded_ones_are_compiled_again_only_when_asked() -> None:
    slow = dict.fromkeys(FEASIBLE[:3], "compiling took over 45 s")
    run(FakeMeasurer(refuses=slow), kept=trials())
    again = FakeMeasurer()
    assert run(again, kept=trials()).discarded == slow
    assert again.measured == []
    still = {FEASIBLE[2]: "spills 300 bytes a thread, over 256"}
    third = FakeMeasurer(refuses=still)
    found = run(third, kept=trials(retry_failed=True))
    assert sorted(third.measured) == list(FEASIBLE[:2])
    assert found.discarded == still
    # Whoever comes later, without asking, sees what came of it.
    fourth = FakeMeasurer()
    last = run(fourth, kept=trials())
    assert (fourth.measured, last.discarded) == ([], still)
    assert set(last.known) == set(FEASIBLE) - still.keys()


def test_ctrl_c_keeps_the_best_so_far_and_frees_the_schedule() -> None:
    kept = trials("memory")

    def interrupt(schedule: Schedule) -> None:
        if len(measurer.measured) == 8:
            raise KeyboardInterrupt

    measurer = FakeMeasurer(on_measure=interrupt)
    found = run(measurer, kept=kept)
    assert (found.interrupted, found.stopped, found.new) == (True, "interrupted", 7)
    assert found.best is not None
    assert kept.taken() == set()
    again = FakeMeasurer()
    run(again, kept=kept)
    assert len(again.measured) == len(FEASIBLE) - 7


def test_a_measurer_that_raises_frees_the_schedule() -> None:
    def broken(schedule: Schedule) -> None:
        raise ZeroDivisionError

    kept = trials("memory")
    with pytest.raises(ZeroDivisionError):
        run(FakeMeasurer(on_measure=broken), kept=kept)
    assert (kept.taken(), kept.known()) == (set(), {})


def test_progress_says_how_far_it_is() -> None:
    steps: list[Progress] = []
    run(
        FakeMeasurer(clock=lambda s: smooth(s) if s != FAST else 90.0, fails={FEASIBLE[0]: "hung"}),
        space=replace(SPACE, bound_us=3.0),
        report=steps.append,
    )
    assert steps[0].doing == f"measuring {DEFAULT}"
    assert (steps[0].best, steps[0].default_us) == (None, None)
    last = steps[-1]
    assert last.doing.startswith("racing ")
    assert (last.trials, last.feasible) == (len(FEASIBLE), len(FEASIBLE))
    assert last.best is not None
    assert last.best.schedule == FAST
    assert (last.default_us, last.bound_us) == (smooth(DEFAULT), 3.0)
    assert (last.failures, last.discarded) == ({"hung": 1}, 0)
    assert 0 < last.seconds_left <= 600


# **** strategies ****


def predictions(error: float) -> dict[Schedule, float]:
    """The truth, tilted: a model that mistakes the worth of warps and of wide tiles."""
    return {
        s: 0.5 * smooth(s) * (s.num_warps / 4) ** error * (s.block_n / 64) ** (error / 2)
        for s in FEASIBLE
    }


ORDERS: dict[str, Callable[[int], ModelOrder | TpeOrder | RandomOrder]] = {
    "model": lambda seed: ModelOrder(predictions(0.8)),
    "tpe": TpeOrder,
    "random": RandomOrder,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_has_every_free_schedule_once(name: str) -> None:
    order = ORDERS[name](3)
    known = {s: timed(s, smooth(s)) for s in FEASIBLE[::4]}
    known[FEASIBLE[0]] = Measurement(FEASIBLE[0], "hung", reason="deadline")
    free = [s for s in FEASIBLE if s not in known]
    assert sorted(order.order(known, free)) == sorted(free)
    assert order.order(known, free) == order.order(known, free)
    assert order.order(known, free[:1]) == free[:1]
    failed = {s: Measurement(s, "failed", reason="x") for s in FEASIBLE[::4]}
    assert sorted(order.order(failed, free)) == sorted(free)


def trials_to_98(name: str, seed: int) -> int:
    measurer = FakeMeasurer()
    search(trials("memory"), SPACE, measurer, ORDERS[name](seed), replace(ALL, trials=60))
    good = [i for i, s in enumerate(measurer.measured, 1) if smooth(s) <= smooth(OPTIMUM) / 0.98]
    return good[0] if good else 61


def test_the_model_corrects_itself_and_beats_chance() -> None:
    by_model = trials_to_98("model", 0)
    by_chance = statistics.median(trials_to_98("random", seed) for seed in range(9))
    assert by_model <= len(FEASIBLE) / 5
    assert by_model < by_chance


def test_predictions_are_asked_for_only_by_the_model() -> None:
    strategy("tpe", lambda: pytest.fail("asked"))
    strategy("random", lambda: pytest.fail("asked"))
    assert strategy("model", lambda: {DEFAULT: 1.0}) == ModelOrder({DEFAULT: 1.0})


def test_the_spec_of_these_tests_has_a_space_worth_searching() -> None:
    assert SPEC.shapes
    assert len(FEASIBLE) > 60
    assert DEFAULT in FEASIBLE
