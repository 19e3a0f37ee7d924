"""Run generated kernels on CPU tensors, by Triton's interpreter, in a process that also compiles.

Triton decides at import whether its own library functions (tl.max, tl.cdiv, …) are compiled or
interpreted. Here they are interpreted for the length of one launch and put back, so that one
process can do both. With TRITON_INTERPRET=1 in the environment there is nothing to swap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from flashgen.errors import FlashgenError

_LOCK = threading.RLock()


def check_interpreter() -> None:
    """Triton 3.6's interpreter fails in any loop with run-time bounds under numpy >= 2.4."""
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        raise FlashgenError(
            f"CPU tensors run in Triton's interpreter, and that of triton {triton.__version__} "
            f"fails with numpy {np.__version__}\n"
            "  hint: pip install 'numpy<2.4', or use triton >= 3.7."
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@cache
def _library_functions() -> tuple[tuple[ModuleType, str, object, object], ...]:
    """(module, name, compiled, interpreted) of each of Triton's library functions."""
    from triton.language import standard

    interpreted: dict[int, InterpretedFunction] = {}
    found = []
    for module in (standard, tl):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                twin = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                found.append((module, name, value, twin))
    return tuple(found)


@contextmanager
def interpreting() -> Iterator[None]:
    """Triton's decorators and library functions interpret inside it; one thread at a time."""
    with _LOCK:
        if knobs.runtime.interpret:  # inside another such block, or TRITON_INTERPRET is set
            yield
            return
        with (
            knobs.runtime.scope(),
            np.errstate(all="ignore"),
            _language_restored(),
            _library_interpreted(),
            _patched_once(),
            _nothing_computed_in_vain(),
        ):
            knobs.runtime.interpret = True
            yield


@contextmanager
def _library_interpreted() -> Iterator[None]:
    swaps = _library_functions()
    for module, name, _, twin in swaps:
        setattr(module, name, twin)
    try:
        yield
    finally:
        for module, name, compiled, _ in swaps:
            setattr(module, name, compiled)


@contextmanager
def _language_restored() -> Iterator[None]:
    """Undo what the interpreter leaves behind in the language.

    It patches `tl.core` whenever an interpreted function calls another, and does not take that back
    (triton 3.7); whatever is compiled in this process afterwards would fail in `tl.cdiv`.
    """
    spaces = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base, tl.core.dtype)
    saved = [(space, dict(vars(space))) for space in spaces]
    try:
        yield
    finally:
        for space, names in saved:
            for name, value in list(vars(space).items()):
                if name not in names:
                    delattr(space, name)
                elif names[name] is not value:
                    setattr(space, name, names[name])


@contextmanager
def _patched_once() -> Iterator[None]:
    """The interpreter patches the language for a launch, and not again in each function called.

    It does (triton 3.6 to 3.8), a fifth of its time, though all is as it was. What is patched is
    forgotten where a launch ends, which takes its own patches back. A Triton that does this some
    other way is left to itself.
    """
    patch: Any = getattr(interpreter, "_patch_lang", None)
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or not hasattr(scope, "restore"):
        yield
        return
    patched: set[tuple[bool, ...]] = set()

    def restore(made: Any) -> None:
        patched.clear()
        scope.restore(made)

    noticed = type(scope.__name__, (scope,), {"restore": restore})

    def patch_lang(function: Any) -> Any:
        names = function.__globals__.values()
        seen = tuple(any(value is module for value in names) for module in (tl, tl.core))
        if seen in patched:
            return noticed()
        made = patch(function)
        if isinstance(made, noticed):
            patched.add(seen)
        return made

    interpreter._patch_lang, interpreter._LangPatchScope = patch_lang, noticed
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._LangPatchScope = patch, scope


@contextmanager
def _nothing_computed_in_vain() -> Iterator[None]:
    """Whether integers overflow is computed only where the interpreter would say so.

    Without `debug` it computes that, a fifth of its time, and asserts nothing (triton 3.6 to 3.8).
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if not (hasattr(options, "sanitize_overflow") and hasattr(options, "debug")):
        yield
        return
    builder.options = replace(options, sanitize_overflow=options.debug)
    try:
        yield
    finally:
        builder.options = options
