"""The measurer of isolated processes: real compilers, and something else in the place of a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runners import ABORTS, GOOD, HANGS, WRONG, tile
from test_worker import group_members, wait_until

from flashgen import freeze
from flashgen.errors import FrozenError, TuningError
from flashgen.problem import Problem
from flashgen.runtime.frozen import thaw
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import measure as measure_module
from flashgen.tune.ahead import Compiled
from flashgen.tune.measure import (
    SPILL_LIMIT_BYTES,
    IsolatedMeasurer,
    gpu_measurer,
    kept_workers,
)

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="measured", head_dim=16, dtype="fp16", mask=["causal"])
SHAPE = Shape(1, 2, 1, 300, 300)
FEW: Sequence[int] = (0,)


@pytest.fixture(autouse=True)
def own_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shared by these tests: each kernel is compiled once."""
    folder = tmp_path_factory.getbasetemp() / "triton"
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


def measurer(
    *, runner: str = "fake_runners:FakeRunner", devices: Sequence[int] = FEW, **more: float
) -> IsolatedMeasurer:
    return IsolatedMeasurer(Problem(SPEC, TARGET), SHAPE, devices=devices, runner=runner, **more)


class AllCompiled(IsolatedMeasurer):
    """Leaves out the compilers: these tests are about what comes after them."""

    def _compile(
        self, schedules: Sequence[Schedule], *, first: bool = False
    ) -> dict[Schedule, Compiled]:
        self._check_open()
        return {schedule: Compiled(0.1, 4096, 64, 0) for schedule in schedules}


def all_compiled(
    *, runner: str = "fake_runners:FakeRunner", devices: Sequence[int] = FEW, **more: float
) -> AllCompiled:
    return AllCompiled(Problem(SPEC, TARGET), SHAPE, devices=devices, runner=runner, **more)


def test_prepared_schedules_are_measured_and_the_others_say_why() -> None:
    no_tile = replace(GOOD, block_n=24)
    made = measurer()
    try:
        refused = made.prepare([GOOD, no_tile])
        assert list(refused) == [no_tile]
        assert refused[no_tile].startswith("CompileError")
        assert made.measure(GOOD).measured
        unprepared = made.measure(no_tile)
        assert unprepared.state == "failed"
        assert unprepared.reason == refused[no_tile]
        raced = made.race([GOOD, WRONG])
        assert list(raced) == [GOOD, WRONG]
        assert raced[GOOD].measured and raced[WRONG].state == "wrong"
        pids = made.pids()
        assert len(pids) == 2
    finally:
        made.close()
    made.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(TuningError, match="the measurer is closed"):
        made.measure(GOOD)


def test_what_spills_or_does_not_fit_as_compiled_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = all_compiled()
    fits, spills, large = (tile(16, rows) for rows in (16, 32, 128))
    default = made._default
    said = {
        fits: Compiled(1.0, 232_448, 255, SPILL_LIMIT_BYTES),
        spills: Compiled(1.0, 4096, 255, SPILL_LIMIT_BYTES + 4),
        large: Compiled(1.0, 232_449, 64, 0),
        default: Compiled(1.0, 4096, 255, 4000),
    }
    monkeypatch.setattr(made, "_compile", lambda schedules, **_: {s: said[s] for s in schedules})
    try:
        assert made.prepare(list(said)) == {
            spills: "spills 260 bytes a thread, over 256",
            large: "needs 232449 B of shared memory as compiled, target has 232448 B",
        }
        assert made.measure(spills).measured
        assert made.measure(large).state == "does_not_fit"
    finally:
        made.close()


def test_a_schedule_that_ends_its_process_harms_no_other() -> None:
    made = all_compiled(deadline_s=1.0)
    try:
        found = [made.measure(each) for each in (GOOD, ABORTS, GOOD, HANGS, WRONG, GOOD)]
    finally:
        made.close()
    states = ["measured", "crashed", "measured", "hung", "wrong", "measured"]
    assert [each.state for each in found] == states
    assert len({each.time_us for each in found if each.measured}) == 3  # processes


def test_a_race_that_ends_its_process_is_run_again_and_then_each_alone() -> None:
    made = all_compiled(runner="fake_runners:CrashesInRaces")
    try:
        raced = made.race([GOOD, ABORTS])
    finally:
        made.close()
    assert {schedule: each.state for schedule, each in raced.items()} == {
        GOOD: "measured",
        ABORTS: "crashed",
    }


@pytest.mark.slow
def test_each_device_has_a_worker_and_they_work_at_the_same_time() -> None:
    made = all_compiled(devices=(0, 1, 2))
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(made.measure, [HANGS, GOOD, GOOD], timeout=100))
    except TimeoutError:
        pytest.fail("one that hangs holds up the others")
    finally:
        made.close()
    assert found[0].state == "hung"
    assert found[1].measured and found[2].measured


def test_workers_that_are_kept_serve_the_next_case() -> None:
    with kept_workers():
        first = all_compiled()
        pid = first.measure(GOOD).time_us
        first.close()
        second = all_compiled()
        assert second.measure(GOOD).time_us == pid
        second.close()
        assert Path(f"/proc/{int(pid or 0)}").exists()
    assert not Path(f"/proc/{int(pid or 0)}").exists()


def test_a_helper_that_dies_is_replaced_once() -> None:
    made = measurer()
    try:
        assert made.prepare([GOOD]) == {}
        os.kill(made.pids()[0], signal.SIGKILL)
        wait_until(lambda: bool(made._staff.helper and made._staff.helper.ended))
        assert made.prepare([tile(32)]) == {}
    finally:
        made.close()


class Dying:
    """A compiling process that never lives to do anything."""

    ended = "the compiling process ended early: the process ended by SIGKILL"
    pid = 0

    def submit(self, jobs: object, *, first: bool = False) -> None: ...

    def wait_for(self, jobs: object) -> dict[object, object]:
        return {}

    def close(self) -> None: ...


def test_messages(golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for devices in ("all", (0, 9), "1"):
        with pytest.raises(TuningError) as error:
            gpu_measurer(SPEC, SHAPE, TARGET, devices=devices)
        texts.append(str(error.value))
    monkeypatch.setattr(measure_module, "Compiling", lambda **_: Dying())
    monkeypatch.setattr(measure_module, "cores", lambda: 16)
    made = measurer()
    with pytest.raises(TuningError) as error:
        made.prepare([GOOD])
    texts.append(str(error.value))
    made.close()
    golden("errors/tune-measure.txt", "\n\n".join(texts))


def test_nothing_is_measured_when_frozen() -> None:
    try:
        with freeze(), pytest.raises(FrozenError, match="tune measured for nvidia-h200"):
            gpu_measurer(SPEC, SHAPE, TARGET)
    finally:
        thaw()


def test_closing_while_it_measures_ends_the_wait() -> None:
    made = all_compiled()
    assert made.measure(GOOD).measured
    closer = threading.Timer(0.3, made.close)
    closer.start()
    begun = time.monotonic()
    assert made.measure(HANGS).state == "crashed"
    assert time.monotonic() - begun < measure_module.DEADLINE_S
    closer.join()


PARENT = """
import sys
sys.path.insert(0, {folder!r})
from fake_runners import GOOD, HANGS
from test_measure import measurer
made = measurer()
made.measure(GOOD)
print(*made.pids(), flush=True)
made.measure(HANGS)
"""


def test_no_process_outlives_a_search_that_is_killed() -> None:
    program = PARENT.format(folder=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_until(lambda: not any(group_members(pid) for pid in pids))
