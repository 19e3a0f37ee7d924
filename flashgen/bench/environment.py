"""What a run was measured with: the GPU, the driver, and the versions of everything between."""

from __future__ import annotations

import platform

import torch
import triton

import flashgen
from flashgen.codegen.digest import generator_digest
from flashgen.tune.toolchain import driver_version


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
