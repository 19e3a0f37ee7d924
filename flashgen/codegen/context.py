"""Everything a template may see: texts and flags derived from a problem, frozen and complete."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import sympy as sp
from sympy.printing.precedence import PRECEDENCE

from flashgen.codegen.expr import LOG2_E, TritonPrinter, clear_denominators
from flashgen.codegen.options import options_text
from flashgen.codegen.reads import (
    InputRead,
    dense_tensors,
    elems_per_16_bytes,
    input_read,
    reads_of,
    variables_for,
)
from flashgen.dtypes import get_dtype
from flashgen.passes.inputs import EXTENTS, collapse_broadcasts, range_conditions
from flashgen.passes.simplify import under_mask
from flashgen.passes.visibility import (
    Q_FIRST,
    Q_LAST,
    ROW_FIRST,
    ROW_LAST,
    Scan,
    Span,
    visibility,
)
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

QK = sp.Symbol("scores", real=True)  # raw q·k, as the matmul leaves it
BoundsKind = Literal["none", "single", "pair", "chunks"]
SCAN_KEYS = 4096  # ids read per step of a document scan: 16 a thread at 8 warps

# Largest and smallest value of an id's format, for the minimum over the rows of a tile.
ID_LIMITS = {
    "int32": ("-2147483648", "2147483647"),
    "int64": ("-9223372036854775808", "9223372036854775807"),
    "bool": ("0", "1"),
}
FLOAT_LIMITS = ('float("-inf")', 'float("inf")')


@dataclass(frozen=True)
class Header:
    """Docstring of a generated module: what it is, from which spec, with which meanings."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Parameters:
    """Run-time parameters of the kernels: signature lines, and the host's argument lines."""

    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Score:
    """From raw q·k to scores, and from scores to the exponent of 2.

    folded: no score change and scale > 0, so that the scale is applied inside the exponent (one
    FFMA an element); otherwise `lines` leave scores in natural units. precise: fp32, where the
    maximum is subtracted before the change of base and exp2 is better than the hardware's.
    """

    folded: bool
    precise: bool
    scale: str
    scale_log2: str
    lines: tuple[str, ...]
    may_be_minus_inf: bool

    @property
    def to_log2(self) -> str:
        """Name of the factor from scores, as `lines` leave them, to base 2."""
        return "QK_SCALE_LOG2" if self.folded else "LOG2_E"

    @property
    def exp2(self) -> str:
        return "exp2_fp32" if self.precise else "tl.exp2"


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


@dataclass(frozen=True)
class Entry:
    """Names of the kernels in a module."""

    loop: str = "attention_fwd"
    single_tile: str = "attention_fwd_single_tile"


@dataclass(frozen=True)
class Argument:
    """A keyword argument of the callable beyond q, k, v; `local` is what the host code calls it."""

    name: str
    is_scalar: bool

    @property
    def local(self) -> str:
        return host_name(self.name)

    @property
    def renamed(self) -> bool:
        return self.local != self.name


# Names with a meaning in templates/triton/host.py.jinja, which an input may have too.
HOST_NAMES = frozenset(
    "kernel options batch num_batch num_q_heads num_kv_heads gqa_group q_len kv_len aligned align "
    "grid out lse out_dtype q_max kv_max t tensor unit torch triton tl run SCHEDULES "
    "has_aligned_rows HEAD_DIM_V all any int float next zip inputs".split()
)


def host_name(name: str) -> str:
    """The variable of an input in the host code: its name, or one that is free."""
    return f"{name}_input" if name in HOST_NAMES else name


@dataclass(frozen=True)
class Positions:
    """Which positions of a query tile a kernel computes, so that none is left unused."""

    row_last: bool
    q_first: bool
    q_last: bool
    q_idx: bool


