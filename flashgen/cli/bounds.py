"""Loop bounds as JSON types; their text is `compiler.report.loop_bounds`."""

from __future__ import annotations

import sympy as sp

from flashgen.passes.visibility import Keys, Period, Visibility


def facts(found: Visibility) -> dict[str, object]:
    """The bounds of one mask; null: a side without a bound, or a range that is never full."""
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
