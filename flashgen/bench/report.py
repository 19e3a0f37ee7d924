"""The table of a run, made from its record alone: the same record gives the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flashgen.bench.cases import GROUPS, MASK_GROUPS, PLAIN
from flashgen.bench.counters_report import counters_line, counters_parts
from flashgen.bench.fa_report import fa_line, fa_parts
from flashgen.bench.markdown import number, table
from flashgen.bench.orders_report import orders_parts
from flashgen.bench.record import COPY, CaseRecord, Record, Result, matmul_name
from flashgen.bench.schedules_report import hopper_parts, schedules_line, schedules_parts
from flashgen.bench.tuner_report import tuner_line, tuner_parts
from flashgen.tune.summary import geometric_mean

FLASHGEN = "flashgen"
FLEX = "flex"
FLASHGEN_CALL = "flashgen_call"
FLEX_CALLS = ("flex_call_eager_mask", "flex_call_compiled_mask")
PLAIN_PEERS = (FLEX, "sdpa_flash", "sdpa_cudnn")
TITLES = {
    "specs": "Every shipped spec",
    "flex": "flashgen, FlexAttention and SDPA",
    "dispatch": "Host time of a call, and waiting times",
    "schedules": "Schedules, measured and predicted",
    "counters": "Bytes, predicted and counted",
    "loop-orders": "Loop orders: flash1 and flash2",
    "tuner": "The tuner against exhaustive search",
    "fa-paper": "Hopper kernels against the fastest peers",
}
METHOD = (
    "Times are medians of device time per call over bursts of at most 20 ms after idle pauses, in "
    "which the contestants take turns; (a–b) is the 20th to the 80th percentile. TFLOP/s count the "
    "matmuls of visible pairs, 2·(head_dim_qk + head_dim_v) each. Tensors are random and rotate "
    "where they would stay in L2. Every contestant was held against fp64 before it was timed. A "
    "speed ratio above 1 means that flashgen is faster; compare numbers only within this run."
)

MANY = 3  # cases with the same failure, from which on they are one line

RatioOf = Callable[[CaseRecord], float | None]


def render(record: Record) -> str:
    """The record as Markdown."""
    body = {
        "specs": _specs,
        "flex": _flex,
        "dispatch": _dispatch,
        "schedules": schedules_parts,
        "counters": counters_parts,
        "loop-orders": orders_parts,
        "tuner": tuner_parts,
        "fa-paper": lambda record: [*fa_parts(record), *hopper_parts(record)],
    }[record.suite](record)
    parts = [
        f"# {TITLES[record.suite]}: {record.environment.get('gpu', record.target)}",
        _provenance(record),
        *([METHOD] if record.suite in ("specs", "flex") else []),
        *body,
        *_left_out(record),
    ]
    return "\n\n".join(parts) + "\n"


def progress_line(case: CaseRecord) -> str:
    """A finished case in one line."""
    if case.group == "startup":
        texts = [f"{start} {_first_result(case.facts.get(start))}" for start in ("cold", "warm")]
        return f"{case.id}: {', '.join(texts)}"
    if "plain flops" in case.facts:
        return fa_line(case)
    if "schedules" in case.facts:
        return schedules_line(case)
    if case.group == "tuner":
        return tuner_line(case)
    if "cold" in case.facts:
        return counters_line(case)
    cells = []
    for result in case.results:
        if result.error is not None or result.ms is None:
            cells.append(f"{result.name} {result.error or 'not timed'}")
            continue
        rate = case.tflops(result.name)
        speed = f" {number(rate)} TFLOP/s" if rate else ""
        cells.append(f"{result.name} {_us(result.ms.median)} us{speed}")
    return f"{case.id}: {'; '.join(cells)}"


# ---- parts that all suites share -----------------------------------------------------------------


def _provenance(record: Record) -> str:
    known = record.environment.items()
    state = "" if record.complete else "; **the run did not come to its end**"
    lines = [
        f"- {record.started}, {record.seconds:.0f} s{state}",
        f"- command: `{record.command}`",
        *_of_run(record),
        f"- {', '.join(f'{name} {value}' for name, value in known if name != 'gpu')}",
    ]
    if record.ceilings:
        rates = (
            f"{ceiling.name} {' and '.join(map(number, ceiling.values))} {ceiling.unit}"
            for ceiling in record.ceilings
        )
        what = "8192³ matmul; copy, read + written"
        lines.append(f"- ceilings measured in this run ({what}): {', '.join(rates)}")
    return "\n".join(lines)


def _of_run(record: Record) -> list[str]:
    """That several suites were one run, and what was done before anything was timed."""
    lines = []
    if len(record.suites) > 1:
        lines.append(
            f"- run {record.run}: suites {' and '.join(record.suites)} in one process, one after "
            "the other, with the same ceilings; seconds count from its start"
        )
    if record.preparation:
        lines.append(f"- before anything was timed: {record.preparation}")
    lines += [
        f"- goes on from {part.started}, {part.seconds:.0f} s: `{part.command}`; {part.preparation}"
        for part in record.parts
    ]
    return lines


def _left_out(record: Record) -> list[str]:
    failures = _failures(record)
    failures += dict.fromkeys(
        str(case.facts.get("verification"))
        for case in record.cases
        if case.facts.get("verified") is False
    )
    parts = []
    if failures:
        parts.append("## Failed\n\n" + "\n".join(f"- {text}" for text in failures))
    if record.not_run:
        parts.append("## Not run\n\n" + "\n".join(f"- {text}" for text in record.not_run))
    return parts


def _failures(record: Record) -> list[str]:
    """One line for a contestant that failed for the same reason in many cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in record.cases:
        for result in case.results:
            for text in _faults(result):
                found.setdefault((result.name, text), []).append(case.id)
    lines = []
    for (name, text), ids in found.items():
        if len(ids) < MANY:
            lines += [f"{case_id}, {name}: {text}" for case_id in ids]
        else:
            lines.append(f"{ids[0]} and {len(ids) - 1} other cases, {name}: {text}")
    return lines


