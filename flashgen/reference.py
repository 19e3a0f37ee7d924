"""The oracle: what a spec means, in plain torch operations, slow on purpose, on any device.

`attention` computes in fp64 and defines correctness; `eager` computes the same the way a model in
plain torch would (matmuls in the spec's dtype, softmax in fp32) and says what error is usual;
`compare` judges a kernel's result by both. Mask and score are read by walking the expression tree
of `flashgen.spec.expr`, which shares nothing with the code generator's way, through SymPy.

Shapes: q [batch, q_heads, q_len, head_dim.qk], k and v [batch, kv_heads, kv_len, …] in layout bhsd;
heads and length trade places in bshd, in the output too. lse is [batch, q_heads, q_len] in both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from flashgen.dtypes import get_dtype
from flashgen.errors import NotServedError, TensorError
from flashgen.spec.expr import (
    Binary,
    Call,
    Compare,
    Index,
    Logic,
    Name,
    Negate,
    Node,
    Not,
    Number,
    parse_expression,
    walk,
)
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import (
    Alibi,
    Bias,
    Causal,
    Expr,
    MaskItem,
    Paged,
    Same,
    ScoreItem,
    Softcap,
    Window,
)

# Scores held at a time: 128 MiB in fp64, and some temporaries of that size beside them.
BLOCK_SCORES = 2**24

NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

Inputs = Mapping[str, "Tensor | bool | int | float"]


# --------------------------------------------------------------------------------------------------
# Expressions


@dataclass(frozen=True)
class Reader:
    """Evaluates expression trees on cells: every symbol is a tensor, and they broadcast together.

    `symbols`: int64 tensors shaped [batch, q_heads, rows, keys] or with extents 1, and the score s;
    `inputs`: name -> (tensor, declared shape); `real`: the dtype of real numbers; `in_mask`: a read
    outside an input makes its comparison fail, where in a score it gives 0.
    """

    symbols: Mapping[str, Tensor]
    inputs: Mapping[str, tuple[Tensor, tuple[int | str, ...]]]
    real: torch.dtype
    in_mask: bool

    def condition(self, node: Node, holds: bool = True) -> Tensor:
        """Where `node` holds, or where it fails; `not` is moved inwards, onto the comparisons."""
        if isinstance(node, Not):
            return self.condition(node.operand, not holds)
        if isinstance(node, Logic):
            parts = [self.condition(part, holds) for part in node.operands]
            conjunction = (node.operator == "and") == holds
            return reduce(operator.and_ if conjunction else operator.or_, parts)
        if isinstance(node, Compare):
            pairs = [
                self._compared(name if holds else NEGATED[name], left, right)
                for name, left, right in zip(
                    node.operators, node.operands, node.operands[1:], strict=False
                )
            ]
            return reduce(operator.and_ if holds else operator.or_, pairs)
        return self._hidden_outside((self._leaf(node) != 0) == holds, node)

    def _compared(self, name: str, left: Node, right: Node) -> Tensor:
        result = COMPARISONS[name](self.number(left), self.number(right))
        return self._hidden_outside(self._hidden_outside(result, left), right)

    def _hidden_outside(self, condition: Tensor, node: Node) -> Tensor:
        """`condition`, but in a mask false wherever a read in `node` falls outside its input."""
        for part in walk(node) if self.in_mask else ():
            if isinstance(part, Index):
                condition = condition & self._read(part)[1]
        return condition

    def number(self, node: Node) -> Tensor:
        """The value of `node`: int64 for an integer, `real` for a real number."""
        if isinstance(node, Number):
            dtype = torch.int64 if isinstance(node.value, int) else self.real
            return torch.tensor(node.value, dtype=dtype, device=self.symbols["k"].device)
        if isinstance(node, Negate):
            return -self.number(node.operand)
        if isinstance(node, Binary):
            return self._arithmetic(node.operator, self.number(node.left), self.number(node.right))
        if isinstance(node, Call):
            return self._call(node)
        return self._leaf(node)

    def _arithmetic(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        if name == "/":
            return left.to(self.real) / right.to(self.real)
        if name in {"//", "%"}:
            return self._divided(name, left, right)
        return {"+": operator.add, "-": operator.sub, "*": operator.mul}[name](left, right)

    @staticmethod
    def _divided(name: str, left: Tensor, right: Tensor) -> Tensor:
        """left // right (an integer) or left % right, rounded down; 0 where right is 0."""
        by_zero = right == 0
        right = torch.where(by_zero, torch.ones_like(right), right)
        if name == "//":
            result = torch.floor_divide(left, right).to(torch.int64)
        else:
            result = torch.remainder(left, right)  # with the sign of the divisor, as Python's
        return torch.where(by_zero, torch.zeros_like(result), result)

    def _call(self, node: Call) -> Tensor:
        if node.function == "where":
            condition = self.condition(node.arguments[0])
            return torch.where(condition, *map(self.number, node.arguments[1:]))
        values = [self.number(argument) for argument in node.arguments]
        if node.function in {"min", "max"}:
            return reduce(torch.minimum if node.function == "min" else torch.maximum, values)
        if node.function == "abs":
            return values[0].abs()
        if node.function == "floor":
            return values[0].to(self.real).floor().to(torch.int64)
        return getattr(torch, node.function)(values[0].to(self.real))  # exp log tanh sigmoid

    def _leaf(self, node: Node) -> Tensor:
        if isinstance(node, Index):
            return self._read(node)[0]
        assert isinstance(node, Name), node
        if node.name in self.inputs:
            return self._typed(self.inputs[node.name][0])
        return self.symbols[node.name]

    def _typed(self, value: Tensor) -> Tensor:
        if value.is_floating_point():
            return value.to(self.real)
        return value if value.dtype == torch.bool else value.to(torch.int64)

    def _read(self, node: Index) -> tuple[Tensor, Tensor]:
        """The elements read (0 for those outside) and which reads lie inside."""
        tensor, shape = self.inputs[node.name]
        inside = torch.ones((), dtype=torch.bool, device=tensor.device)
        indices = []
        for part, declared, extent in zip(node.indices, shape, tensor.shape, strict=True):
            index = self.number(part)
            if declared == 1:  # an axis of extent 1 broadcasts, whatever its index
                index = torch.zeros_like(index)
            else:
                # Keys that do not exist have no entry in an input either.
                end = self.symbols.get("kv_len", extent) if declared == "kv_len" else extent
                within = (index >= 0) & (index < end)
                inside = inside & within
                index = torch.where(within, index, 0)
            indices.append(index)
        if tensor.numel() == 0:
            empty = torch.zeros_like(torch.broadcast_tensors(inside, *indices)[0])
            return self._typed(empty.to(tensor.dtype)), empty
        value = self._typed(tensor[tuple(indices)])
        return torch.where(inside, value, torch.zeros_like(value)), inside


