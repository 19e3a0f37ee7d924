"""The record of a run, as JSON with a line a case, and its report in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from flashgen.bench.model_check.compare import EXACT, HIGH, LOW, Row, grouped
from flashgen.bench.record import RecordError

VERSION = 1
COLUMNS = tuple(field.name for field in fields(Row))


@dataclass(frozen=True)
class Record:
    """All rows of a run, and what it was made with. not_run: cases that time did not allow."""

    environment: Mapping[str, str]
    command: str
    started: str
    seconds: float
    not_run: int
    rows: tuple[Row, ...]

    @property
    def faults(self) -> tuple[Row, ...]:
        """Rows in which the model is further off than it may be."""
        return tuple(
            row
            for row in self.rows
            if not row.is_close or row.breaks_a_bound or row.wrongly_rejected
        )

    def to_json(self) -> str:
        head = {
            "version": VERSION,
            "environment": dict(self.environment),
            "command": self.command,
            "started": self.started,
            "seconds": self.seconds,
            "not_run": self.not_run,
            "columns": COLUMNS,
        }
        lines = ",\n".join(json.dumps(astuple(row)) for row in self.rows)
        return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of `to_json`; RecordError for anything else."""
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION or tuple(data.pop("columns")) != COLUMNS:
                raise RecordError("a record of another version")
            return cls(**{**data, "rows": tuple(Row(*row) for row in data["rows"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise RecordError(f"not a record: {type(error).__name__}: {error}") from None


def load(path: Path) -> Record:
    """The record in `path`; RecordError names the file."""
    try:
        return Record.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecordError) as error:
        raise RecordError(f"{path}: {error}") from None


def render(record: Record) -> str:
    """The report: the same record gives the same text."""
    rows = record.rows
    parts = [
        f"# On-chip memory: the model and Triton {record.environment['triton']}",
        _provenance(record),
        _METHOD,
        "## Shared memory",
        _table(_SHARED, [_shared(*each) for each in _by_target(rows).items()]),
        *_unaligned(rows),
        "## Feasibility",
        "\n".join(f"- {line}" for line in _feasibility(rows)),
        "## Registers",
        "\n".join(f"- {line}" for line in _registers(rows)),
    ]
    if record.faults:
        parts += [
            "## Further off than it may be",
            "\n".join(f"- {_told(r)}" for r in record.faults),
        ]
    return "\n\n".join(parts) + "\n"


_METHOD = (
    "Every case is a kernel of a spec (dtype, head dims, mask or score) and a schedule for a "
    "target, compiled without its GPU. The sample was drawn without asking the model, mostly near "
    "the target's limit, on either side of it. A kernel that could not be launched is given up "
    "once Triton has allocated its memory; of the others, machine code is made for those that were "
    "rejected for registers, and for every sixth admitted one. The model's shared bytes must be "
    f"exact on {EXACT}, and elsewhere between {LOW:.0%} and +{HIGH:.0%} of the compiler's. "
    "Feasibility is decided by lower bounds: bytes of what is alive at the same time, and "
    "registers of accumulator, scores and row statistics, for rows that are aligned to 16 bytes."
)
_UNALIGNED = (
    "Of these, rows that are not aligned to 16 bytes. Elements of 4 bytes can be copied "
    "asynchronously one by one, those of 2 bytes cannot: they pass through registers, and of a "
    "pipelined loop's stages none are in shared memory. Schedules are chosen for aligned rows, "
    "which need more, but for some score inputs: those change their layout in fewer passes."
)
_SHARED = ("target", "cases", "exact", "lowest", "highest", "outside")


def _provenance(record: Record) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    missing = f"; **{record.not_run} cases were not compiled**" if record.not_run else ""
    return "\n".join(
        (
            f"- {record.started}, {record.seconds:.0f} s, {len(record.rows)} cases{missing}",
            f"- command: `{record.command}`",
            f"- {versions}",
        )
    )


def _by_target(rows: Sequence[Row]) -> Mapping[str, tuple[Row, ...]]:
    return grouped(rows, lambda row: row.arch)


def _unaligned(rows: Sequence[Row]) -> Iterator[str]:
    """The part about rows that are not aligned, where there are any."""
    found = [row for row in rows if not row.aligned]
    if found:
        groups = grouped(found, lambda row: row.dtype)
        header = ("dtype", *_SHARED[1:])
        yield "## Shared memory, rows not aligned"
        yield _UNALIGNED
        yield _table(header, [_shared(*each) for each in sorted(groups.items())])


def _shared(group: str, rows: Sequence[Row]) -> tuple[str, ...]:
    known = [row for row in rows if row.off is not None]
    offs = [row.off or 0.0 for row in known]
    return (
        group,
        str(len(known)),
        str(sum(off == 0 for off in offs)),
        f"{min(offs, default=0):+.2%}",
        f"{max(offs, default=0):+.2%}",
        str(sum(not row.is_close for row in rows)),
    )


def _feasibility(rows: Sequence[Row]) -> Iterator[str]:
    admitted = [row for row in rows if not row.reason]
    wrong = [row for row in admitted if row.wrongly_admitted]
    yield (
        f"admitted: {len(admitted)}; {len(wrong)} of them "
        f"({len(wrong) / max(1, len(admitted)):.1%}) could not be launched, and are discarded "
        "when compiled"
    )
    for reason, found in sorted(grouped([r for r in rows if r.reason], lambda r: r.reason).items()):
        refused = sum(not row.launchable and not row.error for row in found)
        spilled = [row.spill_bytes for row in found if row.launchable and row.spill_bytes]
        failed = sum(bool(row.error) for row in found)
        parts = [f"{refused} could not be launched"] if refused else []
        if spilled:
            parts.append(f"{len(spilled)} spill, {min(spilled)} B a thread or more")
        if failed:
            parts.append(f"{failed} do not compile in time")
        unknown = sum(not row.is_judged and row.aligned for row in found)
        if unknown:
            parts.append(f"{unknown} without machine code")
        aside = sum(row.launchable and not row.aligned for row in found)
        if aside:
            parts.append(f"{aside} of rows not aligned, judged by aligned ones")
        yield f"rejected, {reason}: {len(found)}: {', '.join(parts)}"
    yield f"rejected, and yet compiled and fitted: {sum(row.wrongly_rejected for row in rows)}"


def _registers(rows: Sequence[Row]) -> Iterator[str]:
    made = [row for row in rows if row.regs is not None]
    whole = [row for row in made if not row.spill_bytes]
    yield f"machine code was made for {len(made)}; {len(made) - len(whole)} spill"
    below = sum((row.regs or 0) < row.least_regs for row in whole)
    yield f"without spilling, fewer registers than the lower bound: {below}"
    if whole:
        ratios = sorted(row.least_regs / (row.regs or 1) for row in whole)
        yield (
            "lower bound as a share of the registers used, without spilling: median "
            f"{ratios[len(ratios) // 2]:.0%}, highest {ratios[-1]:.0%}"
        )


def _told(row: Row) -> str:
    found = f"{row.allocated_bytes} B, {row.regs} registers, {row.spill_bytes} B spilled"
    said = f"{row.smem_bytes} B ({row.least_smem_bytes} B, {row.least_regs} registers at least)"
    verdict = row.rejection or "admitted"
    return f"{row.id}: {found}; the model: {said}; {verdict} {row.error}".strip()


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
