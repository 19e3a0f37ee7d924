"""Schedule -> kernels and arguments of a launch. On the warm path: imports nothing heavy."""

from __future__ import annotations

from flashgen.schedule.model import Schedule


def kernel_kinds(schedule: Schedule) -> tuple[str, ...]:
    """The kernels that a schedule needs, fields of `codegen.host.Entry`; `run` takes the first."""
    if schedule.kernel == "single_tile" or schedule.loop_order == "flash2":
        return (schedule.kernel,)
    if schedule.num_kv_splits is None:
        return ("flash1", "flash1_split", "merge")
    return ("flash1",) if schedule.num_kv_splits == 1 else ("flash1_split", "merge")


def options(schedule: Schedule) -> dict[str, int | None]:
    """The keyword arguments of a launch that come from its schedule.

    `num_kv_splits`, of flash1 only, is for the module's `run`; None leaves the number to it.
    """
    found: dict[str, int | None] = {
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "num_warps": schedule.num_warps,
        "num_stages": schedule.num_stages,
    }
    if schedule.maxnreg is not None:
        found["maxnreg"] = schedule.maxnreg
    if schedule.loop_order == "flash1" and schedule.kernel == "loop":
        found["num_kv_splits"] = schedule.num_kv_splits
    return found


def kernel_options(schedule: Schedule, kind: str) -> dict[str, int]:
    """What one of a schedule's kernels is launched with: constants and launch options."""
    found = {name: value for name, value in options(schedule).items() if value is not None}
    found.pop("num_kv_splits", None)
    if kind == "merge":
        return {name: found[name] for name in ("BLOCK_M", "num_warps")}
    return found


def options_text(schedule: Schedule) -> str:
    return ", ".join(f"{name}={value}" for name, value in options(schedule).items())
