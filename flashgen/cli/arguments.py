"""Arguments that several commands share, and the spec that an argument means."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flashgen import settings
from flashgen.cli.output import say
from flashgen.compiler.arguments import family_argument
from flashgen.errors import FlashgenError, ScheduleError, SpecError, SpecProblem
from flashgen.schedule.families import FAMILIES
from flashgen.schedule.model import Family
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.spec.parse import load_spec

MAX_SHOWN = 200  # characters of an argument that messages repeat

SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC", help="A spec file, or the name of a shipped spec.", show_default=False
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", metavar="ID", help="GPU to compile for; `flashgen list --targets`."),
]


def _family(text: str) -> Family:
    """BadParameter for no family of kernels."""
    try:
        found = family_argument(text)
    except FlashgenError as error:
        raise typer.BadParameter(str(error).removeprefix("family: ")) from None
    assert found is not None
    return found


FamilyOption = Annotated[
    Family | None,
    typer.Option(
        "--family",
        metavar="|".join(FAMILIES),
        parser=_family,
        help="Kernels of this family alone, where it serves the spec.",
    ),
]
SHAPE_FIELDS = ("batch", "q_heads", "kv_heads", "q_len", "kv_len")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def shipped_specs() -> dict[str, Path]:
    """Names of the shipped specs, sorted, and their files."""
    return {path.stem: path for path in sorted(settings.specs_dir().glob("*.yaml"))}


def find_spec(argument: str) -> AttentionSpec:
    """The spec in the file `argument`, else the shipped spec of that name.

    Its warnings are printed. SpecError with every fault of the file; for neither a file nor a name,
    with the name that was likely meant.
    """
    if not argument:
        raise typer.BadParameter("got nothing, expected a spec file or name", param_hint="SPEC")
    path = Path(argument)
    shipped = shipped_specs()
    if not path_exists(path) or path.is_dir():  # a build folder may be called as its spec is
        if argument not in shipped and not path_exists(path):
            raise _not_found(argument, shipped)
        path = shipped.get(argument, path)
    spec = load_spec(path)
    for text in spec.warnings():
        say(f"warning: {path.name}: {text}")
    return spec


def path_exists(path: Path) -> bool:
    """Whether something is there; nothing is where a name is too long for the file system."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def named_path(text: str) -> Path:
    """The value of an option that names a file or folder: nothing is not the current folder."""
    if not text:
        raise typer.BadParameter("got nothing, expected a path")
    return Path(text)


def _not_found(argument: str, shipped: dict[str, Path]) -> SpecError:
    if len(argument) > MAX_SHOWN:
        argument = f"{argument[:MAX_SHOWN]}…"
    near = difflib.get_close_matches(Path(argument).stem.lower().replace("-", "_"), shipped, n=1)
    meant = f"did you mean '{near[0]}'? " if near else ""
    hint = f"{meant}`flashgen list` shows the shipped specs."
    message = "no such file, and no shipped spec has this name"
    return SpecError([SpecProblem(argument, 0, 0, "", message, hint)])


def parse_shape(text: str | None) -> dict[str, int] | None:
    """The value of `--shape`: five numbers, in the order of `SHAPE_FIELDS`."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(SHAPE_FIELDS):
        raise typer.BadParameter(
            f"--shape: expected five whole numbers, {','.join(SHAPE_FIELDS)} (got {text!r})"
        )
    return dict(zip(SHAPE_FIELDS, numbers, strict=True))


def shape_of(spec: AttentionSpec, sizes: dict[str, int] | None) -> Shape | None:
    """The shape of `--shape`; wrong usage where `spec` does not allow it."""
    if sizes is None:
        return None
    from flashgen.compiler.arguments import shape_argument

    try:
        return shape_argument(spec, sizes)
    except SpecError as error:
        faults = []
        for fault in error.problems:
            hint = f"\n  hint: {fault.hint}" if fault.hint else ""
            field = fault.field.rpartition(".")[2]
            faults.append(f"--shape: {spec.display_name}: {field}: {fault.message}{hint}")
        raise typer.BadParameter("\n".join(faults)) from None


@contextmanager
def blamed_on_shape(shape: Shape | None) -> Iterator[None]:
    """A shape that no GPU holds is wrong usage, where it comes from `--shape`."""
    try:
        yield
    except ScheduleError as error:
        if shape is None:
            raise
        raise typer.BadParameter(f"--{error}") from None
