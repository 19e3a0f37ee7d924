"""Which tuned schedule serves a shape bucket: exact, else near, else a relative GPU's, else none.

`tables_of` is on the warm path: it reads the few files that may say something of a spec and gives a
key for the cache of plans, so that a changed table is a new plan. `resolve` runs once a plan, where
one is generated: it parses, checks every entry against `schedule.space.check`, and says what was
not used and what would mend it. A call finds its schedule in its plan; nothing is looked up there.

Folders, first to last: FLASHGEN_CONFIG_DIR, `tuned_configs` in the user's cache, the packaged one.
Inside a stage of the order (exact, near, relative) an earlier folder wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen import settings
from flashgen.errors import TableError
from flashgen.fingerprint import fingerprint_text
from flashgen.runtime.said import say_once
from flashgen.schedule.model import KV_LEN_LIMITS, Bucket, Schedule, all_buckets
from flashgen.spec.model import AttentionSpec
from flashgen.target import TARGETS, Target
from flashgen.tune.table import MAKE_READABLE, RETUNE, Entry, Table, parse_table, read_data

if TYPE_CHECKING:
    from flashgen.problem import Problem

# A schedule serves lengths up to 4 times shorter or longer than those it was tuned for: each step
# between buckets is a factor of 2 in keys. Farther off the untuned choice is as good a guess.
NEAR_STEPS = 2


@dataclass(frozen=True)
class Source:
    """A file that may have something for a spec, or with `unread` what cannot be read, and why."""

    path: Path
    gpu: str
    data: bytes
    unread: str = ""


@dataclass(frozen=True)
class Tables:
    """All sources for a spec on a target, best first; `key` changes with any of them."""

    sources: tuple[Source, ...]
    key: str


@dataclass(frozen=True)
class Tuned:
    """A table's entry for a bucket, and where it comes from, in words."""

    entry: Entry
    origin: str

    @property
    def schedule(self) -> Schedule:
        return self.entry.schedule


@dataclass(frozen=True)
class Resolved:
    """What tables say for every bucket (those left out: nothing), and what is to be said once."""

    choices: Mapping[Bucket, Tuned]
    notes: tuple[str, ...]


_Found = list[tuple[Table, Source]]
NOTHING = Tables((), "")
_memo: dict[tuple[str, str, str, tuple[Path, ...]], Tables] = {}


def tables_of(spec: AttentionSpec, target: Target) -> Tables:
    """The tables of `spec`, by name or fingerprint, for `target` and GPUs like it. Memoised."""
    places = tuple(folders())
    key = (spec.fingerprint, spec.display_name, target.id, places)
    found = _memo.get(key)
    if found is None:
        check_folder()
        found = _memo[key] = _read_all(spec, target, places)
    return found


def folders() -> Iterator[Path]:
    """Where tables are looked for, first to last."""
    chosen = settings.config_dir()
    if chosen is not None:
        yield chosen
    yield settings.cache_dir() / "tuned_configs"
    yield settings.tuned_configs_dir()


def check_folder() -> None:
    """Say once that FLASHGEN_CONFIG_DIR names no folder."""
    chosen = settings.config_dir()
    if chosen is None or chosen.is_dir():
        return
    found, hint = "there is no such folder", "correct it, or let `flashgen tune` make the folder."
    if chosen.exists():
        found, hint = "is no folder", "name a folder of tables, or unset it."
    say_once(f"FLASHGEN_CONFIG_DIR={chosen}: {found}; no tables are read from it\n  hint: {hint}")


def forget() -> None:
    """Read tables anew from now on: one was written."""
    _memo.clear()


def relatives(target: Target) -> tuple[Target, ...]:
    """Other GPUs of the same compute capability, the ones with the nearest number of SMs first."""
    others = [
        other
        for other in TARGETS.values()
        if other.id != target.id
        and (other.vendor, other.compute_capability) == (target.vendor, target.compute_capability)
    ]
    return tuple(sorted(others, key=lambda t: (abs(t.sm_count - target.sm_count), t.id)))


def resolve(tables: Tables, problem: Problem, buckets: Iterable[Bucket] | None = None) -> Resolved:
    """The tuned schedule of each bucket (default: all) that has one, and the notes with them."""
    notes: list[str] = []
    found = _all_usable(tables, problem, notes)
    own = [item for item in found if item[1].gpu == problem.target.id]
    others = [item for item in found if item[1].gpu != problem.target.id]
    choices: dict[Bucket, Tuned] = {}
    refused: dict[tuple[Path, Bucket], str] = {}
    for bucket in all_buckets() if buckets is None else buckets:
        chosen = _choose(bucket, own, problem, refused, "tuned")
        if chosen is None:
            chosen = _choose(bucket, others, problem, refused, "tuned on {gpu}")
        if chosen is not None:
            choices[bucket] = chosen
    for (path, _), text in refused.items():
        notes.append(f"{path}: {text}; the entry is ignored\n  hint: {RETUNE}")
    borrowed = sorted(
        {s.gpu for _, s in others if any(s.gpu in c.origin for c in choices.values())}
    )
    if borrowed:
        notes.append(
            f"{problem.name}: schedules tuned on {', '.join(borrowed)} are used on "
            f"{problem.target.id}, which has the same compute capability\n"
            f"  hint: `flashgen tune {problem.name}` on this GPU finds its own."
        )
    return Resolved(choices, tuple(notes))


