"""flashgen: attention described as data, compiled to verified, tuned, readable GPU kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.compiler import (
        build,
        compile,  # noqa: A004 -- the public name
        explain,
        tune,
        verify,
    )
    from flashgen.errors import FlashgenError
    from flashgen.runtime.frozen import freeze
    from flashgen.runtime.merge import merge
    from flashgen.schedule.model import Schedule
    from flashgen.spec.model import AttentionSpec
    from flashgen.spec.parse import load_spec, parse_spec
    from flashgen.target import Target

__version__ = "0.1.0"

# Public name -> module. Imported at first use: `import flashgen` alone loads no torch.
_PLACES = {
    "AttentionSpec": "flashgen.spec.model",
    "FlashgenError": "flashgen.errors",
    "Schedule": "flashgen.schedule.model",
    "Target": "flashgen.target",
    "build": "flashgen.compiler",
    "compile": "flashgen.compiler",
    "explain": "flashgen.compiler",
    "freeze": "flashgen.runtime.frozen",
    "load_spec": "flashgen.spec.parse",
    "merge": "flashgen.runtime.merge",
    "parse_spec": "flashgen.spec.parse",
    "verify": "flashgen.compiler",
}

__all__ = [
    "AttentionSpec",
    "FlashgenError",
    "Schedule",
    "Target",
    "__version__",
    "build",
    "compile",
    "explain",
    "freeze",
    "load_spec",
    "merge",
    "parse_spec",
    "tune",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "tune":  # a package that can be called
        return import_module("flashgen.tune")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
