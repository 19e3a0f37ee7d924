"""Shared memory of a kernel, as formulas that come from walking its tile graph.

Two models are kept apart. `textbook_smem_bytes` is the papers' constraint: every loaded tile and
one fp32 score tile. The compiler-level one follows what Triton does with the tiles: `smem_bytes` is
what it will report, `least_smem_bytes` what no version of it can do without. `python -m
flashgen.bench.model_check` holds both against the compiler; `benchmarks/compiler` has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata

import sympy as sp

from flashgen.dtypes import get_dtype
from flashgen.ir import ops
from flashgen.ir.graph import TileGraph
from flashgen.ir.ops import Tile
from flashgen.ir.symbols import (
    BLOCK_M,
    BLOCK_N,
    HEAD_DIM_QK,
    HEAD_DIM_QK_PADDED,
    HEAD_DIM_V_PADDED,
    NUM_STAGES,
    NUM_WARPS,
)
from flashgen.schedule import scratch
from flashgen.schedule.largest import largest, maximum, minimum
from flashgen.schedule.traffic import is_state
from flashgen.schedule.units import MatmulUnit

TritonVersion = tuple[int, int]
KNOWN_TRITON: tuple[TritonVersion, ...] = ((3, 6), (3, 7), (3, 8))
# Head dims that an fp32 kernel multiplies at a time; it loads q and k in such parts.
QK_PART = 16
ASYNCHRONOUS: tuple[MatmulUnit, ...] = ("wgmma", "tcgen05")
ASYNCHRONOUS_BYTES = 4  # of the smallest copy to shared memory that a thread does not wait for
MBARRIERS = 4  # of a pipelined loop on tcgen05
UNSTAGED_MBARRIERS = 3  # of one whose operands pass through registers


@cache
def installed_triton() -> TritonVersion:
    """The known version that is nearest to the Triton here; without any, the middle one."""
    try:
        return nearest_triton(metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return KNOWN_TRITON[1]


def nearest_triton(version: str) -> TritonVersion:
    """The latest known version that is not later than `version` ("3.7.1"), or the first."""
    wanted = tuple(int(part) for part in version.split(".")[:2])
    return max((known for known in KNOWN_TRITON if known <= wanted), default=KNOWN_TRITON[0])


@cache
def textbook_smem_bytes(graph: TileGraph) -> sp.Expr:
    """Every loaded tile once, at its true width, and one score tile.

    4*block_m*block_n + w*(block_m*head_dim_qk + block_n*(head_dim_qk + head_dim_v)), in both loop
    orders: what a loop carries lives in registers, wherever it comes from.
    """
    loaded = (
        tile.bytes
        for op in graph.of_kind(ops.Load)
        for tile in graph.inputs(op)
        if tile.space == "hbm" and not is_state(graph, tile)
    )
    scores = (
        tile.bytes
        for op in graph.of_kind(ops.Matmul)
        for tile in graph.outputs(op)
        if tile.shape == (BLOCK_M, BLOCK_N)
    )
    return sp.expand(sp.Add(*loaded, *scores))


@cache
def smem_bytes(
    graph: TileGraph,
    unit: MatmulUnit,
    triton: TritonVersion | None = None,
    *,
    aligned: bool = True,
) -> sp.Expr:
    """Shared memory as Triton (None: the one here) allocates it: its `metadata.shared`.

    Pipelined (num_stages > 1): what stays for the whole loop, plus num_stages copies of a matmul's
    operands where the matmul itself is asynchronous (wgmma, tcgen05), one copy less where it is
    not, and one less of other staged tiles. Not pipelined: the largest set of tiles that are read
    at the same time. Without a loop: all operands, because v is loaded before the scores are
    computed. Probs change hands between warps through shared memory where warps split the
    columns of the output: mma does when block_m < head_dim_v_padded, fma always, wgmma and tcgen05
    never. mfma (AMD) takes each operand to registers on its own, q before the loop; whether probs
    change hands there differs, so they are counted. `scratch.py` has what comes on top of tiles.

    flash2 keeps q and stages k and v; flash1 keeps k and v and stages q. Its state (acc, m_i, l_i)
    goes from the workspace to registers and back.

    aligned: rows of all tensors start at multiples of 16 bytes. Where they do not, elements are
    copied one by one, which is asynchronous from ASYNCHRONOUS_BYTES on; narrower tiles pass through
    registers and have no stages.
    """
    return _Allocation(graph, unit, triton or installed_triton(), aligned).bytes


@cache
def least_smem_bytes(graph: TileGraph, unit: MatmulUnit) -> sp.Expr:
    """A lower bound of `smem_bytes`, whatever the version of Triton.

    The tiles that are alive at the same time and, on mma and wgmma, what a loaded score input takes
    to change its layout. No gap, barrier or scratch of a reduction is in it.
    """
    return _Allocation(graph, unit, None).bytes


@dataclass(frozen=True)
class _Allocation:
    """One kernel's shared memory; with `triton` None, the lower bound."""

    graph: TileGraph
    unit: MatmulUnit
    triton: TritonVersion | None
    aligned: bool = True

    @property
    def bytes(self) -> sp.Expr:
        if self.unit == "mfma":
            return self.through_registers()
        if self.state:
            return self.one_by_one()
        if not any(tile.staged for tile in self.graph.tiles):
            return self.loaded_up_front()
        are_staged = any(tile in self.operands for tile in self.staged)
        pipelined = self.pipelined() if are_staged else self.beside_unstaged()
        return sp.Piecewise((self.one_by_one(), sp.Le(NUM_STAGES, 1)), (pipelined, True))

    # **** tiles ****

    @cached_property
    def shared(self) -> list[Tile]:
        return [tile for tile in self.graph.tiles if tile.space == "smem"]

    @cached_property
    def staged(self) -> list[Tile]:
        """What is loaded asynchronously: booleans, a byte each, are not."""
        staged = [tile for tile in self.graph.tiles if tile.staged and tile.dtype != "bool"]
        if self.aligned:
            return staged
        return [t for t in staged if get_dtype(t.dtype).bytes >= ASYNCHRONOUS_BYTES]

    @cached_property
    def operands(self) -> list[Tile]:
        """Tiles in shared memory that a matmul reads."""
        names = {n for op in self.graph.of_kind(ops.Matmul) for n in (op.left, op.right)}
        return [tile for tile in self.shared if tile.name in names]

    @cached_property
    def probs(self) -> list[Tile]:
        """The left operands of matmuls that come from registers."""
        return [
            tile
            for op in self.graph.of_kind(ops.Matmul)
            for tile in self.graph.inputs(op)
            if tile.name == op.left and tile.space == "reg"
        ]

    @cached_property
    def right_of_probs(self) -> list[Tile]:
        """The operands that probs are multiplied with."""
        names = {tile.name for tile in self.probs}
        products = [op for op in self.graph.of_kind(ops.Matmul) if op.left in names]
        return [tile for tile in self.operands if any(tile.name == op.right for op in products)]

    @cached_property
    def state(self) -> bool:
        """Whether what a row carries is kept in a workspace between steps (flash1's loop)."""
        return any(is_state(self.graph, tile) for tile in self.graph.tiles)

    @cached_property
    def score_inputs(self) -> list[Tile]:
        """Tiles of block_m x block_n that are loaded: a bias, a dense mask."""
        return [tile for tile in self.shared if tile.shape == (BLOCK_M, BLOCK_N)]

    def whole(self, tile: Tile) -> sp.Expr:
        """Bytes of a tile; in parts, the last of a head dim is as wide as the others."""
        if self.unit != "fma":
            return tile.bytes
        return tile.bytes.subs(HEAD_DIM_QK_PADDED, QK_PART * sp.ceiling(HEAD_DIM_QK / QK_PART))

    def at_once(self, tile: Tile) -> sp.Expr:
        """Bytes of a tile that is loaded when it is needed, part by part where it has parts."""
        return tile.bytes.subs(HEAD_DIM_QK_PADDED, QK_PART) if self.unit == "fma" else tile.bytes

    # **** the ways of loading ****

    def pipelined(self) -> sp.Expr:
        """Every stage of every tile, beside what stays."""
        resident = [self.whole(tile) for tile in self.shared if not tile.staged]
        depth = NUM_STAGES if self.unit in ASYNCHRONOUS else NUM_STAGES - 1
        staged = {
            tile: self.whole(tile) * (depth if tile in self.operands else NUM_STAGES - 1)
            for tile in self.staged
        }
        small = sp.Add(*(each for tile, each in staged.items() if len(tile.shape) < 2))
        large = sp.Add(*(each for tile, each in staged.items() if len(tile.shape) > 1))
        has_ids = small != 0
        if self.unit == "tcgen05" and self.triton is not None:
            small += MBARRIERS * scratch.MBARRIER_BYTES
            small += scratch.call(scratch.tcgen05_rows, BLOCK_M, NUM_WARPS)
        read = [each for tile, each in staged.items() if tile in self.operands]
        last = self.placed_last(small, resident, read)
        exchange = self.exchange()
        if self.triton is not None:
            exchange += self.row_statistics()
        # Masks change their layout before probs change hands: the two use the same place.
        exchange = maximum(exchange, *self.late_conversions(has_ids=has_ids))
        return maximum(sp.Add(*resident, large, last, exchange), self.epilogue())

    def beside_unstaged(self) -> sp.Expr:
        """Stages of score inputs and ids, beside operands that pass through registers.

        On tcgen05 v is there twice, and a score input that has no stages as a whole; in Triton 3.6
        it changes its layout instead.
        """
        staged = {tile: tile.bytes * (NUM_STAGES - 1) for tile in self.staged}
        small = sp.Add(*(each for tile, each in staged.items() if len(tile.shape) < 2))
        large = sp.Add(*(each for tile, each in staged.items() if len(tile.shape) > 1))
        if self.unit == "tcgen05" and self.triton is not None:
            inputs = [t for t in self.score_inputs if t.dtype != "bool" and t not in staged]
            tiles = [*self.operands, *self.right_of_probs]
            if self.triton == (3, 6):
                large += sp.Add(*(self.conversion(tile) for tile in inputs))
                inputs = []
            operands = sp.Add(*(tile.bytes for tile in (*tiles, *inputs)))
            small += (UNSTAGED_MBARRIERS - bool(inputs)) * scratch.MBARRIER_BYTES
        else:
            changing = [tile for tile in self.score_inputs if tile not in staged]
            operands = self.one_by_one(changing, has_ids=small != 0)
        return operands + large + self.placed_after_operands(small)

    def placed_after_operands(self, small: sp.Expr) -> sp.Expr:
        """Small tiles and barriers behind q and the other operands, with their gap."""
        if any(tile.dtype == "bool" for tile in self.score_inputs):
            return small
        deepest = len(self.graph.loops) - 1
        resident = [tile.bytes for tile in self.operands if tile.level < deepest]
        read = [tile for tile in self.operands if tile.level == deepest]
        staged = [tile for tile in self.staged if len(tile.shape) > 1]
        return self.placed_last(small, resident, [tile.bytes for tile in (*read, *staged)])

    def one_by_one(
        self, changing: Sequence[Tile] | None = None, *, has_ids: bool = False
    ) -> sp.Expr:
        """The most that one matmul needs, each tile loaded just before it.

        A tile from outside the loop stays during all of it; score inputs (or those that are
        `changing`) change their layout while k is there. has_ids: ids are staged beside it.
        """
        converted = self.score_inputs if changing is None else changing
        deepest = len(self.graph.loops) - 1
        resident = [tile for tile in self.operands if tile.level < deepest]
        kept = sp.Add(*(self.whole(tile) for tile in resident))
        between = [*self.late_conversions(has_ids=has_ids), self.between_loops()]
        between += self.state_returns()
        needs = [self.epilogue(), *(kept + each for each in between)]
        for op in self.graph.of_kind(ops.Matmul):
            inputs = self.graph.inputs(op)
            read = [tile for tile in inputs if tile in self.operands and tile not in resident]
            size = self.whole if self.state else self.at_once
            need = kept + sp.Add(*(size(tile) for tile in read))
            takes_probs = any(tile in self.probs for tile in inputs)
            if takes_probs:
                need += self.exchange() + self.row_factor()
            else:  # an fp32 kernel loads k, part by part, only after that
                before = kept if self.unit == "fma" and not self.state else need
                needs += [before + each for each in self.early_conversions(converted)]
                needs += [need + each for each in self.state_changes()]
            gap = ([tile.bytes for tile in tiles] for tiles in (resident, read))
            needs += [need, *self.tcgen05_needs(need, *gap, takes_probs=takes_probs)]
        return largest(needs)

    def loaded_up_front(self) -> sp.Expr:
        """All operands at once; once the scores are there, probs may use the place of q and k."""
        keys = {op.right for op in self.graph.of_kind(ops.Matmul) if op.transpose_right}
        parts = [t for t in self.operands if self.unit == "fma" and t.name in keys]
        others = sp.Add(*(self.up_front(tile) for tile in self.operands if tile not in parts))
        together = others + sp.Add(*(self.at_once(tile) for tile in parts))
        beside_probs = [
            tile.bytes
            for op in self.graph.of_kind(ops.Matmul)
            if any(tile in self.probs for tile in self.graph.inputs(op))
            for tile in self.graph.inputs(op)
            if tile.space == "smem"
        ]
        return largest(
            [
                together,
                sp.Add(*beside_probs, self.exchange()),
                self.epilogue(),
                *(others + each for each in self.early_conversions(self.score_inputs)),
                *self.tcgen05_needs(together, [], [], takes_probs=False),
            ]
        )

    def up_front(self, tile: Tile) -> sp.Expr:
        """Bytes of an operand; Triton 3.6 has q, where its rows pass through threads that have one
        each, in tensor memory."""
        queries = {op.left for op in self.graph.of_kind(ops.Matmul) if op.transpose_right}
        narrow = get_dtype(tile.dtype).bytes < ASYNCHRONOUS_BYTES
        if self.aligned or not narrow or tile.name not in queries:
            return self.whole(tile)
        if self.unit != "tcgen05" or self.triton != (3, 6):
            return self.whole(tile)
        has_row_each = sp.Ge(BLOCK_M, scratch.WARP_SIZE * NUM_WARPS)
        return sp.Piecewise((sp.Integer(0), has_row_each), (self.whole(tile), True))

    def through_registers(self) -> sp.Expr:
        """What mfma needs: staged tiles num_stages - 1 deep, any other only on its way through."""
        sizes = [tile.bytes for tile in self.shared]
        one_by_one = largest([*sizes, self.exchange(), self.epilogue()])
        staged = [tile.bytes for tile in self.shared if tile.staged]
        if not staged:
            return one_by_one
        pipelined = maximum(one_by_one, (NUM_STAGES - 1) * sp.Add(*staged) + self.exchange())
        return sp.Piecewise((one_by_one, sp.Le(NUM_STAGES, 1)), (pipelined, True))

    # **** what is not an operand ****

    def exchange(self) -> sp.Expr:
        """Bytes of probs that change hands, as left operand of the second matmul."""
        needed = sp.Add(*(tile.bytes for tile in self.probs))
        if self.unit in ("fma", "mfma"):
            return needed
        if self.unit in ASYNCHRONOUS:
            return sp.Integer(0)
        side_by_side = sp.Lt(BLOCK_M, HEAD_DIM_V_PADDED)
        if self.triton is not None and not any(tile.staged for tile in self.graph.tiles):
            # Without a loop each matmul spreads its own result over the warps.
            side_by_side = sp.Or(side_by_side, sp.Lt(BLOCK_M, scratch.MMA_ROWS * NUM_WARPS))
        return sp.Piecewise((needed, side_by_side), (sp.Integer(0), True))

    def epilogue(self) -> sp.Expr:
        """The output tile changes its layout through shared memory before it is stored.

        Results of fma are stored in the layout that they have.
        """
        return largest(
            tile.bytes
            for op in self.graph.of_kind(ops.Store)
            for tile in self.graph.inputs(op)
            if len(tile.shape) > 1 and not self.state and self.unit != "fma"
        )

    def state_changes(self) -> list[sp.Expr]:
        """Scratch of flash1's accumulator on its way from its workspace, while q is there."""
        if self.triton is None or not self.state or self.unit == "mfma":
            return []
        functions = {
            "mma": scratch.mma_state,
            "wgmma": scratch.wgmma_state,
            "tcgen05": scratch.tcgen05_state,
            "fma": scratch.fma_state,
        }
        return [self.state_change(functions[self.unit])]

    def state_returns(self) -> list[sp.Expr]:
        """The same on its way back, when q is no longer needed."""
        if self.triton is None or not self.state or not self.probs:  # a merge has no products
            return []
        if self.unit == "mma":
            return [self.state_change(scratch.mma_state_out)]
        if self.unit == "tcgen05":
            tile = (BLOCK_M, BLOCK_N, NUM_WARPS, HEAD_DIM_V_PADDED)
            return [scratch.call(scratch.tcgen05_state_out, *tile)]
        if self.unit == "wgmma":  # warpgroups side by side take probs from each other, too
            probs = scratch.call(scratch.wgmma_probs, BLOCK_M, BLOCK_N, NUM_WARPS, self.probs_width)
            return [self.state_change(scratch.wgmma_state_out), probs]
        return []

    def state_change(self, function: Callable[..., int]) -> sp.Expr:
        return scratch.call(function, BLOCK_M, NUM_WARPS, self.probs_width, HEAD_DIM_V_PADDED)

    @property
    def probs_width(self) -> int:
        """Bytes of an element of probs."""
        (width,) = {get_dtype(tile.dtype).bytes for tile in self.probs}
        return width

    def row_statistics(self) -> sp.Expr:
        """Scratch of sums over rows, alive beside the tiles of the loop.

        mma: only where probs are not rounded first (tf32), because rounding comes after the sum.
        """
        numbers = (BLOCK_M, BLOCK_N, NUM_WARPS, HEAD_DIM_V_PADDED)
        if self.unit == "fma":
            return scratch.call(scratch.fma_rows, *numbers)
        if self.unit == "mma" and all(get_dtype(tile.dtype).bytes == 4 for tile in self.probs):
            return scratch.call(scratch.mma_rows, *numbers)
        return sp.Integer(0)

    def row_factor(self) -> sp.Expr:
        """Scratch of the factor that rescales a row of the output, beside probs (fma)."""
        if self.triton is None or self.unit != "fma":
            return sp.Integer(0)
        numbers = (BLOCK_M, BLOCK_N, NUM_WARPS, HEAD_DIM_V_PADDED)
        return scratch.call(scratch.fma_factor, *numbers)

    def late_conversions(self, *, has_ids: bool) -> list[sp.Expr]:
        """Scratch of masks that are not staged, and of comparing ids."""
        if self.triton is None and self.unit not in ("mma", "wgmma"):
            return []
        found = [self.conversion(tile) for tile in self.score_inputs if tile not in self.staged]
        if self.triton == (3, 6) and has_ids and self.unit in ("mma", "wgmma"):
            found.append(scratch.call(scratch.compared_ids, BLOCK_M, BLOCK_N, NUM_WARPS))
        return found

    def early_conversions(self, inputs: Sequence[Tile]) -> list[sp.Expr]:
        """Scratch of score inputs that change their layout before the first matmul.

        Masks did in Triton 3.6, and do it later from 3.7 on.
        """
        if self.triton is None and self.unit not in ("mma", "wgmma"):
            return []
        masks_too = self.triton == (3, 6)
        return [self.conversion(t) for t in inputs if masks_too or t.dtype != "bool"]

    def conversion(self, tile: Tile) -> sp.Expr:
        width = get_dtype(tile.dtype).bytes
        tile_of_warps = (BLOCK_M, BLOCK_N, NUM_WARPS, width)
        if not self.aligned and self.triton == (3, 6):
            return self.conversion_in_one_access(tile, tile_of_warps)
        access = scratch.ACCESS_BYTES if self.aligned else width
        numbers = (*tile_of_warps, access)
        if self.unit == "mma":
            return scratch.call(scratch.mma_conversion, *numbers, HEAD_DIM_V_PADDED)
        functions = {
            "wgmma": scratch.wgmma_conversion,
            "tcgen05": scratch.tcgen05_conversion,
            "fma": scratch.fma_conversion,
        }
        return scratch.call(functions[self.unit], *numbers)

    def conversion_in_one_access(
        self, tile: Tile, tile_of_warps: tuple[sp.Expr | int, ...]
    ) -> sp.Expr:
        """The same in Triton 3.6, of elements that are read one by one."""
        if self.unit == "fma":
            return tile.bytes
        if self.unit == "tcgen05":
            return scratch.call(scratch.one_access_of_rows, *tile_of_warps)
        head_dim_v = HEAD_DIM_V_PADDED if self.unit == "mma" else sp.Integer(0)
        return scratch.call(scratch.one_access, *tile_of_warps, head_dim_v)

    def between_loops(self) -> sp.Expr:
        """Scratch of the accumulator from one block class's loop to the next one's.

        A mask of more than the tail has such loops.
        """
        has_classes = any(" and " in op.predicate for op in self.graph.of_kind(ops.Mask))
        if self.triton is None or self.unit != "mma" or not has_classes:
            return sp.Integer(0)
        numbers = (BLOCK_M, BLOCK_N, NUM_WARPS, HEAD_DIM_V_PADDED)
        return scratch.call(scratch.mma_accumulator, *numbers)

    def placed_last(self, small: sp.Expr, resident: list[sp.Expr], read: list[sp.Expr]) -> sp.Expr:
        """Small tiles and barriers, with the gap behind them."""
        if self.triton is None or self.unit not in ASYNCHRONOUS or small == 0:
            return small
        if not resident or not read:  # nothing that a gap could be between
            return small
        return scratch.call(scratch.with_gap, small, minimum(*resident), maximum(*read))

    def tcgen05_needs(
        self, need: sp.Expr, resident: list[sp.Expr], read: list[sp.Expr], *, takes_probs: bool
    ) -> list[sp.Expr]:
        """What a matmul on tcgen05 needs beside its operands."""
        if self.triton is None or self.unit != "tcgen05":
            return []
        small: sp.Expr = sp.Integer(scratch.MBARRIER_BYTES)
        if takes_probs:
            small = scratch.call(scratch.tmem_probs, BLOCK_M, NUM_WARPS)
        return [need + self.placed_last(small, resident, read)]
