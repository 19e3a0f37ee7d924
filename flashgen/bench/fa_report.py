"""The tables of suite `fa-paper`, from its record alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashgen.bench.fa_cases import (
    CUDNN,
    FA3,
    FLASH,
    FLEX,
    FLEX_TUNED,
    GRID,
    VARIANT,
)
from flashgen.bench.fa_figures import (
    FA3_SCALED,
    FA4_SCALED,
    OURS,
    Figure,
    best_of,
    best_rate,
    goes_on,
    head_dim,
    is_baseline,
    is_ours,
    is_peer,
    lost,
    marked,
    outside_names,
    over,
    peer_ratio,
    percent,
    rate_of,
    ratio_text,
    ratio_to,
    text,
)
from flashgen.bench.fa_goals import family_of, goals, variant_goals
from flashgen.bench.fa_runs import medians_us
from flashgen.bench.fa_schedules import WIDE_CASES
from flashgen.bench.markdown import number, table
from flashgen.bench.record import CaseRecord, Record, matmul_name
from flashgen.tune.summary import geometric_mean

BEST = 5  # schedules that are shown of a case with many

NOTE = (
    "Times are medians of device time per call over bursts of about 9 ms after idle pauses, in "
    "which the contestants take turns; who is 25% behind the fastest one takes part in fewer "
    "rounds. A case is measured in several runs, processes of their own, of which the later ones "
    "are of those that were close; the medians are over the samples of all runs. TFLOP/s count "
    "the matmuls of visible pairs. Tensors are random; each contestant has them contiguous in its"
    " own layout, and every output was held against fp64 at the case's own shape before it was "
    "timed. Best: the fastest schedule of ours; default: the one that `flashgen.compile` takes, "
    "portable: the untuned one of the portable family. A figure marked (scaled) was not measured "
    "here: it is FlashAttention-3's in this run, times the ratio of both in another run. Outside:"
    " a function of a file that was given with `--contestant`; it is no peer in ratios. Settled: "
    "under lasting load, when the GPU has slowed down; after the slash the best peer's. Compare "
    "numbers only within this run."
)


def fa_parts(record: Record) -> list[str]:
    grid = [case for case in record.cases if case.group == GRID]
    variants = [case for case in record.cases if case.group == VARIANT]
    parts = [NOTE]
    if record.cases:
        parts.append(f"## Goals\n\n{goals(record)}")
    if grid:
        parts.append(f"## Grid: how far ahead\n\n{_means(grid)}")
        parts.append(f"## Grid, TFLOP/s\n\n{_grid(grid, record)}")
    if variants:
        parts.append(f"## Variants: what they cost\n\n{variant_goals(variants)}")
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
    cells = [f"{peer} {text(rate_of(case, peer))}", f"ratio {ratio_text(peer_ratio(case))}"]
    wrong = sum(result.error is not None for result in case.results)
    if case.group == VARIANT:
        cells.append(f"lost {percent(lost(case))}")
    if wrong:
        cells.append(f"{wrong} failed")
    return f"{case.id}: {text(best_rate(case))} ({ours}), {', '.join(cells)}"


def _means(grid: Sequence[CaseRecord]) -> str:
    def default(case: CaseRecord) -> float | None:
        peer = rate_of(case, best_of(case, is_peer))
        return over(rate_of(case, case.facts.get("default")), peer)

    rows = [
        _mean("best / fastest peer measured", grid, peer_ratio),
        _mean("best / fastest peer, scaled ones too", grid, lambda c: peer_ratio(c, scaled=True)),
        _mean("default / fastest peer measured", grid, default),
        *(
            _mean(f"best / {name}", grid, lambda case, name=name: ratio_to(case, name))  # type: ignore[misc]
            for name in (*outside_names(grid), FA3, CUDNN, FLASH, FLEX)
        ),
    ]
    return table(["ratio of speeds", "geometric mean", "lowest", "at", "cases"], rows)


def _mean(title: str, cases: Sequence[CaseRecord], ratio: Figure) -> list[str]:
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
    outside = outside_names(cases)
    rows = []
    for case in sorted(cases, key=_place):
        peer = best_of(case, is_peer)
        share = over(best_rate(case), ceiling)
        rows.append(
            [
                case.id,
                f"**{text(best_rate(case))}**",
                text(rate_of(case, case.facts.get("default"))),
                text(rate_of(case, case.facts.get("portable"))),
                *(text(rate_of(case, name)) for name in (*peers, *outside)),
                peer or "",
                f"**{ratio_text(peer_ratio(case))}**",
                ratio_text(peer_ratio(case, scaled=True)),
                *(ratio_text(ratio_to(case, name)) for name in outside),
                percent(share),
                _settled(case),
            ]
        )
    header = [
        "case", "best", "default", "portable", *peers, *outside, "fastest peer", "ratio",
        "with scaled", *(f"best / {name}" for name in outside), "of matmul", "settled",
    ]  # fmt: skip
    return table(header, rows)


def _place(case: CaseRecord) -> tuple[int, bool, int]:
    return head_dim(case), case.id.endswith("causal"), case.shape["q_len"]


def _settled(case: CaseRecord) -> str:
    times: dict[str, float] = case.facts.get("settled ms", {})
    names = (best_of(case, is_ours), best_of(case, is_peer))
    rates = [
        case.matmul_flops / times[name] / 1e9 if name is not None and name in times else None
        for name in names
    ]
    ratio = over(*rates)
    return f"{text(rates[0])} / {text(rates[1])} = {ratio_text(ratio)}" if ratio else ""


def _variants(cases: Sequence[CaseRecord]) -> str:
    rows = []
    outside = outside_names(cases)
    for case in cases:
        rows.append(
            [
                case.id,
                f"**{text(best_rate(case))}**",
                text(rate_of(case, case.facts.get("default"))),
                text(rate_of(case, case.facts.get("portable"))),
                family_of(case),
                text(rate_of(case, best_of(case, is_baseline))),
                *(text(rate_of(case, name)) for name in (FLASH, CUDNN, FLEX, FLEX_TUNED)),
                text(rate_of(case, FA3)) or marked(rate_of(case, FA3_SCALED)),
                marked(rate_of(case, FA4_SCALED)),
                *(text(rate_of(case, name)) for name in outside),
                ratio_text(ratio_to(case, FLEX_TUNED)),
                ratio_text(ratio_to(case, FA3, FA3_SCALED)),
                ratio_text(peer_ratio(case)),
                *(ratio_text(ratio_to(case, name)) for name in outside),
                _settled(case),
            ]
        )
    header = [
        "case", "best", "default", "portable", "family of best", "plain causal", FLASH, CUDNN, FLEX,
        FLEX_TUNED, FA3, "fa4", *outside, "best / flex max-autotune", "best / fa3",
        "best / fastest peer", *(f"best / {name}" for name in outside), "settled",
    ]  # fmt: skip
    means = [
        _mean("best / flex max-autotune", cases, lambda case: ratio_to(case, FLEX_TUNED)),
        _mean("best / fa3, scaled where it lacks the feature", cases,
              lambda case: ratio_to(case, FA3, FA3_SCALED)),
        _mean("best / fastest peer measured", cases, peer_ratio),
    ]  # fmt: skip
    summary = table(["ratio of speeds", "geometric mean", "lowest", "at", "cases"], means)
    return f"~: scaled.\n\n{table(header, rows)}\n\n{summary}"


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
    """The best schedules, and how far apart their medians are from run to run."""
    ours = (each for each in case.results if is_ours(each.name) and goes_on(case, each.name))
    timed = [each for each in ours if each.ms is not None]
    timed.sort(key=lambda each: each.ms.median if each.ms else 0.0)
    first = case.tflops(timed[0].name) if timed else None
    rows = []
    for each in timed[:BEST]:
        rate = case.tflops(each.name)
        rows.append(
            [
                _plain_name(each.name),
                _time(case, each.name),
                text(rate),
                ratio_text(over(rate, first)),
                *_spread(medians_us(case, each.name)),
            ]
        )
    header = [
        "schedule", "us", "TFLOP/s", "of the best", "runs", "medians of the runs, us", "apart",
    ]  # fmt: skip
    return table(header, rows)


def _spread(medians: Sequence[float]) -> list[str]:
    """Of runs, each in a process of its own."""
    if not medians:
        return ["", "", ""]
    low, high = min(medians), max(medians)
    each = ", ".join(number(median) for median in medians)
    return [str(len(medians)), each, f"{high / low - 1:.1%}"]


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
