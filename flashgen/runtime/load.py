"""Plan -> module: import a generated file, for compiling or for interpreting."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flashgen.errors import CompileError
from flashgen.runtime.triton_key import remember_triton_key


def load_module(path: Path, *, interpreted: bool, emulated: bool = False) -> ModuleType:
    """Import the generated module at `path`; kernels of an interpreted one run on the CPU.

    emulated: also those of the Hopper family, which else leave CPU tensors to the portable one.
    Triton reads a kernel's source from its file, so the file stays where it is.
    """
    if emulated:
        from flashgen import emulator
        from flashgen.runtime.interpret import interpreting

        with interpreting():
            return emulator.emulated(path)
    if interpreted:
        from flashgen.runtime.interpret import interpreting

        with interpreting():
            return _import(path, "interpreted")
    remember_triton_key()
    return _import(path, "compiled")


def _import(path: Path, mode: str) -> ModuleType:
    name = f"flashgen_generated.{path.parent.name}.{mode}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise CompileError(f"{path}: the generated module cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
