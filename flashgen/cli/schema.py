"""`flashgen schema`: the spec language as JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer

from flashgen.cli.arguments import JsonOption
from flashgen.cli.output import print_json


def schema(
    tuned_configs: Annotated[
        bool, typer.Option("--tuned-configs", help="The schema of tables of tuned configs instead.")
    ] = False,
    json: JsonOption = False,  # always JSON: the option is there for uniformity
) -> None:
    """Print the JSON Schema of spec files.

    Editors complete and check YAML with it.
    """
    if tuned_configs:
        from flashgen.tune.table_schema import table_schema

        print_json(table_schema())
        return
    from flashgen.spec.schema import json_schema

    print_json(json_schema())
