"""Several runs of a case as one record: samples together, and the median of each run beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashgen.bench.fa_figures import is_ours
from flashgen.bench.record import CaseRecord, Result
from flashgen.tune.summary import summarise

MERGED = ("schedules", "compiled", "settled ms")  # facts by name, to which each run adds


def joined_case(old: CaseRecord | None, new: CaseRecord, about: Mapping[str, Any]) -> CaseRecord:
    """`new` as one more run of `old`; about: what is to be said of the run."""
    run = {
        **about,
        "ms": {each.name: each.ms.median for each in new.results if each.ms is not None},
        "failed": {each.name: each.error for each in new.results if each.error is not None},
    }
    if old is None:
        return replace(new, facts={**new.facts, "runs": [run]})
    facts: dict[str, Any] = {**old.facts, **new.facts, "runs": [*old.facts.get("runs", ()), run]}
    for name in MERGED:
        facts[name] = {**old.facts.get(name, {}), **new.facts.get(name, {})}
    names = dict.fromkeys(each.name for each in (*old.results, *new.results))
    results = tuple(_joined(old.result(name), new.result(name)) for name in names)
    return replace(old, results=results, facts=facts)


def _joined(old: Result | None, new: Result | None) -> Result:
    """A schedule of ours that failed once has no time; a peer's earlier times stay."""
    if old is None or new is None:
        found = old or new
        assert found is not None
        return found
    if new.ms is None:
        return new if is_ours(new.name) or old.ms is None else old
    if old.ms is None:
        return new
    samples = (*old.samples_ms, *new.samples_ms)
    worst = max(
        (each.accuracy for each in (old, new) if each.accuracy is not None),
        key=lambda accuracy: accuracy.relative_error,
        default=None,
    )
    return replace(new, ms=summarise(samples), samples_ms=samples, accuracy=worst)


def medians_us(case: CaseRecord, name: str) -> list[float]:
    """The contestant's median in each run that it took part in, in microseconds."""
    runs = case.facts.get("runs", ())
    return [1e3 * run["ms"][name] for run in runs if name in run["ms"]]
