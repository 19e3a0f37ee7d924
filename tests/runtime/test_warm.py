"""What is begun beside the writing of a kernel: once, and both parts at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.runtime import triton_key, warm


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    warm.start_warming.cache_clear()
    yield
    warm.start_warming.cache_clear()


def test_both_parts_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=20)
    passed: list[str] = []
    for name in ("_hash_library", "_find_gpu"):
        monkeypatch.setattr(warm, name, lambda name=name: (together.wait(), passed.append(name)))
    warm.start_warming().join()
    assert sorted(passed) == ["_find_gpu", "_hash_library"]


def test_a_process_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(warm, "_hash_library", lambda: started.append("key"))
    monkeypatch.setattr(warm, "_find_gpu", lambda: started.append("driver"))
    first = warm.start_warming()
    assert warm.start_warming() is first
    first.join()
    assert sorted(started) == ["driver", "key"]


def test_a_key_that_was_found_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import cache as triton_cache

    hashed: list[str] = []
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_cache, "triton_key", lambda: hashed.append("library") or "its key")
    triton_key.remember_triton_key.cache_clear()
    try:
        triton_key.find_triton_key()
        (tmp_path / "triton-key.json").unlink()
        assert triton_cache.triton_key() == "its key"
        assert hashed == ["library"]
    finally:
        triton_key.remember_triton_key.cache_clear()


def test_the_library_is_hashed_as_triton_does() -> None:
    from triton.runtime import cache as triton_cache

    triton_key.remember_triton_key()
    warm._hash_library()
    assert len(triton_cache.triton_key()) > 20
