"""Hostile text: nothing but a spec or a SpecError ever comes out, and soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forms import FULL

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, load_spec, parse_spec

HEAD = "flashgen: 1\nname: x\nhead_dim: 64\ndtype: bf16\n"


def outcome(text: str) -> AttentionSpec | SpecError:
    try:
        return parse_spec(text)
    except SpecError as error:
        return error


@settings(max_examples=150)
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    outcome(text)


@settings(max_examples=150)
@given(st.text("flashgen: 1\n -[]{}&*!?|>'\"%@`#,.~0xeE+_\\\t", max_size=80))
def test_any_text_of_yaml_marks(text: str) -> None:
    outcome(text)


@settings(max_examples=100)
@given(content=st.binary(max_size=200))
def test_any_bytes(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("bytes") / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        load_spec(path)


@settings(max_examples=150)
@given(
    st.integers(0, len(FULL)),
    st.integers(0, 12),
    st.text("\n :-[]{}'\"&*!kqsb0123456789.e\t", max_size=6),
)
def test_any_damage_to_a_spec(start: int, length: int, inserted: str) -> None:
    result = outcome(FULL[:start] + inserted + FULL[start + length :])
    if isinstance(result, SpecError):
        for problem in result.problems:
            assert f"{problem.field}{problem.message}".isprintable()
            assert problem.line >= 1
    else:
        assert parse_spec(result.to_yaml()) == result


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(("causal", "doc", "auto", "k <= q", "s", "any", "paged", b"bytes", 1j)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from(
                    (
                        "window",
                        "left",
                        "same",
                        "expr",
                        "softcap",
                        "bias",
                        "tensor",
                        "shape",
                        "dtype",
                        "paged",
                        "page_size",
                        "qk",
                        "v",
                        "q",
                        "group",
                        "batch",
                        "doc",
                    )
                ),
                st.text(max_size=3),
                st.integers(0, 3),
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from(
    (
        "flashgen",
        "name",
        "description",
        "head_dim",
        "dtype",
        "heads",
        "scale",
        "mask",
        "align",
        "score",
        "inputs",
        "sink",
        "kv_lens",
        "kv_cache",
        "layout",
        "dropout",
        "loop_order",
        "backward",
        "deterministic",
        "shapes",
        "unknown",
    )
)


@settings(max_examples=150)
@given(st.dictionaries(FIELD_NAMES, VALUES, max_size=6))
def test_any_python_values(fields: dict[str, object]) -> None:
    try:
        spec = AttentionSpec(**{"head_dim": 64, "dtype": "bf16", **fields})
    except SpecError as error:
        assert all(f"{problem.field}{problem.message}".isprintable() for problem in error.problems)
        assert all(problem.line == 0 for problem in error.problems)
    else:
        assert parse_spec(spec.replace(name="x").to_yaml()) == spec.replace(name="x")


BOMBS = {
    "aliases": "a: &a [x, x]\n"
    + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(20)
    ),
    "cycle": "mask: &m [*m]\n",
    "flow-lists": "[" * 200_000,
    "flow-mappings": "{a: " * 60_000,
    "block-lists": "- " * 100_000,
    "complex-keys": "? " * 100_000,
    "long-plain": "a" * 200_000,
    "long-key": "a" * 200_000 + ": 1",
    "many-keys": "".join(f"k{n}: 1\n" for n in range(20_000)),
    "many-anchors": "- &a x\n" * 30_000,
    "many-documents": "---\n" * 50_000,
    "quotes": '"' * 200_000,
    "digits": f"{HEAD}scale: {'1' * 200_000}\n",
    "exponent": f"{HEAD}scale: 1e{'9' * 100_000}\n",
    "long-expression": f"{HEAD}mask: {{expr: '{'(' * 200_000}'}}\n",
    "long-input-name": f"{HEAD}inputs: {{{'a' * 1000}: {{shape: [], dtype: fp32}}}}\n",
    "directive": "%YAML " + "9" * 5000 + ".1\n---\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_soon(name: str) -> None:
    start = time.perf_counter()
    result = outcome(BOMBS[name])
    assert isinstance(result, SpecError)
    assert time.perf_counter() - start < 10
    assert len(str(result)) < 4_000_000
