"""Lookup order, folders, what is ignored and said, and that plans follow their tables."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import FAST, OTHER, SPEC, TARGET, TOO_LARGE, entry, table

from flashgen import AttentionSpec, settings
from flashgen.compiler import choose
from flashgen.errors import FlashgenWarning, TableError
from flashgen.problem import Problem
from flashgen.runtime.said import forget
from flashgen.schedule.model import Bucket, Schedule, all_buckets, bucket_of
from flashgen.schedule.space import default_schedule
from flashgen.target import get_target
from flashgen.tune import lookup
from flashgen.tune.table import LONGEST_FILE, Table, read_table, table_path, write_table

pytestmark = pytest.mark.usefixtures("nothing_packaged")
PROBLEM = Problem(SPEC, TARGET)
HERE = bucket_of(2048, 2048)
RELATIVE = "nvidia-h100-sxm"
THIRD = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=2)


def put(
    value: Table | str, *, folder: Path | None = None, gpu: str = TARGET.id, name: str = "tuned"
) -> Path:
    path = table_path(folder or settings.user_tables_dir(), gpu, name)
    if isinstance(value, Table):
        write_table(path, value)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    lookup.forget()
    return path


def resolved(problem: Problem = PROBLEM) -> lookup.Resolved:
    return lookup.resolve(lookup.tables_of(problem.spec, problem.target), problem)


def test_nothing_is_there() -> None:
    assert lookup.tables_of(SPEC, TARGET) == lookup.NOTHING
    assert resolved() == lookup.Resolved({}, ())


def test_exact_then_near_then_nothing() -> None:
    put(table(entry(FAST, HERE)))
    found = resolved()
    assert found.notes == ()
    assert {bucket.kv_len_max for bucket in found.choices} == {512, 1024, 2048, 4096, 8192}
    assert {bucket.q_len_max for bucket in found.choices} == {None}
    assert found.choices[HERE].origin == "tuned"
    near = found.choices[bucket_of(4096, 4096)]
    assert (near.schedule, near.origin) == (FAST, "tuned for q_len any, kv_len <= 2048")


def test_the_nearest_wins_and_the_longer_of_two() -> None:
    put(table(entry(FAST, bucket_of(2048, 2048)), entry(OTHER, bucket_of(8192, 8192))))
    found = resolved().choices
    assert found[bucket_of(999, 1024)].schedule == FAST
    assert found[bucket_of(999, 4096)].schedule == OTHER  # both are one step away
    assert found[Bucket(None, None)].schedule == OTHER


def test_a_single_tile_serves_its_own_bucket_only() -> None:
    short = Bucket(None, 64)
    one = Schedule(kernel="single_tile", block_m=64, block_n=64, num_warps=8, num_stages=1)
    put(table(entry(one, short)))
    assert list(resolved().choices) == [short]


@pytest.mark.parametrize("one", all_buckets())
def test_distance_is_symmetric_and_zero_only_for_itself(one: Bucket) -> None:
    for other in all_buckets():
        assert lookup.distance(one, other) == lookup.distance(other, one)
        assert (lookup.distance(one, other) == 0) == (one == other)


def test_a_gpu_of_the_same_compute_capability_is_said_aloud() -> None:
    put(table(entry(FAST, HERE), gpu=RELATIVE), gpu=RELATIVE)
    found = resolved()
    assert found.choices[HERE].schedule == FAST
    assert found.choices[HERE].origin == f"tuned on {RELATIVE}"
    assert len(found.notes) == 1
    assert f"schedules tuned on {RELATIVE} are used on {TARGET.id}" in found.notes[0]


def test_a_near_bucket_of_the_own_gpu_comes_before_a_relative() -> None:
    put(table(entry(FAST, bucket_of(4096, 4096))))
    put(table(entry(OTHER, HERE), gpu=RELATIVE), gpu=RELATIVE)
    assert resolved().choices[HERE].schedule == FAST


def test_another_compute_capability_says_nothing() -> None:
    put(table(entry(FAST, HERE), gpu="nvidia-a100-80gb"), gpu="nvidia-a100-80gb")
    assert lookup.tables_of(SPEC, TARGET) == lookup.NOTHING


def test_folders_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, config = tmp_path / "packaged", tmp_path / "config"
    monkeypatch.setattr(settings, "tuned_configs_dir", lambda: packaged)
    put(table(entry(FAST)), folder=packaged)
    assert resolved().choices[HERE].schedule == FAST
    put(table(entry(OTHER)), folder=settings.cache_dir() / "tuned_configs")
    assert resolved().choices[HERE].schedule == OTHER
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(config))
    put(table(entry(THIRD)), folder=config)
    assert resolved().choices[HERE].schedule == THIRD


def test_an_exact_entry_of_a_later_folder_comes_before_a_near_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "tuned_configs_dir", lambda: tmp_path / "packaged")
    put(table(entry(FAST)), folder=tmp_path / "packaged")
    put(table(entry(OTHER, bucket_of(4096, 4096))))
    assert resolved().choices[HERE].schedule == FAST


def test_an_unnamed_spec_finds_the_table_of_its_fingerprint() -> None:
    put(table(entry(FAST)))
    unnamed = AttentionSpec(head_dim=64, dtype="fp16", heads={"group": 1}, mask="causal")
    assert unnamed.fingerprint == SPEC.fingerprint
    assert resolved(Problem(unnamed, TARGET)).choices[HERE].schedule == FAST


def without(name: str) -> str:
    value = json.loads(table().to_json())
    del value[name]
    return json.dumps(value)


IGNORED: dict[str, Callable[[], Table | str]] = {
    "half-written": lambda: table().to_json()[:400],
    "empty": lambda: "",
    "garbage": lambda: "\0\0\0",
    "unknown-version": lambda: json.dumps(json.loads(table().to_json()) | {"schema": 99}),
    "no-entries": lambda: without("entries"),
    "wrong-gpu": lambda: table(gpu="nvidia-a100-80gb"),
    "spec-changed": lambda: Table("tuned", "ab" * 32, TARGET.id, (entry(),)),
    "too-large": lambda: table(entry(TOO_LARGE)),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_cannot_be_used_is_ignored_and_said(
    name: str, golden: Callable[[str, str], None]
) -> None:
    path = put(IGNORED[name]())
    forget()
    with pytest.warns(FlashgenWarning) as said:
        plan, _ = choose.plan(SPEC, TARGET, has_lse=False)
    assert plan.origin == "untuned"
    assert dict(plan.choices)[HERE] == default_schedule(PROBLEM, HERE)
    (text,) = [str(each.message) for each in said]
    golden(f"tune/ignored/{name}.txt", text.replace(str(path), "tuned.json"))


def test_an_entry_that_does_not_fit_does_not_hide_those_that_do() -> None:
    put(table(entry(TOO_LARGE, bucket_of(4096, 4096)), entry(FAST, HERE)))
    found = resolved()
    assert found.choices[bucket_of(4096, 4096)].origin == "tuned for q_len any, kv_len <= 2048"
    assert len(found.notes) == 1


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _too_long(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(LONGEST_FILE + 1)


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "endless": _endless,
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere.json"),
    "too-long": _too_long,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_said_and_waits_for_nothing(
    name: str, golden: Callable[[str, str], None]
) -> None:
    put(table(entry(FAST)))
    path = table_path(settings.user_tables_dir(), TARGET.id, "another")
    UNREADABLE[name](path)
    lookup.forget()
    found = resolved()
    assert found.choices[HERE].schedule == FAST
    (text,) = found.notes
    golden(f"tune/ignored/{name}.txt", text.replace(str(path), "another.json"))
    with pytest.raises(TableError, match="cannot be read"):
        read_table(path)


def test_a_file_that_is_linked_to_is_read(tmp_path: Path) -> None:
    write_table(tmp_path / "elsewhere.json", table(entry(FAST)))
    path = table_path(settings.user_tables_dir(), TARGET.id, "tuned")
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere.json")
    assert resolved().choices[HERE].schedule == FAST


def test_a_table_that_may_not_be_read_is_said_and_read_once_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = put(table())
    opened = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        (text,) = resolved().notes
        refused = lookup.tables_of(SPEC, TARGET).key
    assert text.startswith(f"{path}: cannot be read (Permission denied); the table is ignored\n")
    lookup.forget()
    assert resolved().notes == ()
    assert lookup.tables_of(SPEC, TARGET).key not in {refused, ""}


@pytest.mark.parametrize("is_file", [True, False])
def test_a_chosen_folder_that_is_none_is_said_once(
    is_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    chosen = tmp_path / "config"
    if is_file:
        chosen.write_text("")
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(chosen))
    forget()
    lookup.forget()
    with pytest.warns(FlashgenWarning) as said:
        assert lookup.tables_of(SPEC, TARGET) == lookup.NOTHING
        lookup.forget()
        assert lookup.tables_of(SPEC, TARGET) == lookup.NOTHING
    (text,) = [str(each.message) for each in said]
    name = "folder-is-a-file" if is_file else "no-folder"
    golden(f"tune/ignored/{name}.txt", text.replace(str(chosen), "config"))


def test_plans_follow_their_tables_and_say_who_chose() -> None:
    plain, first = choose.plan(SPEC, TARGET, has_lse=False)
    assert plain.origin == "untuned"
    put(table(entry(FAST)))
    tuned, second = choose.plan(SPEC, TARGET, has_lse=False)
    assert second != first
    assert dict(tuned.choices)[HERE] == FAST
    assert tuned.origin == ("tuned (near) for 4, tuned for 1 of 48 shape buckets, else untuned")
    origins = dict(zip((bucket for bucket, _ in tuned.choices), tuned.origins, strict=True))
    assert origins[HERE] == "tuned"
    assert origins[Bucket(16, 16)] == "untuned"
    assert choose.plan(SPEC, TARGET, has_lse=False) == (tuned, second)
    given, _ = choose.plan(SPEC, TARGET, schedule=OTHER, has_lse=False)
    assert (given.origin, set(given.origins)) == ("given", {"given"})


def test_what_a_cached_plan_has_to_say_is_said_again_in_the_next_process() -> None:
    put(table(entry(FAST, HERE), gpu=RELATIVE), gpu=RELATIVE)
    for _ in range(2):
        forget()
        with pytest.warns(FlashgenWarning, match="same compute capability") as said:
            choose.plan(SPEC, TARGET, has_lse=False)
        assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose.plan(SPEC, TARGET, has_lse=False)


def test_looking_up_again_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    put(table(entry(FAST)))
    found = lookup.tables_of(SPEC, TARGET)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("read again"))
    assert lookup.tables_of(SPEC, get_target(TARGET.id)) is found
