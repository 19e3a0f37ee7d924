"""Schedule -> keyword arguments of a launch. On the warm path: imports nothing heavy."""

from __future__ import annotations

from flashgen.schedule.model import Schedule


def options(schedule: Schedule) -> dict[str, int]:
    """The keyword arguments of a launch that come from its schedule."""
    found = {
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "num_warps": schedule.num_warps,
        "num_stages": schedule.num_stages,
    }
    return found if schedule.maxnreg is None else {**found, "maxnreg": schedule.maxnreg}


def options_text(schedule: Schedule) -> str:
    return ", ".join(f"{name}={value}" for name, value in options(schedule).items())