def _mask_text(item: MaskItem, rank: Callable[[str], int]) -> str:
    """A mask item as an expression: true where a query may see a key."""
    if isinstance(item, Causal):
        return "k <= q"
    if isinstance(item, Window):
        sides = []
        if item.left is not None:
            sides.append(f"k >= q - {item.left}")
        if item.right is not None:
            sides.append(f"k <= q + {item.right}")
        return " and ".join(sides) or "k == k"
    if isinstance(item, Same):
        lead = "b, " * (rank(item.input) - 1)
        return f"{item.input}[{lead}q] == {item.input}[{lead}k]"
    return item.expr


def _score_text(item: ScoreItem, rank: Callable[[str], int]) -> str:
    """A score item as an expression of the score s before it."""
    if isinstance(item, Softcap):
        return f"{item.cap!r} * tanh(s / {item.cap!r})"
    if isinstance(item, Alibi):
        return f"s - {item.input}[h] * abs(q - k)"
    if isinstance(item, Bias):
        indices = ["b", "h", "row", "k"][4 - rank(item.tensor) :]
        return f"s + {item.tensor}[{', '.join(indices)}]" if indices else f"s + {item.tensor}"
    assert isinstance(item, Expr)
    return item.expr


# --------------------------------------------------------------------------------------------------
# A call: sizes, positions, masks and scores


