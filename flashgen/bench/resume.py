"""A record that a later command goes on with: the same GPU, the same versions, what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashgen.bench.record import Part, Record, RecordError, load


def resumed(new: Record, path: Path) -> Record:
    """The record in `path` as this command's, its own earlier parts beside it; `new` as it is where
    there is no such file. RecordError where it cannot be read, or other things were measured."""
    if not path.exists():
        return new
    old = load(path)
    problem = _difference(old, new)
    if problem:
        raise RecordError(
            f"{path}: {problem}, and one record has one GPU and one set of versions\n"
            "  hint: give another folder with --out, or move this file away to begin anew."
        )
    before = Part(old.command, old.started, old.seconds, old.preparation)
    return replace(
        new,
        ceilings=old.ceilings,
        cases=old.cases,
        not_run=old.not_run,
        parts=(*old.parts, before),
    )


def _difference(old: Record, new: Record) -> str:
    if old.suite != new.suite:
        return f"is the record of suite {old.suite}, this is {new.suite}"
    if old.target != new.target:
        return f"was measured on {old.target}, this is {new.target}"
    names = dict.fromkeys((*old.environment, *new.environment))
    differing = [n for n in names if old.environment.get(n) != new.environment.get(n)]
    if not differing:
        return ""
    pairs = (
        f"{name} {old.environment.get(name, 'none')} (now {new.environment.get(name, 'none')})"
        for name in differing
    )
    return f"was measured with {', '.join(pairs)}"