@dataclass(frozen=True)
class RenderContext:
    """What the templates see, and nothing else."""

    header: Header
    head_dim_qk: int
    head_dim_qk_padded: int
    head_dim_v: int
    head_dim_v_padded: int
    elem_bytes: int
    kv_elem_bytes: int
    out_elem_bytes: int
    elems_per_16_bytes: int
    out_dtype: str
    layout: str
    gqa_group: int | None
    align: str
    sink: bool
    kv_lens: bool
    has_lse: bool
    dot_args: str
    heavy_last: bool
    positions: Positions
    full_step_uses_kv_idx: bool
    masks_keys: bool
    visible: str
    score: Score
    bounds: Bounds
    program_reads: tuple[InputRead, ...]
    row_reads: tuple[InputRead, ...]
    key_reads: tuple[InputRead, ...]
    pair_reads: tuple[InputRead, ...]
    parameters: Parameters
    arguments: tuple[Argument, ...]
    dense_inputs: tuple[tuple[str, int], ...]  # with the elements in 16 bytes
    helpers: frozenset[str]
    schedules: tuple[tuple[str, ...], ...]
    callable_name: str
    callable_doc: tuple[str, str]
    entry: Entry = field(default_factory=Entry)
    kernels: tuple[str, ...] = ()

    @property
    def second_walk(self) -> str:
        """The condition under which a query tile is walked again; empty: never."""
        conditions = []
        if self.bounds.kind != "none" and self.masks_keys:
            conditions.append("tl.max((acc != acc).to(tl.int32)) > 0")
        if self.bounds.kind != "none" and not self.score.precise:
            conditions.append("tl.max(overflowed.to(tl.int32)) > 0")
        return (
            " | ".join(f"({c})" for c in conditions) if len(conditions) > 1 else "".join(conditions)
        )

    @property
    def qk_in_row(self) -> str:
        return self._in_dim("dims_qk[None, :]", "QK", self.head_dim_qk, self.head_dim_qk_padded)

    @property
    def qk_in_col(self) -> str:
        return self._in_dim("dims_qk[:, None]", "QK", self.head_dim_qk, self.head_dim_qk_padded)

    @property
    def v_in_row(self) -> str:
        return self._in_dim("dims_v[None, :]", "V", self.head_dim_v, self.head_dim_v_padded)

    @staticmethod
    def _in_dim(dims: str, which: str, dim: int, padded: int) -> str:
        return "" if dim == padded else f"({dims} < HEAD_DIM_{which})"

    @staticmethod
    def mask_only(*conditions: str) -> str:
        """`, mask=...` of the conditions that are there."""
        present = [c for c in conditions if c]
        return f", mask={' & '.join(present)}" if present else ""

    @staticmethod
    def mask_args(*conditions: str) -> str:
        """`, mask=..., other=0.0` of the conditions that are there."""
        masked = RenderContext.mask_only(*conditions)
        return f"{masked}, other=0.0" if masked else ""


