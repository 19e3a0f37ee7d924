"""Everything a template may see: texts and flags derived from a problem, frozen and complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy as sp
from sympy.logic.boolalg import Boolean

from flashgen.codegen.bounds import Bounds, Positions, bounds_text, positions, span_expressions
from flashgen.codegen.expr import TritonPrinter, clear_denominators
from flashgen.codegen.gluon import GluonText, IdsText, TileText, gluon_text
from flashgen.codegen.gluon_score import gluon_score
from flashgen.codegen.host import (
    OPERAND_STRIDES,
    Argument,
    Entry,
    Flash1Parameters,
    Parameters,
    arguments,
    callable_doc,
    checked_extents,
    flash1_parameters,
    host_name,
    identifier,
    operands,
    parameters,
    schedule_rows,
)
from flashgen.codegen.options import options_text
from flashgen.codegen.query_range import QueryRange, query_range
from flashgen.codegen.reads import (
    InputRead,
    dense_tensors,
    elems_per_16_bytes,
    input_read,
    reads_of,
    strides_of,
    variables_for,
)
from flashgen.codegen.row_limits import OWN_LAST, by_own_keys, mask_text, same_document
from flashgen.codegen.score import QK, Score, score_expression, score_text
from flashgen.dtypes import get_dtype
from flashgen.passes.inputs import EXTENTS
from flashgen.passes.score_tile import score_tile
from flashgen.passes.visibility import Q_FIRST, Q_LAST, ROW_FIRST, ROW_LAST, Scan, visibility
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule
from flashgen.schedule.on_chip import installed_triton
from flashgen.schedule.space import portable_schedule
from flashgen.spec import symbolic as sym
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input

# An fp32 matmul adds one product after the other, and its error grows with the length of the chain.
# Sums of 16 have a third of the error of 64 (random calls), and no spills at head dim 64 (264 B).
QK_PART = 16


@dataclass(frozen=True)
class Header:
    """Docstring of a generated module: what it is, from which spec, with which meanings."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class RenderContext:
    """What the templates see, and nothing else."""

    header: Header
    head_dim_qk: int
    head_dim_qk_padded: int
    qk_part: int
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
    query_range: QueryRange | None
    program_reads: tuple[InputRead, ...]
    row_reads: tuple[InputRead, ...]
    key_reads: tuple[InputRead, ...]
    pair_reads: tuple[InputRead, ...]
    strides: tuple[tuple[str, ...], ...]  # of each tensor: what 32 bits of a position multiply
    parameters: Parameters
    flash1: Flash1Parameters
    sm_count: int
    target_name: str
    operands: tuple[Argument, ...]
    arguments: tuple[Argument, ...]
    dense_inputs: tuple[tuple[str, int], ...]  # with the elements in 16 bytes
    helpers: frozenset[str]
    schedules: tuple[tuple[str, ...], ...]
    callable_name: str
    callable_doc: tuple[str, str]
    gluon: GluonText | None  # of modules with a kernel of that family
    portable: str  # options of the kernel that serves where that one cannot
    entry: Entry = field(default_factory=Entry)
    kinds: tuple[str, ...] = ()  # of the module's kernels, and their text
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
        return self._qk_in("dims_qk[None, :]")

    @property
    def qk_in_col(self) -> str:
        return self._qk_in("dims_qk[:, None]")

    @property
    def v_in_row(self) -> str:
        return self._in_dim("dims_v[None, :]", "V", self.head_dim_v, self.head_dim_v_padded)

    def _qk_in(self, dims: str) -> str:
        if self.score.precise:  # dims of a part, which begins at d
            return f"(d + {dims} < HEAD_DIM_QK)" if self.head_dim_qk % QK_PART else ""
        return self._in_dim(dims, "QK", self.head_dim_qk, self.head_dim_qk_padded)

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
    score = score_expression(problem)
    reads = reads_of([seen.predicate, score] + [e for s in seen.spans for e in span_expressions(s)])
    names = _names(spec) | variables_for(reads)
    printer = TritonPrinter(names, precise=problem.elem_bytes == 4)
    dense = dense_tensors(reads)
    in_score = reads_of([score])
    loads = [
        input_read(read, names[read], spec, printer, dense=dense, in_score=read in in_score)
        for read in reads
    ]
    predicate = clear_denominators(seen.predicate)
    bounds = bounds_text(seen.spans, spec, printer)
    text = score_text(score, problem, printer)
    visible = (
        "kv_exists"
        if predicate == sp.true
        else f"kv_exists & {printer.parenthesize(predicate, 90)}"
    )
    element_wise = predicate.free_symbols | score.free_symbols
    scopes = {
        s: tuple(r for r in loads if r.scope == s) for s in ("program", "rows", "keys", "pairs")
    }
    extents = checked_extents(loads)
    heavy_last = any(span.heavy_last for span in seen.spans)
    gluon, portable = None, ""
    if any(schedule.family == "gluon_sm90" for _, schedule in choices):
        scan = seen.spans[0].scan if bounds.scan else None
        limits = by_own_keys(predicate, scan) if scan else predicate
        gluon = gluon_text(
            spec,
            dense=dense,
            extents=extents,
            has_lse=has_lse,
            score=gluon_score(score, problem, printer),
            mask=mask_text(limits, printer),
            tile=_tile_text(spec, names, printer),
            ids=_ids_text(scan, spec, predicate, [limits, score], printer) if scan else None,
            bounds=bounds,
            reads=loads,
            in_mask=frozenset(names[read] for read in reads_of([limits])),
            masks_keys=predicate != sp.true,
            heavy_last=heavy_last,
            packs=any(schedule.packed_heads > 1 for _, schedule in choices),
            version=installed_triton(),
        )
        portable = options_text(portable_schedule(problem))
    return RenderContext(
        header=header,
        head_dim_qk=problem.head_dim_qk,
        head_dim_qk_padded=problem.head_dim_qk_padded,
        qk_part=QK_PART,
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
        heavy_last=heavy_last,
        positions=positions(seen.spans, element_wise),
        full_step_uses_kv_idx=sym.K in score.free_symbols,
        masks_keys=predicate != sp.true,
        visible=visible,
        score=text,
        bounds=bounds,
        query_range=query_range(seen.spans, spec, printer),
        program_reads=scopes["program"],
        row_reads=scopes["rows"],
        key_reads=scopes["keys"],
        pair_reads=scopes["pairs"],
        strides=(*OPERAND_STRIDES, *strides_of(reads, spec)),
        parameters=parameters(spec, dense, extents, has_lse=has_lse),
        flash1=flash1_parameters(
            spec,
            dense,
            extents,
            has_lse=has_lse,
            keeps_bounds=bounds.scan is not None or bounds.kind == "chunks",
        ),
        sm_count=problem.target.sm_count,
        target_name=problem.target.name,
        operands=operands(spec),
        arguments=arguments(spec),
        dense_inputs=tuple(
            (host_name(name), elems_per_16_bytes(spec.input(name))) for name in sorted(dense)
        ),
        helpers=_with_dependencies(printer.helpers, bounds),
        schedules=schedule_rows(choices),
        callable_name=identifier(spec),
        callable_doc=callable_doc(spec, has_lse=has_lse),
        gluon=gluon,
        portable=portable,
    )


