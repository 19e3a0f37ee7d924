"""What the tuner's tests share: an own cache, a spec with a small space, fake timings."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen import settings
from flashgen.tune import lookup


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, and no setting from outside."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FLASHGEN_CONFIG_DIR", "FLASHGEN_STORAGE", "FLASHGEN_FROZEN"):
        monkeypatch.delenv(name, raising=False)
    lookup.forget()
    return tmp_path


@pytest.fixture
def nothing_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged tables hold one of the tests' spec: gpt2's, of the same fingerprint."""
    monkeypatch.setattr(settings, "tuned_configs_dir", lambda: tmp_path / "nothing-packaged")
    lookup.forget()
