"""What the templates of the gluon_sm90 family see beyond the portable family's context."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.codegen.bounds import Bounds
from flashgen.codegen.gluon_score import TANH, GluonScore, Tanh
from flashgen.codegen.host import Parameters, parameter_groups, parameters_of
from flashgen.codegen.reads import InputRead
from flashgen.codegen.row_limits import MaskText
from flashgen.schedule.on_chip import TritonVersion
from flashgen.schedule.sm90 import REGISTERS
from flashgen.spec.model import AttentionSpec


@dataclass(frozen=True)
class Api:
    """Names that differ between versions of Triton."""

    tma_load: str
    tma_store: str


# From this version of Triton on.
APIS: Mapping[TritonVersion, Api] = {
    (3, 6): Api("async_copy_global_to_shared", "async_copy_shared_to_global"),
    (3, 8): Api("async_load", "async_store"),
}


def api_of(version: TritonVersion) -> Api:
    """The names in a version of Triton that has Gluon, 3.6 or later."""
    return APIS[max(known for known in APIS if known <= version)]


@dataclass(frozen=True)
class TileText:
    """The input of the score that TMA brings in tiles of rows and keys.

    variable: its numbers in the kernel; tensor: the host's name; place: indices of its first two
    axes; new_axes: what the host puts before its own so that it has four.
    """

    name: str
    variable: str
    tensor: str
    place: tuple[str, str]
    new_axes: str


@dataclass(frozen=True)
class IdsText:
    """Document ids, where a mask has some.

    tensor: the host's name; element: what it is made of; stride: that of the last axis in the
    kernel, for which the host sees to it that it is 1; strides: the others; same: that a row's and
    a key's id are equal; alone: variables that nothing else names; has_last: whether a row needs
    the last key of its document beside the first.
    """

    tensor: str
    name: str
    element: str
    stride: str
    strides: tuple[str, ...]
    same: str
    alone: tuple[str, ...]
    has_last: bool


@dataclass(frozen=True)
class GluonText:
    """Parameters and conditions of the Hopper kernel, as text.

    inputs, sizes: parameters that come from captured tensors, and lengths and counts; stored: what
    the epilogue takes; kept: what consumers read from shared memory, by number; in_bounds, in_mask:
    variables of reads that the loop bounds and the mask name; partial: which key tiles after the
    first are masked ("": none, "always", or a condition);
    roles: consumers, programs on an SM, warps of the workers, registers a thread of each; packs:
    whether query heads share a tile in some schedule of the module; groups: parameters with their
    arguments.
    """

    api: Api
    parameters: Parameters
    inputs: tuple[str, ...]
    sizes: tuple[str, ...]
    stored: tuple[str, ...]
    kept: tuple[str, ...]
    local: tuple[str, ...]
    in_bounds: tuple[str, ...]
    in_mask: tuple[str, ...]
    score: GluonScore
    mask: MaskText
    tanh: Tanh
    tile: TileText | None
    ids: IdsText | None
    partial: str
    roles: tuple[tuple[int, int, list[int], list[int]], ...]
    packs: bool
    groups: tuple[tuple[tuple[str, str], ...], ...]

    @property
    def changes_scores(self) -> bool:
        return bool(self.score.lines)

    @property
    def score_names_keys(self) -> bool:
        return any("kv_idx" in _words(line) for line in self.score.lines)

    @property
    def to_log2(self) -> str:
        """The factor from scores, as the lines leave them, to base 2."""
        if self.score.tilt or (self.changes_scores and self.score.folded):
            return self.score.scale_log2
        return self.score.to_log2

    def parameters_for(self, text: str) -> Parameters:
        """Those of the parameters that `text` needs."""
        words = _words(text)
        return parameters_of(
            [[p for p in group if p[0].split(":")[0] in words] for group in self.groups]
        )

    def args(self, text: str) -> tuple[str, ...]:
        """Which parameters and variables of a query tile `text` needs from its caller."""
        bound = set(re.findall(r"^\s*(\w+) = ", text, re.MULTILINE))
        needed = _words(text) - bound
        return tuple(n for n in (*self.inputs, *self.sizes, *self.local) if n in needed)

    @staticmethod
    def names_in(names: Sequence[str], *texts: str) -> tuple[str, ...]:
        """Which of `names` occur in some texts."""
        words = _words(" ".join(texts))
        return tuple(n for n in names if n in words)

    @staticmethod
    def without_lengths(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(n for n in names if n not in LENGTHS)

    def parameters_in(self, *texts: str) -> tuple[str, ...]:
        """Which parameters of the kernel occur in some texts."""
        words = _words(" ".join(texts))
        return tuple(n for n in (*self.inputs, *self.sizes) if n in words)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


_TILES = ("tiles_abreast", "num_heads", "heads_abreast")


def gluon_text(
    spec: AttentionSpec,
    *,
    dense: frozenset[str],
    extents: tuple[str, ...],
    has_lse: bool,
    score: GluonScore,
    bounds: Bounds,
    reads: Sequence[InputRead],
    in_mask: frozenset[str],
    mask: MaskText,
    tile: TileText | None,
    ids: IdsText | None,
    masks_keys: bool,
    heavy_last: bool,
    packs: bool,
    version: TritonVersion,
) -> GluonText:
    """The Hopper kernel's parameters in one order, and what its functions pass on."""
    groups = parameter_groups(spec, dense, extents, has_lse=has_lse)
    captured, sizes = groups[_OPERAND_GROUPS:-1], groups[-1]
    lse = [("lse_ptr", "lse")] if has_lse else []
    tiles = ("num_m_tiles", *_TILES) if heavy_last else _TILES  # counted from the last one
    counts = [(f"{name}: tl.int32", name) for name in (*tiles, "num_tiles")]
    keys = [("keys_ptr", "keys")] if bounds.scan else []
    inputs = parameters_of([_OPERANDS, *captured, keys]).names
    groups = [[*lse, ("next_tile_ptr", "next_tile")], _OPERANDS, *captured, keys, sizes, counts]
    bounds_words = _words(" ".join(map(str, bounds.spans)))
    row_variables = [r.variable for r in reads if r.scope in {"program", "rows"}]
    of_tile = ("own_first", "own_last", "full_hi") if ids else ()
    bases = [name for r in reads for name in r.base_variables]
    stored = ["sink_ptr", "stride_sink_0", "q_len"]
    kept = [*parameters_of([_OPERANDS]).names, *LENGTHS]
    kept += ["lse_ptr", "num_q_heads"] if has_lse else []
    kept += ["keys_ptr"] if bounds.scan else []
    if packs and spec.heads.group is None:
        stored.append("gqa_group")
    return GluonText(
        api=api_of(version),
        parameters=parameters_of(_without_strides_of_ids(groups, ids)),
        inputs=inputs,
        sizes=(*parameters_of([sizes]).names, *tiles),
        stored=tuple(n for n in stored if has_lse and ("sink" not in n or n in inputs)),
        kept=tuple(kept),
        local=("b", "h", "hk", "row_idx", "row_exists", "q_idx", *row_variables, *bases, *of_tile),
        in_bounds=tuple(r.variable for r in reads if r.variable in bounds_words),
        in_mask=tuple(sorted(in_mask)),
        score=score,
        mask=mask,
        tanh=TANH[spec.dtype.q],
        tile=tile,
        ids=ids,
        partial=_partial(bounds) if masks_keys else "",
        roles=tuple(
            (n, programs, [*[4] * (n - 1), 1], [*[consumer] * (n - 1), producer])
            for (n, programs), (consumer, producer) in sorted(REGISTERS.items())
        ),
        packs=packs,
        groups=tuple(map(tuple, groups)),
    )


