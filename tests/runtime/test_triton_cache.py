"""Triton's disk cache: what is damaged there, or no room for, does not reach who compiles."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.runtime.cache import FileCacheManager

from flashgen import AttentionSpec
from flashgen.compiler import choose
from flashgen.compiler.choose import compile as compile_spec
from flashgen.errors import FlashgenWarning
from flashgen.problem import Problem
from flashgen.runtime.ahead import CompiledKernel, compile_schedule
from flashgen.runtime.load import load_module
from flashgen.runtime.triton_cache import (
    WholeEntries,
    checked_entries,
    is_whole,
    use_writable_cache,
)
from flashgen.schedule.model import Schedule
from flashgen.target import get_target

SPEC = AttentionSpec(name="kept", head_dim=16, dtype="fp16")
TILE = Schedule(block_m=16, block_n=16, num_warps=1, num_stages=1)


def compiled(target: str = "nvidia-h200") -> CompiledKernel:
    problem = Problem(SPEC, get_target(target))
    plan, path = choose.plan(SPEC, problem.target, schedule=TILE, has_lse=False)
    module = load_module(path, interpreted=False)
    return compile_schedule(problem, plan, module, TILE, aligned=True)


def quietly(target: str = "nvidia-h200") -> CompiledKernel:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlashgenWarning)
        return compiled(target)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that each test damages and has mended."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def triton_cache(kept: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(kept)
        yield


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def holding(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def zeros_inside(path: Path) -> None:
    """Header and tables stay, so that only who reads the code can tell."""
    data = path.read_bytes()
    path.write_bytes(data[:64] + bytes(len(data) // 2) + data[64 + len(data) // 2 :])


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" * 50)


NVIDIA = [
    ("cubin", "empty", cut(0)),
    ("cubin", "1000-bytes", cut(1000)),
    ("cubin", "one-byte-less", cut(-1)),
    ("cubin", "other-bytes", holding("x" * 5000)),
    ("cubin", "zeros-inside", zeros_inside),
    ("cubin", "missing", Path.unlink),
    ("cubin", "pipe", a_pipe),
    ("ptx", "empty", cut(0)),
    ("ptx", "100-bytes", cut(100)),
    ("ptx", "5000-bytes", cut(5000)),
    ("ptx", "missing", Path.unlink),
    ("ptx", "no-text", no_text),
    ("ttgir", "no-text", no_text),
    ("json", "empty", cut(0)),
    ("json", "no-figures", holding("{}")),
    ("json", "list", holding("[]")),
    ("json", "nested", holding("[" * 100_000)),
    ("json", "missing", Path.unlink),
]
AMD = [
    ("hsaco", "1000-bytes", cut(1000)),
    ("hsaco", "missing", Path.unlink),
    ("amdgcn", "100-bytes", cut(100)),
    ("amdgcn", "missing", Path.unlink),
]
DAMAGES = [("nvidia-h200", *damage) for damage in NVIDIA] + [("amd-mi300x", *d) for d in AMD]


@pytest.mark.parametrize(
    ("target", "kind", "name", "damage"), DAMAGES, ids=[f"{kind}-{n}" for _, kind, n, _ in DAMAGES]
)
def test_a_damaged_entry_is_compiled_again_and_said_once(
    target: str, kind: str, name: str, damage: Callable[[Path], None], kept: Path
) -> None:
    sound = quietly(target)
    binary = "hsaco" if target.startswith("amd") else "cubin"
    (entry,) = {path.parent for path in kept.rglob(f"*.{binary}")}
    (path,) = (p for p in entry.glob(f"*.{kind}") if not p.name.startswith("__grp__"))
    damage(path)
    with pytest.warns(FlashgenWarning, match="is damaged or incomplete; it is compiled") as said:
        assert compiled(target) == sound
    assert len(said) == 1
    assert quietly(target) == sound


@pytest.mark.parametrize("text", ["[]", '{"child_paths": []}', '{"child_paths": {"a": 5}}', "{"])
def test_a_damaged_list_of_files(text: str, kept: Path) -> None:
    sound = quietly()
    (path,) = (p for p in kept.rglob("__grp__*.json") if list(p.parent.glob("*.cubin")))
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashgenWarning)
        assert compiled() == sound
    assert quietly() == sound


def test_a_cache_without_assembly_is_not_enough(kept: Path) -> None:
    """As TRITON_STORE_BINARY_ONLY leaves it."""
    sound = quietly()
    for path in kept.rglob("*.ptx"):
        path.unlink()
    with knobs.compilation.scope(), pytest.warns(FlashgenWarning, match="incomplete"):
        knobs.compilation.store_binary_only = True
        assert compiled() == sound


def test_a_launch_does_not_ask_for_assembly_that_is_not_stored(tmp_path: Path) -> None:
    """Under TRITON_STORE_BINARY_ONLY; machine code is looked at all the same."""
    knobs.cache.dir = str(tmp_path)
    quietly()
    (path,) = tmp_path.rglob("*.cubin")
    for assembly in tmp_path.rglob("*.ptx"):
        assembly.unlink()
    group = {each.name: str(each) for each in path.parent.iterdir()}
    assert not is_whole(group)
    with knobs.compilation.scope():
        knobs.compilation.store_binary_only = True
        assert is_whole(group)
        cut(1000)(path)
        assert not is_whole(group)


def test_every_launch_checks_the_entry_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = compile_spec(SPEC)
    q = torch.randn(1, 1, 16, 16).half()
    with pytest.warns(FlashgenWarning, match="on the CPU"):
        attention(q, q, q)
    (loaded,) = attention._loaded.values()
    found: list[object] = []
    monkeypatch.setattr(
        loaded.module, "run", lambda *_: found.append(knobs.cache.manager_class), raising=True
    )
    attention(q, q, q)
    assert found == [WholeEntries]
    assert knobs.cache.manager_class is None


def test_a_cache_that_the_user_brings_is_left_alone() -> None:
    class Own(FileCacheManager):  # type: ignore[misc]
        pass

    with knobs.cache.scope():
        knobs.cache.manager_class = Own
        quietly()
        with checked_entries():
            assert knobs.cache.manager_class is Own
        assert knobs.cache.manager_class is Own


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_is_found_before_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs.cache.dir = str(tmp_path)
    assert use_writable_cache() is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    warning = use_writable_cache()
    assert warning is not None
    assert f"{tmp_path}: Triton's kernel cache cannot be written (No space left" in warning
    assert knobs.cache.dir != str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_gets_full_while_a_kernel_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = quietly()
    knobs.cache.dir = str(tmp_path)
    replace = os.replace

    def refusing(source: str, to: str) -> None:
        if to.startswith(str(tmp_path)) and to.endswith(".ttgir"):
            full()
        replace(source, to)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.warns(FlashgenWarning, match=r"cannot be written \(No space left") as said:
        assert compiled() == sound
    assert len(said) == 1
    assert quietly() == sound  # from the folder that took its place
    assert not list(tmp_path.rglob("tmp.pid_*"))
