"""`flashgen.tune` on fake timings: tables, seeds, devices, turns, failures; and tune="auto"."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import FAST, OTHER, SPEC, TARGET, entry, table
from fakes import FakeMeasurer, smooth
from tuning_cases import ALL_FEASIBLE, BUCKET, CASE, DEFAULT, PROBLEM

import flashgen
from flashgen import AttentionSpec, settings
from flashgen.compiler import choose
from flashgen.compiler.tuning import SelfTuning, Tuning, TuningInterrupted
from flashgen.errors import FlashgenError, FlashgenWarning, FrozenError, TableError, TuningError
from flashgen.runtime.said import forget
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.spec.parts import Shape
from flashgen.tune import lookup
from flashgen.tune.session import Request, add_entries, space_of, tune_case
from flashgen.tune.table import read_table, table_path, write_table

OPTIMUM = min(ALL_FEASIBLE, key=smooth)


def tune(measurer: FakeMeasurer | None = None, spec: AttentionSpec = SPEC, **others: Any) -> Tuning:
    found = measurer or FakeMeasurer()
    result = flashgen.tune(
        spec, target=TARGET.id, make_measurer=lambda case, devices: found, **others
    )
    assert found.closed >= 1 or not found.measured
    return result  # type: ignore[no-any-return]


def test_what_was_found_is_in_the_users_table_and_in_the_next_plan() -> None:
    found = tune(trials=120)  # a fifth of the space, what a search has by itself
    assert found.path == table_path(settings.user_tables_dir(), TARGET.id, SPEC.display_name)
    assert found.table is not None
    (kept,) = found.table.entries
    assert kept.schedule == OPTIMUM
    assert (kept.bucket, kept.shape, kept.feasible) == (BUCKET, SPEC.shapes[0], len(ALL_FEASIBLE))
    assert kept.speedup is not None
    assert kept.speedup > 1
    assert kept.unit == "TFLOP/s"
    assert 0 < kept.bound_us < kept.time_us
    assert 12 <= kept.trials <= 120
    plan, _ = choose.plan(SPEC, TARGET, has_lse=True)
    assert dict(plan.choices)[BUCKET] == OPTIMUM


def test_tuning_again_measures_nothing_and_writes_the_same_bytes() -> None:
    first = tune(trials=20).path.read_bytes()
    again = FakeMeasurer()
    assert tune(again, trials=20).path.read_bytes() == first
    assert (again.measured, again.raced) == ([], [])


def test_one_case_a_bucket_and_the_first_shape_stands_for_it() -> None:
    shapes = [
        {"batch": 1, "q_heads": 4, "kv_heads": 4, "q_len": n, "kv_len": n} for n in (2000, 1500, 99)
    ]
    found = tune(shapes=shapes, trials=3)
    assert [r.case.shape.q_len for r in found.results] == [2000, 99]
    assert [r.case.bucket for r in found.results] == [bucket_of(2000, 2000), bucket_of(99, 99)]
    assert found.table is not None
    assert len(found.table.entries) == 2


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    found = tune(out=tmp_path / "tuned_configs", trials=3)
    assert found.path == tmp_path / "tuned_configs" / TARGET.id / "tuned.json"
    assert found.path.is_file()
    assert not settings.user_tables_dir().exists()


def test_nothing_is_written_where_it_is_not_wanted() -> None:
    found = tune(trials=3, write=False)
    assert found.table is None
    assert found.results[0].entry is not None


@pytest.mark.usefixtures("nothing_packaged")
def test_seeds_are_the_predicted_best_and_committed_ones() -> None:
    write_table(
        table_path(settings.user_tables_dir(), "nvidia-h100-sxm", "tuned"),
        table(entry(FAST), gpu="nvidia-h100-sxm"),
    )
    lookup.forget()
    space = space_of(PROBLEM, CASE, {OTHER: 1.0, DEFAULT: 2.0, OPTIMUM: 3.0})
    assert space.seeds == (OTHER, DEFAULT, FAST)
    assert space.first == (DEFAULT, OTHER, FAST)
    measurer = FakeMeasurer()
    tune(measurer, trials=5)
    assert FAST in measurer.measured[:6]


def test_one_gpu_each_and_no_schedule_twice() -> None:
    made: list[tuple[int, ...]] = []
    measurers = [FakeMeasurer(seconds=0.01) for _ in range(3)]

    def make(case: object, devices: tuple[int, ...]) -> FakeMeasurer:
        made.append(devices)
        return measurers[devices[0]]

    found = flashgen.tune(SPEC, target=TARGET.id, devices=[0, 1, 2], trials=40, make_measurer=make)
    assert made == [(0,), (1,), (2,)]
    measured = [schedule for each in measurers for schedule in each.measured]
    assert all(each.measured for each in measurers)
    assert len(measured) == len(set(measured))
    assert [each.closed for each in measurers] == [1, 1, 1]
    assert sum(len(each.raced) for each in measurers) <= 1
    assert found.results[0].entry is not None


def test_a_gpu_that_fails_does_not_end_the_search() -> None:
    def broken(schedule: Schedule) -> None:
        raise RuntimeError("the driver is gone")

    bad, good = FakeMeasurer(on_measure=broken), FakeMeasurer(seconds=0.02)
    with pytest.warns(FlashgenWarning, match="a measuring worker ended early .*driver is gone"):
        forget()
        found = flashgen.tune(
            SPEC,
            target=TARGET.id,
            devices=[0, 1],
            trials=15,
            make_measurer=lambda case, devices: (good, bad)[devices[0]],
        )
    assert found.results[0].entry is not None


def test_ctrl_c_keeps_the_best_so_far_and_says_it() -> None:
    def interrupt(schedule: Schedule) -> None:
        if len(measurer.measured) == 6:
            raise KeyboardInterrupt

    measurer = FakeMeasurer(on_measure=interrupt)
    with pytest.raises(
        TuningInterrupted, match=r"best so far (loop flash2|gluon_sm90) .* us, is kept"
    ) as found:
        tune(measurer)
    kept = read_table(found.value.tuning.path)
    assert kept.entries[0].trials == 5


def test_every_candidate_fails_and_no_entry_is_written() -> None:
    found = tune(FakeMeasurer(fails=dict.fromkeys(ALL_FEASIBLE, "crashed")), trials=12)
    assert found.table is None
    outcome = found.results[0].outcome
    assert outcome is not None
    assert outcome.failures == {"crashed": 12}


def test_a_damaged_table_is_kept_beside_and_said() -> None:
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    path.parent.mkdir(parents=True)
    path.write_text(table().to_json()[:300])
    forget()
    with pytest.warns(FlashgenWarning, match=r"it is kept as tuned\.damaged-\d+"):
        add_entries(path, PROBLEM, TARGET.id, [entry()])
    assert read_table(path).entries == (read_table(path).entry(BUCKET),)
    (aside,) = path.parent.glob("tuned.damaged-*")
    assert aside.read_text() == table().to_json()[:300]


def test_a_table_of_an_older_spec_is_replaced() -> None:
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    other = AttentionSpec(name="tuned", head_dim=32, dtype="fp16")
    write_table(path, table(entry(), spec=other))
    add_entries(path, PROBLEM, TARGET.id, [entry()])
    assert read_table(path).fingerprint == SPEC.fingerprint


def test_a_read_only_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    forget()
    out = tmp_path / "out"
    with pytest.warns(FlashgenWarning, match="trials of this run are kept in memory only"):
        assert tune(trials=3, out=out).table is not None
    with pytest.raises(TableError, match="cannot be written"):
        tune(trials=3)


WRONG: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": "oracle"},
    "storage": {"storage": "ftp://host/x"},
    "shape": {"shapes": [{"batch": 1}]},
    "no-shapes": {"spec": AttentionSpec(name="bare", head_dim=64, dtype="fp16")},
    "too-large": {
        "spec": AttentionSpec(name="wide", head_dim=1024, dtype="fp32"),
        "shapes": [{"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 9, "kv_len": 9}],
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_tuned(name: str, golden: Callable[[str, str], None]) -> None:
    measurer = FakeMeasurer()
    with pytest.raises(FlashgenError) as found:
        tune(measurer, **WRONG[name])
    golden(f"tune/refused/{name}.txt", str(found.value))
    assert measurer.measured == []


def test_without_a_gpu_the_real_thing_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        assert flashgen.tune is not None
        return
    with pytest.raises(TuningError, match="PyTorch sees none"):
        flashgen.tune(SPEC)


# **** processes of one job ****

ONE = """
import sys, time
sys.path[:0] = {paths!r}
from entries import SPEC, TARGET
from fakes import FakeMeasurer
import flashgen
measurer = FakeMeasurer(seconds=0.05)
found = flashgen.tune(
    SPEC, target=TARGET.id, trials=12, make_measurer=lambda case, devices: measurer
)
print(len(measurer.measured), found.results[0].entry.schedule)
"""


def start_ranks(count: int, **more: str) -> list[subprocess.Popen[str]]:
    here = str(Path(__file__).parent)
    program = ONE.format(paths=[here, *(path for path in sys.path if path)])
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]


@pytest.mark.slow
def test_of_a_jobs_ranks_one_tunes_and_all_have_the_same() -> None:
    done = [process.communicate() for process in start_ranks(3, WORLD_SIZE="3")]
    assert all(not err for _, err in done), done
    lines = [out.strip().split(" ", 1) for out, _ in done]
    assert len({schedule for _, schedule in lines}) == 1
    assert sorted(int(count) for count, _ in lines)[:2] == [0, 0]


@pytest.mark.slow
def test_two_tunes_of_one_spec_share_the_study() -> None:
    done = [process.communicate() for process in start_ranks(2)]
    assert all(not err for _, err in done), done
    counts = [int(out.split()[0]) for out, _ in done]
    assert 12 <= sum(counts) <= 13  # one of them may be at its last when the other is through
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    assert read_table(path).entries


def test_whoever_waited_takes_the_table_of_the_other() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(schedule: Schedule) -> None:
        inside.set()
        go_on.wait(60)

    request = Request(exclusive=True)
    first = threading.Thread(
        target=tune_case,
        args=(PROBLEM, CASE, request, lambda case, devices: FakeMeasurer(on_measure=slow)),
    )
    first.start()
    assert inside.wait(60)
    second: list[Any] = []
    measurer = FakeMeasurer()
    waiting = threading.Thread(
        target=lambda: second.append(
            tune_case(PROBLEM, CASE, request, lambda case, devices: measurer)
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        waiting.start()
        time.sleep(0.3)
        go_on.set()
        first.join(60)
        waiting.join(60)
    assert measurer.measured == []
    assert second[0].outcome is None
    assert second[0].entry.bucket == BUCKET


# **** frozen, and tune="auto" ****


def test_frozen_neither_generates_nor_tunes() -> None:
    with flashgen.freeze():
        with pytest.raises(FrozenError, match="generate tuned for nvidia-h200"):
            choose.plan(SPEC, TARGET, has_lse=False)
        with pytest.raises(FrozenError, match="tune tuned for nvidia-h200, q_len any"):
            tune()
    made = choose.plan(SPEC, TARGET, has_lse=False)
    with flashgen.freeze():
        assert choose.plan(SPEC, TARGET, has_lse=False) == made


def test_frozen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_FROZEN", "1")
    with pytest.raises(FrozenError, match="unset FLASHGEN_FROZEN"):
        choose.plan(SPEC, TARGET, has_lse=False)


def test_auto_is_the_only_word(golden: Callable[[str, str], None]) -> None:
    assert isinstance(flashgen.compile(SPEC, tune="auto"), SelfTuning)
    with pytest.raises(FlashgenError) as found:
        flashgen.compile(SPEC, tune="always")
    golden("tune/refused/mode.txt", str(found.value))


def settle(attention: SelfTuning, q_len: int) -> None:
    """What a call of these lengths does before its launch."""
    import torch

    from flashgen.runtime.check import Sizes

    sizes = Sizes(2, 4, 4, q_len, q_len)
    attention._settle(sizes, torch.device("cpu"), bucket_of(q_len, q_len))


@pytest.mark.usefixtures("nothing_packaged")
def test_auto_tunes_a_bucket_once_and_takes_the_new_plan() -> None:
    asked: list[tuple[object, Shape]] = []

    def tuner(problem: object, bucket: object, shape: Shape, device: int) -> None:
        asked.append((bucket, shape))
        add_entries(
            table_path(settings.user_tables_dir(), TARGET.id, "tuned"),
            PROBLEM,
            TARGET.id,
            [entry(FAST)],
        )

    def plan_for(device: object) -> Any:
        return choose.plan(SPEC, TARGET, has_lse=False)

    attention = SelfTuning(SPEC, plan_for, return_lse=False, target=TARGET, tuner=tuner)
    settle(attention, 2048)
    assert asked == [(BUCKET, Shape(2, 4, 4, 2048, 2048))]
    assert dict(attention._plan_for(None)[0].choices)[BUCKET] == FAST  # type: ignore[arg-type]
    settle(attention, 2000)  # tuned by now
    assert len(asked) == 1
    settle(attention, 1000)  # near is not tuned
    assert len(asked) == 2


def test_a_search_that_fails_leaves_the_call_as_it_was() -> None:
    def tuner(*args: object) -> None:
        raise TuningError("no GPU")

    def plan_for(device: object) -> Any:
        return choose.plan(SPEC, TARGET, has_lse=False)

    attention = SelfTuning(SPEC, plan_for, return_lse=False, target=TARGET, tuner=tuner)
    forget()
    with pytest.warns(FlashgenWarning, match="tuned: not tuned for q_len any.*no GPU"):
        settle(attention, 2048)


def test_nothing_is_tuned_on_the_cpu_or_when_frozen() -> None:
    import torch

    attention = SelfTuning(SPEC, lambda device: pytest.fail("planned"), return_lse=False)
    assert not attention._may_tune(torch.device("cpu"))
    with flashgen.freeze():
        assert not attention._may_tune(torch.device("cuda"))


def test_nothing_is_tuned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    attention = SelfTuning(SPEC, lambda device: pytest.fail("planned"), return_lse=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    forget()
    with pytest.warns(FlashgenWarning, match="a CUDA graph is being captured"):
        assert not attention._may_tune(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert attention._may_tune(torch.device("cuda"))
