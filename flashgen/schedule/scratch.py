"""What Triton allocates in shared memory beside tiles: scratch, barriers, gaps.

Found by compiling with Triton 3.6 to 3.8 (`benchmarks/compiler`). In formulas these are named
functions; here they are computed, from a schedule's numbers. All extents are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy as sp

WARP_SIZE = 32
ACCESS_BYTES = 16  # the widest load of a thread
# Results of a warp's matmul instruction: a thread has rows r and r + 8, columns c and c + 1.
MMA_ROWS, MMA_COLUMNS = 16, 8
OPERAND_ALIGNMENT = 1024  # of what wgmma and tcgen05 read
NUMBER_BYTES = 4
MBARRIER_BYTES = 8
TMEM_PROBS_BYTES = 4096
TMEM_LANES = 128


def call(function: Callable[..., int], *arguments: sp.Expr | int) -> sp.Expr:
    """One of this module's functions in a formula: `FUNCTIONS` gives its value."""
    named = sp.Function(function.__name__, integer=True, nonnegative=True)
    return named(*arguments)


# **** a score input changes its layout ****
#
# A tile of block_m x block_n that is loaded (a bias, a dense mask) arrives in threads that read
# rows, and is needed in those that hold the scores. It passes through shared memory, as little at a
# time as possible: bits of an element's place that number registers in both layouts are taken one
# after the other. `width` is bytes of an element, `access` those that a thread reads at once:
# ACCESS_BYTES, or an element where rows are not aligned.


def mma_conversion(
    block_m: int, block_n: int, num_warps: int, width: int, access: int, head_dim_v: int
) -> int:
    """Bytes of the change to warp-level mma, whose warps stand side by side for a wide output."""
    if block_m >= head_dim_v:
        return wgmma_conversion(block_m, block_n, num_warps, width, access)
    return _in_passes(_abreast, block_m, block_n, num_warps, width, access)


