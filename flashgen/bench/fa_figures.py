"""What a record of suite `fa-paper` says of a case: who is whose, rates and ratios, and as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from flashgen.bench.fa_cases import FA3_PLAIN
from flashgen.bench.fa_outside import PREFIX
from flashgen.bench.markdown import number
from flashgen.bench.record import CaseRecord

OURS, PLAIN = "flashgen ", "plain "
FA3_SCALED, FA4_SCALED = "fa3 (scaled)", "fa4 (scaled)"

Choice = Callable[[str], bool]
Figure = Callable[[CaseRecord], float | None]


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def is_baseline(name: str) -> bool:
    return name.startswith(PLAIN)


def is_outside(name: str) -> bool:
    return name.startswith(PREFIX)


def is_peer(name: str) -> bool:
    others = (is_ours, is_baseline, is_outside)
    return name != FA3_PLAIN and not any(is_other(name) for is_other in others)


def outside_names(cases: Iterable[CaseRecord]) -> list[str]:
    """Outside contestants, in the order in which they were first met."""
    names = (each.name for case in cases for each in case.results if is_outside(each.name))
    return list(dict.fromkeys(names))


def best_of(case: CaseRecord, which: Choice) -> str | None:
    """The fastest of those contestants; None where none was timed.

    Of our schedules only those count that were in the latest run: what was fast once, and is not
    timed again, would be a lucky one.
    """
    times = {
        each.name: each.ms.median
        for each in case.results
        if each.ms and which(each.name) and (not is_ours(each.name) or goes_on(case, each.name))
    }
    return min(times, key=lambda name: times[name]) if times else None


def goes_on(case: CaseRecord, name: str) -> bool:
    """Whether a contestant has a time in the latest run: later ones leave out who is behind."""
    runs = case.facts.get("runs")
    return not runs or name in runs[-1]["ms"]


def rate_of(case: CaseRecord, name: str | None) -> float | None:
    """TFLOP/s, also of who was not measured but scaled, and of the plain case beside it."""
    if name is None:
        return None
    scaled: dict[str, float] = case.facts.get("scaled", {})
    if name in scaled:
        return scaled[name]
    if is_baseline(name) or name == FA3_PLAIN:
        median, flops = case.median_ms(name), case.facts.get("plain flops")
        return flops / median / 1e9 if median and flops else None
    return case.tflops(name)


def best_rate(case: CaseRecord) -> float | None:
    return rate_of(case, best_of(case, is_ours))


def peer_ratio(case: CaseRecord, *, scaled: bool = False) -> float | None:
    """Our best over the fastest peer; `scaled`: those who are not here among them."""
    peers = [rate_of(case, best_of(case, is_peer))]
    if scaled:
        peers += case.facts.get("scaled", {}).values()
    return over(best_rate(case), max((rate for rate in peers if rate), default=None))


def ratio_to(case: CaseRecord, *names: str) -> float | None:
    """Our best over the first of these peers that has a figure."""
    rates = (rate_of(case, name) for name in names)
    return over(best_rate(case), next((rate for rate in rates if rate), None))


def lost(case: CaseRecord) -> float | None:
    """The share of the plain causal kernel's TFLOP/s that a variant's mask or score costs."""
    share = over(best_rate(case), rate_of(case, best_of(case, is_baseline)))
    return None if share is None else 1 - share


def head_dim(case: CaseRecord) -> int:
    return int(re.findall(r"/d(\d+)/", case.id)[0])


def over(mine: float | None, peer: float | None) -> float | None:
    """A ratio; None where one of the two has no figure."""
    return mine / peer if mine and peer else None


# **** as text ****


def text(rate: float | None) -> str:
    return "" if rate is None else number(rate)


def marked(rate: float | None) -> str:
    return "" if rate is None else f"~{number(rate)}"


def ratio_text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