def context(
    problem: Problem, choices: Sequence[tuple[Bucket, Schedule]], *, has_lse: bool, header: Header
) -> RenderContext:
    """Problem -> RenderContext: mask, score and inputs turned into kernel text."""
    spec = problem.spec
    seen = visibility(spec)
    score = _score_expression(problem)
    reads = reads_of(
        [seen.predicate, score] + [e for s in seen.spans for e in _span_expressions(s)]
    )
    names = _names(spec) | variables_for(reads)
    printer = TritonPrinter(names, precise=problem.elem_bytes == 4)
    dense = dense_tensors(reads)
    in_score = reads_of([score])
    loads = [
        input_read(read, names[read], spec, printer, dense=dense, in_score=read in in_score)
        for read in reads
    ]
    predicate = clear_denominators(seen.predicate)
    bounds = _bounds(seen.spans, spec, printer)
    score_text = _score_text(score, problem, printer)
    visible = (
        "kv_exists"
        if predicate == sp.true
        else f"kv_exists & {printer.parenthesize(predicate, 90)}"
    )
    element_wise = predicate.free_symbols | score.free_symbols
    scopes = {
        s: tuple(r for r in loads if r.scope == s) for s in ("program", "rows", "keys", "pairs")
    }
    return RenderContext(
        header=header,
        head_dim_qk=problem.head_dim_qk,
        head_dim_qk_padded=problem.head_dim_qk_padded,
        head_dim_v=problem.head_dim_v,
        head_dim_v_padded=problem.head_dim_v_padded,
        elem_bytes=problem.elem_bytes,
        kv_elem_bytes=problem.kv_elem_bytes,
        out_elem_bytes=problem.out_elem_bytes,
        elems_per_16_bytes=16
        // min(problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes),
        out_dtype=get_dtype(spec.dtype.out).torch_name,
        layout=spec.layout,
        gqa_group=problem.gqa_group,
        align=spec.align,
        sink=spec.sink == "per_head",
        kv_lens=spec.kv_lens == "per_batch",
        has_lse=has_lse,
        dot_args=_DOT_ARGS.get(spec.dtype.q, ""),
        heavy_last=any(s.hull.stop.has(Q_LAST, ROW_LAST) for s in seen.spans),
        positions=_positions(seen.spans, element_wise),
        full_step_uses_kv_idx=sym.K in score.free_symbols,
        masks_keys=predicate != sp.true,
        visible=visible,
        score=score_text,
        bounds=bounds,
        program_reads=scopes["program"],
        row_reads=scopes["rows"],
        key_reads=scopes["keys"],
        pair_reads=scopes["pairs"],
        parameters=_parameters(spec, dense, _checked_extents(loads), has_lse=has_lse),
        arguments=_arguments(spec),
        dense_inputs=tuple(
            (host_name(name), elems_per_16_bytes(spec.input(name))) for name in sorted(dense)
        ),
        helpers=_with_dependencies(printer.helpers, bounds),
        schedules=_schedule_rows(choices),
        callable_name=_identifier(spec),
        callable_doc=_callable_doc(spec, has_lse=has_lse),
    )


_DOT_ARGS = {"fp32": ', input_precision="ieee"', "tf32": ', input_precision="tf32"'}


def _names(spec: AttentionSpec) -> dict[sp.Basic, str]:
    names: dict[sp.Basic, str] = {
        sym.Q: "q_idx",
        sym.ROW: "row_idx",
        sym.K: "kv_idx",
        sym.B: "b",
        sym.H: "h",
        sym.HK: "hk",
        sym.Q_LEN: "q_len",
        sym.KV_LEN: "kv_len",
        QK: "scores",
        **{symbol: symbol.name for symbol in EXTENTS.values()},
    }
    for symbol in (Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST):
        names[symbol] = symbol.name
    for scalar in _scalars(spec):
        names[sym.scalar(scalar)] = f"{scalar.name}_value"
    return names


def _scalars(spec: AttentionSpec) -> list[Input]:
    return [i for i in spec.inputs if not i.shape]


def _with_dependencies(helpers: set[str], bounds: Bounds) -> frozenset[str]:
    return frozenset(helpers | ({"floor_div"} if bounds.kind == "chunks" else set()))


# ---- host side -----------------------------------------------------------------------------------


# Names with a meaning in a generated module, beside Python's own; a callable hides none of them.
_IN_MODULE = frozenset(
    "torch triton tl run has_aligned_rows floor_div floor_mod exp2_fp32 tanh attention_fwd "
    "attention_fwd_single_tile kernel options inputs q k v out lse sink kv_lens "
    "q_len kv_len q_max kv_max out_dtype".split()
)


def _identifier(spec: AttentionSpec) -> str:
    """A Python name for the module's callable: gpt-oss.local -> gpt_oss_local."""
    text = "".join(c if c.isalnum() else "_" for c in spec.display_name)
    taken = {*_IN_MODULE, *dir(builtins), *(declared.name for declared in spec.inputs)}
    if not text[:1].isalpha() or keyword.iskeyword(text) or text in taken:
        return f"attention_{text}"
    return text


def _callable_doc(spec: AttentionSpec, *, has_lse: bool) -> tuple[str, str]:
    axes = "batch, len, heads, dim" if spec.layout == "bshd" else "batch, heads, len, dim"
    result = "output and lse [batch, heads, len], fp32" if has_lse else "output"
    return f"Attention of q, k, v: [{axes}], any strides.", f"Returns {result}."


