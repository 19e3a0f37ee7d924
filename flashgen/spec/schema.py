"""The spec language as JSON Schema, so that editors complete and check specs as they are written.

It states the structure: fields, forms, ranges, words. What needs more than one field to be seen
(undeclared inputs, head counts that do not divide, expressions) is told by `load_spec`.
"""

from __future__ import annotations

import keyword
from typing import Any

from flashgen.dtypes import INPUT_DTYPES, MATMUL_DTYPES, OUTPUT_DTYPES
from flashgen.spec.expr import MAX_LENGTH
from flashgen.spec.parts import (
    ALIGNS,
    CALL_ARGUMENTS,
    EXTENTS,
    FUNCTIONS,
    INPUT_NAME_PATTERN,
    KV_LENS,
    LAYOUTS,
    LOOP_ORDERS,
    MAX_DESCRIPTION,
    MAX_EXTENT,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_INPUT_NAME,
    MAX_INPUT_RANK,
    MAX_ITEMS,
    MAX_NAME,
    MAX_NUMBER,
    MAX_PAGE_SIZE,
    MAX_SHAPES,
    MIN_NUMBER,
    NAME_PATTERN,
    SHAPE_FIELDS,
    SHAPE_LIMITS,
    SINKS,
    SPEC_VERSION,
    SYMBOLS,
)
from flashgen.spec.read import REQUIRED_IN_YAML

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of a spec file (draft 2020-12), as JSON types."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flashgen attention spec, version 1",
        "type": "object",
        "properties": {
            "flashgen": {"const": SPEC_VERSION, "description": "Version of the spec language."},
            "name": {
                "type": "string",
                "pattern": f"^{NAME_PATTERN}$",
                "maxLength": MAX_NAME,
                "description": "Name of the variant; by convention also that of the file.",
            },
            "description": {"type": "string", "maxLength": MAX_DESCRIPTION},
            "head_dim": {
                "description": "Elements of a head: one number, or {qk, v} where they differ.",
                "oneOf": [
                    _integer(1, MAX_HEAD_DIM),
                    _object(
                        {"qk": _integer(1, MAX_HEAD_DIM), "v": _integer(1, MAX_HEAD_DIM)},
                        ("qk", "v"),
                    ),
                ],
            },
            "dtype": {
                "description": "Number format of q, k, v and the output, or {q, kv, out}.",
                "oneOf": [
                    {"enum": list(MATMUL_DTYPES)},
                    _object(
                        {
                            "q": {"enum": list(MATMUL_DTYPES)},
                            "kv": {"enum": list(MATMUL_DTYPES)},
                            "out": {"enum": list(OUTPUT_DTYPES)},
                        },
                        ("q",),
                    ),
                ],
            },
            "heads": {
                "description": "Query heads per K/V head; any: read at run time.",
                "default": "any",
                "oneOf": [
                    {"const": "any"},
                    _object(
                        {"group": {"oneOf": [{"const": "any"}, _integer(1, MAX_GROUP)]}},
                        ("group",),
                    ),
                ],
            },
            "scale": {
                "description": "Factor of q·k; auto: 1/sqrt(head_dim.qk).",
                "default": "auto",
                "oneOf": [{"const": "auto"}, _sized()],
            },
            "mask": {
                "description": "What a query may see: all items must hold.",
                "default": [],
                **_items(_mask_item()),
            },
            "align": {
                "description": "bottom_right: q = row + kv_len - q_len; top_left: q = row.",
                "default": "bottom_right",
                "enum": list(ALIGNS),
            },
            "score": {
                "description": "Steps applied to s = scale * (q·k), in order.",
                "default": [],
                **_items(_score_item()),
            },
            "inputs": {
                "description": "Tensors that a call passes by name, for mask and score.",
                "default": {},
                "type": "object",
                "maxProperties": MAX_ITEMS,
                "propertyNames": {
                    "pattern": f"^{INPUT_NAME_PATTERN}$",
                    "maxLength": MAX_INPUT_NAME,
                    "not": {"enum": sorted({*SYMBOLS, *CALL_ARGUMENTS, *FUNCTIONS, *_WORDS})},
                },
                "additionalProperties": _object(
                    {
                        "shape": {
                            "type": "array",
                            "maxItems": MAX_INPUT_RANK,
                            "items": {"oneOf": [{"enum": list(EXTENTS)}, _integer(1, MAX_EXTENT)]},
                        },
                        "dtype": {"enum": list(INPUT_DTYPES)},
                    },
                    ("shape", "dtype"),
                ),
            },
            "sink": {
                "description": "per_head: an extra logit that joins the softmax denominator.",
                "default": "none",
                "enum": list(SINKS),
            },
            "kv_lens": {
                "description": "per_batch: only the first kv_lens[b] keys exist.",
                "default": "none",
                "enum": list(KV_LENS),
            },
            "kv_cache": {
                "description": "Where K and V live.",
                "default": "contiguous",
                "oneOf": [
                    {"const": "contiguous"},
                    _object(
                        {
                            "paged": _object(
                                {"page_size": _integer(1, MAX_PAGE_SIZE)}, ("page_size",)
                            )
                        },
                        ("paged",),
                    ),
                ],
            },
            "layout": {
                "description": "Order of the axes; packed: sequences end to end, by cu_seqlens.",
                "default": "bhsd",
                "enum": list(LAYOUTS),
            },
            "dropout": {
                "description": "Probability of dropping a weight.",
                "default": 0.0,
                "type": "number",
                "minimum": 0,
                "exclusiveMaximum": 1,
            },
            "loop_order": {
                "description": "flash2: queries outside; flash1: keys and values outside.",
                "default": "flash2",
                "enum": list(LOOP_ORDERS),
            },
            "backward": {
                "description": "Emit and tune the gradients too.",
                "default": False,
                "type": "boolean",
            },
            "deterministic": {
                "description": "Equal inputs give equal bits.",
                "default": True,
                "type": "boolean",
            },
            "shapes": {
                "description": "Sizes to tune and report for; the kernel serves all sizes.",
                "default": [],
                "type": "array",
                "maxItems": MAX_SHAPES,
                "items": _object(
                    {field: _integer(1, most) for field, most in SHAPE_LIMITS.items()},
                    SHAPE_FIELDS,
                ),
            },
        },
        "required": list(REQUIRED_IN_YAML),
        "additionalProperties": False,
    }