@dataclass(frozen=True)
class Case:
    """A checked call of a spec: its sizes and the tensors beside q, k and v."""

    spec: AttentionSpec
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    inputs: Mapping[str, tuple[Tensor, tuple[int | str, ...]]]
    kv_lens: Tensor | None
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.q_heads // max(self.kv_heads, 1)

    def symbols(self, batches: slice, rows: slice) -> dict[str, Tensor]:
        """The position symbols of some batches and query rows, as broadcasting int64 tensors.

        kv_len counts the keys that exist: with `kv_lens`, those of the batch.
        """

        def along(axis: int, start: int, stop: int) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[axis] = stop - start
            return torch.arange(start, stop, device=self.device).view(shape)

        head = along(1, 0, self.q_heads)
        row = along(2, rows.start, rows.stop)
        position = row
        if self.spec.align == "bottom_right":
            position = row + self.used(batches) - self.q_len
        return {
            "b": along(0, batches.start, batches.stop),
            "h": head,
            "hk": head // max(self.group, 1),
            "row": row,
            "q": position,
            "k": along(3, 0, self.kv_len),
            "q_len": torch.tensor(self.q_len, device=self.device),
            "kv_len": self.used(batches),
        }

    def used(self, batches: slice) -> Tensor:
        """How many keys exist in each of some batches: [batch or 1, 1, 1, 1]."""
        if self.kv_lens is None:
            return torch.tensor(self.kv_len, device=self.device).view(1, 1, 1, 1)
        return self.kv_lens[batches].to(torch.int64).view(-1, 1, 1, 1)

    def visible(self, batches: slice, rows: slice) -> Tensor:
        """Which keys each query may see: bool, broadcasting to [batch, q_heads, rows, kv_len]."""
        symbols = self.symbols(batches, rows)
        reader = Reader(symbols, self.inputs, torch.float64, in_mask=True)
        result = symbols["k"] < self.used(batches)
        for item in self.spec.mask:
            text = _mask_text(item, lambda name: len(self.inputs[name][1]))
            result = result & reader.condition(parse_expression(text))
        return result

    def scored(self, scores: Tensor, batches: slice, rows: slice) -> Tensor:
        """`scores` (scaled q·k) after the spec's score pipeline, in their dtype."""
        symbols = self.symbols(batches, rows)
        for item in self.spec.score:
            reader = Reader({**symbols, "s": scores}, self.inputs, scores.dtype, in_mask=False)
            text = _score_text(item, lambda name: len(self.inputs[name][1]))
            scores = reader.number(parse_expression(text)).to(scores.dtype).expand_as(scores)
        return scores


def _checked_inputs(
    spec: AttentionSpec, inputs: Inputs, sizes: Mapping[str, int], device: torch.device
) -> dict[str, tuple[Tensor, tuple[int | str, ...]]]:
    declared = {item.name: item for item in spec.inputs}
    for name in inputs:
        if name not in declared:
            raise TensorError(name, "an argument", f"only declared inputs: {sorted(declared)}")
    checked = {}
    for name, item in declared.items():
        if name not in inputs:
            raise TensorError(name, "nothing", f"a tensor of shape {list(item.shape)}")
        given = inputs[name]
        if not isinstance(given, Tensor):  # a number becomes what the kernel is passed
            given = torch.tensor(given, dtype=torch_dtype(item.dtype))
        tensor = given.to(device)
        if not item.shape and tensor.numel() == 1:
            tensor = tensor.reshape(())
        expected = [sizes[axis] if isinstance(axis, str) else axis for axis in item.shape]
        if list(tensor.shape) != expected:
            raise TensorError(name, f"shape {list(tensor.shape)}", f"shape {expected}")
        checked[name] = (tensor, item.shape)
    return checked


