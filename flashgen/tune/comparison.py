"""Samplers held against exhaustive data: how many trials each needs to come within 2% of the best.

    python -m flashgen.tune.comparison measure SPEC [SPEC...] --out DIR --seconds 300
    python -m flashgen.tune.comparison compare DIR

`measure` times every feasible schedule of a spec's first shape on the GPU here, once, into
DIR/<spec>.json; run again, it goes on where it ended. `compare` needs no GPU: it replays every
sampler on that data, and writes DIR/comparison.md and, with matplotlib, DIR/comparison.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from flashgen import settings
from flashgen.errors import install_hint
from flashgen.problem import Problem
from flashgen.runtime.artifact import replace_file
from flashgen.schedule.families import PORTABLE
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import default_schedule, enumerate_space
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune.measurement import Measurement, Measurer
from flashgen.tune.processes import cores
from flashgen.tune.search import Limits, close_quietly
from flashgen.tune.strategies import SAMPLERS, Known, strategy
from flashgen.tune.toolchain import device_here, toolchain
from flashgen.tune.work import predictions

WITHIN = 0.02
SEEDS = 15
BATCH = 16  # schedules that are compiled together
DATA_VERSION = 1


@dataclass(frozen=True)
class Exhaustive:
    """Every feasible schedule of one case with its result; `discarded` were never timed."""

    spec: AttentionSpec
    gpu: str
    shape: Shape
    found: Mapping[Schedule, Measurement]
    discarded: Mapping[Schedule, str]
    predicted_us: Mapping[Schedule, float]
    default: Schedule

    @property
    def times(self) -> dict[Schedule, float]:
        return {s: m.time_us for s, m in self.found.items() if m.time_us is not None}

    @property
    def label(self) -> str:
        s = self.shape
        return f"{self.spec.display_name} b{s.batch} q{s.q_len} k{s.kv_len}"


@dataclass(frozen=True)
class Replay:
    """One sampler on one case: the best after each trial over the optimum, for each seed."""

    sampler: str
    runs: tuple[tuple[float, ...], ...]

    def trials_to(self, within: float = WITHIN) -> float:
        """The median number of trials until the best is that close; infinity: never."""
        reached = [
            next((n for n, ratio in enumerate(run, 1) if ratio <= 1 / (1 - within)), math.inf)
            for run in self.runs
        ]
        return statistics.median(reached)

    def ratio_after(self, trials: int) -> float:
        """The median of best over optimum after so many trials."""
        return statistics.median(run[min(trials, len(run)) - 1] for run in self.runs)


def replay(data: Exhaustive, sampler: str, seeds: Sequence[int], trials: int) -> Replay:
    """Run a sampler as the search does, on times that are known: default and seeds first.

    Only the first of each order is used, so no more is asked for: TPE's is the same as in the
    search, and its 24 proposals were 14 of 15 parts of the time.
    """
    optimum = min(data.times.values())
    ranked = sorted(data.predicted_us, key=lambda s: (data.predicted_us[s], s))
    first = [s for s in dict.fromkeys((data.default, *ranked[:2])) if s in data.found]
    runs = []
    for seed in seeds:
        order = strategy(sampler, lambda: data.predicted_us, seed, used=1)
        known: dict[Schedule, Measurement] = {}
        ratios: list[float] = []
        free = list(data.found)
        while free and len(known) < trials:
            left = [s for s in first if s not in known]
            chosen = left[0] if left else order.order(_view(known), free)[0]
            free.remove(chosen)
            known[chosen] = data.found[chosen]
            times = [m.time_us for m in known.values() if m.time_us is not None]
            ratios.append(min(times, default=math.inf) / optimum)
        runs.append(tuple(ratios))
    return Replay(sampler, tuple(runs))


def replay_all(cases: Sequence[Exhaustive]) -> list[dict[str, Replay]]:
    """Every sampler on every case, by name, with `SEEDS` seeds each, on all cores."""
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        running = [
            {
                name: [
                    pool.submit(replay, data, name, (seed,), _trials(data))
                    for seed in range(1 if name == "model" else SEEDS)
                ]
                for name in SAMPLERS
            }
            for data in cases
        ]
        return [
            {
                name: Replay(name, tuple(run for each in jobs for run in each.result().runs))
                for name, jobs in samplers.items()
            }
            for samplers in running
        ]


def _trials(data: Exhaustive) -> int:
    return min(len(data.found), 3 * Limits().trials_of(len(data.found)))


def _view(known: dict[Schedule, Measurement]) -> Known:
    return dict(known)


# **** measuring ****


def measure_all(
    data: Exhaustive,
    measurer: Measurer,
    deadline: float,
    *,
    keep: Callable[[Exhaustive], None] = lambda data: None,
) -> Exhaustive:
    """Time what has no result yet, until the clock (`time.monotonic`) says `deadline`.

    A batch compiles while the one before it is timed; `keep` is given what is known after each.
    """
    found, discarded = dict(data.found), dict(data.discarded)
    rest = [s for s in data.predicted_us if s not in found and s not in discarded]
    batches = [rest[start : start + BATCH] for start in range(0, len(rest), BATCH)]
    with ThreadPoolExecutor(1, thread_name_prefix="flashgen-ahead") as thread:
        ahead = thread.submit(measurer.prepare, batches[0]) if batches else None
        for number, batch in enumerate(batches, 1):
            if ahead is None or time.monotonic() >= deadline:
                break
            refused = dict(ahead.result())
            ahead = None
            if number < len(batches):
                ahead = thread.submit(measurer.prepare, batches[number])
            discarded.update(refused)
            for schedule in (s for s in batch if s not in refused):
                if time.monotonic() >= deadline:
                    break
                found[schedule] = measurer.measure(schedule)
            data = replace(data, found=dict(found), discarded=dict(discarded))
            keep(data)
    return data


def progress(data: Exhaustive) -> str:
    """How far it is, in one line."""
    best = min(data.times.values(), default=math.nan)
    return (
        f"{data.label}: {len(data.found)} of {len(data.predicted_us) - len(data.discarded)} timed, "
        f"{len(data.discarded)} discarded, best {best:.4g} us"
    )


def empty(spec: AttentionSpec, gpu: str, shape: Shape) -> Exhaustive:
    """A case without results: its space and what the model says of it."""
    problem, bucket = Problem(spec, get_target(gpu)), bucket_of(shape.q_len, shape.kv_len)
    feasible = enumerate_space(problem, bucket, (PORTABLE,)).feasible
    default = default_schedule(problem, bucket)
    return Exhaustive(spec, gpu, shape, {}, {}, predictions(problem, feasible, shape), default)


def to_json(data: Exhaustive) -> str:
    return json.dumps(
        {
            "version": DATA_VERSION,
            "spec": data.spec.to_yaml(),
            "gpu": data.gpu,
            "shape": asdict(data.shape),
            "toolchain": toolchain().to_dict(),
            "found": [m.to_dict() | {"samples_us": []} for m in data.found.values()],
            "discarded": [
                {"schedule": s.to_dict(), "reason": why} for s, why in data.discarded.items()
            ],
        },
        indent=1,
    )


def from_json(text: str) -> Exhaustive:
    """The inverse of `to_json`; predictions are made anew, by the model as it is now."""
    from flashgen.spec.parse import parse_spec

    value = json.loads(text)
    if value["version"] != DATA_VERSION:
        raise ValueError(f"version {value['version']}, expected {DATA_VERSION}")
    base = empty(parse_spec(value["spec"]), value["gpu"], Shape(**value["shape"]))
    results = [Measurement.from_dict(each) for each in value["found"]]
    discarded = {Schedule.from_dict(d["schedule"]): d["reason"] for d in value["discarded"]}
    found = {m.schedule: m for m in results if m.schedule in base.predicted_us}
    return Exhaustive(
        base.spec, base.gpu, base.shape, found, discarded, base.predicted_us, base.default
    )


# **** the report ****


def markdown(cases: Sequence[tuple[Exhaustive, Mapping[str, Replay]]]) -> str:
    """A table: trials to 98% of the optimum, and what is reached with a fifth of the space."""
    lines = [
        "# Samplers on exhaustive data",
        "",
        "Replayed, a trial at a time: the sampler is told the kept times of what it chose before "
        "and chooses the next, from all that is left, up to three times the default number of "
        f"trials. Median of {SEEDS} seeds; the model has none. Trials until the best is within "
        f"{100 * WITHIN:.0f}% of the optimum, then best over optimum after the default number of "
        "trials (a fifth of the space). Default and the two best predicted are tried first.",
        "",
        "| case | schedules | default / optimum | limit | "
        + " | ".join(f"{name}: trials | after limit" for name in SAMPLERS)
        + " |",
        "|---" * (4 + 2 * len(SAMPLERS)) + "|",
    ]
    for data, replays in cases:
        limit = Limits().trials_of(len(data.found))
        optimum = min(data.times.values())
        default_us = data.times.get(data.default, math.nan)
        cells = [data.label, len(data.found), f"{default_us / optimum:.3f}", limit]
        for name in SAMPLERS:
            cells += [f"{replays[name].trials_to():g}", f"{replays[name].ratio_after(limit):.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def plot(cases: Sequence[tuple[Exhaustive, Mapping[str, Replay]]], path: Path) -> None:
    """Best over optimum against trials, a panel a case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(cases))
    rows = math.ceil(len(cases) / columns)
    figure = Figure(figsize=(5 * columns, 3.5 * rows))
    FigureCanvasAgg(figure)
    for number, (data, replays) in enumerate(cases, 1):
        axes = figure.add_subplot(rows, columns, number)
        for name, each in replays.items():
            middle = [statistics.median(column) for column in zip(*each.runs, strict=True)]
            axes.step(range(1, len(middle) + 1), middle, where="post", label=name)
        axes.axhline(1 / (1 - WITHIN), linestyle=":", color="grey")
        axes.axvline(Limits().trials_of(len(data.found)), linestyle=":", color="grey")
        axes.set(title=data.label, xlabel="trials", ylabel="best / optimum", ylim=(0.99, 1.5))
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)


