"""Schedule -> kernels and arguments of a launch. On the warm path: imports nothing heavy."""

from __future__ import annotations

from typing import TypeAlias

from flashgen.schedule.model import Schedule, Sm90


def kernel_kinds(schedule: Schedule) -> tuple[str, ...]:
    """The kernels that a schedule needs, fields of `codegen.host.Entry`; `run` takes the first."""
    if schedule.family == "gluon_sm90":
        return ("sm90",)
    if schedule.kernel == "single_tile" or schedule.loop_order == "flash2":
        return (schedule.kernel,)
    if schedule.num_kv_splits is None:
        return ("flash1", "flash1_split", "merge")
    return ("flash1",) if schedule.num_kv_splits == 1 else ("flash1_split", "merge")


Option: TypeAlias = int | str | None


def options(schedule: Schedule) -> dict[str, Option]:
    """The keyword arguments of a launch that come from its schedule.

    `num_kv_splits`, of flash1 only, is for the module's `run`; None leaves the number to it.
    """
    if schedule.family == "gluon_sm90":
        return _gluon_options(schedule)
    found: dict[str, Option] = {
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


def _gluon_options(schedule: Schedule) -> dict[str, Option]:
    """`group_mb` is for the module's `run`; num_warps: of one warpgroup, the kernel adds others."""
    own = schedule.sm90 or Sm90()
    found: dict[str, Option] = {
        "BLOCK_N": schedule.block_n,
        "CONSUMERS": schedule.consumers,
        "STAGES": schedule.num_stages,
        "Q_BUFFERS": own.q_buffers,
        "SCHEDULER": own.scheduler,
        "SEPARATE_OUT": own.separate_out,
        "DIRECT_OUT": own.direct_out,
        "OVERLAPPED": own.overlapped,
        "PROGRAMS_PER_SM": own.programs_per_sm,
        "num_warps": 4,
        **({"maxnreg": _registers(schedule)} if own.programs_per_sm > 1 else {}),
        "group_mb": own.group_mb,
    }
    if own.packed_heads > 1:
        found["PACKED_HEADS"] = own.packed_heads
    return found


def _registers(schedule: Schedule) -> int:
    """Registers a thread with which so many programs fit on an SM; roles then part them anew."""
    own = schedule.sm90 or Sm90()
    return REGISTERS_OF_SM // (32 * schedule.num_warps * own.programs_per_sm) // 8 * 8


REGISTERS_OF_SM = 64 * 1024  # CUDA C++ Programming Guide, compute capability 9.0


def kernel_options(schedule: Schedule, kind: str) -> dict[str, int | str]:
    """What one of a schedule's kernels is launched with: constants and launch options."""
    found = {name: value for name, value in options(schedule).items() if value is not None}
    for name in ("num_kv_splits", "group_mb"):
        found.pop(name, None)
    if kind == "merge":
        return {name: found[name] for name in ("BLOCK_M", "num_warps")}
    return found


def options_text(schedule: Schedule) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in options(schedule).items())


def _literal(value: Option) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
