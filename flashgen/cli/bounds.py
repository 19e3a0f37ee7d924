"""Loop bounds as text: which keys the kernel visits for a query tile, and where it needs the mask."""

from __future__ import annotations

import sympy as sp

from flashgen.passes.visibility import Keys, Period, Span, Visibility

NOTES = """
A query tile holds rows at the positions q_first to q_last among the keys; k is a key's position.
Key tiles outside the keys that some row may see are empty: never visited. Tiles inside the keys that
every row sees are full: no mask is computed. All other tiles are partial: the mask decides each pair.
"""


def describe(name: str, found: Visibility) -> str:
    """The bounds of one spec, as `flashgen show --bounds` prints them."""
    lines = [f"loop bounds of {name}", "", f"mask: {found.predicate if found.spans else 'false'}"]
    for index, span in enumerate(found.spans):
        title = "keys" if len(found.spans) == 1 else f"keys, range {index + 1} of {len(found.spans)}"
        lines += ["", title, *_span_lines(span)]
    if not found.spans:
        lines += ["", "keys", "  no row sees a key: no tile is visited"]
    return "\n".join(lines) + "\n" + NOTES


def facts(found: Visibility) -> dict[str, object]:
    """The same as JSON types; a bound that does not exist is null."""
    return {
        "mask": str(found.predicate),
        "spans": [
            {
                "some_row": _interval(span.hull),
                "some_row_if": str(span.possible),
                "every_row": None if span.never_full else _interval(span.full),
                "every_row_if": str(span.always),
                "period": span.period and _period(span.period),
                "scan": span.scan and {"input": span.scan.name},
            }
            for span in found.spans
        ],
    }


def _interval(keys: Keys) -> dict[str, str | None]:
    start, stop = (None if e in (sp.oo, -sp.oo) else str(e) for e in (keys.start, keys.stop))
    return {"start": start, "stop": stop}


def _period(period: Period) -> dict[str, str]:
    return {name: str(getattr(period, name)) for name in ("start", "width", "period", "uniform")}


def _span_lines(span: Span) -> list[str]:
    lines = [f"  some row may see  {_text(span.hull)}{_condition(span.possible)}"]
    if span.scan:
        lines.append(
            f"                    and only from the first to the last key whose {span.scan.name} is "
            "that of a row, found at run time"
        )
    if span.never_full:
        lines.append("  every row sees    none for certain")
    else:
        lines.append(f"  every row sees    {_text(span.full)}{_condition(span.always)}")
    if span.scan and not span.never_full:
        lines.append(
            f"                    and only where rows and keys all have one {span.scan.name}"
        )
    if span.period:
        chunk = span.period
        lines.append(
            f"  in chunks         start + t*{chunk.period} <= k < start + t*{chunk.period} + width, for each t"
        )
        lines.append(f"                    start = {chunk.start}")
        lines.append(f"                    width = {chunk.width}")
        lines.append(f"                    full where {chunk.uniform}")
    return lines


def _text(keys: Keys) -> str:
    start = "0" if keys.start == -sp.oo else str(keys.start)
    stop = "kv_len" if keys.stop == sp.oo else str(keys.stop)
    return f"{start} <= k < {stop}"


def _condition(condition: sp.Basic) -> str:
    return "" if condition == sp.true else f", where {condition}"