def _case(
    spec: AttentionSpec,
    sizes: Mapping[str, int],
    inputs: Inputs,
    kv_lens: Tensor | None,
    device: torch.device,
) -> Case:
    unserved = [
        text
        for text, asked in (
            ("kv_cache: paged", isinstance(spec.kv_cache, Paged)),
            ("layout: packed", spec.layout == "packed"),
            ("dropout", spec.dropout != 0),
        )
        if asked
    ]
    if unserved:
        raise NotServedError(spec.display_name, unserved)
    group = spec.heads.group
    q_heads, kv_heads = sizes["q_heads"], sizes["kv_heads"]
    heads = f"{kv_heads} heads for {q_heads} query heads"
    if group is not None and q_heads != group * kv_heads:
        raise TensorError("k", heads, f"{group} query heads per K/V head")
    if q_heads and (kv_heads == 0 or q_heads % kv_heads):
        hint = "grouped-query attention needs q_heads % kv_heads == 0."
        raise TensorError("k", heads, "a number of heads that divides q's", hint)
    if (kv_lens is not None) != (spec.kv_lens == "per_batch"):
        raise TensorError(
            "kv_lens", "nothing" if kv_lens is None else "a tensor", f"kv_lens: {spec.kv_lens}"
        )
    if kv_lens is not None:
        kv_lens = kv_lens.to(device)
        wrong_shape = list(kv_lens.shape) != [sizes["batch"]]
        if wrong_shape or bool(((kv_lens < 0) | (kv_lens > sizes["kv_len"])).any()):
            raise TensorError(
                "kv_lens",
                f"{kv_lens.tolist()}",
                f"{sizes['batch']} lengths from 0 to {sizes['kv_len']}",
            )
    checked = _checked_inputs(spec, inputs, sizes, device)
    return Case(spec=spec, inputs=checked, kv_lens=kv_lens, device=device, **sizes)


