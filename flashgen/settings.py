"""Every environment variable and folder that flashgen uses, read in one place.

FLASHGEN_CACHE_DIR   generated sources and artefacts (default: the user's cache folder)
FLASHGEN_CONFIG_DIR  tuned configs that come before the packaged ones (default: none)
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
