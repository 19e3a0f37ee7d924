"""Random specs and expressions that are valid, for property tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from flashgen.dtypes import MATMUL_DTYPES, OUTPUT_DTYPES
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
)

# The inputs that random expressions read: (shape, dtype).
INPUTS: dict[str, tuple[list[int | str], str]] = {
    "doc": (["batch", "kv_len"], "int32"),
    "table": ([64], "fp32"),
    "m": (["batch", 1, "q_len", "kv_len"], "bool"),
    "reach": ([], "int32"),
    "gain": ([], "fp32"),
    "on": ([], "bool"),
}
POSITIONS = ("q", "row", "k", "b", "h", "hk", "q_len", "kv_len")


# Divisors that are 0 in places.
DIVISORS = (
    *(Name(name) for name in (*POSITIONS, "reach")),
    Binary("-", Name("k"), Name("row")),
    Binary("%", Name("k"), Number(3)),
)


def declared() -> dict[str, dict[str, Any]]:
    return {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in INPUTS.items()}


@cache
def integers(depth: int) -> st.SearchStrategy[Node]:
    """Integer-valued expressions of at most `depth` levels."""
    leaf = st.one_of(
        st.integers(0, 40).map(Number),
        st.sampled_from(POSITIONS).map(Name),
        st.just(Name("reach")),
    )
    if depth <= 1:
        return leaf
    inner = integers(depth - 1)
    pair = st.tuples(inner, inner)
    return st.one_of(
        leaf,
        st.builds(lambda op, ab: Binary(op, *ab), st.sampled_from("+-*"), pair),
        st.builds(
            lambda op, a, n: Binary(op, a, Number(n)),
            st.sampled_from(("//", "%")),
            inner,
            st.integers(1, 9),
        ),
        st.builds(Binary, st.sampled_from(("//", "%")), inner, st.sampled_from(DIVISORS)),
        inner.map(Negate),
        st.builds(Call, st.sampled_from(("min", "max")), pair),
        inner.map(lambda a: Call("abs", (a,))),
        st.builds(
            lambda a, n: Call("floor", (Binary("/", a, Number(n)),)), inner, st.integers(1, 9)
        ),
        st.builds(lambda c, ab: Call("where", (c, *ab)), conditions(depth - 1), pair),
        pair.map(lambda ab: Index("doc", ab)),
    )


@cache
def conditions(depth: int) -> st.SearchStrategy[Node]:
    """Conditions of at most `depth` levels; only integers are compared, so they are exact."""
    if depth <= 1:
        return st.just(Name("on"))
    numbers = integers(depth - 1)
    comparison = st.lists(numbers, min_size=2, max_size=3).flatmap(
        lambda operands: st.lists(
            st.sampled_from(("<", "<=", ">", ">=", "==", "!=")),
            min_size=len(operands) - 1,
            max_size=len(operands) - 1,
        ).map(lambda operators: Compare(tuple(operators), tuple(operands)))
    )
    inner = conditions(depth - 1)
    return st.one_of(
        comparison,
        inner.map(Not),
        st.builds(
            lambda op, parts: Logic(op, tuple(parts)),
            st.sampled_from(("and", "or")),
            st.lists(inner, min_size=2, max_size=3),
        ),
        st.builds(lambda a, b: Index("m", (Name("b"), Number(0), a, b)), numbers, numbers),
    )


@cache
def reals(depth: int) -> st.SearchStrategy[Node]:
    """Real-valued expressions of at most `depth` levels."""
    leaf = st.one_of(
        st.just(Name("s")),
        st.just(Name("gain")),
        st.floats(0, 4, allow_subnormal=False).map(lambda x: Number(round(x, 3))),
    )
    if depth <= 1:
        return leaf
    inner = st.one_of(reals(depth - 1), integers(depth - 1))
    return st.one_of(
        leaf,
        st.builds(Binary, st.sampled_from(("+", "-", "*", "/")), inner, inner),
        inner.map(Negate),
        st.builds(
            lambda f, a: Call(f, (a,)),
            st.sampled_from(("exp", "log", "tanh", "sigmoid", "abs")),
            inner,
        ),
        st.builds(lambda f, *ab: Call(f, ab), st.sampled_from(("min", "max")), inner, inner),
        st.builds(lambda c, *ab: Call("where", (c, *ab)), conditions(depth - 1), inner, inner),
        integers(depth - 1).map(lambda a: Index("table", (a,))),
    )


NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}(\.[a-z0-9_-]{1,4})?", fullmatch=True)
SIZES = st.integers(1, 2**31 - 1)
LENGTHS = st.integers(1, 2**29)
NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(-1e15, 1e15, allow_nan=False).filter(lambda x: x == 0 or abs(x) >= 1e-15),
)
TEXT = st.text(
    st.characters(
        codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs"), include_characters=" \n"
    ),
    max_size=60,
)


@st.composite
def shapes(draw: st.DrawFn, group: int | None) -> dict[str, int]:
    kv_heads = draw(st.integers(1, 64))
    ratio = group if group is not None else draw(st.integers(1, 16))
    return {
        "batch": draw(SIZES),
        "q_heads": kv_heads * ratio,
        "kv_heads": kv_heads,
        "q_len": draw(LENGTHS),
        "kv_len": draw(LENGTHS),
    }


@st.composite
def spec_fields(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a valid spec as they are written, in one of the allowed forms each."""
    from flashgen.spec.expr import unparse

    sizes = st.integers(1, 1024)
    formats = st.sampled_from(MATMUL_DTYPES)
    fields: dict[str, Any] = {
        "flashgen": 1,
        "name": draw(NAMES),
        "head_dim": draw(st.one_of(sizes, st.fixed_dictionaries({"qk": sizes, "v": sizes}))),
        "dtype": draw(
            st.one_of(
                formats,
                st.fixed_dictionaries(
                    {"q": formats},
                    optional={"kv": formats, "out": st.sampled_from(OUTPUT_DTYPES)},
                ),
            )
        ),
    }
    inputs = {
        **declared(),
        "slopes": {"shape": ["q_heads"], "dtype": "fp32"},
        "rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "bf16"},
    }
    window = st.fixed_dictionaries({}, optional={"left": st.integers(0, 9), "right": SIZES})
    mask_item = st.one_of(
        st.just("causal"),
        window.filter(bool).map(lambda sides: {"window": sides}),
        st.just({"same": "doc"}),
        conditions(3).map(lambda node: {"expr": unparse(node)}),
    )
    score_item = st.one_of(
        st.floats(1e-3, 1e6).map(lambda cap: {"softcap": cap}),
        st.just({"alibi": "slopes"}),
        st.booleans().map(lambda grad: {"bias": {"tensor": "rel", "grad": grad}}),
        reals(3).map(lambda node: {"expr": unparse(node)}),
    )
    group = draw(st.one_of(st.none(), st.integers(1, 64)))
    packed = draw(st.booleans())
    optional = {
        "description": TEXT,
        "heads": st.just("any" if group is None else {"group": group}),
        "scale": st.one_of(st.just("auto"), NUMBERS),
        "mask": st.one_of(mask_item, st.lists(mask_item, max_size=3)),
        "align": st.sampled_from(("bottom_right", "top_left")),
        "score": st.one_of(score_item, st.lists(score_item, max_size=3)),
        "sink": st.sampled_from(("none", "per_head")),
        "kv_lens": st.just("none") if packed else st.sampled_from(("none", "per_batch")),
        "kv_cache": st.one_of(
            st.just("contiguous"),
            st.integers(1, 65536).map(lambda size: {"paged": {"page_size": size}}),
        ),
        "layout": st.just("packed") if packed else st.sampled_from(("bhsd", "bshd")),
        "dropout": st.floats(0, 1, exclude_max=True),
        "loop_order": st.sampled_from(("flash2", "flash1", "auto")),
        "backward": st.booleans(),
        "deterministic": st.booleans(),
        "shapes": st.lists(shapes(group), max_size=2),
    }
    fields |= draw(st.fixed_dictionaries({}, optional=optional))
    fields["inputs"] = inputs
    return fields