def _faults(result: Result) -> list[str]:
    """What went wrong with a contestant; flashgen is also held to its own bound."""
    found = [] if result.error is None else [result.error]
    accuracy = result.accuracy
    if result.name == FLASHGEN and accuracy is not None and accuracy.max_error > accuracy.bound:
        found.append(f"error {accuracy.max_error:.3g} is over its bound of {accuracy.bound:.3g}")
    return found


def _us(ms: float) -> str:
    return number(1e3 * ms)


def _time(result: Result | None) -> str:
    """`123 (121–125)`, in microseconds."""
    if result is None:
        return ""
    if result.ms is None:
        return "failed"
    return f"{_us(result.ms.median)} ({_us(result.ms.p20)}–{_us(result.ms.p80)})"


def _rate(case: CaseRecord, name: str) -> str:
    result = case.result(name)
    if result is None:
        return ""
    rate = case.tflops(name)
    return "failed" if rate is None else number(rate)


def _ratio(case: CaseRecord, ours: str, theirs: str) -> float | None:
    mine, peer = case.median_ms(ours), case.median_ms(theirs)
    return peer / mine if mine and peer else None


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


# ---- suite flex ----------------------------------------------------------------------------------


def _flex(record: Record) -> list[str]:
    plain = [case for case in record.cases if case.group == PLAIN]
    variants = [case for group in GROUPS[1:] for case in record.cases if case.group == group]
    parts = [f"## Geometric means of speed ratios\n\n{_means(record)}"]
    if plain:
        rows = [
            [
                case.id,
                *(_rate(case, name) for name in (FLASHGEN, *PLAIN_PEERS)),
                _time(case.result(FLASHGEN)),
                _time(case.result(FLEX)),
                *(_ratio_text(_ratio(case, FLASHGEN, name)) for name in PLAIN_PEERS),
            ]
            for case in plain
        ]
        header = [
            "case", FLASHGEN, *PLAIN_PEERS, "flashgen us", "flex us",
            *(f"flashgen / {name}" for name in PLAIN_PEERS),
        ]  # fmt: skip
        parts.append(f"## Plain attention, TFLOP/s\n\n{table(header, rows)}")
    if variants:
        rows = [
            [
                case.id,
                _rate(case, FLASHGEN),
                _rate(case, FLEX),
                _time(case.result(FLASHGEN)),
                _time(case.result(FLEX)),
                _ratio_text(_ratio(case, FLASHGEN, FLEX)),
                _time(case.result(FLASHGEN_CALL)),
                *(_time(case.result(name)) for name in FLEX_CALLS),
                _ratio_text(with_mask_ratio(case)),
            ]
            for case in variants
        ]
        header = [
            "case", "flashgen TFLOP/s", "flex TFLOP/s", "flashgen us", "flex us", "kernel / kernel",
            "flashgen call us", "flex + eager mask us", "flex + compiled mask us", "call / call",
        ]  # fmt: skip
        note = (
            "Kernel / kernel: FlexAttention's block mask is made beforehand. Call / call: calls as "
            "a program makes them, one after the other, and FlexAttention makes its block mask "
            "before each one, as a new batch needs it (`create_block_mask`, eager or compiled, "
            "whichever was faster)."
        )
        parts.append(f"## Variants\n\n{note}\n\n{table(header, rows)}")
    parts.append(f"## Error against fp64\n\n{_errors(record)}")
    return parts


