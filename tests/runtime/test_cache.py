"""The disk cache: broken entries are rebuilt and said, and a warm call imports nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from flashgen import AttentionSpec
from flashgen.compiler import choose
from flashgen.errors import FlashgenWarning
from flashgen.runtime.said import forget
from flashgen.target import get_target

SPEC = AttentionSpec(name="cached", head_dim=16, dtype="fp16", mask="causal")
TARGET = get_target("nvidia-h200")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def fetch() -> Path:
    plan, path = choose.plan(SPEC, TARGET, has_lse=True)
    assert path.read_text() == plan.text
    return path


def test_one_folder_a_plan_and_two_files(cache: Path) -> None:
    path = fetch()
    assert path == fetch()
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.py", "plan.json"]
    assert path.parent.name.startswith("cached-")
    choose.plan(SPEC, TARGET, has_lse=False)
    choose.plan(SPEC, get_target("nvidia-l4"), has_lse=True)
    assert len(list((cache / "kernels").iterdir())) == 3


def altered(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)


# Every field of a plan, with a value of its type that is not the one that was written.
OTHER_VALUES: dict[str, object] = {
    "name": "another",
    "entries": {},
    "arguments": ["zz"],
    "has_lse": False,
    "origin": "tuned",
    "origins": [],
    "notes": ["mine"],
    "hopper_digest": "0",
    "choices": [],
}
BROKEN = {
    "truncated-plan": ("plan.json", lambda text: text[: len(text) // 2]),
    "empty-plan": ("plan.json", lambda text: ""),
    "brace": ("plan.json", lambda text: "{"),
    "list": ("plan.json", lambda text: "[]"),
    "other-version": ("plan.json", lambda text: json.dumps(json.loads(text) | {"version": 0})),
    "null": ("plan.json", lambda text: "null"),
    "nested": ("plan.json", lambda text: "[" * 100_000 + "]" * 100_000),
    "nested-choices": (
        "plan.json",
        lambda text: text.replace('"choices": [', f'"choices": [{"[" * 400 + "]" * 400},'),
    ),
    "no-digest": ("plan.json", lambda text: altered(text, digest=None)),
    "digest-of-the-module": (
        "plan.json",
        lambda text: altered(text, module_digest="0" * 64),
    ),
    "schedule": ("plan.json", lambda text: text.replace('"block_m"', '"block_q"')),
    "truncated-kernel": ("kernel.py", lambda text: text[: len(text) // 2]),
    "edited-kernel": ("kernel.py", lambda text: text + "# mine\n"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_entries_are_rebuilt_and_said_once(name: str, cache: Path) -> None:
    file, change = BROKEN[name]
    path = fetch()
    text = path.read_text()
    broken = path.parent / file
    broken.write_text(change(broken.read_text()))
    with pytest.warns(FlashgenWarning, match="the cached kernel cannot be read") as said:
        assert fetch().read_text() == text
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fetch()


@pytest.mark.parametrize("field", OTHER_VALUES)
@pytest.mark.parametrize("kind", ["another", "none", "missing"])
def test_a_plan_with_another_field_is_rebuilt(field: str, kind: str, cache: Path) -> None:
    path = fetch().parent / "plan.json"
    text = path.read_text()
    told = json.loads(text)
    assert told.keys() - {"version", "digest", "module_digest"} == OTHER_VALUES.keys()
    told[field] = OTHER_VALUES[field] if kind == "another" else None
    if kind == "missing":
        del told[field]
    path.write_text(json.dumps(told))
    with pytest.warns(FlashgenWarning, match="cannot be read"):
        fetch()
    assert path.read_text() == text


@pytest.mark.parametrize("file", ["plan.json", "kernel.py"])
def test_a_pipe_in_the_place_of_a_file(file: str, cache: Path) -> None:
    path = fetch().parent / file
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(FlashgenWarning, match="is no file"):
        fetch()
    assert path.is_file()


def test_bytes_that_are_no_text(cache: Path) -> None:
    path = fetch()
    (path.parent / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.warns(FlashgenWarning, match="cannot be read"):
        fetch()


@pytest.mark.parametrize("file", ["plan.json", "kernel.py"])
def test_a_missing_file(file: str, cache: Path) -> None:
    path = fetch()
    (path.parent / file).unlink()
    with pytest.warns(FlashgenWarning, match="is incomplete; it is rebuilt"):
        fetch()
    assert (path.parent / file).is_file()


def test_a_garbage_file_in_the_place_of_the_folder(cache: Path) -> None:
    path = fetch()
    folder = path.parent
    for file in list(folder.iterdir()):
        file.unlink()
    folder.rmdir()
    folder.write_text("garbage")
    with pytest.warns(FlashgenWarning, match="the kernel cache cannot be written"):
        assert fetch().parent != folder
    assert folder.read_text() == "garbage"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(FlashgenWarning, match="cannot be written") as said:
        first = fetch()
    assert "hint: set FLASHGEN_CACHE_DIR" in str(said[0].message)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch() == first


CONCURRENT = """
import sys
from flashgen import AttentionSpec
from flashgen.compiler import choose
from flashgen.target import get_target
spec = AttentionSpec(name="cached", head_dim=16, dtype="fp16", mask="causal")
plan, path = choose.plan(spec, get_target("nvidia-h200"), has_lse=True)
assert path.read_text() == plan.text
print(path)
"""


def test_processes_that_fill_one_cache(cache: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CONCURRENT],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    folder = Path(results[0][0].strip()).parent
    assert sorted(p.name for p in folder.iterdir()) == ["kernel.py", "plan.json"]


WARM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import flashgen
spec = flashgen.AttentionSpec(name="cached", head_dim=16, dtype="fp16", mask="causal")
attention = flashgen.compile(spec, target="nvidia-h200", return_lse=True)
attention(*[torch.zeros(1, 1, 2, 16).half()] * 3)
heavy = {"sympy", "networkx", "jinja2", "optuna"} & set(sys.modules)
print(sorted(heavy), [name for name in sys.modules if name.startswith("flashgen.passes")])
"""


def test_a_cached_plan_needs_neither_sympy_nor_networkx_nor_jinja2(cache: Path) -> None:
    fetch()
    done = subprocess.run(
        [sys.executable, "-c", WARM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[] []"
    assert len(list((cache / "kernels").iterdir())) == 1


def test_import_is_cheap() -> None:
    program = (
        "import sys, flashgen; flashgen.load_spec; flashgen.Schedule; flashgen.Target;"
        "print(sorted({'torch', 'triton', 'sympy', 'jinja2', 'networkx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_said_again_after_forget(cache: Path) -> None:
    for _ in range(2):
        forget()
        path = fetch()
        (path.parent / "plan.json").write_text("{")
        with pytest.warns(FlashgenWarning):
            fetch()
