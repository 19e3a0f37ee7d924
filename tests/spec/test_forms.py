"""Every field, every form: YAML and Python give equal specs with equal fingerprints."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from strategies import spec_fields

from flashgen.spec import AttentionSpec, load_spec, parse_spec
from flashgen.spec.model import (
    Alibi,
    Bias,
    Causal,
    DTypes,
    Expr,
    HeadDim,
    Heads,
    Input,
    Paged,
    Same,
    Shape,
    Softcap,
    Window,
)
from flashgen.spec.read import FIELDS

FULL = """
flashgen: 1
name: gemma2_local
head_dim: 256                      # or {qk: 192, v: 128}
dtype: bf16
heads: {group: 2}                  # query heads per K/V head
scale: auto
mask:
  - causal
  - window: {left: 4095, right: 0}
  - same: doc
align: bottom_right
score:
  - softcap: 50.0
  - alibi: slopes
  - bias: {tensor: rel, grad: true}
  - expr: "s + 0.1 * log(1 + abs(q - k))"
inputs:
  doc:    {shape: [batch, kv_len], dtype: int32}
  slopes: {shape: [q_heads], dtype: fp32}
  rel:    {shape: [1, q_heads, q_len, kv_len], dtype: bf16}
sink: none
kv_lens: none
kv_cache: contiguous
layout: bhsd
dropout: 0.0
loop_order: flash2
backward: false
deterministic: true
shapes:
  - {batch: 2, q_heads: 16, kv_heads: 8, q_len: 8192, kv_len: 8192}