def with_mask_ratio(case: CaseRecord) -> float | None:
    """Speed of a flashgen call over FlexAttention's with its mask, made the faster way."""
    ratios = [_ratio(case, FLASHGEN_CALL, name) for name in FLEX_CALLS]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _means(record: Record) -> str:
    """Means by group: an incomplete group says of how many cases it is."""
    by_group = {group: [c for c in record.cases if c.group == group] for group in GROUPS}
    masked = [case for group in MASK_GROUPS for case in by_group[group]]
    rows = [
        _mean_row(f"{PLAIN}: flashgen / {peer}", by_group[PLAIN], _ratio_to(peer))
        for peer in PLAIN_PEERS
    ]
    for title, cases in (*((g, by_group[g]) for g in GROUPS[1:]), (", ".join(MASK_GROUPS), masked)):
        rows.append(_mean_row(f"{title}: kernel / flex kernel", cases, _ratio_to(FLEX)))
        rows.append(_mean_row(f"{title}: call / flex call with its mask", cases, with_mask_ratio))
    return table(["group", "speed ratio", "lowest", "highest", "cases"], rows)


def _ratio_to(peer: str) -> RatioOf:
    return lambda case: _ratio(case, FLASHGEN, peer)


def _mean_row(title: str, cases: Sequence[CaseRecord], ratio_of: RatioOf) -> list[str]:
    ratios = [ratio for ratio in map(ratio_of, cases) if ratio is not None]
    mean = geometric_mean(ratios)
    if mean is None:
        return [title, "", "", "", f"0 of {len(cases)}"]
    ends = [_ratio_text(min(ratios)), _ratio_text(max(ratios))]
    count = str(len(ratios)) if len(ratios) == len(cases) else f"{len(ratios)} of {len(cases)}"
    return [title, f"**{mean:.3f}**", *ends, count]


def _errors(record: Record) -> str:
    """The worst of each contestant's errors."""
    found: dict[str, list[Result]] = {}
    for case in record.cases:
        for result in case.results:
            if result.accuracy is not None:
                found.setdefault(result.name, []).append(result)
    rows = []
    for name, results in found.items():
        judged = [result.accuracy for result in results if result.accuracy is not None]
        over = sum(each.max_error > each.bound for each in judged)
        rows.append(
            [
                name,
                str(len(judged)),
                f"{max(each.relative_error for each in judged):.2e}",
                f"{max(each.max_error for each in judged):.2e}",
                str(over),
                str(sum(each.poisoned for each in judged)),
            ]
        )
    header = [
        "contestant",
        "cases",
        "worst relative",
        "worst absolute",
        "over the bound",
        "poisoned",
    ]
    return table(header, rows)


# ---- suite specs ---------------------------------------------------------------------------------


