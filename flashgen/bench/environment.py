"""What a run was measured with: the GPU, the driver, and the versions of everything between."""

from __future__ import annotations

import platform
import subprocess

import torch
import triton

import flashgen
from flashgen.codegen.digest import generator_digest


def environment(device: torch.device) -> dict[str, str]:
    """Names and versions, as text."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "device memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "flashgen": flashgen.__version__,
        "generator digest": generator_digest()[:16],
    }


def driver_version() -> str:
    """The driver's version as nvidia-smi prints it; "unknown" where that does not run."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if lines else "unknown"
