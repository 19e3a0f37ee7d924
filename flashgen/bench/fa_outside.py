"""Contestants of suite `fa-paper` that are not part of the project: a function in a file.

`--contestant NAME=FILE.py:FUNCTION`. FUNCTION is called once a case with its facts (`facts_of`), in
the process that times; it returns None where it does not serve the case, else
`attend(q, k, v, **others) -> out`. q, k, v: bf16 [batch, heads, length, head_dim], contiguous;
others: the spec's inputs by their names, and `sink` where there is one; out: a new tensor like q.
An `attend` that a CUDA graph can capture is timed as device time alone, like everybody else.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from flashgen.bench.fa_cases import FaCase
from flashgen.errors import FlashgenError
from flashgen.fingerprint import fingerprint_text

PREFIX = "outside "  # how their names in a record begin
SPELLING = "NAME=FILE.py:FUNCTION"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")

Function = Callable[[Mapping[str, Any]], Callable[..., Any] | None]


class ContestantError(FlashgenError, ValueError):
    """A `--contestant` that names no function of a file."""

    def __init__(self, got: str, problem: str, hint: str) -> None:
        super().__init__(f"--contestant {got}: {problem}\n  hint: {hint}")


@dataclass(frozen=True)
class Outside:
    """A function in a file, and the name that its figures get."""

    title: str
    path: str
    function: str

    @classmethod
    def parse(cls, text: str) -> Outside:
        """From NAME=FILE.py:FUNCTION; ContestantError where there is no such function. The file is
        read, not run."""
        title, equals, place = text.partition("=")
        path, colon, function = place.rpartition(":")
        words = _NAME.fullmatch(title) and function.isidentifier() and path.endswith(".py")
        if not (equals and colon and words):
            raise ContestantError(
                text,
                f"expected {SPELLING}",
                "NAME begins with a-z and has a-z, 0-9, _ and -; e.g. other=other.py:attention",
            )
        found = _names_in(text, path)
        if function not in found:
            raise ContestantError(
                text,
                f"{path} has no {function}",
                f"it has {', '.join(found) or 'no functions'}.",
            )
        return cls(title, str(Path(path).resolve()), function)

    @property
    def name(self) -> str:
        """The name in a record."""
        return f"{PREFIX}{self.title}"

    @property
    def option(self) -> str:
        """As it is written on the command line, wherever the file is."""
        return f"{self.title}={Path(self.path).name}:{self.function}"

    @property
    def version(self) -> str:
        """The function and a digest of the file that it is in."""
        text = Path(self.path).read_text("utf-8")
        return f"{Path(self.path).name}:{self.function} {fingerprint_text(text)[:12]}"

    def attend(self, case: FaCase) -> Callable[..., Any] | None:
        """What computes the case; None where the function does not serve it. Runs the file."""
        module_name = f"flashgen_contestant_{self.title.replace('-', '_')}"
        module = sys.modules.get(module_name)
        if module is None:
            spec = importlib.util.spec_from_file_location(module_name, self.path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_name]
                raise
        return cast("Function", getattr(module, self.function))(facts_of(case))


def contestants_of(texts: Sequence[str]) -> tuple[Outside, ...]:
    """Those of a command line; ContestantError also where two have the same name."""
    found: dict[str, Outside] = {}
    for text in texts:
        one = Outside.parse(text)
        if one.title in found:
            raise ContestantError(
                text, f"a second one called {one.title}", "give each a name of its own."
            )
        found[one.title] = one
    return tuple(found.values())


def _names_in(text: str, path: str) -> list[str]:
    try:
        tree = ast.parse(Path(path).read_text("utf-8"), path)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ContestantError(
            text, f"{path or 'no file'} cannot be read: {error}", f"expected {SPELLING}."
        ) from None
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def facts_of(case: FaCase) -> dict[str, Any]:
    """What a function is told of a case: plain numbers and words.

    `window`: keys that a query sees, its own included; `documents`: lengths of what is packed into
    the row; `alibi`, `bias`, `sink`: whether the call has `slopes`, `rel`, `sink`.
    """
    names = ("id", "kind", "head_dim", "causal", "window", "softcap", "alibi", "bias", "sink")
    return {
        **{name: getattr(case, name) for name in names},
        "documents": list(case.documents),
        **asdict(case.shape),
    }
