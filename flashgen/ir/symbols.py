"""The symbols that tile shapes, byte counts and FLOP counts are written in."""

from __future__ import annotations

import sympy as sp

from flashgen.spec.symbolic import KV_LEN, Q_LEN

__all__ = ["KV_LEN", "Q_LEN"]


def _positive(name: str) -> sp.Symbol:
    return sp.Symbol(name, integer=True, positive=True)


# A schedule's numbers.
BLOCK_M = _positive("block_m")
BLOCK_N = _positive("block_n")
NUM_WARPS = _positive("num_warps")
NUM_STAGES = _positive("num_stages")
NUM_KV_SPLITS = _positive("num_kv_splits")

# A problem's numbers. A padded head dim is the width of a tile, a plain one what is transferred.
HEAD_DIM_QK = _positive("head_dim_qk")
HEAD_DIM_V = _positive("head_dim_v")
HEAD_DIM_QK_PADDED = _positive("head_dim_qk_padded")
HEAD_DIM_V_PADDED = _positive("head_dim_v_padded")

# A shape's numbers, with q_len and kv_len. The last five depend on the mask: tiles that are not
# empty, pairs (query, key) that are visible, and so on, per batch and query head.
BATCH = sp.Symbol("batch", integer=True, nonnegative=True)
NUM_Q_HEADS = sp.Symbol("num_q_heads", integer=True, nonnegative=True)
NUM_KV_HEADS = sp.Symbol("num_kv_heads", integer=True, nonnegative=True)
VISITED_TILES = sp.Symbol("visited_tiles", integer=True, nonnegative=True)
VISIBLE_PAIRS = sp.Symbol("visible_pairs", integer=True, nonnegative=True)
# (query tile, split of the keys) pairs with a visited tile: how often a row's state starts anew.
FIRST_VISITS = sp.Symbol("first_visits", integer=True, nonnegative=True)
# Keys of the key tiles that some query tile visits: all of them, but for masks that hide keys from
# every query.
VISITED_KEYS = sp.Symbol("visited_keys", integer=True, nonnegative=True)
# Key tiles that flash1's outer loop walks: from the first to the last that some query tile visits,
# in each range of keys of the mask.
WALKED_KEY_TILES = sp.Symbol("walked_key_tiles", integer=True, nonnegative=True)

# How often the outer loop runs: programs along the query (or key) axis, per batch and query head.
QUERY_TILES = sp.ceiling(Q_LEN / BLOCK_M)
KEY_TILES = sp.ceiling(KV_LEN / BLOCK_N)

PADDED: dict[sp.Symbol, sp.Symbol] = {
    HEAD_DIM_QK: HEAD_DIM_QK_PADDED,
    HEAD_DIM_V: HEAD_DIM_V_PADDED,
}
