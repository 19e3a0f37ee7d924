"""The JSON Schema accepts what the reader accepts, as far as one field at a time can tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from cases import FIELDS, HEAD, INPUTS
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from strategies import spec_fields
from test_forms import FULL

from flashgen.spec import read
from flashgen.spec.schema import json_schema

VALIDATOR = Draft202012Validator(json_schema())


def test_schema_is_valid_and_is_json() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert json.loads(json.dumps(json_schema())) == json_schema()


def test_schema_knows_every_field() -> None:
    assert set(json_schema()["properties"]) == set(read.FIELDS)
    assert json_schema()["required"] == ["flashgen", "name", "head_dim", "dtype"]


def test_the_full_example_is_accepted() -> None:
    VALIDATOR.validate(yaml.safe_load(FULL))


@settings(max_examples=60)
@given(spec_fields())
def test_any_spec_is_accepted(fields: dict[str, Any]) -> None:
    VALIDATOR.validate(fields)


# Faults that take more than the structure of one field to see; the reader alone finds them.
BEYOND = {
    "alibi-dtype",
    "alibi-shape",
    "alibi-undeclared",
    "bias-boolean",
    "bias-integer-grad",
    "bias-shape",
    "bias-undeclared",
    "description-unprintable",
    "kv-lens-packed",
    "same-dtype",
    "same-no-inputs",
    "same-shape",
    "same-undeclared",
    "shape-divides",
    "shape-group",
}
# Faults of YAML's text, which are gone once it is read.
TEXT_ONLY = {
    "alias",
    "anchor",
    "anchor-mapping",
    "duplicate-field",
    "exponent-for-integer",  # YAML 1.1, as PyYAML loads it, takes 1e3 for text
    "input-duplicate",
    "key-not-a-word",
    "merge-key",
    "nan",  # not a number of JSON
    "octal",
    "off",
    "overflow",
    "tag",
    "tag-key",
    "underscored",
    "yes",
    "beyond-fp32",  # text for PyYAML
    "enormous-integer",
    "control-character",
}


@pytest.mark.parametrize("name", sorted(set(FIELDS) - TEXT_ONLY))
def test_bad_specs_are_refused(name: str) -> None:
    document = yaml.safe_load(HEAD + FIELDS[name])
    assert VALIDATOR.is_valid(document) == (name in BEYOND)


@pytest.mark.parametrize(
    "change",
    [
        {"flashgen": 2},
        {"name": "A"},
        {"name": "a..b"},
        {"head_dim": 0},
        {"head_dim": {"qk": 64}},
        {"dtype": "fp64"},
        {"dtype": {"q": "bf16", "out": "tf32"}},
        {"extra": 1},
        {"mask": {"window": {}}},
        {"inputs": {"row": {"shape": [], "dtype": "fp32"}}},
        {"inputs": {"lambda": {"shape": [], "dtype": "fp32"}}},
        {"dropout": 1},
        {"scale": 1e39},
        {"scale": 1e-20},
        {"score": {"softcap": 3e38}},
        {"score": {"softcap": 1e-20}},
    ],
)
def test_bad_values_are_refused(change: dict[str, Any]) -> None:
    base = yaml.safe_load(HEAD + INPUTS)
    VALIDATOR.validate(base)
    assert not VALIDATOR.is_valid({**base, **change})


def test_required_fields_are_required() -> None:
    base = yaml.safe_load(HEAD)
    for field in base:
        assert not VALIDATOR.is_valid({key: base[key] for key in base if key != field})
