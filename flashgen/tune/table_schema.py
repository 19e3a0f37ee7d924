"""The JSON Schema of tables of tuned configs; published by `flashgen schema --tuned-configs`.

It says of one field at a time what `table.read_table` says; CI holds every committed table to both.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flashgen.schedule.model import (
    _CHOICES,
    KV_LEN_LIMITS,
    Q_LEN_LIMITS,
    SCHEDULERS,
    Schedule,
    field_names,
)
from flashgen.spec.parts import Shape
from flashgen.tune.table import PASSES, SCHEMA_VERSION, UNITS
from flashgen.tune.toolchain import Device, Toolchain

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string", "minLength": 1}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_TIME: Schema = {"type": "number", "exclusiveMinimum": 0}


def table_schema() -> Schema:
    """The schema of a table (draft 2020-12), as JSON types."""
    toolchain = {f.name: _TEXT for f in fields(Toolchain)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"flashgen tuned configs, version {SCHEMA_VERSION}",
        **_object(
            {
                "schema": {"const": SCHEMA_VERSION, "description": "Version of this format."},
                "spec": {**_TEXT, "description": "The spec's name; also that of the file."},
                "fingerprint": {**_hex(64), "description": "The spec's fingerprint."},
                "gpu": {**_TEXT, "description": "The GPU's id; also the name of the folder."},
                "toolchain": {
                    "anyOf": [_object(toolchain), {"type": "null"}],
                    "description": "The newest that an entry was measured with.",
                },
                "entries": {"type": "array", "items": _entry(toolchain)},
            }
        ),
    }


def _entry(toolchain: Schema) -> Schema:
    numbers = {f.name: _TEXT if f.type == "str" else _WHOLE for f in fields(Device)}
    return _object(
        {
            "pass": {"enum": list(PASSES)},
            "bucket": {
                **_object(
                    {
                        "q_len_max": {"enum": [*Q_LEN_LIMITS, None]},
                        "kv_len_max": {"enum": [*KV_LEN_LIMITS, None]},
                    }
                ),
                "description": "Up to so many rows and keys; null: any number.",
            },
            "shape": _object({f.name: _WHOLE for f in fields(Shape)}),
            "schedule": _schedule(),
            "measured": {
                **_object(
                    {
                        "time_us": _TIME,
                        "low_us": _TIME,
                        "high_us": _TIME,
                        "rate": _TIME,
                        "unit": {"enum": list(UNITS)},
                    }
                ),
                "description": "Median of a launch, 20th and 80th percentile.",
            },
            "bound_us": {"type": "number", "minimum": 0, "description": "The roofline's time."},
            "default": {
                **_object(
                    {"schedule": _schedule(), "time_us": {"anyOf": [_TIME, {"type": "null"}]}}
                ),
                "description": "The untuned schedule in the same run; null: could not be timed.",
            },
            "search": _object({"trials": _WHOLE, "feasible": _WHOLE}),
            "measured_with": _object({**numbers, **toolchain, "kernel_digest": _hex(16)}),
        }
    )


def _schedule() -> Schema:
    positive: Schema = {"type": "integer", "minimum": 1}
    optional: Schema = {"anyOf": [positive, {"type": "null"}]}
    own: Schema = {
        "scheduler": {"enum": list(SCHEDULERS)},
        "q_buffers": positive,
        "separate_out": {"type": "boolean"},
        "group_mb": positive,
        "overlapped": {"type": "boolean"},
        "programs_per_sm": positive,
        "direct_out": {"type": "boolean"},
    }
    known: dict[str, Schema] = {
        **{name: {"enum": list(words)} for name, words in _CHOICES.items()},
        "maxnreg": optional,
        "num_kv_splits": optional,
        "sm90": {
            **_object(own | {"packed_heads": positive}),
            "required": list(own),  # packed_heads: where heads share tiles only
        },
    }
    found = _object({f.name: known.get(f.name, positive) for f in fields(Schedule)})
    return {**found, "required": field_names("triton")}  # sm90: of the family gluon_sm90 only


def _object(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _hex(digits: int) -> Schema:
    return {"type": "string", "pattern": f"^[0-9a-f]{{{digits}}}$"}
