"""Every message of the spec language has a golden text, and every text a case."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import DOCUMENTS, FIELDS, HEAD, INPUTS, MASK_EXPRESSIONS, SCORE_EXPRESSIONS

from flashgen.errors import FlashgenError, SpecError
from flashgen.spec import AttentionSpec, load_spec, parse_spec
from flashgen.spec.model import Input
from flashgen.spec.symbolic import mask_predicate, score_expression

Golden = Callable[[str, str], None]


def text_of(raised: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        raised()
    return str(caught.value)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(name: str, golden: Golden) -> None:
    golden(f"errors/{name}.txt", text_of(lambda: parse_spec(DOCUMENTS[name], "case.yaml")))


@pytest.mark.parametrize("name", FIELDS)
def test_field(name: str, golden: Golden) -> None:
    golden(f"errors/{name}.txt", text_of(lambda: parse_spec(HEAD + FIELDS[name], "case.yaml")))


@pytest.mark.parametrize("name", MASK_EXPRESSIONS)
def test_mask_expression(name: str, golden: Golden) -> None:
    text = f"{HEAD}{INPUTS}mask:\n  - expr: {json.dumps(MASK_EXPRESSIONS[name])}\n"
    golden(f"errors/expr-{name}.txt", text_of(lambda: parse_spec(text, "case.yaml")))


@pytest.mark.parametrize("name", SCORE_EXPRESSIONS)
def test_score_expression(name: str, golden: Golden) -> None:
    text = f"{HEAD}{INPUTS}score:\n  - expr: {json.dumps(SCORE_EXPRESSIONS[name])}\n"
    golden(f"errors/score-expr-{name}.txt", text_of(lambda: parse_spec(text, "case.yaml")))


# What cannot be written in YAML, or only there.


def too_deep() -> object:
    items: list[object] = []
    items.append(items)
    return items


PYTHON: dict[str, dict[str, object]] = {
    "python-several": {"head_dim": 0, "dtype": "fp12", "mask": "casual", "bakward": True},
    "python-missing": {},
    "python-object": {"head_dim": 64, "dtype": "bf16", "scale": 1j},
    "python-key": {"head_dim": {1: 2, "qk": 64, "v": 64}, "dtype": "bf16"},
    "python-cycle": {"head_dim": 64, "dtype": "bf16", "mask": too_deep()},
    "python-huge-integer": {"head_dim": 10**5000, "dtype": "bf16"},
    "python-dtype": {"head_dim": 64, "dtype": torch.float16},
    "python-dtype-part": {"head_dim": 64, "dtype": {"q": torch.bfloat16, "out": torch.float32}},
    "python-boolean-sink": {"head_dim": 64, "dtype": "bf16", "sink": True},
    "python-nan": {"head_dim": 64, "dtype": "bf16", "scale": float("nan")},
    "python-expression": {"head_dim": 64, "dtype": "bf16", "mask": {"expr": "k <= qq"}},
    "python-folded-expression": {"head_dim": 64, "dtype": "bf16", "mask": {"expr": "k\n<= qq"}},
}


@pytest.mark.parametrize("name", PYTHON)
def test_python_form(name: str, golden: Golden) -> None:
    golden(f"errors/{name}.txt", text_of(lambda: AttentionSpec(**PYTHON[name])))


def test_two_inputs_of_one_name(golden: Golden) -> None:
    twice = (Input("doc", ("batch",), "int32"), Input("doc", (), "int32"))
    message = text_of(lambda: AttentionSpec(head_dim=64, dtype="bf16", inputs=twice))
    golden("errors/python-input-twice.txt", message)


def test_folded_expression_gives_the_column_inside_it(golden: Golden) -> None:
    text = f"{HEAD}mask:\n  - expr: >\n      k <= q\n      and kk == 0\n"
    golden("errors/expr-folded.txt", text_of(lambda: parse_spec(text, "case.yaml")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("file-not-utf8", b"flashgen: 1\nname: caf\xe9\n"),
        ("file-utf16", "flashgen: 1\n".encode("utf-16")),
        ("file-binary", b"\x7fELF\x02\x01\x01\x00"),
        ("file-large", b"#" * (300 * 1024)),
    ],
)
def test_file(name: str, content: bytes, golden: Golden, tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_bytes(content)
    golden(f"errors/{name}.txt", text_of(lambda: load_spec(path)).replace(str(path), "case.yaml"))


def test_no_file(golden: Golden, tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    message = text_of(lambda: load_spec(path)).replace(str(path), "case.yaml")
    golden("errors/file-missing.txt", message)


def test_folder(golden: Golden, tmp_path: Path) -> None:
    message = text_of(lambda: load_spec(tmp_path)).replace(str(tmp_path), "specs")
    golden("errors/file-folder.txt", message)


def test_device_is_not_read(golden: Golden) -> None:
    golden("errors/file-device.txt", text_of(lambda: load_spec("/dev/zero")))


def test_impossible_path(golden: Golden) -> None:
    message = text_of(lambda: load_spec("case\0.yaml")).replace("\0", "␀")
    golden("errors/file-path.txt", message)


def test_folder_in_the_way(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = text_of(lambda: load_spec(tmp_path / "file" / "case.yaml"))
    golden("errors/file-unreadable.txt", message.replace(str(tmp_path), "."))


@pytest.mark.parametrize(
    ("name", "mask", "score"),
    [
        ("symbolic-mask", "k < 1 / (q - q)", "s"),
        ("symbolic-score", "k <= q", "s + log(k - k - 1)"),
        ("symbolic-divisor", "k % (q - q) == 0", "s"),
        ("symbolic-integer", "k * 2147483647 * 2147483647 * 2147483647 > 5", "s"),
        ("symbolic-large", "k <= q", "s * 1e30 * 1e30"),
        ("symbolic-small", "k <= q", "s / 1e30 / 1e30"),
    ],
)
def test_after_simplification(name: str, mask: str, score: str, golden: Golden) -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16", mask={"expr": mask}, score={"expr": score})
    golden(f"errors/{name}.txt", text_of(lambda: (mask_predicate(spec), score_expression(spec))))


def test_every_golden_text_has_a_case() -> None:
    tests = Path(__file__).parents[1]
    source = "".join(path.read_text("utf-8") for path in sorted(tests.rglob("test_*.py")))
    named_by_others = tuple(re.findall(r"errors/([a-z0-9-]+-)\{", source))  # f"errors/tensor-{…}"
    known = {*DOCUMENTS, *FIELDS, *PYTHON}
    known |= {f"expr-{name}" for name in MASK_EXPRESSIONS}
    known |= {f"score-expr-{name}" for name in SCORE_EXPRESSIONS}
    spec_prefixes = ("expr-", "score-expr-")
    stale = {
        path.stem
        for path in (tests / "golden" / "errors").glob("*.txt")
        if path.stem not in known
        and f'"{path.stem}"' not in source
        and f"errors/{path.name}" not in source
        and not path.stem.startswith(tuple(set(named_by_others) - set(spec_prefixes)))
    }
    assert stale == set()


# What holds for every message.

ALL = {
    **DOCUMENTS,
    **{name: HEAD + text for name, text in FIELDS.items()},
}


@pytest.mark.parametrize("name", ALL)
def test_messages_are_one_line_each(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(ALL[name], "case.yaml")
    for problem in caught.value.problems:
        for part in (problem.field, problem.message, problem.hint or ""):
            assert part.isprintable() or part == ""
        assert len(problem.message) < 300


@pytest.mark.parametrize("name", FIELDS)
def test_a_fault_is_placed_where_it_stands(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(HEAD + FIELDS[name], "case.yaml")
    for problem in caught.value.problems:
        assert problem.line > HEAD.count("\n")
        assert problem.column >= 1


def test_problems_are_in_the_order_of_their_places() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(DOCUMENTS["everything-at-once"])
    places = [(problem.line, problem.column) for problem in caught.value.problems]
    assert places == sorted(places)
    assert len(places) == 9


def test_spec_error_is_a_value_error_with_exit_code_3() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec("")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FlashgenError)
    assert caught.value.exit_code == 3


def test_spec_error_can_be_pickled() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(DOCUMENTS["rule-8"])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SpecError
    assert copy.problems == caught.value.problems
    assert str(copy) == str(caught.value)
