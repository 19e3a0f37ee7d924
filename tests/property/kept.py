"""Calls that once were wrong, kept as they were drawn, or with less around what was wrong."""

from __future__ import annotations

from property.drawn import Drawn

KEPT: tuple[Drawn, ...] = (
    # flash1: a == b & c, where (a == b) & c was meant: rows of two chunks went without their mask.
    Drawn(
        spec={
            "head_dim": 16,
            "dtype": "fp16",
            "kv_lens": "per_batch",
            "loop_order": "flash1",
            "mask": ["causal", {"expr": "(k // 8) % 4 == (q // 8) % 4"}],
        },
        sizes=(3, 1, 1, 33, 70),
        tile=("loop", 16, 16),
    ),
    # Scale 0 left a score of no shape.
    Drawn(
        spec={"head_dim": 1, "dtype": "fp16", "scale": 0},
        sizes=(1, 1, 1, 65, 65),
        tile=("loop", 16, 16),
    ),
    # A run-time scalar of type bool.
    Drawn(
        spec={
            "head_dim": 31,
            "dtype": "fp16",
            "mask": [{"expr": "on or k <= q"}],
            "inputs": {"on": {"shape": [], "dtype": "bool"}},
        },
        sizes=(1, 4, 2, 33, 5),
        tile=("loop", 32, 16),
        seed=1,
    ),
    # Document ids shared by all batches.
    Drawn(
        spec={
            "head_dim": 8,
            "dtype": "tf32",
            "mask": [{"same": "docs"}],
            "heads": {"group": 2},
            "inputs": {"docs": {"shape": ["kv_len"], "dtype": "int32"}},
        },
        sizes=(3, 2, 1, 32, 8),
        tile=("single_tile", 32, 16),
        forms={"docs": "offset"},
        seed=2,
    ),
    # The lse of a row without a key was one rounding away from the sink.
    Drawn(
        spec={
            "head_dim": 15,
            "dtype": "bf16",
            "sink": "per_head",
            "kv_lens": "per_batch",
            "scale": 0.3,
        },
        sizes=(3, 2, 2, 3, 3),
        tile=("loop", 32, 16),
        seed=3,
    ),
    # An index with a condition inside it.
    Drawn(
        spec={
            "head_dim": 16,
            "dtype": "fp16",
            "mask": [{"expr": "m[b, 0, 25 - row, where(on, 17, k)]"}],
            "inputs": {
                "on": {"shape": [], "dtype": "bool"},
                "m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"},
            },
        },
        sizes=(1, 1, 1, 9, 40),
        tile=("single_tile", 32, 64),
        seed=4,
    ),
    # The logarithm of an integer.
    Drawn(
        spec={
            "head_dim": 63,
            "dtype": "fp16",
            "mask": ["causal"],
            "score": [{"expr": "s + 0.1 * log(1 + abs(q - k))"}],
        },
        sizes=(1, 3, 1, 15, 49),
        tile=("loop", 16, 32),
        seed=5,
    ),
    # The same where a distance occurs twice and has a name.
    Drawn(
        spec={
            "head_dim": 4,
            "dtype": "fp16",
            "score": [{"expr": "s + 0.1 * log(1 + abs(q - k))"}, {"alibi": "slopes"}],
            "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "bf16"}},
        },
        sizes=(1, 1, 1, 4, 20),
        tile=("loop", 16, 32),
        seed=7,
    ),
    # A bias whose last two axes broadcast.
    Drawn(
        spec={
            "head_dim": 16,
            "dtype": "fp16",
            "score": [{"bias": {"tensor": "rel"}}],
            "inputs": {"rel": {"shape": ["batch", "q_heads", 1, 1], "dtype": "fp16"}},
        },
        sizes=(2, 2, 1, 20, 40),
        tile=("loop", 16, 16),
        seed=8,
    ),
    # tanh of small scores in fp32: 1 - 2 / (exp(2x) + 1) cancels.
    Drawn(
        spec={"head_dim": 40, "dtype": "fp32", "score": [{"softcap": 50.0}], "scale": 1},
        sizes=(1, 1, 1, 40, 7),
        tile=("loop", 16, 16),
        magnitude=0.1,
        seed=537,
    ),
    # A bf16 bias, widened for the interpreter, with rows that are aligned only after that.
    Drawn(
        spec={
            "head_dim": 24,
            "dtype": "fp32",
            "score": [{"bias": {"tensor": "rel"}}],
            "inputs": {"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"}},
        },
        sizes=(1, 1, 1, 33, 20),
        tile=("loop", 32, 32),
        seed=6,
    ),
    # tanh near 0 in tf32, where the products are exactly 0 and eager makes no error.
    Drawn(
        spec={
            "head_dim": 16,
            "dtype": "tf32",
            "mask": [],
            "score": [{"expr": "s + (q - k) // 8 * 0.125"}, {"softcap": 50.0}],
            "align": "top_left",
            "layout": "bshd",
            "scale": 0,
            "heads": {"group": 6},
        },
        sizes=(1, 6, 1, 31, 7),
        tile=("loop", 32, 16),
        forms={"k": "one_batch", "q": "one_batch", "v": "one_row"},
        magnitude=0.0,
        seed=201,
    ),
    # Two ranges of key tiles that overlap, fp32: Triton 3.6 lost what the loop over them carried.
    Drawn(
        spec={
            "head_dim": 228,
            "dtype": "fp32",
            "mask": [
                {"expr": "(k < 32 or (k <= q and q - k < 5)) and (q - k < 10 or (q - k) % 3 == 0)"}
            ],
            "score": [{"bias": {"tensor": "rel"}}],
            "align": "top_left",
            "sink": "per_head",
            "layout": "bshd",
            "inputs": {"rel": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "fp32"}},
            "heads": {"group": 6},
        },
        sizes=(3, 6, 1, 128, 257),
        tile=None,
        forms={"k": "every_other", "q": "offset", "rel": "one_head", "sink": "one_row"},
        magnitude=0.1,
        poison="seen_v",
        seed=7557,
    ),
    # One key for all, large: eager makes no error there, its products being alike bit by bit.
    Drawn(
        spec={"head_dim": {"qk": 31, "v": 1}, "dtype": "fp32", "mask": ["causal"], "scale": 1},
        sizes=(1, 1, 1, 16, 16),
        tile=("loop", 32, 32),
        forms={"k": "one_row"},
        magnitude=5.0,
        seed=507,
    ),
)
