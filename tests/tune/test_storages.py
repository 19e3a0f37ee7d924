"""Shared studies: journal file, PostgreSQL, gRPC proxy; workers that are killed; what is damaged.

The servers are started here. Timings are a formula, so that what is in the storage can be checked
to the last trial.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from entries import FAST, OTHER
from fakes import FakeMeasurer, smooth, timed
from servers import Postgres, free_port, grpc_proxy
from tuning_cases import CASE, DEFAULT, FEASIBLE, SPACE, trials

from flashgen import settings
from flashgen.errors import FlashgenWarning, TuningError
from flashgen.runtime.said import forget
from flashgen.tune import study
from flashgen.tune.journal import Journal
from flashgen.tune.measurement import Measurement
from flashgen.tune.owner import Owner, me
from flashgen.tune.search import Limits, search
from flashgen.tune.storage import place_of
from flashgen.tune.strategies import RandomOrder
from flashgen.tune.study import Trials

ALL = Limits(seconds=240, trials=10**6, patience=10**6)
WORKER = Path(__file__).parent / "shared_worker.py"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def proxy(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with grpc_proxy(postgres.url, tmp_path_factory.mktemp("proxy")) as address:
        yield address


@pytest.fixture(params=["journal", "postgresql", "grpc"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A storage that several processes can use, empty of this case's study."""
    if request.param == "journal":
        yield str(tmp_path / "shared" / "trials.journal")
        return
    server: Postgres = request.getfixturevalue("postgres")
    forget_study(server.url)
    yield server.url if request.param == "postgresql" else request.getfixturevalue("proxy")


def forget_study(url: str) -> None:
    import optuna

    with suppress(KeyError):
        optuna.delete_study(study_name=CASE.study, storage=url.replace("://", "+psycopg2://"))


def start(storage: str, log: Path, seconds: float = 0.05) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(WORKER), storage, str(log), str(seconds)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(log: Path) -> list[list[str]]:
    return [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, "it did not come to that in time"
        time.sleep(0.01)


def check_whole(kept: Trials, log: Path, killed: set[str]) -> None:
    """Every schedule has one result; only what a killed worker was at was measured twice."""
    results = [m for t in kept.study.get_trials() if (m := study._measurement_of(t)) is not None]
    assert Counter(m.schedule for m in results) == Counter(FEASIBLE)
    assert all(m.time_us == smooth(m.schedule) for m in results)
    assert kept.taken() == set()
    states = Counter(t.state.name for t in kept.study.get_trials())
    assert states["COMPLETE"] == len(FEASIBLE)
    assert set(states) <= {"COMPLETE", "FAIL"}
    begun = [(pid, name) for pid, word, name in lines_of(log) if word == "begin"]
    last = dict(begun)
    for name, count in Counter(name for _, name in begun).items():
        at_it = sum(1 for pid in killed if last.get(pid) == name)
        assert count <= 1 + at_it, f"{name} was measured {count} times"


@pytest.mark.slow
def test_four_workers_two_are_killed_no_trial_is_lost_or_doubled(
    shared: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    workers = [start(shared, log) for _ in range(4)]
    try:
        ended = lambda: sum(word == "end" for _, word, _ in lines_of(log))  # noqa: E731
        wait_until(lambda: len({pid for pid, _, _ in lines_of(log)}) == 4 or ended() > 40)
        for number, worker in enumerate(workers[:2]):
            wait_until(lambda number=number: ended() >= 8 + 8 * number)  # type: ignore[misc]
            worker.send_signal(signal.SIGKILL)
        late = start(shared, log)  # one joins
        outs = [worker.communicate() for worker in [*workers[2:], late]]
        assert all(worker.returncode == 0 for worker in [*workers[2:], late]), outs
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    check_whole(trials(shared), log, {str(worker.pid) for worker in workers[:2]})


def test_killed_at_any_moment_and_resumed(tmp_path: Path) -> None:
    storage, log = str(tmp_path / "trials.journal"), tmp_path / "log"
    killed = set()
    chance = random.Random(7)
    for _ in range(5):
        before = len(lines_of(log))
        worker = start(storage, log, seconds=0.002)
        wait_until(lambda before=before: len(lines_of(log)) > before)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.05))
        worker.kill()
        worker.communicate()
        killed.add(str(worker.pid))
        kept = trials(storage)
        ended = {name for _, word, name in lines_of(log) if word == "end"}
        known = {str(schedule) for schedule in kept.known()}
        assert len(ended - known) <= len(killed)  # of each at most the one in flight
    worker = start(storage, log, seconds=0.0)
    out = worker.communicate()
    assert worker.returncode == 0, out
    check_whole(trials(storage), log, killed)


