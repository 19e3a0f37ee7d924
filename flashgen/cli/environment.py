"""What is installed on this machine, what works with it, and how to mend what does not.

Everything is found out from package metadata, files and nvidia-smi: neither torch nor triton is
imported, so that the answer comes at once and also where importing them fails.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from flashgen import __version__, settings
from flashgen.errors import install_hint
from flashgen.target import target_from_device_name

State = Literal["ok", "warning", "failed"]

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 11)
MIN_TRITON = (3, 6)
# torch -> the triton that it brings; other pairs may work and were not tried.
PAIRS = {(2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8)}
OTHER_PACKAGES = ("numpy", "sympy", "networkx", "jinja2", "pyyaml", "typer", "rich")
# What some commands need beside these, and how to get it.
OPTIONAL = {
    "optuna": "to tune: pip install 'optuna>=4.2'",
    "matplotlib": f"to draw: {install_hint('plot')}",
    "plotly": f"for pages of `flashgen tune`: {install_hint('plot')}",
}
FLASHGEN_NEEDS = "pip install -c constraints.txt . , in a checkout of flashgen"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it stands, and for what is wrong the remedy."""

    name: str
    state: State
    detail: str
    remedy: str | None = None


@dataclass(frozen=True)
class Ability:
    """One thing that flashgen does, and what stands in its way here (empty: it works)."""

    name: str
    obstacles: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.obstacles


@dataclass(frozen=True)
class Report:
    """All findings, and what follows from them."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    @property
    def can_build(self) -> bool:
        """Whether specs can be compiled and verified here: all abilities but running on a GPU."""
        return all(ability.works for ability in self.abilities if ability.name != RUN_ON_GPU)

    def to_dict(self) -> dict[str, object]:
        return {
            "can_build": self.can_build,
            "findings": [asdict(finding) for finding in self.findings],
            "abilities": [{**asdict(a), "works": a.works} for a in self.abilities],
        }


DESCRIBE = "list and show specs"
COMPILE = "compile for any GPU of the catalogue"
INTERPRET = "run and verify on the CPU (Triton's interpreter)"
RUN_ON_GPU = "run and verify on a GPU here"


def report() -> Report:
    """Look at this machine."""
    packages = {name: _package(name) for name in OTHER_PACKAGES}
    torch, triton, rule = _torch(), _triton(), _interpreter_rule()
    python, shipped, cache = _python(), _shipped(), _cache()
    assembler, build_torch, compiler, gpu = _assembler(), _torch_build(), _c_compiler(), _gpu()
    generate = [python, shipped, *packages.values()]
    needs = {
        DESCRIBE: generate,
        COMPILE: [*generate, torch, triton, assembler],
        INTERPRET: [*generate, torch, triton, rule],
        RUN_ON_GPU: [*generate, torch, triton, build_torch, compiler, gpu],
    }
    abilities = tuple(
        Ability(name, tuple(f"{f.name}: {f.detail}" for f in found if f.state == "failed"))
        for name, found in needs.items()
    )
    findings = (python, shipped, torch, build_torch, triton, _pair(), *packages.values())
    optional = (_optional(name, remedy) for name, remedy in OPTIONAL.items())
    return Report((*findings, *optional, rule, assembler, compiler, gpu, cache), abilities)


# **** Python and packages ****


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if tuple(map(int, platform.python_version_tuple()[:2])) < MIN_PYTHON:
        return Finding("python", "failed", text, "use Python 3.10 or newer")
    if platform.system() != "Linux":
        return Finding("python", "warning", text, "Triton is published for Linux only")
    return Finding("python", "ok", text)


def _shipped() -> Finding:
    found = len(list(settings.specs_dir().glob("*.yaml")))
    templates = len(list(settings.templates_dir().rglob("*.jinja")))
    text = (
        f"{__version__}, {found} specs and {templates} templates in {settings.specs_dir().parent}"
    )
    if not found or not templates:
        return Finding("flashgen", "failed", text, "install flashgen again: its data is missing")
    return Finding("flashgen", "ok", text)


def _version_text(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str | None) -> tuple[int, int] | None:
    """Major and minor version; None for a package that is not installed."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _package(name: str) -> Finding:
    version = _version_text(name)
    if version is None:
        return Finding(name, "failed", "not installed", f"pip install {name}")
    return Finding(name, "ok", version)


def _optional(name: str, remedy: str) -> Finding:
    version = _version_text(name)
    if version is None:
        return Finding(name, "warning", "not installed", remedy)
    return Finding(name, "ok", version)


def _at_least(name: str, least: tuple[int, int]) -> Finding:
    finding = _package(name)
    found = _numbers(_version_text(name))
    if found is not None and found < least:
        wanted = ".".join(map(str, least))
        return Finding(
            name, "failed", f"{finding.detail}, too old", f"pip install '{name}>={wanted}'"
        )
    return finding


def _torch() -> Finding:
    return _at_least("torch", MIN_TORCH)


def _triton() -> Finding:
    return _at_least("triton", MIN_TRITON)


