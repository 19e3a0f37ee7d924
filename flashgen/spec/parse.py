"""YAML -> AttentionSpec; every fault of a file at once, each with its line and column.

YAML is read as its 1.2 core schema has it, event by event: plain `true`/`false`, decimal numbers,
and text. What reads differently in YAML 1.1 (`yes`, `010`, `0x1F`, `1_000`), tags, anchors and
aliases are refused, so no document grows beyond its size and no value is a surprise.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from flashgen.errors import SpecError
from flashgen.spec.document import (
    MAX_NESTING,
    NOWHERE,
    Duplicate,
    Fault,
    Located,
    Mapped,
    Place,
    Problems,
    Value,
    describe,
)
from flashgen.spec.model import AttentionSpec
from flashgen.spec.read import REQUIRED_IN_YAML, read_spec

MAX_FILE_BYTES = 256 * 1024  # a spec of a real model has about 1 KiB
MAX_VALUES = 20_000


def load_spec(path: str | os.PathLike[str]) -> AttentionSpec:
    """The spec in the file `path`; SpecError with every fault, and for an unreadable file too."""
    source = _source(path)
    content = _content(source)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        place = Place(before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1)
        problems = Problems(source)
        message = f"byte 0x{content[error.start]:02x} is not UTF-8 text"
        problems.add(place, "", message, "save the file as UTF-8")
        raise SpecError(problems.found) from None
    return parse_spec(text, source)


def _source(path: object) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path):
        got = "an empty path" if isinstance(path, (str, bytes)) else describe(path)
        hint = "flashgen.parse_spec(text) reads a spec from text"
        raise _unreadable("load_spec", f"got {got}, expected the path of a file", hint)
    return os.fsdecode(path)


def _check_is_text(text: object) -> None:
    if not isinstance(text, str):
        hint = "flashgen.load_spec(path) reads a file, AttentionSpec(**fields) takes fields"
        raise _unreadable("parse_spec", f"got {describe(text)}, expected the text of a spec", hint)


def _content(source: str) -> bytes:
    try:
        found = Path(source).stat()
        mode, size = found.st_mode, found.st_size
        if stat.S_ISREG(mode):
            with Path(source).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(source, "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(source, f"cannot be read: {reason}") from None
    if stat.S_ISDIR(mode):
        raise _unreadable(source, "a folder, not a spec file", "name one of the files in it")
    if not stat.S_ISREG(mode):
        raise _unreadable(source, "not a regular file")
    if len(content) > MAX_FILE_BYTES:
        raise _unreadable(source, _too_large(size))
    return content


def parse_spec(text: str, source: str = "<text>") -> AttentionSpec:
    """The spec in `text`; SpecError with every fault. `source` is what messages call the text."""
    _check_is_text(text)
    problems = Problems(source)
    if len(text) > MAX_FILE_BYTES:
        problems.add(NOWHERE, "", _too_large(len(text)))
        raise SpecError(problems.found)
    try:
        document = _document(text.removeprefix("\ufeff"))
    except _NotADocument as refusal:
        problems.add(refusal.place, "", refusal.message, refusal.hint)
        raise SpecError(problems.found) from None
    fields = read_spec(document, problems, REQUIRED_IN_YAML)
    if problems.found:
        raise SpecError(problems.found)
    return AttentionSpec(**fields)


def _too_large(size: int) -> str:
    most = MAX_FILE_BYTES // 1024
    return f"has {-(-size // 1024):,} KiB; a spec may have {most} KiB at most"


def _unreadable(source: str, message: str, hint: str | None = None) -> SpecError:
    problems = Problems(source)
    problems.add(NOWHERE, "", message, hint)
    return SpecError(problems.found)


# -------------------------------------------------------------------------------------------------
# YAML events -> a document


@dataclass
class _Open:
    """A list or mapping whose end has not been reached."""

    place: Place
    is_mapping: bool
    fault: Fault | None
    items: list[Located] = field(default_factory=list)
    entries: dict[str, Located] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)
    bad_keys: list[tuple[Place, Fault]] = field(default_factory=list)
    expects_key: bool = True
    key: str | None = None
    key_place: Place = NOWHERE

    def add(self, value: Located) -> None:
        """The next item; in a mapping keys and values take turns."""
        if not self.is_mapping:
            self.items.append(value)
            return
        if self.expects_key:
            self.key_place = value.place
            self.key = value.value if isinstance(value.value, str) else None
            if self.key is None:
                fault = Fault("a field name must be a word")
                if isinstance(value.value, Fault):
                    fault = value.value
                self.bad_keys.append((value.place, fault))
        elif self.key is not None:
            first = self.entries.get(self.key)
            if first is not None:
                self.duplicates.append(Duplicate(self.key, self.key_place, first.place))
            else:
                entry = Located(value.value, self.key_place, value.text_place)
                self.entries[self.key] = entry
        self.expects_key = not self.expects_key

    def closed(self) -> Located:
        """The finished value."""
        if self.fault is not None:
            return Located(self.fault, self.place)
        if not self.is_mapping:
            return Located(tuple(self.items), self.place)
        mapped = Mapped(self.entries, tuple(self.duplicates), tuple(self.bad_keys))
        return Located(mapped, self.place)


class _NotADocument(Exception):  # noqa: N818 - an outcome of reading, not an error that users meet
    """Nothing can be read from the text: where, why, and what may help."""

    def __init__(self, place: Place, message: str, hint: str | None = None) -> None:
        self.place, self.message, self.hint = place, message, hint
        super().__init__(message)


def _document(text: str) -> Located:
    """The one document in `text`; raises _NotADocument."""
    root: Located | None = None
    documents = values = 0
    stack: list[_Open] = []
    for event in _events(text):
        documents += isinstance(event, DocumentStartEvent)
        values += 1
        if documents > 1:
            message = "a second document starts here, a spec file has one"
            raise _NotADocument(_place(event), message, "put each spec in a file of its own")
        if values > MAX_VALUES:
            raise _NotADocument(_place(event), f"more than {MAX_VALUES} values")
        if not isinstance(event, NodeEvent) and not stack:
            continue
        done = _step(event, stack, text)
        if len(stack) > MAX_NESTING:
            raise _NotADocument(_place(event), f"nested more than {MAX_NESTING} levels deep")
        if done is not None and stack:
            stack[-1].add(done)
        elif done is not None:
            root = done
    if root is None or root.value is None:
        hint = "a spec starts with 'flashgen: 1', name, head_dim and dtype"
        raise _NotADocument(Place(1, 1), "the file is empty", hint)
    return root


def _events(text: str) -> Iterator[Event]:
    """PyYAML's events; whatever it raises becomes _NotADocument."""
    place = Place(1, 1)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            place = _place(event)
            yield event
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise _NotADocument(place, message, "is this a text file?") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() fail on escapes and directives that are out of range.
        message = "not YAML: an escape or directive after this is out of range"
        raise _NotADocument(place, message) from None