# **** claims ****


def test_a_claim_is_of_one_and_ends_with_its_result(shared: str) -> None:
    one, other = trials(shared), trials(shared)
    claim = one.claim(FAST)
    assert claim is not None
    assert other.claim(FAST) is None
    assert other.taken() == {FAST}
    assert other.claim(OTHER) is not None
    assert claim.finish(timed(FAST, 5.0))
    assert other.known() == {FAST: timed(FAST, 5.0)}
    assert other.claim(FAST) is None
    assert other.taken() == {OTHER}


def test_a_failure_is_a_result_too(shared: str) -> None:
    one = trials(shared)
    claim = one.claim(FAST)
    assert claim is not None
    failed = Measurement(FAST, "hung", reason="no answer in 10 s")
    assert claim.finish(failed)
    assert trials(shared).known() == {FAST: failed}
    assert trials(shared).claim(FAST) is None
    assert trials(shared, retry_failed=True).claim(FAST) is not None


def test_of_many_that_claim_at_once_one_gets_it(shared: str) -> None:
    import threading

    kept = [trials(shared) for _ in range(6)]
    barrier, got = threading.Barrier(6), []

    def try_it(each: Trials) -> None:
        barrier.wait()
        got.append(each.claim(FAST))

    threads = [threading.Thread(target=try_it, args=(each,)) for each in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claim is not None for claim in got) == 1


def test_a_dead_owners_schedule_is_free_again(shared: str) -> None:
    kept = trials(shared)
    gone = Owner(me().place, 2**22 + 1, 1)
    assert gone.is_dead
    assert not me().is_dead
    kept._add(FAST, {"owner": str(gone)})
    assert kept.taken() == set()
    claim = kept.claim(FAST)
    assert claim is not None
    assert kept.recover() == 1
    assert claim.finish(timed(FAST, 5.0))


def test_a_result_that_was_written_but_not_told_is_not_lost(shared: str) -> None:
    kept = trials(shared)
    trial_id = kept._add(FAST, {"owner": str(Owner(me().place, 2**22 + 1, 1))})
    kept._storage.set_trial_user_attr(trial_id, "measurement", timed(FAST, 5.0).to_dict())
    assert trials(shared).known() == {FAST: timed(FAST, 5.0)}


def test_another_machines_silence_is_judged_by_the_own_watch(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = trials(shared)
    elsewhere = Owner("elsewhere", 1, 1)
    assert not elsewhere.is_dead
    trial_id = kept._add(FAST, {"owner": str(elsewhere)})
    now = 1000.0
    monkeypatch.setattr(study.time, "monotonic", lambda: now)
    assert kept.taken() == {FAST}
    now += study.STALE_S - 1
    kept._beat(trial_id, 1)
    assert kept.taken() == {FAST}
    now += study.STALE_S - 1
    assert kept.taken() == {FAST}
    now += 2
    assert kept.taken() == set()
    assert kept.recover() == 1
    assert not kept._finish(trial_id, timed(FAST, 5.0))  # it comes too late: dropped, not doubled
    assert kept.known() == {}


def test_a_heart_beats_while_a_schedule_is_measured(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BEAT_S", 0.01)
    kept = trials(shared)
    claim = kept.claim(FAST)
    assert claim is not None
    beats = lambda: kept._storage.get_trial(claim.trial_id).user_attrs.get("beat", 0)  # noqa: E731
    with claim.alive():
        wait_until(lambda: beats() >= 3)
        claim.finish(timed(FAST, 5.0))


def test_discards_and_races_are_kept(shared: str) -> None:
    kept = trials(shared)
    kept.discard({FAST: "ptxas: too many registers"})
    kept.keep_race({OTHER: timed(OTHER, 7.0)})
    kept.keep_race({OTHER: timed(OTHER, 6.0)})
    assert trials(shared).discarded() == {FAST: "ptxas: too many registers"}
    assert trials(shared).races() == {OTHER: timed(OTHER, 6.0)}


def test_trials_of_others_in_the_study_do_no_harm(shared: str) -> None:
    import optuna

    kept = trials(shared)
    kept.study.add_trial(optuna.trial.create_trial(value=1.0))
    kept.study.add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={"schedule": {"block_q": 1}})
    )
    kept.study.add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={"measurement": {"state": "odd"}})
    )
    kept.study.set_user_attr("race nonsense", 1)
    kept.study.set_user_attr("discarded {}", "x")
    again = trials(shared)
    assert (again.known(), again.taken(), again.discarded(), again.races()) == ({}, set(), {}, {})


