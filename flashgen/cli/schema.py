"""`flashgen schema`: the spec language as JSON Schema."""

from __future__ import annotations

from flashgen.cli.arguments import JsonOption
from flashgen.cli.output import print_json


def schema(json: JsonOption = False) -> None:  # always JSON: the option is there for uniformity
    """Print the JSON Schema of spec files.

    Editors complete and check YAML with it.
    """
    from flashgen.spec.schema import json_schema

    print_json(json_schema())
