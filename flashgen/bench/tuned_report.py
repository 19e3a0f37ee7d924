"""What tuning won: the committed tables of a GPU as one page, made from them alone.

    python -m flashgen.bench.tuned_report [GPU]

It writes `benchmarks/<gpu>/tuned.md`. Ratios are of a race in which the entry and the untuned
schedule took turns; the entry is never the slower one, since the race decides which it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flashgen import settings
from flashgen.bench.markdown import number, table
from flashgen.errors import FlashgenError
from flashgen.runtime.artifact import replace_file
from flashgen.target import get_target
from flashgen.tune.summary import geometric_mean
from flashgen.tune.table import Entry, Table, read_table

DEFAULT_GPU = "nvidia-h200"


def tables_of(gpu: str, folder: Path | None = None) -> tuple[Table, ...]:
    """All tables of a GPU, by the name of the spec. TableError for one that cannot be read."""
    paths = ((folder or settings.tuned_configs_dir()) / gpu).glob("*.json")
    return tuple(read_table(path) for path in sorted(paths))


def markdown(gpu: str, tables: Sequence[Table]) -> str:
    """The page."""
    entries = [(each.spec, entry) for each in tables for entry in each.entries]
    speedups = [entry.speedup for _, entry in entries if entry.speedup]
    mean = geometric_mean(speedups)
    header = ["spec", "lengths", "schedule", "us", "untuned / tuned"]
    header += ["rate", "of the roofline", "trials", "of"]
    lines = [
        f"# Tuned configs: {gpu}",
        "",
        "- command: `python -m flashgen.bench.tuned_report`, from `tuned_configs`",
        *(f"- {line}" for line in _versions([entry for _, entry in entries])),
        f"- {len(entries)} entries of {len(tables)} specs; tuned over untuned: "
        + (f"{mean:.3f} (geometric mean), " if mean else "")
        + f"lowest {min(speedups, default=1.0):.3f}, highest {max(speedups, default=1.0):.3f}; "
        f"{sum(entry.schedule == entry.default for _, entry in entries)} entries are the untuned "
        "schedule",
        "",
        "Both were timed taking turns, in the same race. Rates are of visible matmuls (TFLOP/s) "
        "or, where memory is the limit, of the least traffic (GB/s).",
        "",
        table(header, [_row(spec, entry) for spec, entry in entries]),
    ]
    return "\n".join(lines) + "\n"


def _versions(entries: Sequence[Entry]) -> list[str]:
    """GPU, driver and versions that entries were measured with, each combination once."""
    found = dict.fromkeys(
        f"{e.device.name}, driver {e.device.driver}, torch {e.toolchain.torch}, triton "
        f"{e.toolchain.triton}, flashgen {e.toolchain.flashgen}"
        for e in entries
    )
    return list(found)


def _row(spec: str, entry: Entry) -> list[str]:
    return [
        spec,
        str(entry.bucket),
        str(entry.schedule),
        number(entry.time_us),
        f"{entry.speedup:.3f}" if entry.speedup else "untuned failed",
        f"{number(entry.rate)} {entry.unit}",
        f"{entry.bound_us / entry.time_us:.0%}",
        str(entry.trials),
        str(entry.feasible),
    ]


def main(arguments: Sequence[str]) -> int:
    """The page of a GPU, in the checkout's folder `benchmarks`. Exit code 1: there is none."""
    gpu = arguments[0] if arguments else DEFAULT_GPU
    try:
        found = tables_of(get_target(gpu).id)
    except FlashgenError as error:
        print(f"tuned_report: {error}", file=sys.stderr)
        return 1
    if not found:
        print(
            f"tuned_report: {gpu}: no tables in {settings.tuned_configs_dir()}\n"
            f"  hint: `flashgen tune SPEC --out {settings.tuned_configs_dir()}` on that GPU "
            "writes one.",
            file=sys.stderr,
        )
        return 1
    path = Path("benchmarks") / gpu / "tuned.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, markdown(gpu, found), shared=True)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
