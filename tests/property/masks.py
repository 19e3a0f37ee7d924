"""Masks and scores of all kinds, for tests that go through every one of them."""

from __future__ import annotations

from typing import Any

DOC = {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}}
DENSE = {"m": {"shape": ["batch", 1, "q_len", "kv_len"], "dtype": "bool"}}

# Each kind of loop bounds: none, one range, two, chunks, a scan, a number known at run time.
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": "causal"},
    "top-left": {"mask": "causal", "align": "top_left"},
    "anticausal": {"mask": [{"expr": "k >= q"}]},
    "window": {"mask": [{"window": {"left": 9, "right": 4}}]},
    "far-window": {"mask": [{"expr": "q - k >= 18 and q - k < 40"}]},
    "two-ranges": {"mask": [{"expr": "k < 4 or abs(q - k) < 12"}]},
    "far-ranges": {"mask": [{"expr": "k < 3 or k > q + 20"}]},
    "dilated": {"mask": ["causal", {"expr": "(k // 8) % 4 == (q // 8) % 4"}]},
    "chunked": {"mask": ["causal", {"expr": "k // 24 == q // 24"}]},
    "scaled": {"mask": [{"expr": "2 * k <= q + 9"}]},
    "documents": {"mask": ["causal", {"same": "doc"}], "inputs": DOC},
    "documents-both-ways": {"mask": [{"same": "doc"}], "inputs": DOC},
    "prefix": {
        "mask": [{"expr": "k < prefix[b] or k <= q"}],
        "inputs": {"prefix": {"shape": ["batch"], "dtype": "int32"}},
    },
    "scalar": {
        "mask": [{"expr": "k <= q and q - k < reach"}],
        "inputs": {"reach": {"shape": [], "dtype": "int32"}},
    },
    "gate": {"mask": [{"expr": "on and k <= q"}], "inputs": {"on": {"shape": [], "dtype": "bool"}}},
    "rows": {"mask": [{"expr": "row >= 20 and row < 40"}]},
    "dense": {"mask": [{"expr": "m[b, 0, row, k]"}], "inputs": DENSE},
    "dense-causal": {"mask": ["causal", {"expr": "m[b, 0, row, k]"}], "inputs": DENSE},
    "nothing": {"mask": [{"expr": "k < 0"}]},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"score": [{"softcap": 5.0}]},
    "alibi": {
        "score": [{"alibi": "slopes"}],
        "inputs": {"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
    },
    "bias": {
        "score": [{"bias": {"tensor": "rel"}}],
        "inputs": {"rel": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "bf16"}},
    },
    "expression": {
        "score": [{"expr": "s + buckets[h, min(max(q - k, 0), 31)]"}],
        "inputs": {"buckets": {"shape": ["q_heads", 32], "dtype": "fp32"}},
    },
}
