"""The host side as text: parameters and arguments of the kernels, names, the table of schedules."""

from __future__ import annotations

import builtins
import json
import keyword
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.options import kernel_kinds, options_text
from flashgen.codegen.reads import InputRead, elems_per_16_bytes
from flashgen.dtypes import get_dtype
from flashgen.schedule.model import Bucket, Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Input


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
class Flash1Parameters:
    """Parameters of the kernels of the flash1 order: not split, split, and their merge.

    keeps_bounds: whether loop bounds wait in a workspace of their own; state_width: fp32 numbers
    that a row's accumulator takes there.
    """

    whole: Parameters
    split: Parameters
    merge: Parameters
    keeps_bounds: bool
    state_width: int


@dataclass(frozen=True)
class Entry:
    """Names of the kernels in a module."""

    loop: str = "attention_fwd"
    single_tile: str = "attention_fwd_single_tile"
    flash1: str = "attention_fwd_flash1"
    flash1_split: str = "attention_fwd_flash1_split"
    merge: str = "attention_merge"
    sm90: str = "attention_fwd_sm90"


@dataclass(frozen=True)
class Argument:
    """An argument of the callable: the dtypes and the axes that a tensor may have, as text.

    `local` is what the host code calls it; a scalar, which is a number, has no axes.
    """

    name: str
    dtypes: str
    axes: str

    @property
    def is_scalar(self) -> bool:
        return not self.axes

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
    "has_aligned_rows HEAD_DIM_V all any int float next zip inputs num_kv_splits launch heads "
    "kv_splits SM_COUNT acc_workspace m_workspace l_workspace bounds_workspace "
    "num_m_tiles num_heads num_tiles kv_heads_abreast heads_abreast head_bytes programs empty "
    "next_tile keys row_tiles document_keys fits_tma tensor_map name value PORTABLE gl "
    "TensorDescriptor attention_fwd min max elsewhere packed_heads packs query_map "
    "RuntimeError check_arguments".split()
)


def host_name(name: str) -> str:
    """The variable of an input in the host code: its name, or one that is free."""
    return f"{name}_input" if name in HOST_NAMES else name


# Names with a meaning in a generated module, beside Python's own; a callable hides none of them.
_IN_MODULE = frozenset(
    "torch triton tl run has_aligned_rows floor_div floor_mod exp_fp32 tanh attention_fwd "
    "attention_fwd_single_tile attention_fwd_flash1 attention_fwd_flash1_split attention_merge "
    "attention_fwd_sm90 fits_tma tensor_map gl gluon mbarrier tma fence_async_shared warpgroup_mma "
    "warpgroup_mma_wait TensorDescriptor PORTABLE ROWS scale_rows scale_rows_operands accumulator "
    "by_thread beside softmax_step scaled of_rows wait_full release fill rows_of skip tiles "
    "barriers query_tile key_tiles changed masked produce_tile producer place_tile placed_number "
    "exists_next store_rows PLACES LO FULL_LO FULL_HI HI FIRST_ROW ALL_LO ALL_HI BATCH HEAD EXISTS "
    "KEPT only_same masked_inside number_of "
    "attend_tile attend_tiles_piped as_operand beside_rows fast_tanh first_softmax fragment "
    "from_on from_view in_place in_view is_odd keep kept_number mma_v2 nan_wins place_of ramp "
    "beside_threads where_in_order "
    "register_column store_lse taken tanh_of thread_column up_to walk walk_again "
    "late swap_in_quads swap_operands in_sixteen_bytes store_directly "
    "consumer document_keys larger smaller same_ids "
    "head_in_tile head_of is_head position_of queries_of query_map "
    "ARGUMENTS check_arguments kv_splits kernel options inputs q k v out lse sink kv_lens "
    "q_len kv_len q_max kv_max out_dtype".split()
)


def identifier(spec: AttentionSpec) -> str:
    """A Python name for the module's callable: gpt-oss.local -> gpt_oss_local."""
    text = "".join(c if c.isalnum() else "_" for c in spec.display_name)
    taken = {*_IN_MODULE, *dir(builtins), *(declared.name for declared in spec.inputs)}
    if not text[:1].isalpha() or keyword.iskeyword(text) or text in taken:
        return f"attention_{text}"
    return text


def callable_doc(spec: AttentionSpec, *, has_lse: bool) -> tuple[str, str]:
    axes = "batch, len, heads, dim" if spec.layout == "bshd" else "batch, heads, len, dim"
    result = "output and lse [batch, heads, len], fp32" if has_lse else "output"
    return f"Attention of q, k, v: [{axes}], any strides.", f"Returns {result}."