def _step(event: Event, stack: list[_Open], text: str) -> Located | None:
    """Take one event in; returns a value when it completes one."""
    place = _place(event)
    if isinstance(event, AliasEvent):
        fault = Fault("aliases (*name) are not part of the spec language", "write the value out")
        return Located(fault, place)
    if isinstance(event, ScalarEvent):
        fault_found = _node_fault(event)
        if fault_found is not None:
            return Located(fault_found, place)
        is_key = bool(stack) and stack[-1].is_mapping and stack[-1].expects_key
        value = event.value if is_key else _scalar(event)
        return Located(value, place, _text_place(event, text))
    if isinstance(event, (MappingStartEvent, SequenceStartEvent)):
        stack.append(_Open(place, isinstance(event, MappingStartEvent), _node_fault(event)))
        return None
    return stack.pop().closed()


def _node_fault(event: ScalarEvent | MappingStartEvent | SequenceStartEvent) -> Fault | None:
    if event.anchor is not None:
        return Fault("anchors (&name) are not part of the spec language", "remove the anchor")
    if event.tag is not None:
        return Fault("tags (!type) are not part of the spec language", "remove the tag")
    return None


_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE = frozenset(("true", "True", "TRUE"))
_FALSE = frozenset(("false", "False", "FALSE"))
_YES = frozenset(("yes", "Yes", "YES", "on", "On", "ON", "y", "Y"))
_NO = frozenset(("no", "No", "NO", "off", "Off", "OFF", "n", "N"))
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_OTHER_NUMBER = re.compile(
    r"[-+]?(0[0-7_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)"
)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_DIGITS = 40


def _scalar(event: ScalarEvent) -> Value:  # noqa: PLR0911 - one return for each kind
    """The value of a scalar by YAML 1.2's core schema; what YAML 1.1 reads otherwise is a fault."""
    text: str = event.value
    if event.style is not None:
        return text
    if text in _NULLS:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text in _YES or text in _NO:
        return Fault(
            f"'{text}' is a boolean to some readers of YAML and text to others",
            f"write {'true' if text in _YES else 'false'} for a boolean, or put the text in quotes",
        )
    if _NOT_FINITE.fullmatch(text):
        return Fault(f"got {text}, expected a finite number")
    if _INTEGER.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            return Fault(f"a number of {len(text)} digits is too large")
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            return Fault(f"got {text[:_MAX_DIGITS]}, expected a finite number")
        return value
    if _OTHER_NUMBER.fullmatch(text):
        return Fault(
            f"'{text[:_MAX_DIGITS]}' is not a plain decimal number; readers of YAML differ on it",
            "write it in decimal digits, or put it in quotes if it is text",
        )
    return text


def _text_place(event: ScalarEvent, text: str) -> Place | None:
    """Where the text of a scalar starts, if it stands in the file letter for letter."""
    mark = event.start_mark
    if mark is None or event.style not in {None, "'", '"'} or "\n" in event.value:
        return None
    quote = event.style is not None
    start = mark.index + quote
    if text[start : start + len(event.value)] != event.value:
        return None
    return Place(mark.line + 1, mark.column + 1 + quote)


def _place(event: Event) -> Place:
    mark = event.start_mark
    return Place(mark.line + 1, mark.column + 1) if mark is not None else NOWHERE


def _syntax_error(error: yaml.MarkedYAMLError) -> _NotADocument:
    mark = error.problem_mark or error.context_mark
    place = Place(mark.line + 1, mark.column + 1) if mark is not None else Place(1, 1)
    problem = error.problem or "cannot be read"
    hint = None
    if r"'\t'" in problem:
        hint = "YAML is indented with spaces, not tabs"
    elif "mapping values are not allowed" in problem:
        hint = "look at the indentation, and put text that contains ': ' in quotes"
    elif "expected ',' or" in problem:
        hint = "look for a missing comma, bracket or brace"
    elif error.context_mark is not None and error.context:
        hint = f"{error.context}, which starts at line {error.context_mark.line + 1}"
    return _NotADocument(place, f"not YAML: {problem}", hint)


__all__ = ["load_spec", "parse_spec"]
