"""Hypothesis strategies for calls: spec x shape x dtype x strides x values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from property.drawn import FORMS, Drawn
from spec.strategies import conditions

from flashgen.spec.expr import unparse

# Inputs that a mask or a score may read: name -> (shape, dtypes).
INPUTS: dict[str, tuple[list[int | str], tuple[str, ...]]] = {
    "doc": (["batch", "kv_len"], ("int32", "int64")),
    "doc_shared": (["kv_len"], ("int32", "int64")),
    "prefix": (["batch"], ("int32", "int64")),
    "reach": ([], ("int32",)),
    "gain": ([], ("fp32",)),
    "on": ([], ("bool",)),
    "widths": (["q_heads"], ("int32",)),
    "starts": (["batch", "q_len"], ("int32",)),
    "m": (["batch", 1, "q_len", "kv_len"], ("bool",)),
    "dense": (["batch", "q_heads", "q_len", "kv_len"], ("bool",)),
    "slopes": (["q_heads"], ("fp32", "bf16")),
    "rel": (["batch", "q_heads", "q_len", "kv_len"], ("fp32", "bf16", "fp16")),
    "rel_heads": ([1, "q_heads", "q_len", "kv_len"], ("fp32", "bf16")),
    "rel_keys": (["batch", 1, 1, "kv_len"], ("fp32", "fp16")),
    "rel_pairs": (["q_len", "kv_len"], ("fp32",)),
    "table": ([64], ("fp32",)),
    "buckets": (["q_heads", 32], ("fp32", "bf16")),
}

# Masks by their constants: {a} to {c} from 0, {p} and {r} from 1.
MASKS = (
    "k <= q",
    "k < q",
    "k >= q",
    "k > q - {a} and k <= q + {b}",
    "q - k < {a}",
    "k < {a} or k <= q",
    "k < {a} or q - k < {b}",
    "k < {a} or (k <= q and q - k < {b})",
    "k < prefix[b] or k <= q",
    "k < reach or k <= q",
    "k >= prefix[b]",
    "k - q < reach and q - k < reach",
    "k // {p} == q // {p}",
    "k // {p} <= q // {p}",
    "q // {p} - k // {p} < {r} and k <= q",
    "(k + {a}) // {p} >= q // {r}",
    "(k // {p}) % {r} == (q // {p}) % {r}",
    "(k // {p} - q // {p}) % {r} == 0",
    "(q - k) % {p} == 0",
    "(q - k) % {p} == {a}",
    "(q - k) % {p} == 0 and k <= q",
    "q - k < {a} or (q - k) % {p} == 0",
    "(k % {p} == {a}) or k // {r} == q // {r}",
    "k % {p} < {r}",
    "abs(q - k) <= {a}",
    "abs(q - k) > {a}",
    "abs(2 * q - k) <= {a}",
    "max(q - k, k - q) < {a}",
    "min(q, {a}) >= k",
    "max(k, {a}) <= q",
    "min(k, q) < {a}",
    "q / {p} < k",
    "{p} * k <= {r} * q + {a}",
    "k < 0.5 * q",
    "k * gain < q",
    "q - k < 7.5 * gain",
    "where(q < {a}, {b}, q) >= k",
    "where(k < {a}, q, {b}) > k - 3",
    "not (k > q)",
    "not (k > q or k < q - {a})",
    "not (k < {a} and q > {b})",
    "not (q - k < {a})",
    "k == q",
    "k != q",
    "k == q - {a}",
    "row % {p} == 0 or k <= q",
    "row < {a}",
    "q >= {a}",
    "h % 2 == 0 or q - k < {a}",
    "hk == 0 or k < {a}",
    "b == 0 or k <= q",
    "on or k <= q",
    "on and k >= q",
    "kv_len - k > {a}",
    "q_len > {a}",
    "k < kv_len // 2 or q_len > {a}",
    "k <= q and k + {a} >= kv_len - q_len",
    "q - k < widths[h]",
    "k >= starts[b, row]",
    "k < prefix[b + {a}]",
    "doc[b, q] == doc[b, k]",
    "doc[b, k] <= doc[b, q]",
    "doc[b, q] != doc[b, k]",
    "doc[b, k + {a}] == doc[b, q]",
    "doc_shared[q] == doc_shared[k]",
    "doc[b, q] == doc[b, k] or k < {a}",
    "doc[b, k] == {a}",
    "m[b, 0, row, k]",
    "dense[b, h, row, k]",
    "dense[b, h, row, k] or k == q",
    "not m[b, 0, row, k]",
    "dense[b, h, row, k - {a}] and k <= q",
)
SCORES = (
    "s + 0.1 * log(1 + abs(q - k))",
    "s * gain",
    "s + gain",
    "-s",
    "s + table[q - k + {a}]",
    "s + buckets[h, min(max(q - k, 0), 31)]",
    "where(k < {a}, s, s - 1)",
    "where(q - k < {a}, 0.5 * s, s)",
    "s - 0.02 * (q - k)",
    "s * sigmoid(s)",
    "tanh(s) + 0.1 * h",
    "max(s, -1.5)",
    "min(s, 2) + s / 4",
    "s + rel[b, h, row, k]",
    "s + 0.5 * rel_keys[b, 0, 0, k]",
    "s - abs(s) / (2 + b)",
    "s + exp(-abs(q - k) / {p})",
    "s * s / 8",
    "s + (k % {p}) * 0.25",
    "s + (q - k) // {p} * 0.125",
    "s - slopes[h] * (q - k)",
    "s * (1 - 2 * (k // {p} % 2))",
)
BIASES = ("rel", "rel_heads", "rel_keys", "rel_pairs")
HEAD_DIMS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 127, 128)
EDGES = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    15,
    16,
    17,
    20,
    31,
    32,
    33,
    40,
    47,
    48,
    49,
    63,
    64,
    65,
    80,
    97,
    127,
    128,
    129,
)
TILES = (("loop", 16, 16), ("loop", 16, 32), ("loop", 32, 16), ("loop", 32, 32), ("loop", 64, 16))
DTYPES = ("fp16", "fp16", "fp32", "fp32", "bf16", "tf32")
MIXED = (
    {"q": "fp16", "out": "fp32"},
    {"q": "bf16", "out": "fp32"},
    {"q": "fp32", "out": "fp16"},
    {"q": "fp16", "out": "bf16"},
)
MAX_WORK = (
    14  # (query tile, key tile) pairs that the interpreter walks in one example, where it can be
)


def _filled(templates: tuple[str, ...]) -> st.SearchStrategy[str]:
    """One of the templates with its constants."""
    small = st.one_of(st.integers(0, 8), st.integers(0, 70))
    positive = st.one_of(st.integers(1, 6), st.sampled_from((8, 16, 32)))
    constants = st.fixed_dictionaries(
        {"a": small, "b": small, "c": small, "p": positive.filter(lambda n: n > 1), "r": positive}
    )
    return st.builds(lambda t, c: t.format(**c), st.sampled_from(templates), constants)


@st.composite
def mask_items(draw: st.DrawFn) -> Any:
    kind = draw(
        st.sampled_from(("causal", "window", "expr", "expr", "expr", "both", "same", "random"))
    )
    if kind == "causal":
        return "causal"
    if kind == "window":
        side = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 70))
        left, right = draw(side), draw(side)
        if left is None and right is None:
            left = 0
        return {"window": {k: v for k, v in (("left", left), ("right", right)) if v is not None}}
    if kind == "same":
        return {"same": draw(st.sampled_from(("doc", "doc_shared")))}
    if kind == "random":
        return {"expr": unparse(draw(conditions(3)))}
    if kind == "both":
        first, second = draw(_filled(MASKS)), draw(_filled(MASKS))
        return {"expr": f"({first}) {draw(st.sampled_from(('and', 'or')))} ({second})"}
    return {"expr": draw(_filled(MASKS))}


@st.composite
def score_items(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(("softcap", "alibi", "bias", "expr", "expr")))
    if kind == "softcap":
        return {"softcap": draw(st.sampled_from((0.5, 5.0, 50.0)))}
    if kind == "alibi":
        return {"alibi": "slopes"}
    if kind == "bias":
        return {"bias": {"tensor": draw(st.sampled_from(BIASES))}}
    return {"expr": draw(_filled(SCORES))}


@st.composite
def specs(draw: st.DrawFn, head_dims: tuple[int, ...] = HEAD_DIMS) -> dict[str, Any]:
    """Fields of a served spec, with the inputs that it reads and no others."""
    masks = draw(st.sampled_from((0, 1, 1, 1, 2)))
    scores = draw(st.sampled_from((0, 0, 1, 1, 2)))
    fields: dict[str, Any] = {
        "head_dim": draw(st.sampled_from(head_dims)),
        "dtype": draw(st.one_of(st.sampled_from(DTYPES), st.sampled_from((*DTYPES, *MIXED)))),
        "mask": [draw(mask_items()) for _ in range(masks)],
        "score": [draw(score_items()) for _ in range(scores)],
        "align": draw(st.sampled_from(("bottom_right", "bottom_right", "top_left"))),
        "sink": draw(st.sampled_from(("none", "none", "per_head"))),
        "kv_lens": draw(st.sampled_from(("none", "none", "per_batch"))),
        "layout": draw(st.sampled_from(("bhsd", "bhsd", "bshd"))),
        "scale": draw(st.sampled_from(("auto", "auto", "auto", 0, -0.5, 1, 0.3))),
        "loop_order": draw(st.sampled_from(("flash2", "flash2", "flash1", "auto"))),
    }
    if draw(st.integers(0, 3)) == 0:
        fields["head_dim"] = {"qk": fields["head_dim"], "v": draw(st.sampled_from(head_dims))}
    text = repr((fields["mask"], fields["score"]))
    used = [name for name in INPUTS if _reads(text, name)]
    fields["inputs"] = {
        name: {"shape": INPUTS[name][0], "dtype": draw(st.sampled_from(INPUTS[name][1]))}
        for name in used
    }
    return fields


def _wide(fields: dict[str, Any]) -> bool:
    dims = fields["head_dim"]
    return (max(dims.values()) if isinstance(dims, dict) else dims) > 64


def _reads(text: str, name: str) -> bool:
    """Whether a spec's text mentions an input as a whole word."""
    import re

    return re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", text) is not None


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    """A call small enough for the interpreter: some hundred milliseconds."""
    fields = draw(specs())
    tile = draw(st.sampled_from((*TILES, *TILES, *TILES, None)))
    q_len, kv_len = draw(st.sampled_from(EDGES)), draw(st.sampled_from(EDGES))
    if draw(st.booleans()):
        q_len = min(q_len, 33)
    if draw(st.integers(0, 9)) == 0:
        q_len = kv_len
    kv_heads, group = draw(
        st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 6)))
    )
    if draw(st.booleans()):
        fields["heads"] = {"group": group}
    batch = draw(st.sampled_from((0, 1, 1, 1, 2, 2, 3)))
    if tile is not None and _wide(fields) and tile[1] > 32:
        tile = TILES[3]  # 64 rows of 128 fp32 numbers do not fit the registers
    if tile is not None and kv_len <= 64 and draw(st.integers(0, 3)) == 0:
        single = max(16, 1 << max(0, kv_len - 1).bit_length())
        tile = ("single_tile", min(32, tile[1]), single)
    block_m, block_n = tile[1:] if tile else (32, 64)
    tiles = max(1, -(-q_len // block_m) * -(-kv_len // block_n))
    while batch > 1 and batch * kv_heads * group * tiles > MAX_WORK:
        batch -= 1
    while kv_heads * group * tiles > MAX_WORK and kv_heads * group > 1:
        kv_heads, group = (1, group) if kv_heads > 1 else (1, 1)
        fields.pop("heads", None)
    forms = {"q", "k", "v", *fields["inputs"], "sink", "kv_lens"}
    return Drawn(
        spec=fields,
        sizes=(batch, kv_heads * group, kv_heads, q_len, kv_len),
        tile=tile,
        forms={
            name: form
            for name in sorted(forms)
            if (form := draw(st.sampled_from(("contiguous", *FORMS)))) != "contiguous"
        },
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.0, 0.1, 5.0))),
        poison=draw(st.sampled_from(("unseen", "unseen", "unseen", "none", "seen_v", "seen_k"))),
        seed=draw(st.integers(0, 2**16)),
        splits=draw(st.sampled_from((1, 1, 2, 3, 9, None))),
    )
