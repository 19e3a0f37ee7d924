"""Tune several specs within one budget of time, and say which family won where.

    python -m flashgen.bench.tuning_run --out DIR --seconds 480 llama3_8b gemma2_local

It looks first whether everything is there, and says what it is going to do. Tables go to
DIR/tuned_configs, trials to DIR/trials (a later run goes on from them), and after each spec
DIR/tuning.json and tuning.md are written anew: so a run that is stopped keeps what it had.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashgen import settings
from flashgen.bench.markdown import number, table
from flashgen.errors import FlashgenError, TuningError
from flashgen.problem import Problem
from flashgen.runtime.artifact import replace_file
from flashgen.schedule.families import families_here, missing_here
from flashgen.schedule.model import HOPPER, Bucket, Schedule, bucket_of
from flashgen.schedule.space import unserved
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.target import Target
from flashgen.tune.session import Result
from flashgen.tune.storage import need_optuna

LEAST_S = 10.0  # of search in a bucket; with less it is left out
START_S = 12.0  # of each spec: processes that import torch and make a context
Tune = Callable[..., Any]


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Plan:
    """A spec and its shape buckets, of which some have a choice between families."""

    spec: AttentionSpec
    buckets: tuple[Bucket, ...]
    with_choice: int

    def __str__(self) -> str:
        return (
            f"{self.spec.display_name}: {len(self.buckets)} buckets, {self.with_choice} of them "
            "with Hopper kernels"
        )


def plans(specs: Iterable[AttentionSpec], target: Target) -> list[Plan]:
    """What there is to tune, specs without a shape left out."""
    found = []
    for spec in specs:
        buckets = tuple(dict.fromkeys(bucket_of(s.q_len, s.kv_len) for s in spec.shapes))
        problem = Problem(spec, target)
        choice = sum(unserved(HOPPER, problem, bucket) is None for bucket in buckets)
        if buckets:
            found.append(Plan(spec, buckets, choice))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", help="default: all that Hopper kernels serve")
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is written")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing later")
    parser.add_argument("--bucket-seconds", type=float, default=45.0, help="at most, of search")
    parser.add_argument("--family", help="search this one alone")
    parser.add_argument("--check", action="store_true", help="only say what would be done")
    options = parser.parse_args()
    begun = time.monotonic()
    try:
        target = _target_here()
        wanted = plans(map(_spec, options.specs or _shipped()), target)
    except FlashgenError as error:
        sys.exit(f"error: {error}")
    if not options.specs:
        wanted = [plan for plan in wanted if plan.with_choice]
    _say(f"{target.name}; families: {', '.join(families_here(target))}")
    if missing := missing_here(HOPPER, target):
        _say(f"no Hopper kernels: {missing}")
    for plan in wanted:
        _say(f"  {plan}")
    if not options.check:
        run = TuningRun(options.out, options.seconds, options.bucket_seconds, options.family)
        run.began = begun
        run.tune_all(wanted, target, _tune)


def _shipped() -> list[str]:
    return sorted(path.stem for path in settings.specs_dir().glob("*.yaml"))


def _spec(name: str) -> AttentionSpec:
    """A shipped spec by its name, or that of a file."""
    return load_spec(settings.specs_dir() / f"{name}.yaml" if name in _shipped() else Path(name))


def _target_here() -> Target:
    """TuningError where nothing can be tuned here."""
    import torch

    from flashgen.compiler.choose import target_of

    need_optuna()
    if not torch.cuda.is_available():
        raise TuningError("tuning measures on a GPU, and PyTorch sees none")
    return target_of(torch.device("cuda", 0))


def _tune(spec: AttentionSpec, **options: Any) -> Any:
    from flashgen.compiler.tuning import tune

    return tune(spec, **options)


@dataclass
class TuningRun:
    """A run: how long, and what came of it. `clock` and `say` are what tests replace."""

    out: Path
    seconds: float
    bucket_seconds: float
    family: str | None = None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = _say
    began: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def tune_all(self, wanted: Sequence[Plan], target: Target, tune: Tune) -> None:
        """One spec after the other, as far as the time goes; what a spec does ends no other."""
        if self.began is None:
            self.began = self.clock()
        (self.out / "trials").mkdir(parents=True, exist_ok=True)
        buckets = sum(len(plan.buckets) for plan in wanted)
        for number_, plan in enumerate(wanted):
            name = plan.spec.display_name
            share = self._share(buckets, len(wanted) - number_)
            buckets -= len(plan.buckets)
            if share < LEAST_S:
                self.left_out[name] = f"the budget of {self.seconds:g} s was spent"
            else:
                self.say(f"{self._passed():6.1f} s  {plan}, {share:.0f} s each")
                self._tune_one(plan, target, tune, share)
            self._write(target)

    def _passed(self) -> float:
        assert self.began is not None
        return self.clock() - self.began

    def _share(self, buckets: int, specs: int) -> float:
        """Seconds of search for each bucket that is left."""
        left = self.seconds - self._passed() - START_S * specs
        return min(self.bucket_seconds, left / max(1, buckets))

    def _tune_one(self, plan: Plan, target: Target, tune: Tune, share: float) -> None:
        try:
            tuning = tune(
                plan.spec,
                target=target,
                seconds=share,
                family=self.family,
                out=self.out / "tuned_configs",
                storage=str(self.out / "trials"),
            )
        except FlashgenError as error:
            self.left_out[plan.spec.display_name] = f"{type(error).__name__}: {error}"
            return
        for result in tuning.results:
            row = facts(plan.spec, result)
            self.rows.append(row)
            self.say(f"{self._passed():6.1f} s    {line(row)}")

    def _write(self, target: Target) -> None:
        record = {"gpu": target.id, "results": self.rows, "left out": self.left_out}
        replace_file(self.out / "tuning.json", json.dumps(record, indent=1) + "\n")
        replace_file(self.out / "tuning.md", markdown(target.id, self.rows, self.left_out))


# **** what came of it ****


def facts(spec: AttentionSpec, result: Result) -> dict[str, Any]:
    """One bucket, as JSON types. place: where the model had the winner among its family's."""
    found, entry = result.outcome, result.entry
    row: dict[str, Any] = {"spec": spec.display_name, **result.to_dict()}
    row["lengths"] = str(result.case.bucket)
    row["discarded"] = (
        dict(Counter(_in_short(why) for why in found.discarded.values())) if found else {}
    )
    if entry is None:
        return row
    row["family"] = entry.schedule.family
    row["place"], row["of"] = _place(entry.schedule, result.predicted_us)
    best: dict[str, float] = {}
    for each in found.known.values() if found else ():
        family = each.schedule.family
        if each.time_us is not None:
            best[family] = min(each.time_us, best.get(family, each.time_us))
    row["best us by family"] = best
    return row