def _schedule_rows(choices: Sequence[tuple[Bucket, Schedule]]) -> tuple[tuple[str, ...], ...]:
    """Rows of the module's table: neighbours that share a schedule are one row."""
    rows: list[tuple[Bucket, Schedule]] = []
    for bucket, schedule in choices:
        if rows and rows[-1][1] == schedule and rows[-1][0].q_len_max == bucket.q_len_max:
            rows[-1] = (bucket, schedule)
        else:
            rows.append((bucket, schedule))
    return tuple(
        (
            str(b.q_len_max),
            str(b.kv_len_max),
            getattr(Entry(), s.kernel),
            f"dict({options_text(s)})",
        )
        for b, s in rows
    )


# ---- score ---------------------------------------------------------------------------------------


def _score_expression(problem: Problem) -> sp.Expr:
    """The score in natural units, as a function of raw q·k (of 0 * q·k where the scale is 0)."""
    spec = problem.spec
    natural = collapse_broadcasts(sym.score_expression(spec), spec)
    score = under_mask(natural, visibility(spec).predicate)
    scale = sp.Float(problem.softmax_scale or 1.0)
    return score.subs(sym.S, scale * QK)


def _score_text(score: sp.Expr, problem: Problem, printer: TritonPrinter) -> Score:
    precise = problem.spec.dtype.q == "fp32"
    folded = not (precise or problem.spec.score) and problem.softmax_scale > 0
    shared, final = _with_shared_named(score)
    lines = [] if problem.softmax_scale else ["scores = scores * 0.0"]
    lines += [f"{name} = {printer.doprint(value)}" for name, value in shared]
    if QK not in score.free_symbols:  # a score of its own: still one for each row and key
        lines.append(
            f"scores = tl.zeros_like(scores) + {printer.parenthesize(final, PRECEDENCE['Add'])}"
        )
    elif final != QK:
        lines.append(f"scores = {printer.doprint(final)}")
    return Score(
        folded=folded,
        precise=precise,
        scale=repr(problem.softmax_scale),
        scale_log2=repr(problem.softmax_scale * LOG2_E),
        lines=() if folded else tuple(lines),
        may_be_minus_inf=_may_be_minus_inf(problem.spec),
    )


def _with_shared_named(score: sp.Expr) -> tuple[list[tuple[sp.Symbol, sp.Expr]], sp.Expr]:
    """Subexpressions that occur more than once as (name, value), and the score in their terms.

    A name of an integer is one too: functions and divisions of integers are printed in another way.
    """
    found, (final,) = sp.cse([score], symbols=sp.numbered_symbols("t", real=True))
    shared: list[tuple[sp.Symbol, sp.Expr]] = []
    typed: dict[sp.Symbol, sp.Symbol] = {}
    for name, plain in found:
        value = plain.xreplace(typed)
        if getattr(value, "is_integer", False):
            typed[name] = sp.Symbol(name.name, integer=True)
        shared.append((typed.get(name, name), value))
    return shared, final.xreplace(typed)


def _may_be_minus_inf(spec: AttentionSpec) -> bool:
    """A bias or an expression may say -inf for a visible pair; softcap and ALiBi cannot."""
    return any(type(item).__name__ in {"Bias", "Expr"} for item in spec.score)


# ---- loop bounds ---------------------------------------------------------------------------------


def _span_expressions(span: Span) -> list[sp.Basic]:
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


def _positions(spans: Sequence[Span], element_wise: set[sp.Basic]) -> Positions:
    in_bounds = {symbol for s in spans for e in _span_expressions(s) for symbol in e.free_symbols}
    scans = any(s.scan for s in spans)
    return Positions(
        row_last=bool({Q_LAST, ROW_LAST} & in_bounds),
        q_first=Q_FIRST in in_bounds,
        q_last=Q_LAST in in_bounds,
        q_idx=sym.Q in element_wise or scans,
    )