# **** the command ****


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 where there was nothing to compare."""
    parser = argparse.ArgumentParser(prog="flashgen.tune.comparison")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("specs", nargs="+")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--gpu", default="nvidia-h200")
    measuring.add_argument("--seconds", type=float, default=300.0)
    comparing = commands.add_parser("compare")
    comparing.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "measure":
        return _measure(given)
    return _compare(given.folder)


def _measure(given: argparse.Namespace) -> int:
    from flashgen.tune.measure import gpu_measurer, kept_workers

    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    say(f"on {device_here().name}")
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    with kept_workers():
        for name in given.specs:
            spec = load_spec(settings.specs_dir() / f"{name}.yaml")
            path = given.out / f"{name}.json"
            data = empty(spec, given.gpu, spec.shapes[0])
            if path.is_file():
                data = from_json(path.read_text("utf-8"))
            measurer = gpu_measurer(spec, data.shape, get_target(given.gpu))
            try:
                data = measure_all(data, measurer, deadline, keep=lambda now: say(progress(now)))
            finally:
                close_quietly(measurer)
            replace_file(path, to_json(data), shared=True)
    return 0


def _compare(folder: Path) -> int:
    cases: list[Exhaustive] = []
    for path in sorted(folder.glob("*.json")):
        data = from_json(path.read_text("utf-8"))
        if not data.times:
            continue
        cases.append(data)
    if not cases:
        print(f"{folder}: no exhaustive data here", file=sys.stderr)
        return 1
    replayed = list(zip(cases, replay_all(cases), strict=True))
    text = markdown(replayed)
    replace_file(folder / "comparison.md", text, shared=True)
    print(text, end="")
    try:
        plot(replayed, folder / "comparison.png")
    except ImportError:
        print(f"no picture: {install_hint('plot')}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