LENGTHS = ("q_len", "kv_len")

# What a second walk loads without tensor maps; the last axis is contiguous.
_OPERANDS = [
    *[(f"{t}_ptr", t) for t in ("q", "k", "v", "out")],
    *[
        (f"stride_{t[0]}{axis}: tl.int64", f"{t}.stride({number})")
        for t, axes in (("q", "bhm"), ("k", "bhn"), ("v", "bhn"), ("out", "bhm"))
        for number, axis in enumerate(axes)
    ],
]
_OPERAND_GROUPS = 5  # of `parameter_groups`: pointers, and strides of q, k, v and out


def _without_strides_of_ids(
    groups: Sequence[Sequence[tuple[str, str]]], ids: IdsText | None
) -> list[list[tuple[str, str]]]:
    """Of ids that are only compared the kernel before leaves address and strides."""
    only_compared = ids is not None and len(ids.alone) == _READS_OF_IDS
    unused = {*ids.strides, ids.stride} if ids is not None and only_compared else set()
    return [[p for p in group if p[0].split(":")[0] not in unused] for group in groups]


_READS_OF_IDS = 2  # a row's and a key's


def _partial(bounds: Bounds) -> str:
    """Which tiles [lo, hi) are not in [full_lo, full_hi): the last of them is masked anyway."""
    if not bounds.full:
        return "always"
    return "(j < full_lo) | (j >= full_hi)" if bounds.left_partial else "j >= full_hi"
