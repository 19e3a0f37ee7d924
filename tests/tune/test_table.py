"""Tables of tuned configs: the same bytes for the same content, strict reading, atomic writing."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import FAST, OTHER, SPEC, TARGET, entry, table
from jsonschema import Draft202012Validator

from flashgen import settings
from flashgen.errors import TableError
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, all_buckets
from flashgen.schedule.space import check
from flashgen.spec.parse import load_spec
from flashgen.target import get_target
from flashgen.tune import table as tables
from flashgen.tune.table import Table, parse_table, read_table, table_path, write_table
from flashgen.tune.table_schema import table_schema

VALIDATOR = Draft202012Validator(table_schema())
DECODE, LONG = Bucket(16, 8192), Bucket(None, 8192)


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = table_path(tmp_path, TARGET.id, SPEC.display_name)
    written = table(entry(), entry(OTHER, DECODE, default_us=None))
    write_table(path, written)
    found = read_table(path)
    assert found == parse_table(written.to_json().encode(), "x")
    assert found.to_json() == written.to_json()
    assert found.entry(DECODE).schedule == OTHER  # type: ignore[union-attr]
    assert found.entry(LONG) is None
    assert [each.speedup for each in found.entries] == [None, pytest.approx(15 / 12.346)]


def test_entries_are_sorted_and_the_text_is_golden(golden: Callable[[str, str], None]) -> None:
    one = table(entry(bucket=LONG), entry(OTHER, DECODE), entry())
    other = table(entry(), entry(bucket=LONG), entry(OTHER, DECODE))
    assert one.to_json() == other.to_json()
    golden("tune/table.json", one.to_json())


def test_a_new_entry_takes_the_place_of_the_one_for_its_bucket() -> None:
    found = table(entry(OTHER), entry(bucket=LONG)).with_entries([entry(FAST)])
    assert [each.schedule for each in found.entries] == [FAST, FAST]


def test_the_schema_accepts_what_is_written_and_is_a_schema() -> None:
    Draft202012Validator.check_schema(table_schema())
    written = table(entry(), entry(OTHER, DECODE, default_us=None))
    VALIDATOR.validate(json.loads(written.to_json()))
    VALIDATOR.validate(json.loads(Table("empty", "0" * 64, TARGET.id, ()).to_json()))
    for bucket in all_buckets():
        VALIDATOR.validate(json.loads(table(entry(bucket=bucket)).to_json()))


def set_(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        *where, name, new = path
        for step in where:
            value = value[step]
        value[name] = new

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        *where, name = path
        for step in where:
            value = value[step]
        del value[name]

    return change


WRONG = {
    "no-schema": drop("schema"),
    "other-version": set_("schema", 2),
    "version-is-true": set_("schema", True),
    "unknown-field": set_("entires", []),
    "missing-field": drop("gpu"),
    "entries-is-an-object": set_("entries", {}),
    "an-entry-is-text": set_("entries", 0, "fast"),
    "fingerprint": set_("fingerprint", "xyz"),
    "negative-time": set_("entries", 0, "measured", "time_us", -1),
    "time-is-true": set_("entries", 0, "measured", "time_us", True),
    "infinite-time": set_("entries", 0, "measured", "time_us", float("inf")),
    "time-of-400-zeros": set_("entries", 0, "measured", "time_us", 10**400),
    "sms-of-400-zeros": set_("entries", 0, "measured_with", "sm_count", 10**400),
    "unit": set_("entries", 0, "measured", "unit", "furlongs"),
    "pass": set_("entries", 0, "pass", "sideways"),
    "bucket": set_("entries", 0, "bucket", "q_len_max", 17),
    "bucket-is-a-list": set_("entries", 0, "bucket", []),
    "schedule": set_("entries", 0, "schedule", "block_m", "big"),
    "schedule-field": set_("entries", 0, "schedule", "block_q", 64),
    "shape": set_("entries", 0, "shape", "batch", 1.5),
    "digest": set_("entries", 0, "measured_with", "kernel_digest", "0123"),
    "trials": set_("entries", 0, "search", "trials", -3),
}


# JSON has no infinity and any whole number, a schema no word for either.
NO_SCHEMA_SAYS = {"infinite-time", "time-of-400-zeros", "sms-of-400-zeros"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_place(
    name: str, golden: Callable[[str, str], None]
) -> None:
    value = json.loads(table().to_json())
    WRONG[name](value)
    with pytest.raises(TableError) as found:
        parse_table(json.dumps(value).encode(), "tuned.json")
    golden(f"tune/table-errors/{name}.txt", str(found.value))
    if name not in NO_SCHEMA_SAYS:
        assert list(VALIDATOR.iter_errors(value))


@pytest.mark.parametrize("digits", [19, 309, 310, 4301, 100_000])
def test_whole_numbers_that_nothing_holds(digits: int) -> None:
    """`int` reads no more than 4300 digits, a float ends after 309; each is said with its place."""
    huge = "9" * digits
    text = table().to_json()
    for field, digits_there in (("schema", "1"), ("sm_count", "132"), ("trials", r"\d+")):
        changed, count = re.subn(rf'"{field}": {digits_there}\b', f'"{field}": {huge}', text)
        assert count == 1
        with pytest.raises(TableError, match=rf"tuned\.json: \S*{field}"):
            parse_table(changed.encode(), "tuned.json")


def test_two_entries_for_one_bucket() -> None:
    value = json.loads(table().to_json())
    value["entries"].append(copy.deepcopy(value["entries"][0]))
    with pytest.raises(TableError, match=r"entries\[1\]: a second one for q_len any"):
        parse_table(json.dumps(value).encode(), "tuned.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"{}" * 3, b"[" * 100_000, b"\0" * 4096],
)
def test_what_is_no_table_at_all(data: bytes) -> None:
    with pytest.raises(TableError, match=r"tuned\.json"):
        parse_table(data, "tuned.json")


def test_every_prefix_of_a_table_is_refused() -> None:
    data = table().to_json().encode()
    for length in range(0, len(data) - 2, 7):
        with pytest.raises(TableError):
            parse_table(data[:length], "half")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        read_table(tmp_path / "none.json")


def test_a_full_disk_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu" / "spec.json"
    write_table(path, table())
    before = path.read_bytes()

    def full(*args: object, shared: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tables, "replace_file", full)
    with pytest.raises(TableError, match=r"cannot be written \(No space left on device\)") as found:
        write_table(path, table(entry(OTHER)))
    assert "the trials are kept" in str(found.value)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["spec.json"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "gpu").write_text("")
    with pytest.raises(TableError, match="cannot be written"):
        write_table(tmp_path / "gpu" / "spec.json", table())


COMMITTED = sorted(settings.tuned_configs_dir().rglob("*.json"))


def test_every_committed_table_is_valid() -> None:
    """Schema, reader, folder and file name, fingerprint, and feasibility of every entry."""
    for path in COMMITTED:
        VALIDATOR.validate(json.loads(path.read_text("utf-8")))
        found = read_table(path)
        assert path.parent.name == found.gpu
        assert path.stem == found.spec
        assert path.read_text("utf-8") == found.to_json(), f"{path}: not as flashgen writes it"
        spec = load_spec(settings.specs_dir() / f"{found.spec}.yaml")
        assert found.fingerprint == spec.fingerprint, f"{path}: the spec changed; tune it again"
        problem = Problem(spec, get_target(found.gpu))
        for each in found.entries:
            assert check(each.schedule, problem, each.bucket) is None, f"{path}: {each.place}"
            assert each.speedup is None or each.speedup >= 1, f"{path}: {each.place}"


def test_tables_are_where_they_are_looked_for() -> None:
    others = [
        path.relative_to(settings.tuned_configs_dir())
        for path in settings.tuned_configs_dir().rglob("*")
        if path.is_file() and path not in COMMITTED and path.suffix != ".lock"
    ]
    assert [str(path) for path in others] == ["README.md"]
    assert {len(path.relative_to(settings.tuned_configs_dir()).parts) for path in COMMITTED} <= {2}