def test_the_study_says_what_it_is_of(shared: str) -> None:
    attributes = trials(shared).study.user_attrs["case"]
    assert attributes["spec"] == CASE.spec
    assert attributes["kernel_digest"] == CASE.kernel_digest
    assert attributes["shape"]["q_len"] == 2048


# **** journals ****


def journal_of(tmp_path: Path, count: int = 5) -> Path:
    path = tmp_path / "trials.journal"
    search(
        trials(str(path)), SPACE, FakeMeasurer(), RandomOrder(), Limits(trials=count), race=False
    )
    return path


def test_a_journal_cut_at_any_byte_is_used_up_to_there(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    data, whole = path.read_bytes(), trials(str(path)).known()
    chance = random.Random(3)
    for cut in [0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(12))]:
        path.write_bytes(data[:cut])
        kept = trials(str(path))
        known = kept.known()
        assert list(known.items()) == list(whole.items())[: len(known)]
        claim = next(c for s in FEASIBLE if (c := kept.claim(s)) is not None)
        assert claim.finish(timed(claim.schedule, 1.0))
        assert all(json.loads(line) for line in path.read_text().splitlines())
        assert claim.schedule in trials(str(path)).known()
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_damaged_middle_is_said_and_kept_beside(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:9], b'{"op_code":5,"tri\0\0\n', *lines[10:]])
    path.write_bytes(damaged)
    forget()
    with pytest.warns(FlashgenWarning, match=r":10: the journal is damaged here; 9 operations"):
        kept = trials(str(path))
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    found = search(kept, SPACE, FakeMeasurer(), RandomOrder(), ALL, race=False)
    # The trial whose end was in the lost lines is this process's, which is alive.
    assert set(found.known) | kept.taken() == set(FEASIBLE)
    assert len(found.known) >= len(FEASIBLE) - 1


def _with(line: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(line) | fields).encode() + b"\n"


# What Optuna raises for each: KeyError, AssertionError, ValueError, RecursionError, TypeError.
NOT_OF_OPTUNA: dict[str, Callable[[bytes], bytes]] = {
    "a distribution without attributes": lambda line: _with(
        line, distributions={"block_m": '{"name": "IntDistribution"}'}
    ),
    "unknown operation": lambda line: _with(line, op_code=99),
    "unknown state": lambda line: _with(line, state=9),
    "too deep": lambda line: b"[" * 100_000 + b"\n",
    "a study that is a list": lambda line: _with(line, study_id=[]),
}


@pytest.mark.parametrize("name", NOT_OF_OPTUNA)
def test_a_line_that_optuna_did_not_write_ends_the_journal(name: str, tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    where = [n for n, line in enumerate(lines) if json.loads(line)["op_code"] == 4][2]
    damaged = b"".join([*lines[:where], NOT_OF_OPTUNA[name](lines[where]), *lines[where + 1 :]])
    path.write_bytes(damaged)
    forget()
    said = rf":{where + 1}: the journal is damaged here; {where} operations before it are used"
    with pytest.warns(FlashgenWarning, match=said):
        kept = trials(str(path))
    assert path.read_bytes().startswith(b"".join(lines[:where]))
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    assert len(kept.known()) == 2
    found = search(kept, SPACE, FakeMeasurer(), RandomOrder(), Limits(trials=5), race=False)
    assert len(found.known) == 5
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlashgenWarning)  # nothing is left to be mended
        assert len(trials(str(path)).known()) == 5


def test_a_long_line_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(TuningError, match="is no journal of Optuna"):
        trials(str(path))
    assert path.read_text() == "[" * 100_000 + "\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("flashgen: 1\nname: mine\n")
    with pytest.raises(TuningError, match="is no journal of Optuna"):
        trials(str(path))
    assert path.read_text() == "flashgen: 1\nname: mine\n"