def _in_short(reason: str) -> str:
    """A compiler's reason without its numbers."""
    return reason.partition(":")[0].partition(" (")[0].partition(" 4")[0][:60]


def _place(schedule: Schedule, predicted: Mapping[Schedule, float]) -> tuple[int | None, int]:
    family = [each for each in predicted if each.family == schedule.family]
    order = sorted(family, key=lambda each: (predicted[each], each))
    return (order.index(schedule) + 1 if schedule in family else None), len(order)


def line(row: Mapping[str, Any]) -> str:
    """A bucket in one line."""
    entry = row["entry"]
    if entry is None:
        return f"{row['lengths']}: nothing was timed ({row['stopped']})"
    schedule = Schedule.from_dict(entry["schedule"])
    took = number(entry["measured"]["time_us"])
    return f"{row['lengths']}: {took} us, {schedule}; {row['new_trials']} trials, {row['stopped']}"


def markdown(gpu: str, rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]) -> str:
    """The run as a page."""
    header = [
        "spec", "lengths", "family", "schedule", "us", "untuned / tuned", "best of triton, us",
        "best of gluon_sm90, us", "the model's place", "trials", "failed", "not compiled",
        "stopped",
    ]  # fmt: skip
    lines = [f"# Tuned in one run: {gpu}", ""]
    lines += [table(header, [_cells(row) for row in rows])] if rows else ["Nothing was tuned."]
    if left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- {name}: {' '.join(why.split())}" for name, why in left_out.items()]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    entry = row["entry"]
    counts = (row["failures"], row["discarded"])
    failed, discarded = (", ".join(f"{n} {what}" for what, n in each.items()) for each in counts)
    tail = [str(row["trials"]), failed, discarded, row["stopped"]]
    if entry is None:
        return [row["spec"], row["lengths"], *[""] * 7, *tail]
    took, untuned = entry["measured"]["time_us"], entry["default"]["time_us"]
    best = row["best us by family"]
    return [
        row["spec"],
        row["lengths"],
        row["family"],
        str(Schedule.from_dict(entry["schedule"])),
        number(took),
        f"{untuned / took:.3f}" if untuned else "",
        *(number(best[family]) if family in best else "" for family in ("triton", HOPPER)),
        f"{row['place']} of {row['of']}" if row["place"] else "",
        *tail,
    ]


if __name__ == "__main__":
    main()
