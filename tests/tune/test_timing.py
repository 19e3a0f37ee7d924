from __future__ import annotations

import pytest
from fake_clock import FakeClock

from flashgen.tune.summary import Summary, geometric_mean, summarise
from flashgen.tune.timing import (
    BURST_MS,
    LONG_MS,
    LONG_ROUNDS,
    MAX_CALLS,
    PAUSE_S,
    ROUNDS,
    Burst,
    Failure,
    alternate,
    describe,
    plan_burst,
)


def nothing() -> None:
    pass


def test_summary_is_that_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    samples = [4.0, 1.5, 9.25, 2.0, 2.5, 100.0, 3.0]
    expected = [float(f"{x:.6g}") for x in numpy.percentile(samples, [50, 20, 80])]
    found = summarise(samples)
    assert [found.median, found.p20, found.p80] == expected
    assert summarise([7.0]) == Summary(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == 4.0
    assert geometric_mean([]) is None


def test_short_calls_are_replayed_from_a_graph_and_bursts_stay_short() -> None:
    clock = FakeClock(default=0.1)
    burst = plan_burst([nothing], clock, graph=True)
    assert burst.how == "30 calls, graph"  # 3 ms a sample
    assert burst.calls * burst.replays * 0.1 <= BURST_MS
    assert burst.estimate_ms == pytest.approx(0.1)


def test_every_tensor_set_is_used_as_often_as_any_other() -> None:
    counts = [0, 0, 0]

    def use(index: int) -> None:
        counts[index] += 1

    calls = [lambda i=i: use(i) for i in range(3)]
    clock = FakeClock(default=0.7)
    burst = plan_burst(calls, clock, graph=True)
    counts[:] = [0, 0, 0]
    burst.replay()
    assert burst.calls == 6
    assert counts == [2, 2, 2]


def test_calls_that_cannot_be_captured_are_timed_one_by_one_and_said_so() -> None:
    clock = FakeClock(default=0.5)
    clock.capturable = False
    assert plan_burst([nothing], clock, graph=True).how == "6 calls, eager, not capturable"
    assert plan_burst([nothing], clock, graph=False).how == "6 calls, eager"


def test_a_call_longer_than_a_burst_is_its_own_sample_and_runs_few_times() -> None:
    clock = FakeClock(default=10 * LONG_MS)
    burst = plan_burst([nothing], clock, graph=True)
    assert (burst.calls, burst.replays) == (1, 1)
    before = sum(count for _, count in clock.diary)
    assert before == 1
    samples = alternate({"slow": burst}, clock)
    assert samples["slow"] == (10 * LONG_MS,) * LONG_ROUNDS


def test_very_short_calls_are_limited_in_number() -> None:
    assert plan_burst([nothing], FakeClock(default=0.0), graph=True).calls == MAX_CALLS


def test_contestants_take_turns_with_pauses_and_another_begins_each_round() -> None:
    order: list[str] = []
    replays = {name: (lambda n=name: order.append(n)) for name in "abc"}
    clock = FakeClock({replays["a"]: 2.0, replays["b"]: 4.0, replays["c"]: 6.0})
    bursts = {name: Burst(replays[name], 2, 1, 1.0, "test") for name in "abc"}
    samples = alternate(bursts, clock)
    assert samples == {"a": (1.0,) * ROUNDS, "b": (2.0,) * ROUNDS, "c": (3.0,) * ROUNDS}
    assert order[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert clock.pauses == [PAUSE_S] * (3 * ROUNDS)


def test_the_first_replay_after_a_pause_is_not_a_sample() -> None:
    class Waking(FakeClock):
        def times_ms(self, call: object, count: int) -> list[float]:
            return [50.0, *[2.0] * (count - 1)]

    burst = Burst(nothing, 1, 4, 2.0, "test")
    assert alternate({"it": burst}, Waking(), rounds=2)["it"] == (2.0,) * 8


def test_one_contestant_that_fails_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("illegal memory access\n  somewhere")

    bursts = {"bad": Burst(fail, 1, 1, 1.0, "t"), "good": Burst(nothing, 1, 1, 1.0, "t")}
    samples = alternate(bursts, FakeClock(), rounds=3)
    assert samples["good"] == (1.0, 1.0, 1.0)
    assert samples["bad"] == Failure("RuntimeError: illegal memory access somewhere")


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert describe(KeyError()) == "KeyError"