def _bounds(spans: Sequence[Span], spec: AttentionSpec, printer: TritonPrinter) -> Bounds:
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
        return "" if e.is_infinite else printer.doprint(e)

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
        row_exists=" & ".join(["row_exists", *(f"({c})" for c in conditions)]),
        key_statement=input_read(
            scan.key_read, "ids", spec, keys, in_tile="scan_exists"
        ).masked_statement,
        keys_per_step=SCAN_KEYS,
        lowest=lowest,
        highest=highest,
    )


# ---- parameters ----------------------------------------------------------------------------------


def _parameters(
    spec: AttentionSpec, dense: frozenset[str], extents: tuple[str, ...], *, has_lse: bool
) -> Parameters:
    """Signature and argument lines, in one order."""
    groups: list[list[tuple[str, str]]] = [
        [(f"{t}_ptr", t) for t in ("q", "k", "v", "out", *(["lse"] if has_lse else []))],
        *[
            _strides(t, axes)
            for t, axes in (("q", "bhmd"), ("k", "bhnd"), ("v", "bhnd"), ("o", "bhm"))
        ],
    ]
    groups += [_input_parameters(i, is_dense=i.name in dense) for i in spec.inputs]
    for name, wanted in (
        ("sink", spec.sink == "per_head"),
        ("kv_lens", spec.kv_lens == "per_batch"),
    ):
        if wanted:
            groups.append(
                [(f"{name}_ptr", name), (f"stride_{name}_0: tl.int64", f"{name}.stride(0)")]
            )
    sizes = ["num_q_heads", *(["gqa_group"] if spec.heads.group is None else []), "q_len", "kv_len"]
    groups.append([(f"{name}: tl.int32", name) for name in (*sizes, *extents)])
    return Parameters(
        lines=tuple(", ".join(p for p, _ in group) + "," for group in groups),
        arguments=tuple(", ".join(a for _, a in group) + "," for group in groups),
        names=tuple(p.split(":")[0] for group in groups for p, _ in group),
    )


def _checked_extents(loads: Sequence[InputRead]) -> tuple[str, ...]:
    """Extents that some load is checked against and that the kernels do not take anyway."""
    text = " ".join(load.masked_statement for load in loads)
    return tuple(e for e in ("num_batch", "num_kv_heads") if e in text)


_AXIS_INDEX = {"b": 0, "h": 1, "m": 2, "n": 2, "d": 3}


def _strides(tensor: str, axes: str) -> list[tuple[str, str]]:
    host = "out" if tensor == "o" else tensor
    return [
        (
            f"stride_{tensor}{axis}: tl.int64",
            f"{host}.stride({_AXIS_INDEX[axis]})" + ("" if axis == "d" else " // align"),
        )
        for axis in axes
    ]


def _input_parameters(tensor: Input, *, is_dense: bool) -> list[tuple[str, str]]:
    if not tensor.shape:  # a number, a bool or a tensor with one element
        is_float = get_dtype(tensor.dtype).kind == "float"
        kind, convert = ("float32", "float") if is_float else ("int32", "int")
        return [(f"{tensor.name}_value: tl.{kind}", f"{convert}({host_name(tensor.name)})")]
    last = len(tensor.shape) - 1
    unit = f" // ({elems_per_16_bytes(tensor)} if align > 1 else 1)" if is_dense else ""
    strides = [
        (
            f"stride_{tensor.name}_{axis}: tl.int64",
            f"{host_name(tensor.name)}.stride({axis})" + (unit if axis != last else ""),
        )
        for axis, extent in enumerate(tensor.shape)
        if extent != 1
    ]
    return [(f"{tensor.name}_ptr", host_name(tensor.name)), *strides]


def _arguments(spec: AttentionSpec) -> tuple[Argument, ...]:
    found = [Argument(i.name, is_scalar=not i.shape) for i in spec.inputs]
    if spec.sink == "per_head":
        found.append(Argument("sink", is_scalar=False))
    if spec.kv_lens == "per_batch":
        found.append(Argument("kv_lens", is_scalar=False))
    return tuple(found)
