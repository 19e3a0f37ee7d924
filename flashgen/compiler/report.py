"""report.md of a build, and its summary on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import sympy as sp

from flashgen.passes.visibility import Keys, Span, visibility
from flashgen.schedule.budget import budget
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec

if TYPE_CHECKING:
    from flashgen.compiler.building import BuildResult, BuiltKernel

BACKWARD = (
    "backward: the spec asks for gradients, and no kernel family serves them yet; what was built "
    "is the forward, which refuses tensors that require gradients."
)


def summary(result: BuildResult) -> str:
    """What a terminal shows after a build."""
    lines = [
        f"{result.spec.display_name} for {result.target.name}: {_verdict(result)}",
        f"  module    {result.module}",
        *(f"  kernel    {_kernel_line(kernel)}" for kernel in result.kernels),
        f"  report    {result.report}",
        *(f"  not served: {BACKWARD}" for name in result.not_served if name == "backward"),
        *(f"  warning: {warning}" for warning in result.warnings),
    ]
    return "\n".join(lines)


def report(result: BuildResult) -> str:
    """The whole report, as Markdown."""
    return "\n".join(_lines(result)).rstrip() + "\n"


def _lines(result: BuildResult) -> Iterator[str]:
    spec, target = result.spec, result.target
    yield f"# {spec.display_name}"
    if spec.description:
        yield from ("", spec.description)
    yield from ("", f"Attention forward for {target.name} ({target.arch}). {_verdict(result)}.", "")
    yield f"- spec fingerprint: `{spec.fingerprint}`"
    yield f"- module: `{result.module.name}`, call `{_call(result)}`"
    yield f"- schedules chosen by: {result.plan.origin}"
    yield f"- made with {', '.join(f'{name} {v}' for name, v in result.versions.items())}"
    yield from ("", "## Spec", "", "```yaml", spec.to_yaml().rstrip(), "```")
    yield from ("", "## Loop bounds", "", *(f"- {line}" for line in loop_bounds(spec)))
    yield from ("", "## Schedules", "", *_schedule_table(result))
    if spec.shapes:
        yield from ("", "## Shapes", "", *_shape_table(result))
    yield from ("", "## Machine code", "", *_kernel_table(result))
    yield from ("", "## Verification", "", *_verification(result))
    yield from ("", "## Not served", "", *_not_served(result))
    if result.warnings:
        yield from ("", "## Warnings", "", *(f"- {warning}" for warning in result.warnings))


def _verdict(result: BuildResult) -> str:
    if result.verification is None:
        return "unverified"
    return result.verification.summary.removeprefix(f"{result.spec.display_name}: ")


def _call(result: BuildResult) -> str:
    arguments = ["q", "k", "v", *(f"{name}=" for name in result.plan.arguments)]
    returned = "(out, lse)" if result.plan.has_lse else "out"
    return f"{result.plan.name}({', '.join(arguments)}) -> {returned}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def _schedule_table(result: BuildResult) -> Iterator[str]:
    """A row for each schedule: the lengths that it serves, and what the budget says it needs."""
    from flashgen.problem import Problem

    problem = Problem(result.spec, result.target)
    limit = result.target.smem_per_block_bytes
    groups: dict[Schedule, list[Bucket]] = {}
    for bucket, schedule in result.plan.choices:
        groups.setdefault(schedule, []).append(bucket)
    rows = []
    for schedule, buckets in groups.items():
        needs = budget(problem, schedule.kernel)
        smem = needs.smem_bytes_of(schedule)
        rows.append(
            (
                "; ".join(_ranges(buckets)),
                schedule,
                f"{smem} B of {limit} B",
                f"{needs.regs_per_thread_of(schedule)} or more",
            )
        )
    yield "By the budget; a call takes the first row that holds its lengths."
    yield ""
    yield from _table(("lengths", "schedule", "shared memory", "registers per thread"), rows)


def _shape_table(result: BuildResult) -> Iterator[str]:
    """What one launch of each of the spec's shapes does, by the budget and the roofline."""
    from flashgen.compiler.building import shape_figures
    from flashgen.problem import Problem

    rows = [
        (
            f"b{f['batch']} h{f['q_heads']}:{f['kv_heads']} q{f['q_len']} k{f['kv_len']}",
            f["schedule"],
            f"{f['matmul_flops']:.3g}",
            f"{f['visited_flops']:.3g}",
            f"{f['dram_bytes']:.3g}",
            f"{f['time_floor_us']:.3g} ({f['bound']})",
        )
        for f in shape_figures(Problem(result.spec, result.target), result.plan)
    ]
    yield "What inputs hide counts as visible. The floor is the catalogue's roofline, not measured."
    yield ""
    figures = ("matmul FLOPs", "FLOPs of visited tiles", "DRAM bytes", "floor, µs")
    yield from _table(("shape", "schedule", *figures), rows)


def _ranges(buckets: Sequence[Bucket]) -> list[str]:
    """The largest bucket of each range of query lengths."""
    largest = {bucket.q_len_max: bucket for bucket in buckets}
    return [str(bucket) for bucket in largest.values()]


