"""Random specs, shapes, dtypes and strides, interpreted on the CPU, against the fp64 oracle.

FLASHGEN_PROPERTY_EXAMPLES: how many (default 100); FLASHGEN_PROPERTY_SEED: which (default 0): the
same seed gives the same examples, another one others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner
from property.drawn import Drawn, verdict
from property.kept import KEPT
from property.strategies_calls import calls

EXAMPLES = int(os.environ.get("FLASHGEN_PROPERTY_EXAMPLES", "100"))
SEED = int(os.environ.get("FLASHGEN_PROPERTY_SEED", "0"))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every example generates a module: keep them out of the user's cache.

    hypothesis follows an example by five that differ from it in a detail. Here, where each costs as
    much as a new one, new ones find more.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder: Path = tmp_path_factory.mktemp("kernels")
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        patch.setattr(ConjectureRunner, "generate_mutations_from", lambda _runner, _data: None)
        yield


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@seed(SEED)
@settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def test_random_calls(drawn: Drawn) -> None:
    comparison = verdict(drawn)
    _forget_module()
    assert comparison.ok, f"{comparison}\n{drawn!r}"


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@pytest.mark.parametrize("drawn", KEPT, ids=lambda drawn: str(drawn.seed))
def test_kept_calls(drawn: Drawn) -> None:
    comparison = verdict(drawn)
    assert comparison.ok, str(comparison)


def _forget_module() -> None:
    """Generated modules are never imported twice here: let them go."""
    for name in [n for n in sys.modules if n.startswith("flashgen_generated.")]:
        del sys.modules[name]
