"""The tables of suite `fa-paper`, from its record alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from flashgen.bench.fa_cases import (
    CUDNN,
    FA3,
    FA3_PLAIN,
    FLASH,
    FLEX,
    FLEX_TUNED,
    GRID,
    VARIANT,
)
from flashgen.bench.fa_schedules import WIDE_CASES
from flashgen.bench.markdown import number, table
from flashgen.bench.record import CaseRecord, Record, matmul_name
from flashgen.tune.summary import geometric_mean

OURS, PLAIN = "flashgen ", "plain "
FA3_SCALED, FA4_SCALED = "fa3 (scaled)", "fa4 (scaled)"
BEST = 5  # schedules that are shown of a case with many
LONG = 8192  # from here on the share of the matmul rate is a goal, for wide heads
WIDE_HEADS = (128, 256)

NOTE = (
    "Times are medians of device time per call over bursts of about 9 ms after idle pauses, in "
    "which the contestants take turns; who is 25% behind the fastest one takes part in fewer "
    "rounds. TFLOP/s count the matmuls of visible pairs. Tensors are random; each contestant has "
    "them contiguous in its own layout, and every output was held against fp64 at the case's own "
    "shape before it was timed. Best: the fastest schedule of ours; default: the one that "
    "`flashgen.compile` takes, portable: the untuned one of the portable family. A figure marked "
    "(scaled) was not measured here: it is FlashAttention-3's in this run, times the ratio of both "
    "in another run. Settled: under lasting load, when the GPU has slowed down; after the slash "
    "the best peer's. Compare numbers only within this run."
)

Choice = Callable[[str], bool]


# **** what is compared with what ****


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def is_baseline(name: str) -> bool:
    return name.startswith(PLAIN)


def is_peer(name: str) -> bool:
    return not is_ours(name) and not is_baseline(name) and name != FA3_PLAIN


def best_of(case: CaseRecord, which: Choice) -> str | None:
    """The fastest of those contestants; None where none was timed."""
    times = {each.name: each.ms.median for each in case.results if each.ms and which(each.name)}
    return min(times, key=lambda name: times[name]) if times else None


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
    return _over(best_rate(case), max((rate for rate in peers if rate), default=None))


def ratio_to(case: CaseRecord, *names: str) -> float | None:
    """Our best over the first of these peers that has a figure."""
    rates = (rate_of(case, name) for name in names)
    return _over(best_rate(case), next((rate for rate in rates if rate), None))


def lost(case: CaseRecord) -> float | None:
    """The share of the plain causal kernel's TFLOP/s that a variant's mask or score costs."""
    share = _over(best_rate(case), rate_of(case, best_of(case, is_baseline)))
    return None if share is None else 1 - share


def _over(mine: float | None, peer: float | None) -> float | None:
    return mine / peer if mine and peer else None


# **** tables ****


def fa_parts(record: Record) -> list[str]:
    grid = [case for case in record.cases if case.group == GRID]
    variants = [case for case in record.cases if case.group == VARIANT]
    parts = [NOTE]
    if grid:
        parts.append(f"## Grid: how far ahead\n\n{_means(grid, record)}")
        parts.append(f"## Grid, TFLOP/s\n\n{_grid(grid, record)}")
    if variants:
        parts.append(f"## Variants, TFLOP/s of visible pairs\n\n{_variants(variants)}")
    parts.append(f"## Our best schedules\n\n{_winners(record.cases)}")
    parts += [
        f"## {case.id}: the {BEST} best schedules\n\n{_five(case)}"
        for case in record.cases
        if case.id in WIDE_CASES
    ]
    rejected = _rejected(record.cases)
    if rejected:
        parts.append("## Schedules that cannot be used\n\n" + "\n".join(rejected))
    return parts


def fa_line(case: CaseRecord) -> str:
    """A finished case in one line."""
    ours, peer = best_of(case, is_ours), best_of(case, is_peer)
    cells = [f"{peer} {_text(rate_of(case, peer))}", f"ratio {_ratio(peer_ratio(case))}"]
    wrong = sum(result.error is not None for result in case.results)
    if case.group == VARIANT:
        cells.append(f"lost {_percent(lost(case))}")
    if wrong:
        cells.append(f"{wrong} failed")
    return f"{case.id}: {_text(best_rate(case))} ({ours}), {', '.join(cells)}"


def _means(grid: Sequence[CaseRecord], record: Record) -> str:
    def default(case: CaseRecord) -> float | None:
        peer = rate_of(case, best_of(case, is_peer))
        return _over(rate_of(case, case.facts.get("default")), peer)

    rows = [
        _mean("best / fastest peer measured", grid, peer_ratio),
        _mean("best / fastest peer, scaled ones too", grid, lambda c: peer_ratio(c, scaled=True)),
        _mean("default / fastest peer measured", grid, default),
        *(
            _mean(f"best / {name}", grid, lambda case, name=name: ratio_to(case, name))  # type: ignore[misc]
            for name in (FA3, CUDNN, FLASH, FLEX)
        ),
    ]
    text = table(["ratio of speeds", "geometric mean", "lowest", "at", "cases"], rows)
    shares = {
        case.id: share
        for case in grid
        if case.shape["q_len"] >= LONG and _head_dim(case) in WIDE_HEADS
        for share in [_over(best_rate(case), record.ceiling(matmul_name(case.dtype)))]
        if share
    }
    if not shares:
        return text
    least = min(shares, key=lambda name: shares[name])
    return (
        f"{text}\n\nOf the rate of an 8192³ matmul in this run, at d=128 and 256 from {LONG} keys "
        f"on: at least {shares[least]:.1%} ({least})."
    )


def _head_dim(case: CaseRecord) -> int:
    return int(re.findall(r"/d(\d+)/", case.id)[0])


def _mean(
    title: str, cases: Sequence[CaseRecord], ratio: Callable[[CaseRecord], float | None]
) -> list[str]:
    found = {case.id: value for case in cases for value in [ratio(case)] if value is not None}
    mean = geometric_mean(found.values())
    if mean is None:
        return [title, "", "", "", f"0 of {len(cases)}"]
    least = min(found, key=lambda name: found[name])
    count = f"{len(found)} of {len(cases)}"
    return [title, f"**{mean:.3f}**", f"{found[least]:.3f}", least, count]


def _grid(cases: Sequence[CaseRecord], record: Record) -> str:
    ceiling = record.ceiling(matmul_name("bf16"))
    peers = (FLASH, CUDNN, FLEX, FLEX_TUNED, FA3, FA4_SCALED)
    rows = []
    for case in sorted(cases, key=_place):
        peer = best_of(case, is_peer)
        share = _over(best_rate(case), ceiling)
        rows.append(
            [
                case.id,
                f"**{_text(best_rate(case))}**",
                _text(rate_of(case, case.facts.get("default"))),
                _text(rate_of(case, case.facts.get("portable"))),
                *(_text(rate_of(case, name)) for name in peers),
                peer or "",
                f"**{_ratio(peer_ratio(case))}**",
                _ratio(peer_ratio(case, scaled=True)),
                _percent(share),
                _settled(case),
            ]
        )
    header = [
        "case", "best", "default", "portable", *peers, "fastest peer", "ratio", "with scaled",
        "of matmul", "settled",
    ]  # fmt: skip
    return table(header, rows)


def _place(case: CaseRecord) -> tuple[int, bool, int]:
    return _head_dim(case), case.id.endswith("causal"), case.shape["q_len"]


def _settled(case: CaseRecord) -> str:
    times: dict[str, float] = case.facts.get("settled ms", {})
    names = (best_of(case, is_ours), best_of(case, is_peer))
    rates = [
        case.matmul_flops / times[name] / 1e9 if name is not None and name in times else None
        for name in names
    ]
    ratio = _over(*rates)
    return f"{_text(rates[0])} / {_text(rates[1])} = {_ratio(ratio)}" if ratio else ""


def _variants(cases: Sequence[CaseRecord]) -> str:
    rows = []
    for case in cases:
        rows.append(
            [
                case.id,
                f"**{_text(best_rate(case))}**",
                _text(rate_of(case, case.facts.get("default"))),
                _text(rate_of(case, case.facts.get("portable"))),
                _text(rate_of(case, best_of(case, is_baseline))),
                f"**{_percent(lost(case))}**",
                *(_text(rate_of(case, name)) for name in (FLASH, CUDNN, FLEX, FLEX_TUNED)),
                _text(rate_of(case, FA3)) or _marked(rate_of(case, FA3_SCALED)),
                _marked(rate_of(case, FA4_SCALED)),
                _ratio(ratio_to(case, FLEX_TUNED)),
                _ratio(ratio_to(case, FA3, FA3_SCALED)),
                _ratio(peer_ratio(case)),
                _settled(case),
            ]
        )
    header = [
        "case", "best", "default", "portable", "plain causal", "lost", FLASH, CUDNN, FLEX,
        FLEX_TUNED, FA3, "fa4", "best / flex max-autotune", "best / fa3", "best / fastest peer",
        "settled",
    ]  # fmt: skip
    means = [
        _mean("best / flex max-autotune", cases, lambda case: ratio_to(case, FLEX_TUNED)),
        _mean("best / fa3, scaled where it lacks the feature", cases,
              lambda case: ratio_to(case, FA3, FA3_SCALED)),
        _mean("best / fastest peer measured", cases, peer_ratio),
    ]  # fmt: skip
    summary = table(["ratio of speeds", "geometric mean", "lowest", "at", "cases"], means)
    note = "Lost: against our plain causal kernel of the same shape, per visible pair; ~: scaled."
    return f"{note}\n\n{table(header, rows)}\n\n{summary}"


def _winners(cases: Sequence[CaseRecord]) -> str:
    rows = []
    for case in cases:
        name = best_of(case, is_ours)
        rows.append([case.id, _plain_name(name), _time(case, name), *_beside(case)])
    return table(["case", "schedule", "us", "default is it", "timed"], rows)


def _beside(case: CaseRecord) -> list[str]:
    timed = sum(is_ours(each.name) and each.ms is not None for each in case.results)
    return ["yes" if case.facts.get("default") == best_of(case, is_ours) else "", str(timed)]


def _five(case: CaseRecord) -> str:
    timed = [each for each in case.results if is_ours(each.name) and each.ms is not None]
    timed.sort(key=lambda each: each.ms.median if each.ms else 0.0)
    first = case.tflops(timed[0].name) if timed else None
    rows = []
    for each in timed[:BEST]:
        rate = case.tflops(each.name)
        share = _over(rate, first)
        rows.append([_plain_name(each.name), _time(case, each.name), _text(rate), _ratio(share)])
    return table(["schedule", "us", "TFLOP/s", "of the best"], rows)


def _rejected(cases: Iterable[CaseRecord]) -> list[str]:
    lines = (
        f"- {case.spec}: {_plain_name(name)}: {reason}"
        for case in cases
        for name, reason in case.facts.get("rejected", {}).items()
    )
    return list(dict.fromkeys(lines))


def _plain_name(name: str | None) -> str:
    return "" if name is None else name.removeprefix(OURS)


def _time(case: CaseRecord, name: str | None) -> str:
    result = case.result(name) if name is not None else None
    if result is None or result.ms is None:
        return ""
    return " ".join(
        (
            number(1e3 * result.ms.median),
            f"({number(1e3 * result.ms.p20)}–{number(1e3 * result.ms.p80)})",
        )
    )


def _text(rate: float | None) -> str:
    return "" if rate is None else number(rate)


def _marked(rate: float | None) -> str:
    return "" if rate is None else f"~{number(rate)}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