def _kernel_table(result: BuildResult) -> Iterator[str]:
    distinct = len({schedule for _, schedule in result.plan.choices})
    built = len({kernel.schedule for kernel in result.kernels})
    yield (
        f"{built} of {distinct} schedules were compiled ahead; the module compiles any other at "
        "its first call. Shared memory and registers are the compiler's figures."
    )
    yield ""
    rows = [
        (
            kernel.schedule,
            kernel.rows,
            f"{kernel.smem_bytes} B",
            f"{kernel.smem_difference_bytes:+d} B",
            _known(kernel.regs_per_thread),
            _known(kernel.spill_bytes, " B"),
            ", ".join(f"`{name}`" for name in kernel.files),
        )
        for kernel in result.kernels
    ]
    head = (
        "schedule",
        "rows",
        "shared memory",
        "compiler − budget",
        "registers",
        "spilled",
        "files",
    )
    yield from _table(head, rows)


def _known(value: int | None, unit: str = "") -> str:
    return "not reported" if value is None else f"{value}{unit}"


def _kernel_line(kernel: BuiltKernel) -> str:
    return (
        f"{kernel.files[1]}: {kernel.smem_bytes} B shared ({kernel.smem_difference_bytes:+d} B "
        f"against the budget), {_known(kernel.regs_per_thread)} registers, "
        f"{_known(kernel.spill_bytes, ' B')} spilled"
    )


def _verification(result: BuildResult) -> Iterator[str]:
    found = result.verification
    if found is None:
        yield "Not verified: the build was told not to, or nothing ran."
        return
    yield f"{found.summary}."
    yield ""
    yield (
        "Bound: max|out − fp64| ≤ 2·max|eager − fp64| + 1 ulp of the output at max|fp64|. Output "
        "and lse start as NaN; keys and values that no query sees, and all that surrounds the "
        "tensors, are NaN too."
    )
    yield ""
    rows = []
    for each in found.results:
        errors: Sequence[object] = (each.failure or "no result", "", "", "")
        if each.comparison is not None:
            c = each.comparison
            numbers = (c.max_error, c.bound, c.lse_error, c.lse_bound)
            errors = [f"{number:.3g}" for number in numbers]
        rows.append((each.case, each.case.schedule, *errors, "ok" if each.ok else "**WRONG**"))
    head = ("case", "schedule", "max error", "bound", "lse error", "bound", "")
    yield from _table(head, rows)
    if found.notes:
        yield ""
        yield from (f"- {note}" for note in found.notes)


def _not_served(result: BuildResult) -> Iterator[str]:
    if not result.not_served:
        yield "Everything that the spec asks for is served."
    for name in result.not_served:
        yield f"- {BACKWARD if name == 'backward' else name}"


# ---- loop bounds in words --------------------------------------------------------------------


def loop_bounds(spec: AttentionSpec) -> list[str]:
    """Which keys the kernel visits for a tile of query rows, and where it computes the mask."""
    found = visibility(spec)
    if not found.spans:
        return ["No row sees any key: no key tile is visited."]
    lines = []
    for number, span in enumerate(found.spans):
        lead = "" if len(found.spans) == 1 else f"Range {number + 1}: "
        lines += [f"{lead}{sentence}" for sentence in _sentences(span)]
    if any(e.has(*_TILE_NAMES) for span in found.spans for e in _bounds_of(span)):
        lines.append(
            "`q_first` and `q_last` are the positions, among the keys, of the first and last query "
            "of a tile; `row_first` and `row_last` count its rows from 0."
        )
    return lines


_TILE_NAMES = sp.symbols("q_first q_last", integer=True) + sp.symbols(
    "row_first row_last", integer=True, nonnegative=True
)


def _bounds_of(span: Span) -> tuple[sp.Basic, ...]:
    return (span.hull.start, span.hull.stop, span.full.start, span.full.stop, span.possible)


def _sentences(span: Span) -> Iterator[str]:
    visited = f"{_keys(span.hull)}{_where(span.possible)}"
    yield f"Visited: key tiles with {visited}; all others are skipped."
    if span.scan:
        yield (
            f"Of these only tiles from the first to the last key whose `{span.scan.name}` can be "
            "that of a row, found at run time by reading the ids once."
        )
    if span.period:
        chunk = span.period
        yield (
            f"Of these only tiles that touch a chunk of `{chunk.width}` keys, one every "
            f"`{chunk.period}`, the first at `{chunk.start}`."
        )
    if span.never_full:
        yield "The mask is computed in every tile that is visited."
    elif span.full == Keys(-sp.oo, sp.oo) and not span.scan and not span.period:
        yield "No mask is computed but in the last tile, which the end of the keys may cut."
    else:
        yield f"No mask is computed in tiles wholly within {_keys(span.full)}{_where(span.always)}."


def _keys(keys: Keys) -> str:
    start = "0" if keys.start == -sp.oo else str(keys.start)
    stop = "kv_len" if keys.stop == sp.oo else str(keys.stop)
    return f"`{start} ≤ k < {stop}`"


def _where(condition: sp.Basic) -> str:
    return "" if condition == sp.true else f", where `{condition}`"