def _specs(record: Record) -> list[str]:
    note = (
        "Floor: the matmuls at the rate of an 8192³ matmul or the bytes at the rate of a copy, as "
        "measured in this run, whichever takes longer (compute or memory); beside it the floor at "
        "the catalogue's rates. Bytes are each visible key and value, each query and input once, "
        "and the output. Beyond output: device memory that a call takes at its peak besides its "
        "result. Built: kernels that `flashgen build` writes for the spec's shapes. Verified: "
        "against fp64 on small shapes that the same schedules serve, with poisoned buffers."
    )
    rows = []
    for case in record.cases:
        floor, limit = _floor_us(case, record)
        median = case.median_ms(FLASHGEN)
        share = 1e-3 * floor / median if floor and median else None
        rate, ceiling = case.tflops(FLASHGEN), record.ceiling(matmul_name(case.dtype))
        catalogue, beyond = (
            case.facts.get("catalogue floor us"),
            case.facts.get("bytes beyond output"),
        )
        rows.append(
            [
                case.id,
                case.dtype,
                _built(case),
                _verdict(case),
                _time(case.result(FLASHGEN)),
                _rate(case, FLASHGEN),
                number(1e-9 * case.dram_bytes / median) if median else "",
                f"{rate / ceiling:.0%}" if rate and ceiling else "",
                f"{number(floor)} ({limit})" if floor else "",
                f"{share:.0%}" if share else "",
                number(catalogue) if catalogue else "",
                "" if beyond is None else str(beyond),
                str(case.facts.get("schedule", "")),
            ]
        )
    header = [
        "case", "dtype", "built", "verified", "us", "TFLOP/s", "TB/s", "of matmul ceiling",
        "floor us", "of floor", "catalogue floor us", "beyond output, bytes", "default schedule",
    ]  # fmt: skip
    return [
        f"## Times\n\n{note}\n\n{table(header, rows)}",
        f"## Error against fp64\n\n{_errors(record)}",
    ]


def _built(case: CaseRecord) -> str:
    """How many kernels; a spec whose build failed is not verified either, and says why."""
    kernels = case.facts.get("built kernels")
    if kernels is not None:
        return f"{kernels} kernels"
    return "NO" if case.facts.get("verified") is False else "not asked"


def _verdict(case: CaseRecord) -> str:
    verified = case.facts.get("verified")
    return "not asked" if verified is None else "yes" if verified else "NO"


def _floor_us(case: CaseRecord, record: Record) -> tuple[float | None, str]:
    """The least time at the rates measured in this run, and which of them sets it."""
    matmul, copy = record.ceiling(matmul_name(case.dtype)), record.ceiling(COPY)
    if matmul is None or copy is None:
        return None, ""
    compute, memory = 1e-6 * case.matmul_flops / matmul, 1e-6 * case.dram_bytes / copy
    return max(compute, memory), "compute" if compute >= memory else "memory"


# ---- suite dispatch ------------------------------------------------------------------------------


def _dispatch(record: Record) -> list[str]:
    calls = [case for case in record.cases if case.group == "dispatch"]
    starts = [case for case in record.cases if case.group == "startup"]
    parts = []
    if calls:
        names = list(dict.fromkeys(result.name for case in calls for result in case.results))
        rows = [[case.id, *(_time(case.result(name)) for name in names)] for case in calls]
        note = (
            "Host time per call, us: `launch` is the bare kernel launch, `run` the generated "
            "module's function around it, `callable` what `flashgen.compile` returns, checks and "
            "output included; `sdpa` is torch's attention without the mask. Medians over batches "
            "of calls, taking turns."
        )
        if "look-up" in names:
            note += (
                " A repeated `callable` is a `look-up` of what its arguments need, a new output "
                "and a launch of the `compiled` kernel. `config` finds the schedule of a call with "
                "new lengths; a repeated call does without."
            )
        times = table(["case", *names], rows)
        parts.append(f"## Host time of a repeated call\n\n{note}\n\n{times}")
    for case in starts:
        parts.append(f"## Waiting for the first result: {case.spec}\n\n{_startup(case)}")
    return parts


def _startup(case: CaseRecord) -> str:
    """Steps of a cold and of a warm process, side by side."""
    found: dict[str, Mapping[str, float]] = {}
    known = case.facts.get("bytecode")
    notes = [f"- bytecode: {known}"] if known else []
    for start in ("cold", "warm"):
        fact = case.facts.get(start) or {}
        if "error" in fact:
            notes.append(f"- {start}: {fact['error']}")
        else:
            found[start] = fact.get("steps_s", {})
            brought = ", ".join(fact.get("heavy_modules", [])) or "none"
            notes.append(f"- {start}: heavy modules that flashgen imported: {brought}")
    steps = list(dict.fromkeys(step for times in found.values() for step in times))
    rows = [
        [step, *(f"{times[step]:.3f}" if step in times else "" for times in found.values())]
        for step in steps
    ]
    seconds = table(["step, s", *(f"{start} caches" for start in found)], rows)
    return f"{seconds}\n\n" + "\n".join(notes)


def _first_result(fact: Mapping[str, object] | None) -> str:
    steps = (fact or {}).get("steps_s")
    if not isinstance(steps, dict):
        return str((fact or {}).get("error", "nothing"))
    return f"first result {steps['first result']:.3f} s"