def mask(
    spec: AttentionSpec,
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    inputs: Inputs | None = None,
    kv_lens: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which keys each query may see, dense: bool [batch, q_heads, q_len, kv_len]."""
    sizes = {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
    }
    case = _case(spec, sizes, inputs or {}, kv_lens, torch.device(device))
    visible = case.visible(slice(0, batch), slice(0, q_len))
    return visible.expand(batch, q_heads, q_len, kv_len)


# --------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are rounded: scores and softmax are `work`, as are all sums of products.

    The others map a tensor to the values that a format can hold, as a `work` tensor: `q` and `kv`
    the operands of the matmuls, `product` the result of the first, `out` that of the second.
    """

    work: torch.dtype
    q: Callable[[Tensor], Tensor]
    kv: Callable[[Tensor], Tensor]
    product: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    inputs: Inputs | None = None,
    sink: Tensor | None = None,
    kv_lens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    chunk: int | None = None,
    rows: range | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `spec`, computed in `dtype`; lse is the natural logarithm.

    A row that sees no key gives out 0 and lse -inf (with a sink: lse = the sink). A key that a row
    may not see has no influence on it, even if it holds NaN; one it may see acts as IEEE 754 says.

    `chunk`: query rows at a time (None: what keeps a block small); `rows`: compute only these query
    rows, consecutive, of q (the result has len(rows) rows).
    Raises TensorError for arguments that do not fit, NotServedError for packed, paged and dropout.
    """

    def exact(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    arithmetic = Arithmetic(work=dtype, q=exact, kv=exact, product=exact, out=exact)
    return _attend(
        spec,
        arithmetic,
        (q, k, v),
        inputs=inputs or {},
        sink=sink,
        kv_lens=kv_lens,
        chunk=chunk,
        rows=rows,
    )


def eager(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    inputs: Inputs | None = None,
    sink: Tensor | None = None,
    kv_lens: Tensor | None = None,
    chunk: int | None = None,
    rows: range | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as a model in plain torch has them: out in the spec's dtype, lse in fp32.

    Each matmul takes operands of the spec's dtype, sums in fp32 and rounds its result to that dtype
    (the same on every device); scores and softmax are fp32. Arguments as for `attention`.
    """
    if "fp8_e4m3" in {spec.dtype.q, spec.dtype.kv}:
        raise NotServedError(spec.display_name, ["dtype: fp8_e4m3"])
    arithmetic = Arithmetic(
        work=torch.float32,
        q=_rounding(spec.dtype.q),
        kv=_rounding(spec.dtype.kv),
        product=_rounding("fp32" if spec.dtype.q == "tf32" else spec.dtype.q),
        out=_rounding(spec.dtype.out),
    )
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32, whatever the process has set
    try:
        out, lse = _attend(
            spec,
            arithmetic,
            (q, k, v),
            inputs=inputs or {},
            sink=sink,
            kv_lens=kv_lens,
            chunk=chunk,
            rows=rows,
        )
    finally:
        torch.set_float32_matmul_precision(precision)
    return out.to(torch_dtype(spec.dtype.out)), lse


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that holds elements of the format `name` (tf32 is fp32 in memory)."""
    return getattr(torch, get_dtype(name).torch_name)


def _rounding(name: str) -> Callable[[Tensor], Tensor]:
    """The values a matmul operand of format `name` can hold, as fp32."""
    if name == "tf32":
        # Tensor cores read the upper 19 bits of an fp32 operand and leave the lower 13 out.
        return lambda tensor: (tensor.float().view(torch.int32) & ~0x1FFF).view(torch.float32)
    dtype = torch_dtype(name)
    return lambda tensor: tensor.to(dtype).float()


def _attend(
    spec: AttentionSpec,
    arithmetic: Arithmetic,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    inputs: Inputs,
    sink: Tensor | None,
    kv_lens: Tensor | None,
    chunk: int | None,
    rows: range | None,
) -> tuple[Tensor, Tensor]:
    _check_qkv(spec, qkv)
    q, k, v = (t.transpose(1, 2) if spec.layout == "bshd" else t for t in qkv)
    sizes = {
        "batch": q.shape[0],
        "q_heads": q.shape[1],
        "kv_heads": k.shape[1],
        "q_len": q.shape[2],
        "kv_len": k.shape[2],
    }
    case = _case(spec, sizes, inputs, kv_lens, q.device)
    if (sink is not None) != (spec.sink == "per_head"):
        raise TensorError("sink", "nothing" if sink is None else "a tensor", f"sink: {spec.sink}")
    if sink is not None and list(sink.shape) != [case.q_heads]:
        raise TensorError("sink", f"shape {list(sink.shape)}", f"shape [{case.q_heads}]")

    rows = range(case.q_len) if rows is None else rows
    out = q.new_zeros(case.batch, case.q_heads, len(rows), v.shape[3], dtype=arithmetic.work)
    lse = q.new_zeros(case.batch, case.q_heads, len(rows), dtype=arithmetic.work)
    if lse.numel() == 0:  # no row to compute
        return (out.transpose(1, 2) if spec.layout == "bshd" else out), lse
    row_scores = max(1, case.q_heads * case.kv_len)
    batch_step = max(1, BLOCK_SCORES // row_scores)
    row_step = chunk or max(1, BLOCK_SCORES // (row_scores * max(1, min(batch_step, case.batch))))
    for b in range(0, case.batch, batch_step):
        batches = slice(b, min(b + batch_step, case.batch))
        keys, values = arithmetic.kv(k[batches]), arithmetic.kv(v[batches])
        for start in range(rows.start, rows.stop, row_step):
            block = slice(start, min(start + row_step, rows.stop))
            place = slice(block.start - rows.start, block.stop - rows.start)
            out[batches, :, place], lse[batches, :, place] = _block(
                case,
                arithmetic,
                (arithmetic.q(q[batches, :, block]), keys, values),
                sink=sink,
                batches=batches,
                rows=block,
            )
    return (out.transpose(1, 2) if spec.layout == "bshd" else out), lse


def _check_qkv(spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    head_dims = {"q": spec.head_dim.qk, "k": spec.head_dim.qk, "v": spec.head_dim.v}
    for (name, head_dim), tensor in zip(head_dims.items(), qkv, strict=True):
        if tensor.ndim != 4 or tensor.shape[3] != head_dim:
            raise TensorError(
                name, f"shape {list(tensor.shape)}", f"4 axes ({spec.layout}), the last {head_dim}"
            )
    q, k, v = qkv
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise TensorError(
            "k, v",
            f"shapes {list(k.shape)} and {list(v.shape)}",
            f"the same batch ({q.shape[0]}, that of q), heads and length",
        )


def _block(
    case: Case,
    arithmetic: Arithmetic,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    sink: Tensor | None,
    batches: slice,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of some batches and query rows; all tensors in `arithmetic.work`."""
    queries, keys, values = qkv
    batch, q_heads, num_rows, _ = queries.shape
    work = arithmetic.work

    def fold(tensor: Tensor) -> Tensor:  # the query heads of one K/V head become more rows of it
        return tensor.reshape(batch, case.kv_heads, case.group * num_rows, -1)

    def unfold(tensor: Tensor) -> Tensor:
        return tensor.reshape(batch, q_heads, num_rows, -1)

    products = arithmetic.product(unfold(fold(queries) @ keys.transpose(2, 3)))
    scores = case.scored(products * case.spec.softmax_scale, batches, rows)
    visible = case.visible(batches, rows).expand(scores.shape)
    scores = torch.where(visible, scores, -math.inf)

    extra = scores.new_full((1, q_heads, 1, 1), -math.inf)
    if sink is not None:
        extra = sink.to(scores).view(1, q_heads, 1, 1)
    highest = extra.expand(batch, q_heads, num_rows, 1)
    if case.kv_len:
        highest = torch.maximum(highest, scores.amax(dim=3, keepdim=True))
    highest = torch.where(highest == -math.inf, 0.0, highest)  # no key at all: exp(-inf - 0) is 0
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=3, keepdim=True) + torch.exp(extra - highest)
    lse = (highest + torch.log(total)).squeeze(3)
    probs = weights / torch.where(total == 0, 1.0, total)

    # 0 * NaN is NaN, so what the V rows that are not finite contribute is decided by who sees them.
    finite = torch.isfinite(values)
    probs = arithmetic.kv(probs)
    out = fold(probs) @ torch.where(finite, values, 0.0)
    if not bool(finite.all()):
        seen = fold(visible.to(work))

        def meets(weight: Tensor, which: Tensor) -> Tensor:
            return weight @ which.to(work) > 0

        up, down = meets(seen, values == math.inf), meets(seen, values == -math.inf)
        undefined = meets(seen, torch.isnan(values)) | (up & down) | torch.isnan(out)
        undefined |= meets(seen * (fold(probs) == 0), torch.isinf(values))
        out = torch.where(up, math.inf, torch.where(down, -math.inf, out))
        out = torch.where(undefined, math.nan, out)
    return arithmetic.out(unfold(out)), lse


