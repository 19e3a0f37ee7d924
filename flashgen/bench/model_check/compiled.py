"""What the compiler said of a kernel, and a file that keeps it: nothing is compiled twice."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashgen.bench.model_check.sample import Case
from flashgen.codegen.options import options
from flashgen.fingerprint import fingerprint_text

OVER_TIME = "over time"


@dataclass(frozen=True)
class Compiled:
    """One kernel as the compiler left it.

    smem_bytes, tmem_columns: as allocated; None if it did not come so far. fits: a launch finds
    enough of both. regs_per_thread, spill_bytes: of the machine code, if it was made. `error` says
    why something is missing.
    """

    smem_bytes: int | None = None
    tmem_columns: int = 0
    fits: bool = False
    regs_per_thread: int | None = None
    spill_bytes: int | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def is_assembled(self) -> bool:
        """Whether machine code was made, or could not be."""
        return self.regs_per_thread is not None or bool(self.error)


class Kept:
    """Results by key in a file with one JSON object a line, added to as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Compiled] = {}
        for key, compiled in _read(path):
            self._take(key, compiled)

    def get(self, key: str) -> Compiled | None:
        return self.found.get(key)

    def add(self, key: str, compiled: Compiled) -> None:
        self._take(key, compiled)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **asdict(compiled)}) + "\n")

    def _take(self, key: str, compiled: Compiled) -> None:
        """The later result; where making machine code failed, what was allocated stays known."""
        before = self.found.get(key)
        if before is not None and compiled.smem_bytes is None:
            compiled = replace(before, error=compiled.error, seconds=compiled.seconds)
        self.found[key] = compiled


def _read(path: Path) -> Iterator[tuple[str, Compiled]]:
    if not path.exists():
        return
    for line in path.read_text("utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue  # a run that was stopped while it wrote
        yield data.pop("key"), Compiled(**data)


def key_of(case: Case, text: str, entry: str, triton_version: str) -> str:
    """Identifies a result: what is compiled (comments and places do not count), how, by whom."""
    tuning = " ".join(f"{name}={value}" for name, value in options(case.schedule).items())
    code = fingerprint_text(kernel_text(text, entry))[:24]
    return f"{triton_version} {case.arch} {tuning} aligned={int(case.aligned)} {code}"


def kernel_text(text: str, entry: str) -> str:
    """The parts of a generated module that one of its kernels is made of, without comments."""
    kept = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            helper = bool(node.decorator_list) and not _is_kernel(node)
            if node.name != entry and not helper:
                continue
        elif not isinstance(node, ast.Assign) or "constexpr" not in ast.unparse(node.value):
            continue
        kept.append(ast.unparse(node))
    return "\n".join(kept)


def _is_kernel(node: ast.FunctionDef) -> bool:
    """Kernels are decorated with arguments, helpers without."""
    return any(isinstance(decorator, ast.Call) for decorator in node.decorator_list)