def _tile_text(
    spec: AttentionSpec, names: Mapping[sp.Basic, str], printer: TritonPrinter
) -> TileText | None:
    found = score_tile(spec)
    if found is None:
        return None
    *leading, _row, _key = zip(found.read.indices, found.tensor.shape, strict=True)
    given = ["0" if extent == 1 else printer.doprint(index) for index, extent in leading]
    first, second = ["0"] * (2 - len(given)) + given
    return TileText(
        name=found.tensor.name,
        variable=names[found.read],
        tensor=host_name(found.tensor.name),
        place=(first, second),
        new_axes=("[None, None]", "[None]", "")[len(given)],
    )


def _ids_text(
    scan: Scan,
    spec: AttentionSpec,
    predicate: Boolean,
    elsewhere: Sequence[sp.Basic],
    printer: TritonPrinter,
) -> IdsText:
    """elsewhere: what else may read ids: the mask by each row's limits, and the score."""
    ids = {scan.row_read, scan.key_read} - set(reads_of(elsewhere))
    tensor = spec.input(scan.name)
    strides = [f"stride_{scan.name}_{n}" for n, extent in enumerate(tensor.shape) if extent != 1]
    return IdsText(
        tensor=host_name(scan.name),
        name=scan.name,
        element=get_dtype(tensor.dtype).triton_name,
        stride=strides[-1],
        strides=tuple(strides[:-1]),
        same=printer.doprint(same_document(predicate, scan)),
        alone=tuple(sorted(printer.names[read] for read in ids)),
        has_last=OWN_LAST in elsewhere[0].free_symbols,
    )


# Without a bound on the imprecise sum Triton folds `x + dot(a, b)` into one long sum, dot(a, b, x).
_DOT_ARGS = {
    "fp32": ', input_precision="ieee", max_num_imprecise_acc=QK_PART',
    "tf32": ', input_precision="tf32"',
}


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
