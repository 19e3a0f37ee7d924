"""Everything here needs a CUDA GPU: marked `gpu`, which tests/conftest.py skips without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Generated modules and machine code of this run only, so that compiles can be counted."""
    with pytest.MonkeyPatch.context() as patch:
        folder: Path = tmp_path_factory.mktemp("kernels")
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
