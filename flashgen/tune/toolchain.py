"""What a measurement was made with: the GPU as its driver describes it, and the versions in use.

Imports neither torch nor triton before a device is asked for: versions come from package metadata.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from flashgen import settings
from flashgen.fingerprint import fingerprint
from flashgen.target import Target

UNKNOWN = "unknown"


@cache
def version_of(package: str) -> str:
    """The installed version; "unknown" where the package carries none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


@dataclass(frozen=True)
class Toolchain:
    """The versions that a kernel's speed depends on.

    Trials are kept per `key`. Triton brings its own assembler, so its version fixes the machine
    code; torch and the driver are recorded beside it and do not part trials.
    """

    flashgen: str
    torch: str
    triton: str

    @property
    def key(self) -> str:
        return f"triton {self.triton}"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def toolchain() -> Toolchain:
    """The toolchain of this process."""
    from flashgen import __version__

    return Toolchain(__version__, version_of("torch"), version_of("triton"))


@dataclass(frozen=True)
class Device:
    """A GPU as its driver reports it: name, compute capability ("9.0"), limits, driver version."""

    name: str
    compute_capability: str
    sm_count: int
    smem_per_block_bytes: int
    driver: str

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def of_target(cls, target: Target) -> Device:
        """What the catalogue says of a GPU that is not here."""
        major, minor = divmod(target.compute_capability, 10)
        return cls(
            target.name, f"{major}.{minor}", target.sm_count, target.smem_per_block_bytes, UNKNOWN
        )


def device_here(index: int = 0) -> Device:
    """The CUDA device `index` of this process."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return Device(
        name=found.name,
        compute_capability=f"{found.major}.{found.minor}",
        sm_count=found.multi_processor_count,
        smem_per_block_bytes=found.shared_memory_per_block_optin,
        driver=driver_version(),
    )


# The version of the driver that is loaded, the one that nvidia-smi prints after half a second.
_DRIVER_FILE = Path("/sys/module/nvidia/version")


@cache
def driver_version() -> str:
    """The driver's version as nvidia-smi prints it; "unknown" where that does not run."""
    with suppress(OSError):
        if found := _DRIVER_FILE.read_text("utf-8").strip():
            return found
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    lines = done.stdout.split("\n")
    return lines[0].strip() or UNKNOWN


BUNDLED = "of triton"


@cache
def assembler() -> str:
    """The ptxas that makes machine code: Triton's own, or another that Triton was told to take."""
    chosen = settings.ptxas()
    if chosen is None:
        return BUNDLED
    try:
        done = subprocess.run(
            [chosen, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return f"{chosen}, {UNKNOWN}"
    lines = done.stdout.strip().splitlines() or [UNKNOWN]
    return f"{chosen}, {lines[-1]}"


def kernel_digest(module_text: str, kernel: str) -> str:
    """Content of one kernel of a generated module and of all that it and its launch use.

    Comments, blank lines, the table of schedules, other kernels and the module's own callable do
    not count: they change no timing. 16 hex digits, the same under every Python.
    """
    lines = _without_comments(module_text)
    kept = [
        line.rstrip()
        for node in ast.parse(module_text).body
        if _counts(node, kernel)
        for line in lines[_first_line(node) - 1 : node.end_lineno]
    ]
    return fingerprint([line for line in kept if line])[:16]


def _counts(node: ast.stmt, kernel: str) -> bool:
    if isinstance(node, ast.Expr):
        return False
    if isinstance(node, ast.Assign):
        return not any(isinstance(t, ast.Name) and t.id == "SCHEDULES" for t in node.targets)
    if not isinstance(node, ast.FunctionDef):
        return True
    is_kernel = any("do_not_specialize" in ast.unparse(d) for d in node.decorator_list)
    return node.name == kernel if is_kernel else "SCHEDULES" not in ast.unparse(node)


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _without_comments(text: str) -> list[str]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return lines
