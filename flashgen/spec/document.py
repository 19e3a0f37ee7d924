"""A spec as it was written, from YAML or from Python: values, each with its place.

The two forms meet here. A value that is wrong whatever field it stands in (an alias, `yes`, a
number with too many digits) carries its fault, which the reader reports under the field's path.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeAlias

from flashgen.errors import SpecProblem
from flashgen.spec.parts import (
    Alibi,
    Causal,
    DTypes,
    Heads,
    Input,
    Same,
    Softcap,
)

MAX_NESTING = 16  # the language itself needs 5


@dataclass(frozen=True)
class Place:
    """Line and column from 1; (0, 0) for a value that was given in Python."""

    line: int = 0
    column: int = 0


NOWHERE = Place()


@dataclass(frozen=True)
class Fault:
    """Why a value cannot be used, whatever field it stands in."""

    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Duplicate:
    """A key that its mapping already has, at `first`."""

    key: str
    place: Place
    first: Place


@dataclass(frozen=True)
class Mapped:
    """A mapping; keys in the order of the text, each with its place."""

    entries: Mapping[str, Located]
    duplicates: tuple[Duplicate, ...] = ()
    bad_keys: tuple[tuple[Place, Fault], ...] = ()


@dataclass(frozen=True)
class Located:
    """A value with the place to report: its key's in a mapping, else its own.

    `text_place` is where the first character of a one-line text stands, if each of its characters
    stands for itself, so that a column inside the text is a column of the file.
    """

    value: Value
    place: Place = NOWHERE
    text_place: Place | None = None


Value: TypeAlias = "bool | int | float | str | tuple[Located, ...] | Mapped | Fault | None"


def describe(value: object) -> str:  # noqa: PLR0911 - one return for each kind
    """`value` as a message shows what was got.

    >>> describe("64"), describe(True), describe(3)
    ('"64" (text)', 'true (a boolean)', '3')
    """
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return f'"{_printable(value)}" (text)'
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapped):
        keys = [word(key) for key in value.entries]
        shown = ", ".join(keys[:6]) + (", …" if len(keys) > 6 else "")
        return f"a mapping {{{shown}}}"
    if isinstance(value, tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    return f"a {type(value).__name__}"


def word(text: str) -> str:
    """`text`, a name somebody wrote, as part of a message: bare if it can be, else in quotes.

    >>> word("doc"), word("a b"), word("")
    ('doc', '"a b"', '""')
    """
    shown = _printable(text)
    bare = shown == text and text and not any(mark.isspace() or mark in ",:\"'" for mark in text)
    return shown if bare else f'"{shown}"'


def _printable(text: str, limit: int = 60) -> str:
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    return shown.encode("unicode_escape").decode("ascii")


def from_fields(fields: Mapping[str, object]) -> Located:
    """The arguments of `AttentionSpec(...)` as a document; `inputs` may be a sequence of parts."""
    inputs = fields.get("inputs")
    if isinstance(inputs, (list, tuple)) and all(isinstance(item, Input) for item in inputs):
        declared: dict[str, Located] = {}
        duplicates: list[Duplicate] = []
        for item in inputs:
            if item.name in declared:
                duplicates.append(Duplicate(str(item.name), NOWHERE, NOWHERE))
            else:
                declared[str(item.name)] = from_python(item)
        located = from_python({**fields, "inputs": None})
        assert isinstance(located.value, Mapped)
        mapped = Located(Mapped(declared, tuple(duplicates)))
        return Located(Mapped({**located.value.entries, "inputs": mapped}))
    return from_python(fields)


def from_python(value: object, depth: int = 0) -> Located:  # noqa: PLR0911 - one return for each kind
    """`value` as a document; an entry that is None counts as not given.

    Mappings, lists and tuples are taken apart; the parts of a spec (`Window(4095, 0)`) are taken
    for what would be written for them, and numbers of other libraries for their value.
    """
    if depth > MAX_NESTING:
        return Located(Fault(f"nested more than {MAX_NESTING} levels deep"))
    if is_dataclass(value) and not isinstance(value, type):
        written = written_form(value)
        if written is not None:
            return from_python(written, depth)
    if value is None or isinstance(value, bool):
        return Located(value)
    if _is_numpy_bool(value):
        return Located(bool(value))
    if isinstance(value, numbers.Integral):
        return Located(int(value))
    if isinstance(value, numbers.Real):
        return Located(_as_float(value))
    if isinstance(value, str):
        return Located(str(value))
    if isinstance(value, Mapping):
        bad = tuple(
            (NOWHERE, Fault(f"a field name must be text, got {describe(key)}"))
            for key in value
            if not isinstance(key, str)
        )
        entries = {
            str(key): from_python(item, depth + 1)
            for key, item in value.items()
            if isinstance(key, str) and item is not None
        }
        return Located(Mapped(entries, bad_keys=bad))
    if isinstance(value, (list, tuple)):
        return Located(tuple(from_python(item, depth + 1) for item in value))
    return Located(Fault(f"got {describe(value)}, which is not a value of the spec language"))


def _is_numpy_bool(value: object) -> bool:
    """numpy is not imported for it; its other scalars are `numbers`."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in {"bool", "bool_"}


def _as_float(value: numbers.Real) -> float:
    """Infinity where a float has no room: both are refused where the number is read."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def written_form(part: object) -> object:  # noqa: PLR0911 - one return for each kind
    """What is written in a spec for a part of it; None for something that is not a part.

    >>> from flashgen.spec.parts import Window
    >>> written_form(Window(left=4095))
    {'window': {'left': 4095}}
    """
    if not type(part).__module__.startswith("flashgen.spec."):
        return None
    if isinstance(part, Causal):
        return "causal"
    if isinstance(part, Same):
        return {"same": part.input}
    if isinstance(part, Alibi):
        return {"alibi": part.input}
    if isinstance(part, Softcap):
        return {"softcap": part.cap}
    if isinstance(part, Heads):
        return "any" if part.group is None else {"group": part.group}
    if isinstance(part, Input):
        return {"shape": list(part.shape), "dtype": part.dtype}
    if isinstance(part, DTypes):
        return {"q": part.q, "kv": part.kv, "out": part.out}
    if not is_dataclass(part):
        return None
    inner = {
        field.name: getattr(part, field.name)
        for field in fields(part)
        if getattr(part, field.name) is not None
    }
    kind = type(part).__name__
    if kind in {"Window", "Bias", "Paged"}:
        return {kind.lower(): inner}
    return inner


class Problems:
    """Collects what is wrong with one source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._found: dict[SpecProblem, None] = {}  # an ordered set: nothing is said twice

    @property
    def found(self) -> tuple[SpecProblem, ...]:
        """What was added, in that order."""
        return tuple(self._found)

    def add(self, place: Place, field: str, message: str, hint: str | None = None) -> None:
        """Note a fault of `field` at `place`."""
        problem = SpecProblem(self.source, place.line, place.column, field, message, hint)
        self._found.setdefault(problem)
