"""What is remembered of Hopper kernels: files that others read, that may be broken, and the tuner
that does not run again what hung."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_cases import CASE

from flashgen.compiler.choose import choose
from flashgen.errors import FlashgenWarning
from flashgen.pipeline import generate
from flashgen.problem import Problem
from flashgen.runtime.artifact import Plan
from flashgen.runtime.said import forget
from flashgen.schedule import families
from flashgen.schedule.model import Bucket, Schedule, Sm90
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import toolchain, verdicts
from flashgen.tune.ahead import Compiled
from flashgen.tune.measure import IsolatedMeasurer
from flashgen.tune.search import Limits, Space, search
from flashgen.tune.storage import place_of
from flashgen.tune.strategies import RandomOrder
from flashgen.tune.study import Trials
from flashgen.tune.toolchain import BUNDLED, Device, Toolchain
from flashgen.tune.verdicts import HUNG, Machine, Subject, Verdict, recall, remember

TARGET = get_target("nvidia-h200")
SPEC = AttentionSpec(name="hopper", head_dim=64, dtype="bf16", mask="causal")
MACHINE = Machine("NVIDIA H200", "570.86.15", "2.11.0", "3.6.0", BUNDLED)


def hopper(block_n: int = 128, stages: int = 2) -> Schedule:
    return Schedule(
        family="gluon_sm90",
        block_m=128,
        block_n=block_n,
        num_warps=12,
        num_stages=stages,
        sm90=Sm90(),
    )


SUBJECT = Subject("hopper", "0123456789abcdef", hopper(), MACHINE)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    verdicts.forget_here()
    forget()
    yield
    verdicts.forget_here()


def file_of(subject: Subject) -> Path:
    return verdicts.folder() / f"{subject.key}.json"


def test_a_verdict_is_read_by_the_next_process() -> None:
    assert recall(SUBJECT) is None
    remember(SUBJECT, "hung", "no answer within 30 s")
    verdicts.forget_here()
    found = recall(SUBJECT)
    assert found is not None
    assert (found.state, found.reason, found.subject) == ("hung", "no answer within 30 s", SUBJECT)
    assert found.refusal == HUNG
    assert verdicts.parse(json.loads(file_of(SUBJECT).read_text())) == found
    assert not list(verdicts.folder().glob(".*"))  # nothing temporary is left


@pytest.mark.parametrize(
    "other",
    [
        replace(SUBJECT, digest="fedcba9876543210"),
        replace(SUBJECT, schedule=hopper(64)),
        *(
            replace(SUBJECT, machine=replace(MACHINE, **{name: "another"}))
            for name in ("gpu", "driver", "torch", "triton", "ptxas")
        ),
    ],
)
def test_another_kernel_schedule_or_toolchain_is_another_question(other: Subject) -> None:
    remember(SUBJECT, "hung", "no answer")
    assert recall(other) is None


def test_the_name_of_the_spec_is_for_people_only() -> None:
    remember(SUBJECT, "proven")
    assert recall(replace(SUBJECT, spec="another name")) is not None


def test_a_bad_verdict_is_not_overruled() -> None:
    remember(SUBJECT, "hung", "no answer")
    assert remember(SUBJECT, "proven").state == "hung"
    verdicts.forget_here()
    assert remember(SUBJECT, "proven").state == "hung"
    remember(replace(SUBJECT, digest="b" * 16), "proven")
    assert remember(replace(SUBJECT, digest="b" * 16), "hung", "later").state == "hung"


@pytest.mark.parametrize("state", ["crashed", "untried"])
def test_what_may_be_luck_is_known_to_this_process_only(state: Any) -> None:
    remember(SUBJECT, state, "out of memory")
    found = recall(SUBJECT)
    assert found is not None
    assert found.refusal == "out of memory"
    verdicts.forget_here()
    assert recall(SUBJECT) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b'{"version": 2, "state": "hung"}',
        b"[" * 100_000,
        b'{"version": 1, "state": "fine", "reason": ""}',
        b'{"version": 1, "state": "hung", "reason": 3, "when": "", "spec": "", '
        b'"kernel_digest": ""}',
        b'{"version": 1, "state": "hung", "reason": "", "when": "", "spec": "", '
        b'"kernel_digest": "", "schedule": {}, "machine": {}}',
        b'{"version": 1, "state": "hung", "reason": "", "when": "", "spec": "", '
        b'"kernel_digest": "", "schedule": 1, "machine": 1}',
    ],
)
def test_a_broken_file_is_said_and_counts_as_not_there(content: bytes) -> None:
    remember(SUBJECT, "hung", "no answer")
    verdicts.forget_here()
    file_of(SUBJECT).write_bytes(content)
    with pytest.warns(FlashgenWarning, match="is no verdict of a kernel"):
        assert recall(SUBJECT) is None
    assert verdicts.known() == ()
    remember(SUBJECT, "proven")
    verdicts.forget_here()
    assert recall(SUBJECT) is not None


def test_a_pipe_or_a_folder_in_its_place_does_not_hang() -> None:
    verdicts.folder().mkdir(parents=True)
    os.mkfifo(file_of(SUBJECT))
    with pytest.warns(FlashgenWarning, match="is no regular file"):
        assert recall(SUBJECT) is None
    other = replace(SUBJECT, digest="b" * 16)
    file_of(other).mkdir()
    with pytest.warns(FlashgenWarning, match="cannot be read"):
        assert recall(other) is None


def test_a_folder_that_cannot_be_written_keeps_it_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(FlashgenWarning) as said:
        remember(SUBJECT, "hung", "no answer")
    golden("errors/verdict-unwritable.txt", str(said[0].message).replace(str(tmp_path), "DIR"))
    found = recall(SUBJECT)
    assert found is not None
    assert found.state == "hung"


PROCESS = """
import sys
from test_verdicts import SUBJECT, hopper, replace
from flashgen.tune.verdicts import known, remember
for stages in range(1, 5):
    remember(replace(SUBJECT, schedule=hopper(128, stages)), "hung", "from " + sys.argv[1])
    assert all(each.state == "hung" for each in known())