def schedule_rows(choices: Sequence[tuple[Bucket, Schedule]]) -> tuple[tuple[str, ...], ...]:
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
            getattr(Entry(), kernel_kinds(s)[0]),
            f"dict({options_text(s)})",
        )
        for b, s in rows
    )


def parameters(
    spec: AttentionSpec, dense: frozenset[str], extents: tuple[str, ...], *, has_lse: bool
) -> Parameters:
    """Signature and argument lines, in one order."""
    return parameters_of(parameter_groups(spec, dense, extents, has_lse=has_lse))


_STATE = [(f"{name}_workspace", f"{name}_workspace") for name in ("acc", "m", "l")]
_BOUNDS = [("bounds_workspace", "bounds_workspace")]
_SPLITS = [("num_kv_splits: tl.int32", "num_kv_splits")]


def flash1_parameters(
    spec: AttentionSpec,
    dense: frozenset[str],
    extents: tuple[str, ...],
    *,
    has_lse: bool,
    keeps_bounds: bool,
) -> Flash1Parameters:
    """Those of `parameters` that each kernel needs, and workspaces."""
    groups = parameter_groups(spec, dense, extents, has_lse=has_lse)
    state = [*_STATE, *(_BOUNDS if keeps_bounds else [])]
    results = {"out_ptr", "lse_ptr", "stride_ob", "stride_oh", "stride_om"}
    sink = {"sink_ptr", "stride_sink_0"}
    merging = results | sink | {"num_q_heads", "q_len"}
    walking = [[p for p in group if _name(p) not in results | sink] for group in groups]
    merged = [[p for p in group if _name(p) in merging] for group in groups]
    return Flash1Parameters(
        whole=parameters_of([*groups, state]),
        split=parameters_of([*walking, state, _SPLITS]),
        merge=parameters_of([*merged, _STATE, _SPLITS]),
        keeps_bounds=keeps_bounds,
        state_width=8 * math.ceil(spec.head_dim.v / 8),
    )


_Group = list[tuple[str, str]]  # (parameter with its type, argument)


def _name(parameter: tuple[str, str]) -> str:
    return parameter[0].split(":")[0]


def parameters_of(groups: Sequence[_Group]) -> Parameters:
    present = [group for group in groups if group]
    return Parameters(
        lines=tuple(", ".join(p for p, _ in group) + "," for group in present),
        arguments=tuple(", ".join(a for _, a in group) + "," for group in present),
        names=tuple(_name(parameter) for group in present for parameter in group),
    )


def parameter_groups(
    spec: AttentionSpec, dense: frozenset[str], extents: tuple[str, ...], *, has_lse: bool
) -> list[_Group]:
    groups: list[_Group] = [
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
    return groups


def checked_extents(loads: Sequence[InputRead]) -> tuple[str, ...]:
    """Extents that some load is checked against and that the kernels do not take anyway."""
    text = " ".join(load.masked_statement for load in loads)
    return tuple(e for e in ("num_batch", "num_kv_heads") if e in text)


# Those that rows, keys and dims are multiplied by; batches and heads have 64 bits themselves.
OPERAND_STRIDES = (
    ("stride_qm", "stride_qd"),
    ("stride_kn", "stride_kd"),
    ("stride_vn", "stride_vd"),
    ("stride_om",),
)
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


def operands(spec: AttentionSpec) -> tuple[Argument, ...]:
    """q, k and v."""
    order = "bhmd" if spec.layout == "bhsd" else "bmhd"
    formats = {"q": spec.dtype.q, "k": spec.dtype.kv, "v": spec.dtype.kv}
    found = []
    for name, dtype in formats.items():
        of = "q" if name == "q" else "kv"
        dim = spec.head_dim.v if name == "v" else spec.head_dim.qk
        axes: dict[str, int | str] = {
            "b": "batch",
            "h": f"{of}_heads",
            "m": f"{of}_len",
            "d": dim,
        }
        found.append(_argument(name, [dtype], [axes[axis] for axis in order]))
    return tuple(found)


def arguments(spec: AttentionSpec) -> tuple[Argument, ...]:
    """The keyword arguments beyond these."""
    found = [_argument(i.name, [i.dtype], i.shape) for i in spec.inputs]
    if spec.sink == "per_head":
        found.append(_argument("sink", ["fp32", "bf16", "fp16"], ["q_heads"]))
    if spec.kv_lens == "per_batch":
        found.append(_argument("kv_lens", ["int32", "int64"], ["batch"]))
    return tuple(found)


def _argument(name: str, dtypes: Sequence[str], axes: Sequence[int | str]) -> Argument:
    formats = " or ".join(get_dtype(dtype).torch_name for dtype in dtypes)
    shown = ", ".join(map(json.dumps, axes))
    return Argument(name, formats, f"({shown}{',' if len(axes) == 1 else ''})" if axes else "")
