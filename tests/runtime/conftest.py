"""A cache of these tests' own, and the warnings that are said once, said again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.runtime.said import forget


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of these tests, apart from the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def say_again() -> None:
    forget()