# Words that cannot name an input: Python's keywords, since inputs are passed by keyword.
_WORDS = ("true", "false", *keyword.kwlist)


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(**bounds: object) -> Schema:
    return {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, **bounds}


def _sized() -> Schema:
    """0, or a number that is not too small."""
    small = {"exclusiveMinimum": -MIN_NUMBER, "exclusiveMaximum": MIN_NUMBER}
    return _number(**{"not": {**small, "not": {"const": 0}}})


def _object(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _items(item: Schema) -> Schema:
    """One item, or a list of them."""
    return {"oneOf": [item, {"type": "array", "items": item, "maxItems": MAX_ITEMS}]}


def _input_name() -> Schema:
    return {"type": "string", "pattern": f"^{INPUT_NAME_PATTERN}$", "maxLength": MAX_INPUT_NAME}


def _expression() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH}


def _mask_item() -> Schema:
    side = _integer(0, MAX_EXTENT)
    window = {**_object({"left": side, "right": side}), "minProperties": 1}
    return {
        "oneOf": [
            {"const": "causal"},
            _object({"window": window}, ("window",)),
            _object({"same": _input_name()}, ("same",)),
            _object({"expr": _expression()}, ("expr",)),
        ]
    }


def _score_item() -> Schema:
    bias = _object({"tensor": _input_name(), "grad": {"type": "boolean"}}, ("tensor",))
    return {
        "oneOf": [
            _object({"softcap": _number(minimum=MIN_NUMBER)}, ("softcap",)),
            _object({"alibi": _input_name()}, ("alibi",)),
            _object({"bias": bias}, ("bias",)),
            _object({"expr": _expression()}, ("expr",)),
        ]
    }
