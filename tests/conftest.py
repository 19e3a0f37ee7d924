"""What all tests share: golden files, and one setting of hypothesis."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is loaded. With a thread a core in each worker of pytest-xdist, they wait busily for
# each other: a seventh of the CPU time of interpreted kernels.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"

# No deadline: the first example of a test pays for imports and, with kernels, for compiling.
settings.register_profile("flashgen", deadline=None, print_blob=True)
settings.load_profile("flashgen")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests produce to tests/golden instead of comparing with it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """With `-n`, each worker begins with its share of the list in order, and takes from the others
    when it is done: neighbours use the same modules, kernels and fixtures.

    Ctrl-C is heard also where the tests are started with it ignored, as `command &` in a script and
    nohup do: children inherit that, and several tests send it to them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def shared_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Machine code of all tests that ask for it, in all workers of pytest-xdist: seconds a kernel.

    Apart from the user's, where a run before this one may have left something.
    """
    run = tmp_path_factory.getbasetemp()
    folder = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "triton"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("errors/unknown-field.txt", text)`: `text` is what that golden file holds."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        wanted = text if text.endswith("\n") else text + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            return
        assert path.is_file(), f"{path} is missing: run pytest --update-golden and review it"
        assert wanted == path.read_text(encoding="utf-8"), (
            f"differs from {path}: run pytest --update-golden and review the change"
        )

    return compare