def wgmma_conversion(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Bytes of the change to wgmma, or to mma with warps one below the other."""
    return _in_passes(_stacked, block_m, block_n, num_warps, width, access)


def _abreast(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Elements that a thread has in both layouts where mma's warps stand side by side."""
    rows, contiguous = _loaded(block_m, block_n, num_warps, width, access)
    columns = _columns(block_n, num_warps, contiguous)
    return _share(block_m, max(rows, MMA_ROWS // 2)) * columns


def _stacked(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """The same where they stand one below the other."""
    rows, contiguous = _loaded(block_m, block_n, num_warps, width, access)
    columns = _columns(block_n, num_warps, contiguous)
    common = _share(block_m, max(rows, MMA_ROWS * num_warps)) * columns
    if rows <= MMA_ROWS // 2:  # r and r + 8
        common *= 2
    if width == 1 < contiguous:  # of 16 contiguous bytes, c and c + 8
        common *= 2
    return common


def tcgen05_conversion(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Bytes of the change to whole rows, as they are read from tensor memory; approximate.

    At once where a thread has less than 64 bytes, or reads element by element; none where two
    threads share a row either way; less of rows of 256 bytes.
    """
    of_thread = block_m * block_n * width // (WARP_SIZE * num_warps)
    if access == width:
        return _in_passes(_rows_of_threads, block_m, block_n, num_warps, width, access)
    if width == 2 and of_thread == ACCESS_BYTES and block_m == 16 * num_warps:
        return 0
    parts = 1 if of_thread < 64 else 4
    if width == 4 and block_n * width == 256 and block_m <= TMEM_LANES:
        parts = 2 if of_thread < 128 else 8
    return block_m * block_n * width // parts


def _rows_of_threads(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Elements that a thread has in both layouts where each has whole rows afterwards."""
    _, contiguous = _loaded(block_m, block_n, num_warps, width, access)
    threads = WARP_SIZE * num_warps
    of_row = _share(threads, block_m)
    columns = _columns(block_n // of_row, num_warps, contiguous)
    return _share(block_m, threads) * columns * (4 if width >= NUMBER_BYTES else 1)


def one_access(block_m: int, block_n: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """Bytes of the change in Triton 3.6 where elements are read one by one.

    A pass is ACCESS_BYTES of each thread, twice that where two warps share their rows; all at once
    where warps stand side by side.
    """
    shared = MMA_ROWS * num_warps == 2 * block_m
    of_pass = ACCESS_BYTES * WARP_SIZE * num_warps * (2 if shared else 1)
    tile = block_m * block_n * width
    return tile if block_m < head_dim_v else min(tile, of_pass)


def one_access_of_rows(block_m: int, block_n: int, num_warps: int, width: int) -> int:
    """The same for tcgen05; none where each thread has a row of its own."""
    rows = WARP_SIZE * num_warps
    of_pass = ACCESS_BYTES * WARP_SIZE * num_warps * (rows // block_m)
    return min(block_m * block_n * width, of_pass) if block_m < rows else 0


def fma_conversion(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Bytes of the change to fp32 results."""
    loaded, _ = _loaded(block_m, block_n, num_warps, width, access)
    rows, abreast = _fma_layout(block_m, block_n, num_warps)
    common = _share(block_m, max(loaded, rows * num_warps // abreast))
    common *= max(1, _fma_side(block_m, block_n, num_warps) // loaded)
    return block_m * block_n * width // common


def _loaded(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> tuple[int, int]:
    """Rows that all threads read at once, and elements that one reads."""
    each = max(1, block_m * block_n // (WARP_SIZE * num_warps))
    contiguous = min(access // width, each)
    across = min(WARP_SIZE * num_warps, block_n // contiguous)
    return num_warps * WARP_SIZE // across, contiguous


def _columns(block_n: int, num_warps: int, contiguous: int) -> int:
    """Columns that a thread has in both layouts: neighbours, and those of a second pass."""
    across = WARP_SIZE * num_warps * contiguous
    return (2 if contiguous > 1 else 1) * _share(block_n, across)


def _share(extent: int, covered: int) -> int:
    return max(1, extent // covered)


def _in_passes(
    common: Callable[..., int],
    block_m: int,
    block_n: int,
    num_warps: int,
    width: int,
    access: int,
) -> int:
    """Bytes of a pass, of as many as elements that a thread has in both layouts allow."""
    tile = (block_m, block_n, num_warps, width, access)
    return block_m * block_n * width // max(1, common(*tile) // _at_once(*tile))


def _at_once(block_m: int, block_n: int, num_warps: int, width: int, access: int) -> int:
    """Elements that a thread moves in one pass: 4 bytes of 16-bit numbers, and 16 of others.

    Of narrow ones that are read one by one 16 bytes too, but a number where all read the same row.
    """
    rows, contiguous = _loaded(block_m, block_n, num_warps, width, access)
    if contiguous == 1 and width < NUMBER_BYTES:
        return 1 if width == 2 and rows == 1 else ACCESS_BYTES // width
    return 2 if width == 2 else 4


# **** flash1's fp32 accumulator comes from its workspace and goes back ****
#
# It comes in threads that have as many columns as of an operand, each of `width` bytes, and goes in
# those of 16 bytes. What both layouts number by registers is taken one after the other, but for
# what a thread moves at once.


def mma_state(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """Bytes of the accumulator's way in."""
    return _state(
        _stacked if block_m >= head_dim_v else _abreast, block_m, num_warps, width, head_dim_v
    )


def mma_state_out(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """Bytes of its way back."""
    return mma_state(block_m, num_warps, NUMBER_BYTES, head_dim_v)


def wgmma_state(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """The same for wgmma."""
    return _state(_stacked, block_m, num_warps, width, head_dim_v)


def wgmma_state_out(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """The same for wgmma."""
    return wgmma_state(block_m, num_warps, NUMBER_BYTES, head_dim_v)


def _state(
    layout: Callable[..., int], block_m: int, num_warps: int, width: int, head_dim_v: int
) -> int:
    access = ACCESS_BYTES * NUMBER_BYTES // width
    common = layout(block_m, head_dim_v, num_warps, NUMBER_BYTES, access)
    passes = common if width < NUMBER_BYTES else common // 4
    return block_m * head_dim_v * NUMBER_BYTES // max(1, passes)


def wgmma_probs(block_m: int, block_n: int, num_warps: int, width: int) -> int:
    """Bytes of probs, and of an access of each thread, where there are more warps than rows for
    them."""
    if block_m >= MMA_ROWS * num_warps:
        return 0
    return block_m * block_n * width + ACCESS_BYTES * WARP_SIZE * num_warps


def tcgen05_state(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """The same for tcgen05; approximate."""
    return block_m * head_dim_v * NUMBER_BYTES // (8 if width == 2 else 1)


def tcgen05_state_out(block_m: int, block_n: int, num_warps: int, head_dim_v: int) -> int:
    """Bytes of its way back: all of it at once where a thread has few numbers of a result."""
    few_scores = block_m * block_n < 32 * WARP_SIZE * num_warps
    few_outputs = block_m == 64 and head_dim_v < 64
    return block_m * head_dim_v * NUMBER_BYTES if few_scores or few_outputs else 0


def fma_state(block_m: int, num_warps: int, width: int, head_dim_v: int) -> int:
    """The same for fp32 matmuls; none where a warp has the same rows on both sides."""
    loaded, _ = _loaded(block_m, head_dim_v, num_warps, width, ACCESS_BYTES)
    rows, abreast = _fma_layout(block_m, head_dim_v, num_warps)
    if abreast == 1 and loaded == rows * num_warps:
        return 0
    return fma_conversion(block_m, head_dim_v, num_warps, width, ACCESS_BYTES)


def mma_accumulator(block_m: int, block_n: int, num_warps: int, head_dim_v: int) -> int:
    """Bytes of the fp32 accumulator's change between loops; none where their layouts agree.

    They differ where there are more warps than rows for them, and few columns of scores.
    """
    differ = head_dim_v <= block_m < MMA_ROWS * num_warps and 4 * block_n <= block_m
    return block_m * head_dim_v if differ else 0


def compared_ids(block_m: int, block_n: int, num_warps: int) -> int:
    """Triton 3.6 compares ids of rows and keys in a layout of its own where warps have 32 rows."""
    if block_m < 32 * num_warps or block_n > 64:
        return 0
    return min(block_m * block_n, 16 * WARP_SIZE * num_warps)


# **** row statistics change hands ****


def mma_rows(block_m: int, block_n: int, num_warps: int, head_dim_v: int) -> int:
    """Bytes of a sum over rows that warps side by side share; none where they are not."""
    if block_m >= head_dim_v:
        return 0
    return NUMBER_BYTES * block_m * min(num_warps, block_n // MMA_COLUMNS)


def tcgen05_rows(block_m: int, num_warps: int) -> int:
    """Bytes of row statistics where two warps read the same lanes of tensor memory, which has 128:
    a number for each lane."""
    return NUMBER_BYTES * TMEM_LANES * int(block_m <= TMEM_LANES < WARP_SIZE * num_warps)


def fma_rows(block_m: int, block_n: int, num_warps: int, head_dim_v: int) -> int:
    """Bytes of row statistics of fp32 matmuls, whose results are spread over threads in squares.

    A number for each warp that has a share of the row; and one for each row where the warps that
    have its scores are not those that have its output.
    """
    scores, output = (_fma_layout(block_m, n, num_warps) for n in (block_n, head_dim_v))
    _, abreast = scores
    across = abreast if abreast > 1 else int(scores != output)
    return NUMBER_BYTES * block_m * across


def fma_factor(block_m: int, block_n: int, num_warps: int, head_dim_v: int) -> int:
    """Bytes of the factor of each row's output, which other warps have than its scores."""
    scores, output = (_fma_layout(block_m, n, num_warps) for n in (block_n, head_dim_v))
    return NUMBER_BYTES * block_m * int(scores != output)


def _fma_layout(block_m: int, columns: int, num_warps: int) -> tuple[int, int]:
    """Rows of one warp, and warps abreast, of a result with so many columns."""
    side = _fma_side(block_m, columns, num_warps)
    threads = min(WARP_SIZE, columns // side)
    return side * WARP_SIZE // threads, min(num_warps, max(1, columns // (side * threads)))


def _fma_side(block_m: int, columns: int, num_warps: int) -> int:
    """Rows, and columns, of the square of a result that a thread has."""
    each = block_m * columns // (WARP_SIZE * num_warps)
    return 4 if each >= 16 else 2 if each >= 4 else 1


# **** barriers and gaps ****


def with_gap(small: int, smallest_resident: int, largest_staged: int) -> int:
    """Bytes of small buffers and of the gap behind them.

    The largest buffers come first; what is small comes last, but for a resident operand that is
    smaller than a staged one: that comes later still, at its alignment.
    """
    behind = smallest_resident < largest_staged
    return small + (-small % OPERAND_ALIGNMENT if behind else 0)


def tmem_probs(block_m: int, num_warps: int) -> int:
    """Bytes of probs on their way to tensor memory where warps share its rows; else a barrier."""
    return TMEM_PROBS_BYTES if block_m == 128 and num_warps > 4 else MBARRIER_BYTES


FUNCTIONS: Mapping[str, Callable[..., int]] = {
    function.__name__: function
    for function in (
        mma_conversion,
        wgmma_conversion,
        tcgen05_conversion,
        one_access,
        one_access_of_rows,
        fma_conversion,
        mma_state,
        mma_state_out,
        wgmma_state,
        wgmma_state_out,
        wgmma_probs,
        tcgen05_state,
        tcgen05_state_out,
        fma_state,
        mma_accumulator,
        compared_ids,
        mma_rows,
        tcgen05_rows,
        fma_rows,
        fma_factor,
        with_gap,
        tmem_probs,
    )
}