def seeds(tables: Tables, problem: Problem, bucket: Bucket) -> tuple[Schedule, ...]:
    """Tuned schedules worth trying for `bucket`: this GPU's and its relatives', nearest first."""
    chosen = [
        entry.schedule
        for entry, _, _ in _candidates(bucket, _all_usable(tables, problem, []))
        if _why_not(entry, bucket, problem) is None
    ]
    return tuple(dict.fromkeys(chosen))


# **** reading ****


def _read_all(spec: AttentionSpec, target: Target, places: tuple[Path, ...]) -> Tables:
    gpus = (target.id, *(other.id for other in relatives(target)))
    sources = tuple(
        source for gpu in gpus for folder in places for source in _sources(folder / gpu, gpu, spec)
    )
    texts = [f"{s.gpu}/{s.path.name}\0{fingerprint_text(s.data.hex())}{s.unread}" for s in sources]
    return Tables(sources, fingerprint_text("\n".join(texts)) if sources else "")


def _sources(folder: Path, gpu: str, spec: AttentionSpec) -> Iterator[Source]:
    """Files called as the spec, and files that hold its fingerprint: an unnamed spec may be a
    shipped one. What cannot be read may be one of these: it is a source, so that it is said."""
    fingerprint = spec.fingerprint.encode()
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return
    for path in paths:
        try:
            data = read_data(path)
        except TableError as error:
            yield Source(path, gpu, b"", error.problem)
        else:
            if path.stem == spec.display_name or fingerprint in data:
                yield Source(path, gpu, data)


def _all_usable(tables: Tables, problem: Problem, notes: list[str]) -> _Found:
    return [
        (table, source)
        for source in tables.sources
        if (table := _usable(source, problem, notes)) is not None
    ]


def _usable(source: Source, problem: Problem, notes: list[str]) -> Table | None:
    """The table, if it is one and of this spec and its folder's GPU; a note where it is not."""
    if source.unread:
        notes.append(
            f"{source.path}: {source.unread}; the table is ignored\n  hint: {MAKE_READABLE}"
        )
        return None
    try:
        table = parse_table(source.data, str(source.path))
    except TableError as error:
        notes.append(f"{error.place}: {error.problem}; the table is ignored\n  hint: {RETUNE}")
        return None
    if table.gpu != source.gpu:
        notes.append(
            f"{source.path}: gpu: is a table of {table.gpu} in the folder of {source.gpu}; "
            f"it is ignored\n  hint: move it to the folder {table.gpu}, or tune on {source.gpu}."
        )
        return None
    if table.fingerprint != problem.spec.fingerprint:
        notes.append(
            f"{source.path}: fingerprint: {table.spec} was tuned as {table.fingerprint[:12]} and "
            f"is now {problem.spec.fingerprint[:12]}; the table is ignored\n  hint: {RETUNE}"
        )
        return None
    return table


# **** choosing ****


def _choose(
    bucket: Bucket,
    found: _Found,
    problem: Problem,
    refused: dict[tuple[Path, Bucket], str],
    origin: str,
) -> Tuned | None:
    for entry, source, steps in _candidates(bucket, found):
        reason = _why_not(entry, bucket, problem)
        if reason is None:
            near = f" for {entry.bucket}" if steps else ""
            return Tuned(entry, origin.format(gpu=source.gpu) + near)
        if not steps:  # an entry that fits its own bucket may well not fit another
            refused[source.path, bucket] = f"entries: {entry.place}: {entry.schedule}: {reason}"
    return None


def _candidates(bucket: Bucket, found: _Found) -> Iterator[tuple[Entry, Source, int]]:
    """Entries that may serve `bucket`, nearest first; among equals those for longer keys."""
    ranked = []
    for number, (table, source) in enumerate(found):
        for entry in table.entries:
            steps = distance(entry.bucket, bucket)
            if entry.direction == "forward" and steps is not None and steps <= NEAR_STEPS:
                ranked.append((steps, number, -_step(entry.bucket), entry, source))
    ranked.sort(key=lambda item: item[:3])
    return ((entry, source, steps) for steps, _, _, entry, source in ranked)


def distance(one: Bucket, other: Bucket) -> int | None:
    """Steps between two buckets; None where they ask for different kinds of schedules.

    Rows of a tile and the kind of kernel differ between rows of buckets, so only the number of keys
    may differ; a single-tile kernel holds exactly its bucket's keys.
    """
    if one == other:
        return 0
    if one.q_len_max != other.q_len_max or "single_tile" in (one.kernel, other.kernel):
        return None
    return abs(_step(one) - _step(other))


def _step(bucket: Bucket) -> int:
    limit = bucket.kv_len_max
    return len(KV_LEN_LIMITS) if limit is None else KV_LEN_LIMITS.index(limit)


def _why_not(entry: Entry, bucket: Bucket, problem: Problem) -> str | None:
    from flashgen.schedule.space import check

    rejection = check(entry.schedule, problem, bucket)
    return None if rejection is None else str(rejection)
