"""Spec -> callable, files, verdict or explanation: choose schedules, let the pipeline work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.compiler.building import BuildResult, BuiltKernel, build
    from flashgen.compiler.choose import (
        check_served,
        compile,  # noqa: A004 -- the public name
        plan,
        target_of,
        unserved_features,
    )
    from flashgen.compiler.explaining import compare, explain
    from flashgen.compiler.explanation import Comparison, Explanation
    from flashgen.compiler.tuning import Tuning, tune
    from flashgen.compiler.verification import CaseResult, Verification, verify

# Name -> module. Imported at first use: a cached kernel's first call needs `choose` alone.
_PLACES = {
    "BuildResult": "building",
    "BuiltKernel": "building",
    "build": "building",
    "check_served": "choose",
    "compile": "choose",
    "plan": "choose",
    "target_of": "choose",
    "unserved_features": "choose",
    "compare": "explaining",
    "explain": "explaining",
    "Comparison": "explanation",
    "Explanation": "explanation",
    "Tuning": "tuning",
    "tune": "tuning",
    "CaseResult": "verification",
    "Verification": "verification",
    "verify": "verification",
}

__all__ = [
    "BuildResult",
    "BuiltKernel",
    "CaseResult",
    "Comparison",
    "Explanation",
    "Tuning",
    "Verification",
    "build",
    "check_served",
    "compare",
    "compile",
    "explain",
    "plan",
    "target_of",
    "tune",
    "unserved_features",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
