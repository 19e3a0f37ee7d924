"""Every environment variable and folder that flashgen uses, read in one place.

FLASHGEN_CACHE_DIR   generated sources, tuning trials and tables (default: the user's cache folder)
FLASHGEN_CONFIG_DIR  tuned configs that come before all others (default: none)
FLASHGEN_STORAGE     where tuning trials are kept, as `flashgen tune --storage` (default: the cache)
WORLD_SIZE           processes of this job, as torchrun sets it: more than 1 tune one by one
FLASHGEN_FROZEN      1: raise where something would be generated, compiled or tuned (default: 0)
FLASHGEN_TRY_FIRST   0: run a Hopper kernel at once that was never tried on this machine, where it
                     may hang this process (default: 1, it is tried in a process with a deadline)
TRITON_PTXAS_PATH    the ptxas that Triton takes in the place of its own; read here, not used
OMP_NUM_THREADS      threads of torch and numpy on the CPU (default, in `build` and `verify`: 1)
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def _shipped(name: str) -> Path:
    """A top-level folder of the project: inside an installed wheel, or beside the package."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    return _shipped("templates")


def specs_dir() -> Path:
    return _shipped("specs")


def tuned_configs_dir() -> Path:
    return _shipped("tuned_configs")


def cache_dir() -> Path:
    """Where generated sources are kept; need not exist, need not be writable."""
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path(os.environ.get("HOME", "/nonexistent")) / ".cache"
    return home / "flashgen"


def config_dir() -> Path | None:
    chosen = os.environ.get("FLASHGEN_CONFIG_DIR")
    return Path(chosen) if chosen else None


def user_tables_dir() -> Path:
    """Where this user's tuned configs are written: the chosen folder, else the cache."""
    return config_dir() or cache_dir() / "tuned_configs"


def trials_dir() -> Path:
    """Where tuning trials are kept, if no other storage is named."""
    return cache_dir() / "trials"


def storage() -> str | None:
    return os.environ.get("FLASHGEN_STORAGE") or None


def frozen() -> bool:
    return os.environ.get("FLASHGEN_FROZEN", "0") not in {"", "0"}


def try_first() -> bool:
    return os.environ.get("FLASHGEN_TRY_FIRST") != "0"


def ptxas() -> str | None:
    return os.environ.get("TRITON_PTXAS_PATH") or None


def in_job() -> bool:
    """Whether this process is one of several of a job: WORLD_SIZE, as torchrun and others set."""
    size = os.environ.get("WORLD_SIZE", "1")
    return size.isdecimal() and int(size) > 1


def one_thread() -> None:
    """torch and numpy work in one thread, unless the user says otherwise; call it before they load.

    Interpreted tiles are too small to share, and threads wait busily for each other while kernels
    are compiled on the same cores: it took a sixth of the CPU time of a build on two cores.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
