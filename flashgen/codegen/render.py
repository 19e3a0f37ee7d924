"""(Problem, schedules) -> KernelSource: a readable module with the kernels that they use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flashgen import settings
from flashgen.codegen.context import RenderContext, context
from flashgen.codegen.dialect import gluon_text
from flashgen.codegen.header import header
from flashgen.codegen.options import kernel_kinds
from flashgen.codegen.template_cache import TemplateCache
from flashgen.problem import Problem
from flashgen.schedule.model import Bucket, Schedule

# Kernel kind -> its template. A family adds rows here, not branches elsewhere.
TEMPLATES = {
    "loop": "triton/attention_fwd.py.jinja",
    "single_tile": "triton/attention_fwd_single_tile.py.jinja",
    "flash1": "triton/attention_fwd_flash1.py.jinja",
    "flash1_split": "triton/attention_fwd_flash1.py.jinja",
    "merge": "triton/attention_merge.py.jinja",
    "sm90": "gluon/attention_fwd_sm90.py.jinja",
}
MODULE_TEMPLATE = "triton/module.py.jinja"

Choice = tuple[Bucket, Schedule]


@dataclass(frozen=True)
class KernelSource:
    """Text of a generated module, and what a caller needs to know about it.

    entries: kernel kind -> name of the kernel in the module; arguments: names of the keyword
    arguments beyond q, k, v, in the order in which `run` takes them; pointer_count: leading kernel
    parameters that are pointers.
    """

    name: str
    text: str
    entries: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    parameters: tuple[str, ...]
    elems_per_16_bytes: int
    has_lse: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def entry(self, kind: str) -> str:
        return dict(self.entries)[kind]


@cache
def environment() -> Environment:
    """Jinja set so that a missing name is an error and blank lines are those of the template."""
    made = Environment(
        loader=FileSystemLoader(settings.templates_dir()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        bytecode_cache=TemplateCache(settings.cache_dir() / "templates"),
        lstrip_blocks=True,
        optimized=False,  # nothing to fold, and looking for it takes a third of compiling
        autoescape=False,  # Python text, not HTML
    )
    made.filters["gluon"] = gluon_text
    return made


def render(
    problem: Problem, choices: Sequence[Choice], *, has_lse: bool, origins: Sequence[str] = ()
) -> KernelSource:
    """One module for all `choices`, each a shape bucket with its schedule; origins: who chose."""
    ctx = context(problem, choices, has_lse=has_lse, header=header(problem, choices, origins))
    found = {kind for _, schedule in choices for kind in kernel_kinds(schedule)}
    kinds = tuple(sorted(found | ({"loop"} if ctx.gluon else set())))
    kernels = tuple(_kernel(kind, ctx) for kind in kinds)
    complete = replace(ctx, kinds=kinds, kernels=kernels)
    text = _tidy(environment().get_template(MODULE_TEMPLATE).render(ctx=complete))
    return KernelSource(
        name=ctx.callable_name,
        text=text,
        entries=tuple((kind, getattr(ctx.entry, kind)) for kind in kinds),
        arguments=tuple(a.name for a in ctx.arguments),
        parameters=tuple(ctx.parameters.names),
        elems_per_16_bytes=ctx.elems_per_16_bytes,
        has_lse=has_lse,
    )


def _kernel(kind: str, ctx: RenderContext) -> str:
    template = environment().get_template(TEMPLATES[kind])
    return template.render(ctx=ctx, split=kind == "flash1_split").strip()


def _tidy(text: str) -> str:
    """No trailing blanks, at most two blank lines in a row, one newline at the end."""
    lines = [_wrapped(line.rstrip()) for line in text.splitlines()]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip() + "\n"


LINE_LENGTH = 100


def _wrapped(line: str) -> str:
    """A call that is too long for one line, with an argument a line.

    before: x = tl.load(pointer, mask=..., other=0.0)
    after:  x = tl.load(
                pointer,
                ...
    """
    opening = line.find("(")
    if len(line) <= LINE_LENGTH or not line.endswith(")") or line.lstrip().startswith(("#", '"')):
        return line
    arguments = _arguments(line[opening + 1 : -1])
    if arguments is None or len(arguments) < 2:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    body = "".join(f"{indent}    {argument},\n" for argument in arguments)
    return f"{line[: opening + 1]}\n{body}{indent})"


def _arguments(text: str) -> list[str] | None:
    """The arguments in a call's parentheses; None if the last does not close the first."""
    found, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]
