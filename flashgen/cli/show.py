"""`flashgen show`: a spec's generated kernel, tile graph, loop bounds, or canonical form."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from flashgen.cli.arguments import (
    FamilyOption,
    JsonOption,
    SpecArgument,
    TargetOption,
    find_spec,
)
from flashgen.cli.output import print_json
from flashgen.schedule.model import Family
from flashgen.spec.model import AttentionSpec


class View(str, Enum):
    """What to show of a spec."""

    SOURCE = "source"
    GRAPH = "graph"
    BOUNDS = "bounds"
    SPEC = "spec"


def show(
    spec: SpecArgument,
    graph: Annotated[bool, typer.Option("--graph", help="The tile graph.")] = False,
    bounds: Annotated[bool, typer.Option("--bounds", help="Loop bounds over key tiles.")] = False,
    as_spec: Annotated[bool, typer.Option("--spec", help="The spec in canonical form.")] = False,
    target: TargetOption = None,
    family: FamilyOption = None,
    json: JsonOption = False,
) -> None:
    """Show a spec's kernel, or what leads to it.

    Needs neither a GPU nor torch.
    """
    asked = {View.GRAPH: graph, View.BOUNDS: bounds, View.SPEC: as_spec}
    views = [view for view, wanted in asked.items() if wanted] or [View.SOURCE]
    if len(views) > 1:
        names = " and ".join(f"--{view.value}" for view in views)
        raise typer.BadParameter(f"{names}: choose one")
    if family is not None and views[0] != View.SOURCE:
        raise typer.BadParameter(f"--family chooses among kernels, --{views[0].value} shows none")
    found = find_spec(spec)
    facts, text = _VIEWS[views[0]](found, target, family)
    if views[0] in _DERIVED:
        facts, text = _with_not_served(found, facts, text)
    if json:
        print_json({"name": found.display_name, "fingerprint": found.fingerprint, **facts})
    else:
        typer.echo(text, nl=False)


def _with_not_served(
    spec: AttentionSpec, facts: dict[str, object], text: str
) -> tuple[dict[str, object], str]:
    """What can be derived from a spec that no kernel serves says so first."""
    from flashgen.compiler.report import not_served

    found = not_served(spec)
    said = "".join(f"not served: {sentence}\n" for sentence in found)
    return {"not_served": list(found), **facts}, f"{said}\n{text}" if said else text


Facts = dict[str, object]


def _source(spec: AttentionSpec, target: str | None, family: Family | None) -> tuple[Facts, str]:
    from flashgen.compiler.choose import DEFAULT_TARGET, check_served, plan
    from flashgen.target import get_target

    check_served(spec)
    found = get_target(target or DEFAULT_TARGET)
    shown, _ = plan(spec, found, family=family, has_lse=True)
    facts: Facts = {
        "target": found.id,
        "schedules": [{**bucket.to_dict(), **s.to_dict()} for bucket, s in shown.choices],
        "source": shown.text,
    }
    return facts, shown.text


def _graph(spec: AttentionSpec, target: str | None, family: Family | None) -> tuple[Facts, str]:
    from flashgen.compiler.choose import DEFAULT_TARGET
    from flashgen.ir.pretty import pretty
    from flashgen.ir.verify import verify
    from flashgen.passes.lower import lower
    from flashgen.problem import Problem
    from flashgen.target import get_target

    graph = lower(Problem(spec, get_target(target or DEFAULT_TARGET)), return_lse=True)
    verify(graph)
    facts: Facts = {
        "stage": graph.stage,
        "loop_order": graph.loop_order,
        "digest": graph.digest,
        "loops": [{"name": loop.name, "trips": str(loop.trips)} for loop in graph.loops],
        "operations": [
            {"name": op.name, "kind": op.kind, "level": op.level, "detail": op.detail}
            for op in graph.ordered
        ],
        "edges": [
            {
                "from": edge.producer,
                "to": edge.consumer,
                "tiles": [
                    {
                        "name": tile.name,
                        "dtype": tile.dtype,
                        "shape": [str(extent) for extent in tile.shape],
                        "space": tile.space,
                    }
                    for tile in edge.tiles
                ],
            }
            for edge in graph.edges
        ],
    }
    return facts, pretty(graph)


def _bounds(spec: AttentionSpec, target: str | None, family: Family | None) -> tuple[Facts, str]:
    from flashgen.cli.bounds import facts
    from flashgen.compiler.report import loop_bounds
    from flashgen.passes.visibility import visibility

    found = visibility(spec)
    lines = [f"loop bounds of {spec.display_name}", f"mask: {found.predicate}", ""]
    lines += [line.replace("`", "") for line in loop_bounds(spec)]
    return facts(found), "\n".join(lines) + "\n"


def _spec(spec: AttentionSpec, target: str | None, family: Family | None) -> tuple[Facts, str]:
    return {"spec": spec.canonical()}, spec.to_yaml()


_DERIVED = (View.GRAPH, View.BOUNDS)  # of specs that no kernel serves, too
_VIEWS = {View.SOURCE: _source, View.GRAPH: _graph, View.BOUNDS: _bounds, View.SPEC: _spec}
