"""The tuner: search over feasible schedules, kept trials, and the tables that come of them.

This package is also the public function: `flashgen.tune(spec)` is `flashgen.compiler.tune(spec)`,
which lies above it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package is an attribute of its parent, so `flashgen.tune` cannot be anything else."""

    def __call__(self, *args: Any, **others: Any) -> Any:
        """`flashgen.compiler.tune`."""
        return import_module("flashgen.compiler.tuning").tune(*args, **others)


sys.modules[__name__].__class__ = _Callable
