"""A small spec, built once: what several tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen import AttentionSpec
from flashgen.compiler import BuildResult, build

TARGET = "nvidia-h200"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of these tests, apart from the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def small() -> AttentionSpec:
    return AttentionSpec(
        name="small",
        description="A small causal spec.",
        head_dim=16,
        dtype="fp16",
        heads={"group": 2},
        mask=["causal", {"expr": "k < prefix[b]"}],
        inputs={"prefix": {"shape": ["batch"], "dtype": "int32"}},
        shapes=[
            {"batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 1, "kv_len": 4096},
            {"batch": 9, "q_heads": 2, "kv_heads": 1, "q_len": 100, "kv_len": 100},
        ],
    )


@pytest.fixture(scope="session")
def built(small: AttentionSpec, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    return build(small, tmp_path_factory.mktemp("built"), target=TARGET)
