"""The work that attention needs at least: visible pairs, FLOPs of the matmuls, bytes of memory.

Pairs are counted from the meaning of the mask, in closed form for causal and window masks and
otherwise cell by cell with the reference's reading of it, so they also hold for masks that depend
on data (document ids, prefixes): the numbers are those of the tensors that were timed. They do not
come from the loop bounds (`passes/count.py`): an error there would flatter the kernel it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashgen.bench.record import CaseRecord, Result
from flashgen.dtypes import get_dtype
from flashgen.reference import Case
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Causal, Shape, Window

CELLS_AT_A_TIME = 2**24


@dataclass(frozen=True)
class Visible:
    """What a mask lets through: (query, key) pairs and distinct keys, over all batches and heads.

    `keys` counts, for every batch, the keys that at least one query sees (of any head).
    """

    pairs: int
    keys: int


@dataclass(frozen=True)
class Work:
    """Work of one call. FLOPs are 2*(head_dim.qk + head_dim.v) for each visible pair.

    `dram_bytes`: each visible key and value, each query and each input read once, output written.
    """

    visible_pairs: int
    matmul_flops: int
    dram_bytes: int


def count_work(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    *,
    kv_lens: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Work:
    """The work of `spec` on `shape` with these declared inputs."""
    seen = count_visible(spec, shape, inputs, kv_lens=kv_lens, device=device)
    dims = spec.head_dim.qk + spec.head_dim.v
    rows = shape.batch * shape.q_heads * shape.q_len
    dram_bytes = (
        rows * spec.head_dim.qk * get_dtype(spec.dtype.q).bytes
        + rows * spec.head_dim.v * get_dtype(spec.dtype.out).bytes
        + seen.keys * shape.kv_heads * dims * get_dtype(spec.dtype.kv).bytes
        + sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
    )
    return Work(seen.pairs, 2 * dims * seen.pairs, dram_bytes)


def case_record(
    case_id: str,
    group: str,
    spec: AttentionSpec,
    shape: Shape,
    work: Work,
    results: tuple[Result, ...],
    facts: Mapping[str, Any],
) -> CaseRecord:
    """The record of a case, with the work that one call of it takes."""
    return CaseRecord(
        id=case_id,
        group=group,
        spec=spec.display_name,
        shape=asdict(shape),
        dtype=spec.dtype.q,
        **asdict(work),
        results=results,
        facts=facts,
    )


def count_visible(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    *,
    kv_lens: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Visible:
    """Visible pairs over all batches and query heads, and the keys that they touch."""
    banded = all(isinstance(item, Causal | Window) for item in spec.mask)
    if banded and kv_lens is None:
        return _count_band(spec, shape)
    return _count_cells(spec, shape, inputs, kv_lens, torch.device(device))


def _count_band(spec: AttentionSpec, shape: Shape) -> Visible:
    """Each row sees one interval of keys, and both of its ends move right from row to row."""
    offset = shape.kv_len - shape.q_len if spec.align == "bottom_right" else 0
    position = torch.arange(shape.q_len, dtype=torch.int64) + offset
    first, last = torch.zeros_like(position), torch.full_like(position, shape.kv_len - 1)
    for item in spec.mask:
        left = item.left if isinstance(item, Window) else None
        right = item.right if isinstance(item, Window) else 0
        if left is not None:
            first = torch.maximum(first, position - left)
        if right is not None:
            last = torch.minimum(last, position + right)
    seen = (last - first + 1).clamp(min=0)
    rows = seen > 0
    keys = int(last[rows].max() - first[rows].min()) + 1 if bool(rows.any()) else 0
    return Visible(int(seen.sum()) * shape.batch * shape.q_heads, keys * shape.batch)


def _count_cells(
    spec: AttentionSpec,
    shape: Shape,
    inputs: Mapping[str, torch.Tensor],
    kv_lens: torch.Tensor | None,
    device: torch.device,
) -> Visible:
    case = Case(
        spec=spec,
        batch=shape.batch,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        inputs={
            declared.name: (inputs[declared.name].to(device), declared.shape)
            for declared in spec.inputs
        },
        kv_lens=kv_lens if kv_lens is None else kv_lens.to(device),
        device=device,
    )
    if shape.kv_len == 0:
        return Visible(0, 0)
    pairs, touched = 0, torch.zeros(shape.batch, shape.kv_len, dtype=torch.bool, device=device)
    step = max(1, CELLS_AT_A_TIME // max(1, shape.batch * shape.kv_len))
    for start in range(0, shape.q_len, step):
        rows = slice(start, min(start + step, shape.q_len))
        visible = case.visible(slice(0, shape.batch), rows)
        repeats = (shape.batch // visible.shape[0]) * (shape.q_heads // visible.shape[1])
        per_row = (rows.stop - rows.start) // visible.shape[2]
        pairs += int(visible.sum()) * repeats * per_row * (shape.kv_len // visible.shape[3])
        touched |= visible.any(dim=2).any(dim=1)
    return Visible(pairs, int(touched.sum()))