# --------------------------------------------------------------------------------------------------
# Judging a result


@dataclass(frozen=True)
class Comparison:
    """A result held against the oracle: errors are absolute, the largest of all elements.

    `misplaced`: elements of out or lse that are finite where the oracle's is not, or the reverse;
    `unclean`: rows that see no key whose out is not exactly 0 or whose lse is not exactly -inf
    (the sink, where there is one).
    """

    max_error: float
    bound: float
    lse_error: float
    lse_bound: float
    misplaced: int
    unclean: int

    @property
    def ok(self) -> bool:
        """Whether every element is right."""
        return (
            self.max_error <= self.bound
            and self.lse_error <= self.lse_bound
            and self.misplaced == 0
            and self.unclean == 0
        )

    def __str__(self) -> str:
        text = (
            f"max error {self.max_error:.3g} (bound {self.bound:.3g}), "
            f"lse error {self.lse_error:.3g} (bound {self.lse_bound:.3g})"
        )
        if self.misplaced:
            text += f", {self.misplaced} elements finite on one side only"
        if self.unclean:
            text += f", {self.unclean} rows without a key not exactly empty"
        return text


def ulp(value: float, dtype: str | torch.dtype) -> float:
    """The distance from |value| to the next larger number of `dtype`.

    >>> ulp(1.0, "bf16"), ulp(3.9, "bf16")
    (0.0078125, 0.015625)
    """
    info = torch.finfo(torch_dtype(dtype) if isinstance(dtype, str) else dtype)
    exponent = math.frexp(max(abs(value), info.tiny))[1] - 1
    return info.eps * 2.0**exponent


