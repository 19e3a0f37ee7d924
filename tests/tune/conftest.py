"""What the tuner's tests share: an own cache, a spec with a small space, fake timings."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.tune import lookup


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, and no setting from outside."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FLASHGEN_CONFIG_DIR", "FLASHGEN_STORAGE", "FLASHGEN_FROZEN"):
        monkeypatch.delenv(name, raising=False)
    lookup.forget()
    return tmp_path
