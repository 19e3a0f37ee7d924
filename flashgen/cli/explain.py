"""`flashgen explain`: why a kernel is cut as it is, what it costs, and what limits it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.arguments import (
    JsonOption,
    blamed_on_shape,
    find_spec,
    named_path,
    parse_shape,
    path_exists,
    shape_of,
    shipped_specs,
)
from flashgen.cli.output import print_json, say
from flashgen.errors import FlashgenError, SpecError, SpecProblem
from flashgen.spec.model import AttentionSpec, Shape

if TYPE_CHECKING:
    from flashgen.compiler.explanation import Comparison, Explanation

ALL = "all"


def explain(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...",
            help="Spec files, names of shipped specs, or folders of specs.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="ID", help="GPU (default: nvidia-h200), or `all` for a table."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="B,H,HK,Q,K",
            help="Batch, query heads, K/V heads, query and key length (default: the spec's first).",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", parser=named_path, help="Draw (.png, .svg or .pdf)."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", parser=named_path, help="Write a page with pictures."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain a spec's kernel: formulas, what fits, loop orders side by side, what limits it.

    Derived, not measured. Needs neither a GPU nor torch; pictures need the extra `plot`.
    """
    sizes = parse_shape(shape)
    if (plot or html) and target == ALL:
        raise typer.BadParameter("--plot and --html show one target, not --target all")
    found = [find_spec(path) for argument in specs for path in _paths(argument)]
    if (plot or html) and len(found) > 1:
        raise typer.BadParameter("--plot and --html show one spec")
    if plot or html:
        _check_pictures(plot)
        _check_writable(plot, html)
    shapes = [shape_of(spec, sizes) for spec in found]
    results = [_explained(spec, target, s) for spec, s in zip(found, shapes, strict=True)]
    if json:
        facts = [result.to_dict() for result in results]
        print_json(facts if len(facts) > 1 else facts[0])
    else:
        typer.echo("\n".join(map(str, results)), nl=False)
    if plot or html:
        _draw(found[0], target, shapes[0], plot, html)


def _paths(argument: str) -> list[str]:
    """A folder stands for the specs in it; one that is called as a shipped spec may have none."""
    folder = Path(argument)
    if not (argument and path_exists(folder) and folder.is_dir()):
        return [argument]
    inside = sorted(map(str, folder.glob("*.yaml")))
    if not inside and argument not in shipped_specs():
        message = "this folder holds no spec (*.yaml)"
        hint = "name a spec file, a folder with some, or a shipped spec (`flashgen list`)."
        raise SpecError([SpecProblem(argument, 0, 0, "", message, hint)])
    return inside or [argument]


def _explained(
    spec: AttentionSpec, target: str | None, shape: Shape | None
) -> Explanation | Comparison:
    from flashgen.compiler.explaining import compare, explain

    with blamed_on_shape(shape):
        if target == ALL:
            return compare(spec, shape=shape)
        return explain(spec, target=target, shape=shape)


def _check_pictures(plot: Path | None) -> None:
    """What cannot be drawn is said before anything else is printed."""
    from flashgen.compiler.pictures import check_path, need_matplotlib

    if plot:
        check_path(plot)
    need_matplotlib()


def _check_writable(*files: Path | None) -> None:
    """FlashgenError for what cannot be a new file, before anything is printed."""
    for file in filter(None, files):
        reason = _unwritable(file)
        if reason:
            raise FlashgenError(f"{file}: cannot be written ({reason})")


def _unwritable(file: Path) -> str | None:
    try:
        if file.is_dir():
            return "a folder"
        if not file.parent.is_dir():
            return f"no folder {file.parent}"
        place = file if file.exists() else file.parent
    except OSError as error:  # such as a name that is too long
        return error.strerror or str(error)
    return None if os.access(place, os.W_OK) else "no permission"


def _draw(
    spec: AttentionSpec,
    target: str | None,
    shape: Shape | None,
    plot: Path | None,
    html: Path | None,
) -> None:
    from flashgen.compiler.explaining import explain

    found = explain(spec, target=target, shape=shape)
    if plot:
        from flashgen.compiler.pictures import draw

        draw(found, plot)
        say(f"wrote {plot}")
    if html:
        from flashgen.compiler.explanation_html import write_html

        write_html(found, html)
        say(f"wrote {html}")
