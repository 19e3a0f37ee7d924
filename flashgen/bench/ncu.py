"""Nsight Compute: its command line, and what it prints, read.

`l1tex__m_xbar2l1tex_read_bytes` is what comes from L2 to the SMs' L1 and shared memory, whatever
the instruction (cp.async past L1 as well as plain loads that miss there), and
`l1tex__m_l1tex2xbar_write_bytes` what they send to L2: their sum is what tile traffic models. The
`lts__t_sectors` counters see the same sectors (32 bytes) from the side of L2, where those of
`ltcfabric` are one partition's requests to the other. `dram__bytes` cross the memory's pins.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.errors import FlashgenError

READ, WRITTEN = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
NEEDED = (READ, WRITTEN, DRAM_READ, DRAM_WRITTEN)
DRAM_METRICS = (DRAM_READ, DRAM_WRITTEN)  # one pass: the kernel runs once, as it does alone
WISHED = (
    "gpu__time_duration.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum",
    "lts__t_sectors_srcunit_ltcfabric.sum",
    "lts__t_sectors_srcunit_ltcfabric_lookup_miss.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sectors_op_read_lookup_miss.sum",
    "lts__d_sectors_fill_device.sum",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.max",
    "sm__warps_active.avg.per_cycle_active",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__waves_per_multiprocessor",
)
METRICS = (*NEEDED, *WISHED)
PASSES = "profiler__replayer_passes"  # on the raw page whatever was asked for, as 150 others
KEPT = frozenset((*METRICS, PASSES))
LABEL = "flashgen case"  # an NVTX range of that name and a number holds a case's kernels
AFTER = "flashgen after"  # and this one what is run after them, to empty the cache
QUERY_LIMIT_S = 60.0

_LABELLED = re.compile(rf"({LABEL}|{AFTER}) (\d+)\b")
_PASSES = re.compile(r"100% - (\d+) pass")


class CounterError(FlashgenError):
    """Nsight Compute is not there, or did not give what was asked of it."""


@dataclass(frozen=True)
class KernelCounters:
    """One profiled kernel, and the range it ran in: `LABEL` or `AFTER`, and the case's number."""

    name: str
    grid: str
    label: tuple[str, int] | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Profile:
    """A run of Nsight Compute: its kernels in order, replays of each at most, what was said."""

    kernels: tuple[KernelCounters, ...]
    passes: int | None
    messages: tuple[str, ...]
    complaints: tuple[str, ...] = ()  # of the program

    def labelled(self, label: str, number: int) -> tuple[KernelCounters, ...]:
        """The kernels that ran in a range."""
        return tuple(kernel for kernel in self.kernels if kernel.label == (label, number))


def find_ncu() -> str:
    """The path of `ncu`; CounterError says where it comes from."""
    path = shutil.which("ncu")
    if path is None:
        raise CounterError(
            "bench: ncu (Nsight Compute) is not on the PATH, and suite counters reads counters "
            "with it\n  hint: it comes with the CUDA toolkit; add its folder to PATH."
        )
    return path


def available(ncu: str, wished: Iterable[str]) -> tuple[str, ...]:
    """Those of `wished` that the GPU here has; all of them where ncu does not say.

    Launch metrics are no counters and always there.
    """
    command = [ncu, "--query-metrics"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return tuple(wished)
    known = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    if not any(name.startswith("dram__") for name in known):
        return tuple(wished)
    return tuple(
        name for name in wished if name.startswith("launch__") or name.partition(".")[0] in known
    )


def command_line(
    ncu: str, program: Sequence[str], metrics: Sequence[str], log: Path, *, flush: bool
) -> list[str]:
    """The command that profiles what `program` marks (cudaProfilerStart to Stop).

    flush: empty the caches before each replay of a kernel; otherwise they are left alone. Clocks
    are left alone in any case.
    """
    return [
        ncu,
        *("--metrics", ",".join(metrics)),
        *("--clock-control", "none"),
        *("--cache-control", "all" if flush else "none"),
        *("--profile-from-start", "off"),
        *("--target-processes", "application-only"),
        "--nvtx",
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", str(log)),
        *program,
    ]


def profile(
    ncu: str,
    program: Sequence[str],
    metrics: Sequence[str],
    log: Path,
    *,
    flush: bool,
    limit_s: float,
) -> Profile:
    """Run `program` under Nsight Compute; CounterError if no kernel was profiled.

    After `limit_s` it is ended, and its counters are lost: the program should end before.
    """
    command = command_line(ncu, program, metrics, log, flush=flush)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        complaints = tuple(line for line in done.stderr.splitlines() if line.strip())
    except subprocess.TimeoutExpired:
        complaints = (f"ended after {limit_s:g} s",)
    text = log.read_text("utf-8", errors="replace") if log.is_file() else ""
    found = replace(parse(text), complaints=complaints)
    if not found.kernels:
        errors = [line for line in (*found.messages, *complaints) if "ERROR" in line]
        said = next(iter([*errors, *reversed(complaints)]), "it said nothing")[:300]
        raise CounterError(
            f"bench: ncu profiled no kernel: {said}\n"
            "  hint: some virtual machines and drivers keep the counters from users "
            "(ERR_NVGPUCTRPERM, LibraryNotLoaded); then this GPU cannot be asked."
        )
    return found


def parse(text: str) -> Profile:
    """What `--csv --page raw` printed, with the messages around it."""
    lines = text.splitlines()
    messages = tuple(line for line in lines if line.startswith("=="))
    passes = [int(found[1]) for line in messages if (found := _PASSES.search(line))]
    kernels = tuple(_kernels([line for line in lines if line.startswith('"')]))
    passes += [int(kernel.metrics[PASSES]) for kernel in kernels if PASSES in kernel.metrics]
    return Profile(kernels, max(passes, default=None), messages)


def _kernels(table: Sequence[str]) -> Iterator[KernelCounters]:
    rows = csv.reader(table)
    header = next(rows, None)
    if header is None or "Kernel Name" not in header:
        return
    for cells in rows:
        row = dict(zip(header, cells, strict=False))
        if not row.get("ID", "").strip():
            continue  # the row of units
        values = {name: _number(cell) for name, cell in row.items() if name in KEPT}
        labels = [found for cell in cells if (found := _LABELLED.search(cell))]
        yield KernelCounters(
            name=row["Kernel Name"],
            grid=row.get("Grid Size", ""),
            label=(labels[0][1], int(labels[0][2])) if labels else None,
            metrics={name: value for name, value in values.items() if value is not None},
        )


def _number(cell: str) -> float | None:
    """A cell as a number; None for `n/a` and the like. Thousands may be set off by commas."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
