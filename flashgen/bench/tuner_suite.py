"""Suite `tuner`: how near the tuner comes to the best of all schedules, and how soon.

Every feasible schedule of some cases is timed once; that takes longer than a run, so it is kept in
files and goes on in the next one. Where a case is complete, `flashgen tune` runs with empty caches,
in processes of its own. Then its pick, the untuned schedule and the best of all race each other,
and the race decides.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from flashgen import settings
from flashgen.bench.record import CaseRecord, RecordError, Result, load
from flashgen.bench.run import Run
from flashgen.bench.specs_suite import case_id
from flashgen.compiler.choose import target_of
from flashgen.errors import FlashgenError
from flashgen.problem import Problem
from flashgen.runtime.artifact import replace_file
from flashgen.schedule.families import PORTABLE
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import enumerate_space
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune.comparison import Exhaustive, empty, from_json, measure_all, progress, to_json
from flashgen.tune.measure import gpu_measurer, kept_workers
from flashgen.tune.measurement import Measurement, Measurer
from flashgen.tune.search import close_quietly
from flashgen.tune.summary import Summary

# Head dims 64, 72, 128 and 256; causal, windowed and full; a softcap, a bias, grouped heads.
SHAPES: Mapping[str, Shape] = {
    "llama3_8b": Shape(1, 32, 8, 4096, 4096),
    "gpt2": Shape(16, 12, 12, 1024, 1024),
    "gemma2_global": Shape(1, 16, 8, 4096, 4096),
    "siglip_so400m": Shape(16, 16, 16, 729, 729),
    "t5_encoder": Shape(8, 12, 12, 1024, 1024),
    "mistral_7b": Shape(1, 32, 8, 8192, 8192),
}
TUNE_S = 60.0  # what a cold run may take
TUNE_PROCESS_S = 150.0  # with the imports, and the starts of processes
RACERS = 3  # the best of all schedules, by the times that were taken one by one
DATA = "tuner-data"


class MakeMeasurer(Protocol):
    """`gpu_measurer`, or what a test puts in its place."""

    def __call__(self, data: Exhaustive, target: Target) -> Measurer: ...


@dataclass(frozen=True)
class Picked:
    """What `flashgen tune` found with empty caches, and how long it took.

    seconds: of the search; process_s: from the start of Python to its end.
    """

    schedule: Schedule | None = None
    trials: int = 0
    feasible: int = 0
    seconds: float = 0.0
    process_s: float = 0.0
    error: str = ""


def run_tuner(run: Run, device: torch.device) -> None:
    """Every wanted case: go on timing all schedules; where all are known, tune and race."""
    target = target_of(device)
    done = {case.id: case for case in earlier_cases(run)}
    with kept_workers():
        for name, shape in SHAPES.items():
            spec = load_spec(settings.specs_dir() / f"{name}.yaml")
            wanted = case_id(spec, shape)
            if not run.wants(wanted):
                continue
            if wanted in done:
                run.add(done[wanted])
            elif run.has_time_for(wanted):
                data = stored(run, empty(spec, target.id, shape))
                run_case(run, wanted, data, target, on_gpu(device), tune_cold)


def on_gpu(device: torch.device) -> MakeMeasurer:
    """Measurers on one GPU."""

    def make(data: Exhaustive, target: Target) -> Measurer:
        return gpu_measurer(data.spec, data.shape, target, devices=(device.index or 0,))

    return make


def run_case(
    run: Run,
    wanted: str,
    data: Exhaustive,
    target: Target,
    make_measurer: MakeMeasurer,
    tune: Callable[[Exhaustive], Picked],
) -> None:
    """One case, as far as the time goes. What was timed is kept after each batch."""
    measurer = make_measurer(data, target)
    until = time.monotonic() + run.budget_s - run.seconds

    def keep(now: Exhaustive) -> None:
        keep_data(run, now)
        run.say(f"{run.seconds:6.1f} s  {wanted}: {progress(now)}")

    try:
        data = measure_all(data, measurer, until, keep=keep)
        keep_data(run, data)
        left = len(data.predicted_us) - len(data.found) - len(data.discarded)
        if left:
            run.leave_out(wanted, f"{left} schedules are still to be timed; run again")
            return
        if not data.times:
            run.leave_out(wanted, "no schedule could be timed")
            return
        picked = tune(data)
        raced = measurer.race(racers(data, picked))
    except FlashgenError as error:  # the others may run
        run.leave_out(wanted, f"{type(error).__name__}: {error}")
        return
    finally:
        close_quietly(measurer)
    run.add(record_of(wanted, data, picked, raced, target))


def racers(data: Exhaustive, picked: Picked) -> tuple[Schedule, ...]:
    """The pick, the untuned schedule and the best ones."""
    best = sorted(data.times, key=lambda schedule: (data.times[schedule], schedule))[:RACERS]
    own = [each for each in (picked.schedule, data.default) if each in data.times]
    return tuple(dict.fromkeys((*own, *best)))


def record_of(
    wanted: str,
    data: Exhaustive,
    picked: Picked,
    raced: Mapping[Schedule, Measurement],
    target: Target,
) -> CaseRecord:
    """The case with everything that its table shows."""
    bucket = bucket_of(data.shape.q_len, data.shape.kv_len)
    space = enumerate_space(Problem(data.spec, target), bucket, (PORTABLE,))
    states: dict[str, int] = {}
    for each in data.found.values():
        states[each.state] = states.get(each.state, 0) + 1
    found = asdict(replace(picked, schedule=None))
    return CaseRecord(
        id=wanted,
        group="tuner",
        spec=data.spec.display_name,
        shape=asdict(data.shape),
        dtype=data.spec.dtype.q,
        results=tuple(_result(schedule, each) for schedule, each in raced.items()),
        facts={
            "grid": len(space.feasible) + len(space.rejections),
            "feasible": len(data.predicted_us),
            "discarded": reasons(data.discarded.values()),
            "states": states,
            "times_us": {str(schedule): time for schedule, time in data.times.items()},
            "default": str(data.default),
            "picked": found | {"schedule": picked.schedule and str(picked.schedule)},
        },
    )


def reasons(texts: Iterable[str]) -> dict[str, int]:
    """How many were discarded for the same reason, numbers aside.

    >>> reasons(["spills 300 bytes a thread, over 256", "spills 4 bytes a thread, over 256"])
    {'spills': 2}
    """
    found: dict[str, int] = {}
    for text in texts:
        word = next((w for w in _REASONS if text.startswith(w)), text.split(":")[0])
        found[word] = found.get(word, 0) + 1
    return found


_REASONS = ("spills", "needs", "compiling took over", "the compiler ended")


def _result(schedule: Schedule, measured: Measurement) -> Result:
    if measured.time_us is None:
        return Result(str(schedule), error=f"{measured.state}: {measured.reason}")
    times = (measured.time_us, measured.low_us or math.nan, measured.high_us or math.nan)
    return Result(str(schedule), how="race", ms=Summary(*(us / 1e3 for us in times)))


# ---- what is kept between runs


def earlier_cases(run: Run) -> tuple[CaseRecord, ...]:
    """Cases that an earlier run with the same GPU and versions finished; they are not run again."""
    if run.out is None:
        return ()
    try:
        earlier = load(run.out / run.record.target / f"{run.record.suite}.json")
    except RecordError:
        return ()
    same = earlier.environment == run.record.environment
    return tuple(case for case in earlier.cases if same and not case.facts["picked"]["error"])


def data_path(run: Run, data: Exhaustive) -> Path | None:
    """Where the times of a case are; None where the run keeps nothing."""
    if run.out is None:
        return None
    return run.out / run.record.target / DATA / f"{data.spec.display_name}.json"


def stored(run: Run, data: Exhaustive) -> Exhaustive:
    """The case with what earlier runs timed; another shape's or spec's times do not count."""
    path = data_path(run, data)
    if path is None or not path.is_file():
        return data
    try:
        found = from_json(path.read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError, FlashgenError) as error:
        run.say(f"{path}: {type(error).__name__}: {error}; every schedule is timed again")
        return data
    same = found.spec.fingerprint == data.spec.fingerprint and found.shape == data.shape
    return found if same else data


def keep_data(run: Run, data: Exhaustive) -> None:
    path = data_path(run, data)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(data), shared=True)


# ---- the tuner itself


def tune_cold(data: Exhaustive) -> Picked:
    """`flashgen tune` as a user runs it the first time: no kernel, no trial, no table is there."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashgen-tuner-") as folder:
        try:
            done = subprocess.run(
                tune_command(data, Path(folder)),
                env=cold_environment(Path(folder)),
                capture_output=True,
                text=True,
                timeout=TUNE_PROCESS_S,
                check=True,
            )
            found = json.loads(done.stdout)["results"][0]
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            return Picked(error=f"exit code {error.returncode}: {lines[-1] if lines else ''}")
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
            return Picked(error=f"{type(error).__name__}: {error}"[:300])
    entry = found["entry"]
    return Picked(
        schedule=Schedule.from_dict(entry["schedule"]) if entry else None,
        trials=found["trials"],
        feasible=found["feasible"],
        seconds=found["seconds"],
        process_s=round(time.monotonic() - begun, 1),
    )


def tune_command(data: Exhaustive, folder: Path) -> Sequence[str]:
    """The command; the spec travels as a file, so that it need not be a shipped one."""
    path = folder / f"{data.spec.display_name}.yaml"
    path.write_text(data.spec.to_yaml(), encoding="utf-8")
    s = data.shape
    sizes = ",".join(map(str, (s.batch, s.q_heads, s.kv_heads, s.q_len, s.kv_len)))
    options = ["--shape", sizes, "--seconds", f"{TUNE_S:g}", "--out", str(folder / "tables")]
    options += ["--family", PORTABLE]  # of which every schedule was timed
    return [sys.executable, "-m", "flashgen", "tune", str(path), *options, "--json"]


def cold_environment(folder: Path) -> dict[str, str]:
    """This environment with caches that are empty."""
    return {
        **os.environ,
        "FLASHGEN_CACHE_DIR": str(folder / "flashgen"),
        "FLASHGEN_CONFIG_DIR": str(folder / "none"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