def test_a_lock_that_a_killed_process_left_is_passed_over(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    lock = path.with_name("trials.journal.lock")
    lock.symlink_to(str(Owner(me().place, 2**22 + 1, 1)))
    begun = time.monotonic()
    kept = trials(str(path))
    assert kept.claim(next(s for s in FEASIBLE if s not in kept.known())) is not None
    assert not lock.is_symlink()
    assert time.monotonic() - begun < 25  # Optuna's own lock waits 30 s


def test_a_lock_of_a_living_process_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.tune import journal

    path = journal_of(tmp_path)
    monkeypatch.setattr(journal, "LONGEST_WAIT_S", 0.2)
    path.with_name("trials.journal.lock").symlink_to(str(me()))
    with pytest.raises(TuningError, match=f"held for 0 s by {me()}"):
        trials(str(path))


def test_a_lock_of_another_machine_is_taken_over_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.tune import journal

    path = journal_of(tmp_path)
    monkeypatch.setattr(journal, "GRACE_S", 0.2)
    path.with_name("trials.journal.lock").symlink_to(str(Owner("elsewhere", 1, 1)))
    assert trials(str(path)).known()


def test_a_full_disk_leaves_the_journal_whole_and_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trials.journal"
    kept = trials(str(path))
    append, count = Journal.append_logs, [0]
    monkeypatch.setattr(study, "RETRIES_S", ())

    def full(self: Journal, logs: Any) -> None:
        count[0] += 1
        if count[0] > 17:
            with self.path.open("ab") as stream:
                stream.write(b'{"op_code":')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, logs)

    monkeypatch.setattr(Journal, "append_logs", full)
    found = search(kept, SPACE, FakeMeasurer(), RandomOrder(), ALL)
    assert found.error is not None
    assert "No space left on device" in str(found.error)
    assert "make room on the disk and run the same command again" in str(found.error)
    assert found.best is not None
    monkeypatch.setattr(Journal, "append_logs", append)
    again = FakeMeasurer()
    resumed = search(trials(str(path)), SPACE, again, RandomOrder(), ALL)
    assert resumed.error is None
    assert len(again.measured) == len(FEASIBLE) - len(found.known)


def test_the_default_is_a_journal_for_each_case_in_the_cache() -> None:
    kept = trials()
    assert [p.name for p in settings.trials_dir().glob("*.journal")] == [f"{CASE.study}.journal"]
    assert kept.place.kind == "journal"


# **** servers that do not answer ****


@pytest.mark.parametrize(
    "kind", ["postgresql://flashgen:secret@127.0.0.1:{}/x", "grpc://127.0.0.1:{}"]
)
def test_an_unreachable_server_is_said_within_seconds(
    kind: str, golden: Callable[[str, str], None]
) -> None:
    port = free_port()
    begun = time.monotonic()
    with pytest.raises(TuningError) as found:
        trials(kind.format(port))
    assert time.monotonic() - begun < 60
    text = str(found.value).replace(str(port), "PORT")
    assert "secret" not in text
    if kind.startswith("postgresql"):
        assert "Connection refused" in text
        return
    golden("tune/unreachable-grpc.txt", text)


@pytest.mark.slow
def test_a_database_that_goes_away_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Postgres()
    monkeypatch.setattr(study, "RETRIES_S", (0.05,))
    try:
        server.start()

        def stop(schedule: object) -> None:
            if len(measurer.measured) == 6:
                server.kill()

        measurer = FakeMeasurer(on_measure=stop)
        found = search(trials(server.url), SPACE, measurer, RandomOrder(), ALL)
        assert found.error is not None
        assert "cannot be reached or used" in str(found.error)
        assert "which the next run takes up" in str(found.error)
        assert found.best is not None
        assert len(found.known) == 6
        server.start()
        again = FakeMeasurer()
        resumed = search(trials(server.url), SPACE, again, RandomOrder(), ALL)
        assert resumed.error is None
        assert set(again.measured) == set(FEASIBLE) - set(measurer.measured)
        assert not list((settings.trials_dir() / "untold").iterdir())
    finally:
        server.remove()


PLACES = {
    "x.journal": ("journal", "x.journal"),
    "postgresql://u:p@h/d": ("database", "postgresql://u:***@h/d"),
    "postgresql+pg8000://u@h/d": ("database", "postgresql+pg8000://u@h/d"),
    "sqlite:///x.db": ("database", "sqlite:///x.db"),
    "grpc://h:13000": ("grpc", "grpc://h:13000"),
    "memory": ("memory", "memory, not kept"),
}


@pytest.mark.parametrize("text", PLACES)
def test_places_and_how_they_are_shown(text: str) -> None:
    assert (place_of(text).kind, str(place_of(text))) == PLACES[text]


@pytest.mark.parametrize("text", ["grpc://", "grpc://host", "ftp://x", "redis://h/0"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(TuningError, match="--storage"):
        trials(text)


def test_the_default_schedule_is_among_those_of_these_tests() -> None:
    assert DEFAULT in FEASIBLE
