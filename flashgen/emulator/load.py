"""A generated module whose Gluon kernels run here."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import KernelInterface

from flashgen.emulator.language import Language, run_range
from flashgen.emulator.machine import Machine
from flashgen.emulator.memory import Memory
from flashgen.emulator.shared import Mbarrier, SharedMemory, TensorMap, Tma, Wgmma, matrix_product
from flashgen.emulator.values import TORCH_DTYPE, Value, scalar

_GLUON = "triton.experimental.gluon"
_NUMBERS = itertools.count()


def emulated(path: Path, *, seed: int = 0, sm_count: int = 3) -> ModuleType:
    """Import the generated module at `path`; its Gluon kernels take CPU tensors.

    Its other kernels are Triton's to interpret: import it where Triton interprets. seed: of the
    order in which roles and copies go on, another one for each program. sm_count: that of the GPU,
    few so that programs have several query tiles each.
    """
    module = ModuleType(f"flashgen_emulated_{next(_NUMBERS)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    kernels = _Kernels(module, seed)
    names = vars(module)
    names.update(kernels.names())
    exec(_compiled(path.read_text("utf-8"), str(path)), names)
    for name, value in list(names.items()):
        if isinstance(value, tl.constexpr) and not inspect.isclass(value):
            names[name] = value.value
        elif isinstance(value, KernelInterface):
            names[name] = _Helper(value, names)
    names["SM_COUNT"] = sm_count
    fits_tma = names["fits_tma"]
    names["fits_tma"] = lambda tensor: fits_tma(_OnGpu(tensor))
    return module


class _Helper:
    """A function of Triton's, which kernels of Gluon may call too."""

    def __init__(self, function: Any, names: Mapping[str, Any]) -> None:
        self._function, self._names = function, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._function[grid]

    @property
    def fn(self) -> Any:
        """What the interpreter calls where it combines the elements of a scan."""
        return self._function.fn

    def __call__(self, *args: Any) -> Any:
        if not any(isinstance(arg, Value) for arg in args):
            return self._function(*args)
        names = {**self._names, "tl": self._names["gl"]}
        return FunctionType(self._function.fn.__code__, names)(*args)


class _OnGpu:
    """A CPU tensor that passes for one of a GPU."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


# **** the text ****


@lru_cache(maxsize=64)
def _compiled(text: str, path: str) -> CodeType:
    """Imports of Gluon fall away: the module has what they would bring. `range` in a Gluon function
    counts with values. Takes 0.2 s, as long as a short call: kept for the next one."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not _imports_gluon(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(_is_gluon_jit(d) for d in node.decorator_list):
            _count_with_values(node)
    return compile(tree, path, "exec", dont_inherit=True)


def _imports_gluon(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return False
    of_host = node.module.endswith("gluon.nvidia.hopper")  # tensor maps, made outside kernels
    names = {alias.name for alias in node.names}
    is_gluon = node.module.startswith(_GLUON) or "gluon" in names
    return is_gluon and not of_host


def _is_gluon_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("gluon.jit")


def _count_with_values(function: ast.FunctionDef) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == "range":
            node.id = "_range"


# **** kernels ****


class _Kernels:
    """Stands for `gluon` in the module: makes its kernels, and gives their names a meaning."""

    def __init__(self, module: ModuleType, seed: int) -> None:
        self._module, self._seed = module, seed
        self._launches = itertools.count()

    def names(self) -> dict[str, Any]:
        """What the module finds while it is imported."""
        names = self._names_of(Machine(self._seed), Memory(), 0, 0)
        return names | {"gluon": self, "_range": run_range}

    def jit(self, function: Callable[..., None] | None = None, **_options: Any) -> Any:
        """A function of a kernel is called as it is; one with options is a kernel."""
        if function is not None:
            return function
        return lambda kernel: _Launcher(kernel, self)

    @staticmethod
    def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
        return cache(function)

    def run(self, kernel: Callable[..., None], programs: int, given: Mapping[str, Any]) -> None:
        memory = Memory()
        launch = next(self._launches)
        for program in range(programs):
            machine = Machine(hash((self._seed, launch, program)))
            with self._in_program(self._names_of(machine, memory, program, programs)):
                kernel(**_arguments(kernel, given, memory))
            machine.complete_stores(0)

    @staticmethod
    def _names_of(machine: Machine, memory: Memory, program: int, programs: int) -> dict[str, Any]:
        shared = SharedMemory(machine)
        wgmma = Wgmma(machine)
        return {
            "gl": Language(machine, memory, shared, program, programs),
            "mbarrier": Mbarrier(machine, shared, _mbarrier_layout()),
            "tma": Tma(machine, shared),
            "warpgroup_mma": wgmma.multiply,
            "warpgroup_mma_wait": wgmma.wait,
            "mma_v2": matrix_product,
            "fence_async_shared": machine.fence,
        }

    @contextmanager
    def _in_program(self, names: Mapping[str, Any]) -> Iterator[None]:
        before = {name: vars(self._module)[name] for name in names}
        vars(self._module).update(names)
        try:
            yield
        finally:
            vars(self._module).update(before)


def _mbarrier_layout() -> Any:
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    return mbarrier.MBarrierLayout


class _Launcher:
    def __init__(self, kernel: Callable[..., None], kernels: _Kernels) -> None:
        self._kernel, self._kernels = kernel, kernels
        self.__name__ = kernel.__name__
        self.arg_names = list(inspect.signature(kernel).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            signature = inspect.signature(self._kernel)
            own = {name: value for name, value in options.items() if name in signature.parameters}
            bound = signature.bind(*args, **own)
            self._kernels.run(self._kernel, int(grid[0]), bound.arguments)

        return launch


def _arguments(
    kernel: Callable[..., None], given: Mapping[str, Any], memory: Memory
) -> dict[str, Any]:
    """Tensors as pointers, descriptors as tensor maps, numbers as known when it runs."""
    parameters = inspect.signature(kernel).parameters
    return {
        name: _argument(value, parameters[name].annotation, memory) for name, value in given.items()
    }


def _argument(value: Any, annotation: Any, memory: Memory) -> Any:
    if annotation is tl.constexpr or isinstance(value, str | bool):
        return value
    if value is None or isinstance(value, torch.Tensor):
        return memory.pointer(value)
    if hasattr(value, "block_shape"):
        return TensorMap(value)
    return _number(value, annotation)


def _number(value: Any, annotation: Any) -> Value:
    dtype = TORCH_DTYPE.get(str(annotation))
    if dtype is None:
        dtype = torch.float32 if isinstance(value, float) else torch.int32
    return scalar(value, dtype)
