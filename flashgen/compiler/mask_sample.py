"""A mask at a size that can be looked at: pair by pair, and tile by tile as the kernel walks it.

What a mask reads from inputs is drawn here, always the same. Neither torch nor triton is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from flashgen.passes.count import tile_classes, visible_matrix
from flashgen.passes.lowering import Kernel
from flashgen.passes.visibility import visibility
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.spec.parts import Input, Same

MAX_LENGTH = 32_768  # rows and keys of a sample
MAX_DENSE = 2_048  # where an input has an element for each pair
PIXELS = 512  # of the element view: larger samples are averaged
PER_PIXEL = 4  # rows, and keys, that are looked at for each pixel
TILES = 24  # shown at least, where the shape has as many
PERIODS = 6  # of the largest number in the mask


@dataclass(frozen=True, eq=False)
class MaskSample:
    """`density`: the visible share of each pixel's pairs; `classes`: see `count.tile_classes`.

    `drawn` names the inputs that were drawn; `whole` says whether the sample is the whole shape.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    density: NDArray[np.float64]
    classes: NDArray[np.int8]
    drawn: tuple[str, ...]
    whole: bool


def sample_mask(
    spec: AttentionSpec, shape: Shape, block_m: int, block_n: int, kernel: Kernel = "loop"
) -> MaskSample:
    """The mask of the first batch and head, at most of `shape`'s lengths, with drawn inputs."""
    length = _length(spec, max(block_m, block_n))
    q_len, kv_len = min(shape.q_len, length), min(shape.kv_len, length)
    small = Shape(1, spec.heads.group or 1, 1, q_len, kv_len)
    inputs = _draw(spec, small)
    rows, keys = _strata(q_len), _strata(kv_len)
    seen = visible_matrix(spec, small, inputs, rows=rows.ravel(), keys=keys.ravel())
    pixels = seen.reshape(*rows.shape, *keys.shape).mean(axis=(1, 3))
    return MaskSample(
        q_len=q_len,
        kv_len=kv_len,
        block_m=block_m,
        block_n=block_n,
        density=pixels,
        classes=tile_classes(spec, small, block_m, block_n, inputs, kernel),
        drawn=tuple(sorted(inputs)),
        whole=(q_len, kv_len) == (shape.q_len, shape.kv_len),
    )


def _length(spec: AttentionSpec, block: int) -> int:
    """Rows and keys that show the mask's structure and enough tiles."""
    predicate = visibility(spec).predicate
    constants = [abs(int(n)) for n in predicate.atoms(sp.Integer)]
    constants += [int(n.q) for n in predicate.atoms(sp.Rational)]
    wanted = max(PERIODS * max(constants, default=0), TILES * block)
    dense = any({"q_len", "kv_len"} <= set(map(str, i.shape)) for i in spec.inputs)
    return min(wanted, MAX_DENSE if dense else MAX_LENGTH)


def _strata(length: int) -> NDArray[np.int64]:
    """[pixels, positions in each]: all positions, or evenly many at random places of each pixel."""
    if length <= PIXELS:
        return np.arange(length, dtype=np.int64)[:, None]
    edges = np.linspace(0, length, PIXELS + 1)
    if length <= PIXELS * PER_PIXEL and length % PIXELS == 0:
        return np.arange(length, dtype=np.int64).reshape(PIXELS, -1)
    places = np.random.default_rng(0).random((PIXELS, PER_PIXEL))
    positions = edges[:-1, None] + places * np.diff(edges)[:, None]
    return np.sort(positions.astype(np.int64), axis=1)


# **** inputs ****


def _draw(spec: AttentionSpec, shape: Shape) -> Mapping[str, Any]:
    """Values of every input that the mask reads, and of kv_lens."""
    predicate = visibility(spec).predicate
    read = {str(base) for base in predicate.atoms(sp.IndexedBase)}
    read |= {str(symbol) for symbol in predicate.free_symbols}
    ids = {item.input for item in spec.mask if isinstance(item, Same)}
    rng = np.random.default_rng(0)
    drawn = {
        each.name: _value(each, shape, rng, is_id=each.name in ids)
        for each in spec.inputs
        if each.name in read
    }
    if spec.kv_lens == "per_batch":
        drawn["kv_lens"] = np.array([max(1, (4 * shape.kv_len) // 5)])
    return drawn


def _value(declared: Input, shape: Shape, rng: np.random.Generator, *, is_id: bool) -> Any:
    extents = {
        "batch": shape.batch,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
    }
    sizes = [extents[e] if isinstance(e, str) else e for e in declared.shape]
    along_keys = bool(sizes) and sizes[-1] == shape.kv_len and shape.kv_len > 1
    if declared.dtype == "bool":
        return _blobs(sizes, rng)
    if declared.dtype.startswith("int") and (is_id or along_keys):
        return np.broadcast_to(_documents(sizes[-1], rng), sizes).copy()
    if declared.dtype.startswith("int"):
        values = rng.integers(shape.kv_len // 4, max(1, shape.kv_len // 2) + 1, sizes)
        return values if sizes else int(values)
    numbers = rng.standard_normal(sizes)
    return numbers if sizes else float(numbers)


def _documents(length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Sorted ids: documents one after another, a sixth of the length on average."""
    cuts = np.sort(rng.integers(0, max(1, length), 5))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int64)


def _blobs(sizes: list[int], rng: np.random.Generator) -> Any:
    """True in about half of the places, in runs rather than one by one."""
    if not sizes:
        return True
    coarse = rng.random([max(1, -(-size // 32)) for size in sizes]) < 0.5
    for axis, size in enumerate(sizes):
        coarse = np.repeat(coarse, 32, axis=axis).take(range(size), axis=axis)
    return coarse
