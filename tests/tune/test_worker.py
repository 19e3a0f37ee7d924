"""Measuring processes that crash, hang, lie or are told to stop: the search gets an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_runners import ABORTS, ENDS, GOOD, HANGS, RAISES, SPOILS, WRONG

from flashgen.errors import TuningError
from flashgen.schedule.model import Schedule
from flashgen.tune import worker as worker_module
from flashgen.tune.measurement import Measurement
from flashgen.tune.processes import Child, ChildEndedError, SilentError, ending
from flashgen.tune.worker import Asked, Order, Worker

LONG_S = 120.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(Order("fake_runners:FakeRunner", "a case", 3))
    yield made
    made.stop()


def ask(worker: Worker, schedule: Schedule, deadline_s: float = LONG_S) -> Measurement:
    return worker.ask(Asked("measure", (schedule,)), deadline_s)[schedule]


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be counted as ended does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def group_members(pgid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()


def test_a_good_schedule_is_measured_in_the_same_process_again_and_again(worker: Worker) -> None:
    first, second = ask(worker, GOOD), ask(worker, GOOD)
    assert first.measured
    assert first.time_us == second.time_us == worker.pid
    assert worker.pid != os.getpid()


@pytest.mark.parametrize(
    ("bad", "state", "reason"),
    [
        (ABORTS, "crashed", "the process ended by SIGABRT: illegal memory access"),
        (ENDS, "crashed", "the process ended with exit status 7"),
        (RAISES, "failed", "RuntimeError: the runner itself failed"),
        (SPOILS, "measured", ""),
    ],
)
def test_who_cannot_be_trusted_any_more_is_replaced(
    worker: Worker, bad: Schedule, state: str, reason: str
) -> None:
    before = ask(worker, GOOD)
    found = ask(worker, bad)
    assert (found.state, found.reason) == (state, reason)
    after = ask(worker, GOOD)
    assert after.measured
    assert after.time_us != before.time_us


def test_a_wrong_result_is_an_answer_and_keeps_its_process(worker: Worker) -> None:
    before = ask(worker, GOOD)
    assert ask(worker, WRONG) == Measurement(WRONG, "wrong", reason="max error 3 (bound 0.1)")
    assert ask(worker, GOOD) == before


def test_what_hangs_is_ended_with_everything_it_started(worker: Worker) -> None:
    pid = int(ask(worker, GOOD).time_us or 0)
    found = ask(worker, HANGS, deadline_s=0.5)
    assert (found.state, found.reason) == ("hung", "no answer within 0.5 s")
    wait_until(lambda: not group_members(pid))
    assert ask(worker, GOOD).time_us != pid


def test_ctrl_c_while_it_measures_leaves_no_stale_answer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = int(ask(worker, GOOD).time_us or 0)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ask(worker, HANGS)
    timer.join()
    wait_until(lambda: not group_members(pid))
    assert ask(worker, GOOD).measured


def test_a_worker_that_cannot_do_the_case_says_why() -> None:
    refusing = Worker(Order("fake_runners:refuses", "a case", 3))
    with pytest.raises(TuningError) as error:
        ask(refusing, GOOD)
    assert "ValueError: no GPU 3 for a case" in str(error.value)
    assert refusing.pid is None


def test_messages(golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    starts = {"fake_runners:refuses": LONG_S, "fake_runners:slow_start": 0.5, "no_such:one": LONG_S}
    for runner, start_s in starts.items():
        monkeypatch.setattr(worker_module, "START_S", start_s)
        with pytest.raises(TuningError) as error:
            ask(Worker(Order(runner, "a case", 3)), GOOD)
        texts.append(str(error.value))
    golden("errors/tune-worker.txt", "\n\n".join(texts))


def test_another_case_in_the_same_process(tmp_path: Path) -> None:
    cases = [tmp_path / "one", tmp_path / "two"]
    worker = Worker(Order("fake_runners:says_case", str(cases[0]), 0))
    try:
        first = ask(worker, GOOD)
        worker.take(Order("fake_runners:says_case", str(cases[1]), 0))
        assert ask(worker, GOOD).time_us == first.time_us
        assert cases[0].read_text() == cases[1].read_text() == f"{worker.pid} 0\n"
    finally:
        worker.stop()


def test_stop_leaves_neither_process_nor_zombie(worker: Worker) -> None:
    pid = int(ask(worker, GOOD).time_us or 0)
    worker.stop()
    worker.stop()
    assert not Path(f"/proc/{pid}").exists()


PARENT = """
import sys, threading
sys.path.insert(0, {folder!r})
from fake_runners import GOOD, HANGS
from flashgen.tune.worker import Asked, Order, Worker
worker = Worker(Order("fake_runners:FakeRunner", "a case", 0))
worker.ask(Asked("measure", (GOOD,)), 100)
print(worker.pid, flush=True)
worker.ask(Asked("measure", (HANGS,)), 100)
"""


@pytest.mark.parametrize("ending_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_parent(ending_signal: signal.Signals) -> None:
    program = PARENT.format(folder=str(Path(__file__).parent))
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        wait_until(lambda: len(group_members(pid)) == 2)  # the worker, and what hangs in it
        parent.send_signal(ending_signal)
        parent.wait(LONG_S)
    wait_until(lambda: not group_members(pid))


def test_what_a_child_says_and_how_it_ends() -> None:
    child = Child("child_mains:echo")
    child.send({"a": 1})
    assert child.receive(LONG_S) == {"a": 1}
    with pytest.raises(SilentError):
        child.receive(0.05)
    child.send("end")
    with pytest.raises(ChildEndedError) as error:
        child.receive(LONG_S)
    assert str(error.value) == "the process ended with exit status 5: about to end"
    assert not child.runs
    with pytest.raises(ChildEndedError):
        child.send("anybody?")
    child.kill()
    child.kill()
    assert child.last_words() == ""


def test_endings_in_words() -> None:
    assert [ending(status) for status in (0, -9, -200, None)] == [
        "with exit status 0",
        "by SIGKILL",
        "by signal 200",
        "but is not gone yet",
    ]


def test_two_threads_may_end_a_child_that_a_third_one_waits_for() -> None:
    """Each of the three hears of the end; no descriptor is closed twice, or while it is in use."""
    for _ in range(20):
        child = Child("child_mains:echo")
        child.send("hello")
        assert child.receive(30.0) == "hello"
        together = threading.Barrier(3)

        def wait(child: Child = child, together: threading.Barrier = together) -> str:
            together.wait()
            with pytest.raises(ChildEndedError) as error:
                child.receive(30.0)
            child.kill()
            return str(error.value)

        def kill(child: Child = child, together: threading.Barrier = together) -> None:
            together.wait()
            child.kill()

        with ThreadPoolExecutor(3) as pool:
            waiting = pool.submit(wait)
            for ending_it in (pool.submit(kill), pool.submit(kill)):
                ending_it.result()
            assert waiting.result() == "the process ended by SIGKILL"
