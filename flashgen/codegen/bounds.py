"""Loop bounds as kernel text: which key tiles a query tile skips, computes plainly, or masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sympy as sp

from flashgen.codegen.expr import TritonPrinter
from flashgen.codegen.reads import input_read
from flashgen.passes.inputs import range_conditions
from flashgen.passes.visibility import Q_FIRST, Q_LAST, ROW_LAST, Scan, Span
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec

BoundsKind = Literal["none", "single", "pair", "chunks"]
SCAN_KEYS = 4096  # ids read per step of a document scan: 16 a thread at 8 warps

# Largest and smallest value of an id's format, for the minimum over the rows of a tile.
ID_LIMITS = {
    "int32": ("-2147483648", "2147483647"),
    "int64": ("-9223372036854775808", "9223372036854775807"),
    "bool": ("0", "1"),
}
# A bound that has 64 bits, as key positions have it: there are none beyond 2**29.
NARROWED = "tl.minimum(tl.maximum({}, -1073741824), 1073741824).to(tl.int32)"
FLOAT_LIMITS = ('float("-inf")', 'float("inf")')


@dataclass(frozen=True)
class SpanText:
    """Loop bounds of one span, as kernel text; an empty text means unbounded."""

    start: str
    stop: str
    full_start: str
    full_stop: str
    possible: str
    always: str


@dataclass(frozen=True)
class PeriodText:
    """A periodic mask's chunks, as kernel text."""

    start: str
    width: str
    period: str
    uniform: str


@dataclass(frozen=True)
class ScanText:
    """A document scan, as kernel text."""

    name: str
    row_variable: str
    key_variable: str
    row_exists: str
    key_statement: str
    keys_per_step: int
    lowest: str
    highest: str


@dataclass(frozen=True)
class Bounds:
    """Which loops a query tile needs: partial before full, full, partial after."""

    kind: BoundsKind
    spans: tuple[SpanText, ...] = ()
    left_partial: bool = False
    full: bool = False
    period: PeriodText | None = None
    scan: ScanText | None = None

    @property
    def walk_starts(self) -> tuple[str, ...]:
        """Suffixes of the ranges whose first key tile depends on what the queries see (flash1)."""
        return self._decided([span.start for span in self.spans])

    @property
    def walk_stops(self) -> tuple[str, ...]:
        """The same for the tile after the last."""
        return self._decided([span.stop or span.possible for span in self.spans])

    def _decided(self, ends: list[str]) -> tuple[str, ...]:
        if self.kind == "pair":
            return ("_0", "_1")
        searched = self.kind == "chunks" or self.scan is not None
        return ("",) if searched or any(ends) else ()


@dataclass(frozen=True)
class Positions:
    """Which positions of a query tile a kernel computes, so that none is left unused."""

    row_last: bool
    q_first: bool
    q_last: bool
    q_idx: bool


def span_expressions(span: Span) -> list[sp.Basic]:
    texts = [
        span.hull.start,
        span.hull.stop,
        span.full.start,
        span.full.stop,
        span.possible,
        span.always,
    ]
    if span.period:
        texts += [span.period.start, span.period.width, span.period.period, span.period.uniform]
    if span.scan:
        texts += [span.scan.row_read, span.scan.key_read]
    return texts


def positions(spans: Sequence[Span], element_wise: set[sp.Basic]) -> Positions:
    in_bounds = {symbol for s in spans for e in span_expressions(s) for symbol in e.free_symbols}
    scans = any(s.scan for s in spans)
    return Positions(
        row_last=bool({Q_LAST, ROW_LAST} & in_bounds),
        q_first=Q_FIRST in in_bounds,
        q_last=Q_LAST in in_bounds,
        q_idx=sym.Q in element_wise or scans,
    )


def bounds_text(spans: Sequence[Span], spec: AttentionSpec, printer: TritonPrinter) -> Bounds:
    if not spans:
        return Bounds("none")
    full = not all(s.never_full for s in spans)
    left = full and any(s.full.start != -sp.oo or s.scan or s.period for s in spans)
    first = spans[0]
    kind: BoundsKind = "pair" if len(spans) > 1 else "chunks" if first.period else "single"
    return Bounds(
        kind=kind,
        spans=tuple(_span_text(s, printer) for s in spans),
        left_partial=left,
        full=full,
        period=PeriodText(*(printer.doprint(e) for e in _period_parts(first)))
        if first.period
        else None,
        scan=_scan_text(first.scan, spec, printer) if first.scan and kind == "single" else None,
    )


def _period_parts(span: Span) -> tuple[sp.Basic, ...]:
    assert span.period is not None
    return (span.period.start, span.period.width, span.period.period, span.period.uniform)


def _span_text(span: Span, printer: TritonPrinter) -> SpanText:
    def bound(e: sp.Expr) -> str:
        if e.is_infinite:
            return ""
        text = printer.doprint(e)
        return NARROWED.format(text) if printer.is_wide(e) else text

    def condition(e: sp.Basic) -> str:
        return "" if e == sp.true else printer.doprint(e)

    full_stop = "0" if span.never_full else bound(span.full.stop)
    return SpanText(
        start=bound(span.hull.start),
        stop=bound(span.hull.stop),
        full_start="" if span.never_full else bound(span.full.start),
        full_stop=full_stop,
        possible=condition(span.possible),
        always="" if span.never_full else condition(span.always),
    )


def _scan_text(scan: Scan, spec: AttentionSpec, printer: TritonPrinter) -> ScanText:
    keys = TritonPrinter({**printer.names, sym.K: "scan_idx"})
    lowest, highest = ID_LIMITS.get(spec.input(scan.name).dtype, FLOAT_LIMITS)
    conditions = [printer.doprint(c) for c in range_conditions(scan.row_read, spec)]
    return ScanText(
        name=scan.name,
        row_variable=printer.names[scan.row_read],
        key_variable=printer.names[scan.key_read],
        row_exists=" & ".join(["row_exists", *(f"({c})" for c in conditions)]),
        key_statement=input_read(
            scan.key_read, "ids", spec, keys, in_tile="scan_exists"
        ).masked_statement,
        keys_per_step=SCAN_KEYS,
        lowest=lowest,
        highest=highest,
    )
