"""The cache of compiled templates: whatever is wrong with it, rendering goes on."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment

from flashgen.codegen.template_cache import TemplateCache
from flashgen.errors import FlashgenWarning

TEMPLATES = {"one": "{{ n }} kernel", "two": "{{ n }} kernels"}


def environment(folder: Path) -> Environment:
    return Environment(
        loader=DictLoader(TEMPLATES), bytecode_cache=TemplateCache(folder), autoescape=False
    )


def rendered(folder: Path) -> list[str]:
    made = environment(folder)
    return [made.get_template(name).render(n=7) for name in TEMPLATES]


def quietly(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rendered(folder) == ["7 kernel", "7 kernels"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quietly(tmp_path / "cache" / "templates")
    return tmp_path / "cache" / "templates"


def test_a_template_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(folder.iterdir())) == len(TEMPLATES)
    monkeypatch.setattr(Environment, "compile", None)
    quietly(folder)


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "60-bytes": lambda path: os.truncate(path, 60),
    "one-byte-less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one-byte-changed": changed,
    "garbage": lambda path: path.write_bytes(b"j2" * 500),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_templates_are_compiled_again_and_said_once(name: str, folder: Path) -> None:
    for path in folder.iterdir():
        DAMAGES[name](path)
    with pytest.warns(FlashgenWarning, match="a cached template is damaged") as said:
        assert rendered(folder) == ["7 kernel", "7 kernels"]
    assert len(said) == 1
    quietly(folder)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [a_pipe, a_folder])
def test_what_is_no_file(change: Callable[[Path], None], folder: Path) -> None:
    for path in folder.iterdir():
        change(path)
    quietly(folder)


def test_a_folder_that_is_gone_is_made_again(folder: Path) -> None:
    made = environment(folder)
    made.get_template("one")
    shutil.rmtree(folder.parent)
    assert made.get_template("two").render(n=7) == "7 kernels"
    assert folder.is_dir()


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    quietly(tmp_path / "file" / "templates")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, call in ((os, "open"), (os, "fdopen"), (Path, "replace"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, full)
            quietly(tmp_path / call)
        assert not list((tmp_path / call).glob(".*"))