def _largest(tensor: Tensor) -> float:
    """The largest magnitude among the finite elements; 0 if there is none."""
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def error_bound(out64: Tensor, eager_out: Tensor, out_dtype: str | torch.dtype) -> float:
    """How far a kernel's output may be from fp64: 2 * max|eager - fp64| + 1 ulp at max|fp64|."""
    usual = _largest(eager_out.to(out64) - out64)
    return 2.0 * usual + ulp(_largest(out64), out_dtype)


# Roundings of an fp32 lse that even an exact eager result does not show: exp2, log2, the change of
# base, and the sum of products in another order.
LSE_ULPS = 8


def compare(
    out: Tensor,
    lse: Tensor | None,
    ref_out: Tensor,
    ref_lse: Tensor,
    eager_out: Tensor,
    *,
    eager_lse: Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    sink: Tensor | None = None,
    layout: str = "bhsd",
) -> Comparison:
    """Hold `out` and `lse` against the oracle's `ref_out`, `ref_lse`, allowing for the usual error.

    `eager_out`, `eager_lse` are those of `eager` on the same arguments. Bound of lse:
    2 * max|eager - fp64| + 8 ulps of fp32 at max(1, |fp64|); without `eager_lse` the usual error is
    taken to be 1 ulp of the output dtype there. `lse` None: only out is judged.
    Where the oracle is not finite (a NaN that the row sees), the result must not be finite either.
    """
    ref_out, ref_lse = ref_out.double(), ref_lse.double()
    out64 = out.to(ref_out)
    out_dtype = out.dtype if out_dtype is None else out_dtype
    bound = error_bound(ref_out, eager_out, out_dtype)
    misplaced = int((torch.isfinite(out64) != torch.isfinite(ref_out)).sum())

    by_head = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    nothing = (by_head(ref_out) == 0).all(dim=3)  # not so where a key counts 0 and holds NaN
    empty = nothing & (ref_lse == -math.inf)
    if sink is not None:
        empty = empty | (nothing & (ref_lse == sink.to(ref_lse).view(1, -1, 1)))
    clean = (by_head(out64) == 0).all(dim=3)
    lse_error, lse_bound = 0.0, 0.0
    if lse is not None:
        lse64 = lse.to(ref_lse)
        clean = clean & (lse64 == ref_lse)
        misplaced += int((torch.isfinite(lse64) != torch.isfinite(ref_lse)).sum())
        lse_error = _largest(lse64 - ref_lse)
        size = max(1.0, _largest(ref_lse))
        usual = ulp(size, out_dtype)
        if eager_lse is not None:
            usual = _largest(eager_lse.to(ref_lse) - ref_lse)
        lse_bound = 2.0 * usual + LSE_ULPS * ulp(size, torch.float32)
    return Comparison(
        max_error=_largest(out64 - ref_out),
        bound=bound,
        lse_error=lse_error,
        lse_bound=lse_bound,
        misplaced=misplaced,
        unclean=int((empty & ~clean).sum()),
    )