"""


def test_several_processes_write_and_read() -> None:
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(n)], env=environment) for n in range(3)
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert len(verdicts.known()) == 4


def test_listing_and_forgetting() -> None:
    remember(SUBJECT, "proven")
    remember(replace(SUBJECT, spec="b", schedule=hopper(64)), "hung", "no answer")
    remember(replace(SUBJECT, spec="a", schedule=hopper(64, 3)), "refused", "spill_bytes")
    assert [v.subject.spec for v in verdicts.known(bad=True)] == ["a", "b"]
    assert len(verdicts.known()) == 3
    assert verdicts.forget_bad() == 2
    assert [v.state for v in verdicts.known()] == ["proven"]
    assert recall(replace(SUBJECT, schedule=hopper(64))) is None


# **** what a tuned config vouches for ****


def test_an_entry_vouches_for_the_very_kernel_of_a_triton_on_a_gpu_model() -> None:
    from entries import entry

    made = replace(
        entry(SUBJECT.schedule, Bucket(None, None)),
        kernel_digest=SUBJECT.digest,
        device=Device(MACHINE.gpu, "9.0", 132, 232448, MACHINE.driver),
        toolchain=Toolchain("0.1.0", MACHINE.torch, MACHINE.triton),
    )
    assert verdicts.vouched(made, SUBJECT)
    assert not verdicts.vouched(None, SUBJECT)
    for other in (
        replace(made, schedule=hopper(64)),
        replace(made, kernel_digest="another"),
        replace(made, device=replace(made.device, name="NVIDIA H100")),
        replace(made, toolchain=replace(made.toolchain, triton="3.7.0")),
    ):
        assert not verdicts.vouched(other, SUBJECT)
    for other in (
        replace(made, device=replace(made.device, driver="575.0")),
        replace(made, toolchain=replace(made.toolchain, torch="2.12.0")),
    ):
        assert verdicts.vouched(other, SUBJECT)
    own = replace(SUBJECT, machine=replace(MACHINE, ptxas="/opt/ptxas, V13.1"))
    assert not verdicts.vouched(made, own)


# **** the toolchain ****


def test_the_assembler_is_triton_s_own_or_the_one_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    toolchain.assembler.cache_clear()
    assert toolchain.assembler() == BUNDLED
    fake = tmp_path / "ptxas"
    fake.write_text("#!/bin/sh\necho ptxas: NVIDIA\necho Build 13.1\n")
    fake.chmod(0o755)
    for path, said in ((str(fake), "Build 13.1"), (str(tmp_path / "none"), "unknown")):
        monkeypatch.setenv("TRITON_PTXAS_PATH", path)
        toolchain.assembler.cache_clear()
        assert toolchain.assembler() == f"{path}, {said}"
    toolchain.assembler.cache_clear()


@pytest.mark.parametrize(
    ("version", "folder", "said"),
    [
        ("3.6.0", True, None),
        ("3.8.0+git1", True, None),
        ("unknown", False, None),
        ("3.5.1", True, "triton 3.5.1 has no Gluon for Hopper, 3.6 or newer is needed"),
        ("3.7.1", False, "triton 3.7.1 here has no triton.experimental.gluon"),
    ],
)
def test_whether_triton_here_has_gluon(
    version: str, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, folder: bool
) -> None:
    class Found:
        submodule_search_locations = (str(tmp_path),)

    if folder:
        (tmp_path / "experimental" / "gluon").mkdir(parents=True)
        (tmp_path / "experimental" / "gluon" / "__init__.py").touch()
    monkeypatch.setattr(families, "_triton_version", lambda: version)
    monkeypatch.setattr(families, "find_spec", lambda name: Found)
    assert families.gluon_missing.__wrapped__() == said


# **** the tuner ****


def plan_of(*schedules: Schedule) -> Plan:
    problem = Problem(SPEC, TARGET)
    (first, *_) = schedules
    return generate(problem, choose(problem, first), has_lse=False, origin="given")


SHAPE = Shape(1, 2, 1, 300, 300)
LONG_S = 120.0


class HopperMeasurer(IsolatedMeasurer):
    """Compilers left out, but for one schedule whose compiler never ends."""

    asked: list[Schedule]

    def _compile(
        self, schedules: Sequence[Schedule], *, first: bool = False
    ) -> dict[Schedule, Compiled]:
        self.asked = [*getattr(self, "asked", []), *schedules]
        late = Compiled(45.0, error="compiling took over 45 s", hung=True)
        good = Compiled(0.1, 4096, 64, 0)
        return {each: late if each.num_stages == 3 else good for each in schedules}


@pytest.fixture
def measurer() -> Iterator[Callable[[], HopperMeasurer]]:
    made: list[HopperMeasurer] = []

    def make() -> HopperMeasurer:
        made.append(
            HopperMeasurer(
                Problem(SPEC, TARGET),
                SHAPE,
                devices=(0,),
                deadline_s=1.0,
                runner="fake_runners:HopperRunner",
                machine=lambda: MACHINE,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


HANGS, GOOD, COMPILES_FOR_EVER = hopper(128), hopper(64), hopper(64, 3)


def test_what_hung_is_not_asked_again_by_another_run(
    measurer: Callable[[], HopperMeasurer],
) -> None:
    first = measurer()
    assert first.measure(HANGS).state == "hung"
    assert first.measure(GOOD).measured
    assert first.prepare([COMPILES_FOR_EVER]) == {COMPILES_FOR_EVER: "compiling took over 45 s"}
    first.close()
    verdicts.forget_here()
    states = {v.subject.schedule: v.state for v in verdicts.known()}
    assert states == {HANGS: "hung", GOOD: "proven", COMPILES_FOR_EVER: "hung"}
    second = measurer()
    assert second.prepare([HANGS, GOOD, COMPILES_FOR_EVER]) == {
        HANGS: HUNG,
        COMPILES_FOR_EVER: HUNG,
    }
    assert second.asked == [GOOD]
    again = second.measure(HANGS)
    assert (again.state, again.reason) == ("hung", HUNG)
    assert second.asked == [GOOD]


def test_the_portable_family_is_measured_as_ever(measurer: Callable[[], HopperMeasurer]) -> None:
    made = measurer()
    tile = Schedule(block_m=64, block_n=32, num_warps=4, num_stages=2)
    assert made.measure(tile).measured
    assert verdicts.known() == ()


def test_a_search_records_it_and_a_later_one_asks_anew(
    measurer: Callable[[], HopperMeasurer], tmp_path: Path
) -> None:
    plan = plan_of(HANGS)
    remember(verdicts.subject_of(plan, SPEC.display_name, HANGS, MACHINE), "hung", "no answer")
    found = Space((GOOD, HANGS), GOOD)
    trials = Trials(CASE, place_of(str(tmp_path / "journal")))
    outcome = search(trials, found, measurer(), RandomOrder(0), Limits(near_bound=2.0), race=False)
    assert outcome.discarded == {HANGS: HUNG}
    assert set(outcome.known) == {GOOD}
    assert trials.discarded() == {}


def test_readers_meet_no_half_file() -> None:
    stop = threading.Event()
    broken: list[str] = []

    def read() -> None:
        while not stop.is_set():
            text = file_of(SUBJECT).read_text()
            if not text.endswith("}\n"):
                broken.append(text)

    verdict: Verdict = remember(SUBJECT, "hung", "x" * 100_000)
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        verdicts._write(verdict)
    stop.set()
    reader.join()
    assert not broken