def _pair() -> Finding:
    """Whether torch and triton are of the versions that belong together."""
    torch, triton = _numbers(_version_text("torch")), _numbers(_version_text("triton"))
    if not torch or not triton:
        return Finding("torch with triton", "warning", "not both installed", FLASHGEN_NEEDS)
    text = f"torch {torch[0]}.{torch[1]} with triton {triton[0]}.{triton[1]}"
    wanted = PAIRS.get(torch)
    if wanted == triton:
        return Finding("torch with triton", "ok", text)
    if wanted is None:
        return Finding("torch with triton", "warning", f"{text}: not a version that was tried")
    return Finding(
        "torch with triton",
        "warning",
        f"{text}: torch brings triton {wanted[0]}.{wanted[1]}",
        f"pip install 'triton=={wanted[0]}.{wanted[1]}.*'",
    )


def _interpreter_rule() -> Finding:
    """Triton 3.6's interpreter fails in loops with run-time bounds under numpy >= 2.4."""
    text = f"triton {_version_text('triton')} with numpy {_version_text('numpy')}"
    triton, numpy = _numbers(_version_text("triton")), _numbers(_version_text("numpy"))
    if triton and numpy and triton < (3, 7) and numpy >= (2, 4):
        remedy = "pip install 'numpy<2.4', or use triton >= 3.7"
        return Finding("interpreter", "failed", f"{text}: its loops fail", remedy)
    return Finding("interpreter", "ok", text)


# **** compilers ****


def _triton_folder() -> Path | None:
    found = importlib.util.find_spec("triton")
    return Path(found.origin).parent if found and found.origin else None


def _assembler() -> Finding:
    """ptxas makes machine code for NVIDIA; Triton's wheel brings it."""
    folder = _triton_folder()
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    path = Path(chosen) if chosen else folder and folder / "backends" / "nvidia" / "bin" / "ptxas"
    if path and path.is_file() and os.access(path, os.X_OK):
        return Finding("ptxas", "ok", str(path))
    remedy = "install triton from its wheel, or set TRITON_PTXAS_PATH to a ptxas"
    return Finding("ptxas", "failed", "not found" if path is None else f"{path}: not there", remedy)


def _c_compiler() -> Finding:
    """Triton builds a small launcher in C when it first runs on a GPU."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not found or not shutil.which(found):
        remedy = "apt-get install gcc, or set CC"
        return Finding("C compiler", "failed", "none found; Triton needs one on a GPU", remedy)
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        remedy = "install Python's header files (python3-dev)"
        return Finding("C compiler", "failed", f"{found}, but Python.h is missing", remedy)
    return Finding("C compiler", "ok", f"{found}, with Python.h")


# **** GPUs ****


def _torch_build() -> Finding:
    """For which GPUs the installed torch was built, from torch/version.py."""
    found = PathFinder.find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found and found.origin else None
    if path is None or not path.is_file():
        return Finding("torch build", "failed", "torch is not installed", FLASHGEN_NEEDS)
    text = path.read_text("utf-8")
    for kind, name in (("cuda", "CUDA"), ("hip", "ROCm")):
        version = re.search(rf"^{kind}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        if version:
            return Finding("torch build", "ok", f"for {name} {version[1]}")
    state: State = "failed" if _gpu_names() else "warning"
    remedy = "install torch's CUDA or ROCm build to run on a GPU"
    return Finding("torch build", state, "for the CPU only", remedy)


def _gpu_names() -> list[str]:
    """Names of NVIDIA GPUs as the driver gives them, and AMD GPUs by architecture."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text("utf-8"), re.MULTILINE)
        names += [model[1].strip()] if model else []
    return names or _names_by_nvidia_smi() or _amd_architectures()


def _names_by_nvidia_smi() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _amd_architectures() -> list[str]:
    """gfx942 is 90402 in the kernel driver's `gfx_target_version`; CPUs have 0."""
    names = []
    for path in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        version = re.search(r"^gfx_target_version (\d+)$", path.read_text("utf-8"), re.MULTILINE)
        number = int(version[1]) if version else 0
        if number:
            names.append(f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return names


def _gpu() -> Finding:
    names = _gpu_names()
    if not names:
        remedy = "kernels compile without one; to run, use a machine with a GPU and its driver"
        return Finding("GPU", "failed", "none found", remedy)
    known = {name: target_from_device_name(name) for name in names}
    text = ", ".join(f"{name} ({target.id})" if target else name for name, target in known.items())
    if any(target is None for target in known.values()):
        remedy = "pass --target with the id of a GPU like it: `flashgen list --targets`"
        return Finding("GPU", "warning", f"{text}: not all in the catalogue", remedy)
    return Finding("GPU", "ok", f"{len(names)} x {text}" if len(names) > 1 else text)


# **** cache ****


def _cache() -> Finding:
    folder = settings.cache_dir()
    kernels = sorted((folder / "kernels").glob("*/plan.json"))
    size = sum(file.stat().st_size for plan in kernels for file in plan.parent.glob("*"))
    text = f"{folder}, {len(kernels)} kernels, {size / 1024:.0f} KiB"
    parent = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=parent):
            return Finding("cache", "ok", text)
    except OSError as error:
        remedy = "set FLASHGEN_CACHE_DIR to a folder that can be written"
        return Finding("cache", "warning", f"{text}: not writable ({error.strerror})", remedy)