"""


def python_form(text: str) -> AttentionSpec:
    return AttentionSpec(**yaml.safe_load(text))


def brief(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"head_dim": 64, "dtype": "bf16", **fields})


def test_the_full_example_is_read_as_the_design_says() -> None:
    spec = parse_spec(FULL)
    assert spec.flashgen == 1
    assert spec.name == "gemma2_local"
    assert spec.head_dim == HeadDim(256, 256)
    assert spec.dtype == DTypes("bf16", "bf16", "bf16")
    assert spec.heads == Heads(2)
    assert spec.scale is None
    assert spec.softmax_scale == 1 / 16
    assert spec.mask == (Causal(), Window(4095, 0), Same("doc"))
    assert spec.align == "bottom_right"
    assert spec.score == (
        Softcap(50.0),
        Alibi("slopes"),
        Bias("rel", grad=True),
        Expr("s + 0.1 * log(1 + abs(q - k))"),
    )
    assert spec.inputs == (
        Input("doc", ("batch", "kv_len"), "int32"),
        Input("rel", (1, "q_heads", "q_len", "kv_len"), "bf16"),
        Input("slopes", ("q_heads",), "fp32"),
    )
    assert (spec.sink, spec.kv_lens, spec.kv_cache, spec.layout) == (
        "none",
        "none",
        "contiguous",
        "bhsd",
    )
    assert (spec.dropout, spec.loop_order, spec.backward, spec.deterministic) == (
        0.0,
        "flash2",
        False,
        True,
    )
    assert spec.shapes == (Shape(2, 16, 8, 8192, 8192),)


def test_only_four_fields_are_required_and_the_defaults_are_the_designs() -> None:
    short = parse_spec("flashgen: 1\nname: x\nhead_dim: 64\ndtype: bf16\n")
    assert short == parse_spec(
        "flashgen: 1\nname: x\nhead_dim: 64\ndtype: bf16\nheads: any\nscale: auto\nmask: []\n"
        "align: bottom_right\nscore: []\ninputs: {}\nsink: none\nkv_lens: none\n"
        "kv_cache: contiguous\nlayout: bhsd\ndropout: 0\nloop_order: flash2\nbackward: false\n"
        "deterministic: true\nshapes: []\n"
    )
    assert short.heads == Heads(None)


def test_python_and_yaml_are_equal() -> None:
    assert python_form(FULL) == parse_spec(FULL)
    assert python_form(FULL).fingerprint == parse_spec(FULL).fingerprint
    assert hash(python_form(FULL)) == hash(parse_spec(FULL))


def test_name_and_version_are_optional_in_python() -> None:
    spec = brief()
    assert spec.name is None
    assert spec.flashgen == 1
    assert spec.display_name == f"spec-{spec.fingerprint[:12]}"
    assert spec.fingerprint == brief(name="x").fingerprint


def test_none_counts_as_not_given_in_python() -> None:
    assert brief(name=None, scale=None, mask=None, heads={"group": 2}) == brief(heads=Heads(2))
    assert brief(mask={"window": {"left": 3, "right": None}}) == brief(mask={"window": {"left": 3}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"head_dim": 64}, {"head_dim": {"qk": 64, "v": 64}}),
        ({"dtype": "bf16"}, {"dtype": {"q": "bf16", "kv": "bf16", "out": "bf16"}}),
        ({"dtype": "bf16"}, {"dtype": {"q": "bf16"}}),
        ({"dtype": "tf32"}, {"dtype": {"q": "tf32", "kv": "tf32", "out": "fp32"}}),
        ({"dtype": "fp8_e4m3"}, {"dtype": {"q": "fp8_e4m3", "out": "bf16"}}),
        ({"heads": "any"}, {"heads": {"group": "any"}}),
        ({"scale": 1}, {"scale": 1.0}),
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"mask": "causal"}, {"mask": ["causal"]}),
        ({"mask": "causal"}, {"mask": [Causal()]}),
        ({"mask": {"window": {"left": 3}}}, {"mask": (Window(3),)}),
        ({"mask": {"expr": "k<=q"}}, {"mask": [{"expr": "(k) <= q"}]}),
        ({"score": {"softcap": 50}}, {"score": [{"softcap": 50.0}]}),
        ({"score": Softcap(50.0)}, {"score": [{"softcap": 50}]}),
        ({"kv_cache": Paged(16)}, {"kv_cache": {"paged": {"page_size": 16}}}),
        ({"dropout": 0}, {"dropout": 0.0}),
        (
            {"shapes": [Shape(1, 2, 1, 4, 4)]},
            {"shapes": [{"batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 4, "kv_len": 4}]},
        ),
        (
            {"inputs": (Input("doc", ("kv_len",), "int32"),)},
            {"inputs": {"doc": {"shape": ["kv_len"], "dtype": "int32"}}},
        ),
    ],
)
def test_forms_that_mean_the_same_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert brief(**one) == brief(**other)
    assert brief(**one).fingerprint == brief(**other).fingerprint


def test_attributes_of_a_spec_build_it_again() -> None:
    spec = parse_spec(FULL)
    assert AttentionSpec(**{field: getattr(spec, field) for field in FIELDS}) == spec


def test_replace_checks_and_keeps_the_rest() -> None:
    spec = parse_spec(FULL)
    changed = spec.replace(head_dim=128, name=None)
    assert changed.head_dim == HeadDim(128, 128)
    assert changed.name is None
    assert changed.mask == spec.mask
    with pytest.raises(ValueError, match="head_dim: got 0"):
        spec.replace(head_dim=0)


def test_specs_are_frozen_and_can_be_copied_and_pickled() -> None:
    spec = parse_spec(FULL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.align = "top_left"  # type: ignore[misc]
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)).fingerprint == spec.fingerprint


def test_input_by_name() -> None:
    spec = parse_spec(FULL)
    assert spec.input("slopes") == Input("slopes", ("q_heads",), "fp32")
    with pytest.raises(KeyError):
        spec.input("nothing")


def test_yaml_quoting_is_respected() -> None:
    spec = parse_spec("flashgen: 1\nname: '123'\nhead_dim: 64\ndtype: \"bf16\"\nsink: 'none'\n")
    assert spec.name == "123"


def test_yaml_reads_numbers_as_its_version_1_2_does() -> None:
    head = "flashgen: 1\nname: x\nhead_dim: 64\ndtype: bf16\n"
    assert parse_spec(head + "scale: 1e-3\n").scale == 0.001
    assert parse_spec(head + "scale: +.5\n").scale == 0.5
    assert parse_spec(head + "scale: -1\n").scale == -1.0


def test_zero_is_a_number_and_a_window_side() -> None:
    assert brief(scale=0).scale == 0.0
    assert brief(scale=0).softmax_scale == 0.0
    assert brief(scale=0) != brief()
    shut = brief(mask={"window": {"left": 3, "right": 0}})
    unlimited = brief(mask={"window": {"left": 3}})
    assert shut != unlimited
    assert shut.fingerprint != unlimited.fingerprint


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Any) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + FULL.lstrip().replace("\n", "\r\n").encode())
    assert load_spec(path) == parse_spec(FULL)
    assert load_spec(str(path)) == parse_spec(FULL)


# Fingerprints


def test_key_order_comments_and_layout_do_not_matter() -> None:
    fields = yaml.safe_load(FULL)
    turned = {field: fields[field] for field in reversed(list(fields))}
    turned["inputs"] = dict(reversed(list(turned["inputs"].items())))
    rewritten = yaml.safe_dump(turned, sort_keys=False)
    assert parse_spec("# a comment\n" + rewritten) == parse_spec(FULL)
    assert parse_spec(rewritten).fingerprint == parse_spec(FULL).fingerprint


CHANGES: list[dict[str, Any]] = [
    {"head_dim": {"qk": 128, "v": 256}},
    {"head_dim": {"qk": 256, "v": 128}},
    {"dtype": "fp16"},
    {"dtype": {"q": "bf16", "kv": "fp8_e4m3"}},
    {"dtype": {"q": "bf16", "out": "fp32"}},
    {"heads": "any"},
    {"heads": {"group": 4}},
    {"scale": 0},
    {"scale": 0.0625},
    {"mask": []},
    {"mask": ["causal", {"same": "doc"}, {"window": {"left": 4095, "right": 0}}]},
    {"mask": ["causal", {"window": {"left": 4096, "right": 0}}, {"same": "doc"}]},
    {"mask": ["causal", {"window": {"left": 4095, "right": 1}}, {"same": "doc"}]},
    {"mask": ["causal", {"window": {"left": 4095}}, {"same": "doc"}]},
    {"mask": {"expr": "k <= q"}},
    {"align": "top_left"},
    {"score": []},
    {"score": {"softcap": 30}},
    {"score": {"alibi": "slopes"}},
    {"score": {"bias": {"tensor": "rel"}}},
    {"score": {"bias": {"tensor": "rel", "grad": True}}},
    {"score": {"expr": "s + 0.1 * log(2 + abs(q - k))"}},
    {"sink": "per_head"},
    {"kv_lens": "per_batch"},
    {"kv_cache": {"paged": {"page_size": 16}}},
    {"kv_cache": {"paged": {"page_size": 32}}},
    {"layout": "bshd"},
    {"layout": "packed"},
    {"dropout": 0.1},
    {"loop_order": "flash1"},
    {"loop_order": "auto"},
    {"backward": True},
    {"deterministic": False},
]


def test_every_semantic_field_is_in_the_fingerprint() -> None:
    base = yaml.safe_load(FULL) | {"shapes": []}
    prints = [AttentionSpec(**base).fingerprint]
    prints += [AttentionSpec(**{**base, **change}).fingerprint for change in CHANGES]
    changed_input = copy.deepcopy(base)
    changed_input["inputs"]["doc"]["dtype"] = "int64"
    prints.append(AttentionSpec(**changed_input).fingerprint)
    changed_input["inputs"]["doc"]["shape"] = ["kv_len"]
    prints.append(AttentionSpec(**changed_input).fingerprint)
    assert len(set(prints)) == len(prints)
    changed = {field for change in CHANGES for field in change} | {"inputs"}
    assert changed == set(FIELDS) - {"flashgen", "name", "description", "shapes"}


def test_name_description_and_shapes_are_not_in_the_fingerprint() -> None:
    base = parse_spec(FULL)
    for change in ({"name": "other"}, {"description": "words"}, {"shapes": []}):
        assert base.replace(**change).fingerprint == base.fingerprint
        assert base.replace(**change) != base


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = f"from flashgen.spec import parse_spec; print(parse_spec({FULL!r}).fingerprint)"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    ).stdout.strip()
    assert printed == parse_spec(FULL).fingerprint
    assert len(printed) == 64


# Writing


def test_to_yaml_is_what_a_person_would_write(golden: Any) -> None:
    golden("spec/full.yaml", parse_spec(FULL).to_yaml())


def test_to_yaml_of_an_unnamed_spec_names_it_after_its_fingerprint() -> None:
    spec = brief(mask="causal")
    assert parse_spec(spec.to_yaml()) == spec.replace(name=spec.display_name)


@pytest.mark.parametrize("name", ["on", "yes", "null", "1e5", "123", "0x10", "1_0", "a.b-c"])
def test_names_that_look_like_something_else_are_quoted(name: str) -> None:
    spec = brief(
        name=name, inputs={"on": {"shape": ["kv_len"], "dtype": "int32"}}, mask={"same": "on"}
    )
    assert parse_spec(spec.to_yaml()) == spec


@settings(max_examples=100)
@given(spec_fields())
def test_any_spec_survives_both_forms_and_writing(fields: dict[str, Any]) -> None:
    spec = AttentionSpec(**fields)
    assert parse_spec(json.dumps(fields, ensure_ascii=False)) == spec  # JSON is YAML
    again = parse_spec(spec.to_yaml())
    assert again == spec
    assert again.fingerprint == spec.fingerprint
    assert AttentionSpec(**spec.canonical()).fingerprint == spec.fingerprint
    assert isinstance(spec.warnings(), tuple)
