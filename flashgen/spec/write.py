"""A spec's canonical fields as YAML text, laid out as a person would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from flashgen.dtypes import output_dtype

_DEFAULTS: dict[str, Any] = {
    "description": None,
    "heads": "any",
    "scale": "auto",
    "mask": [],
    "align": "bottom_right",
    "score": [],
    "inputs": {},
    "sink": "none",
    "kv_lens": "none",
    "kv_cache": "contiguous",
    "layout": "bhsd",
    "dropout": 0.0,
    "loop_order": "flash2",
    "backward": False,
    "deterministic": True,
    "shapes": [],
}

# Text that every reader of YAML takes for text when it is not quoted.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NOT_PLAIN = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))


class _Quoted(str):
    """Text to be written in double quotes."""

    __slots__ = ()


class _OnOneLine(dict[str, Any]):
    """A mapping to be written in braces."""


class _Dumper(yaml.SafeDumper):
    """Never writes an anchor, which the spec language refuses."""

    def ignore_aliases(self, data: object) -> bool:
        """Repeated values are written out."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: _Quoted) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')


def _represent_mapping(dumper: yaml.SafeDumper, mapping: _OnOneLine) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping.items(), flow_style=True)


_Dumper.add_representer(_Quoted, _represent_text)
_Dumper.add_representer(_OnOneLine, _represent_mapping)


def to_yaml(written: Mapping[str, Any]) -> str:
    """YAML of all fields of a spec, given as JSON types; those at their default are left out."""
    short = {
        field: value
        for field, value in written.items()
        if field not in _DEFAULTS or value != _DEFAULTS[field]
    }
    head_dim, dtype = short["head_dim"], short["dtype"]
    if head_dim["qk"] == head_dim["v"]:
        short["head_dim"] = head_dim["qk"]
    if dtype == {"q": dtype["q"], "kv": dtype["q"], "out": output_dtype(dtype["q"])}:
        short["dtype"] = dtype["q"]
    laid_out = {field: _laid_out(field, value) for field, value in short.items()}
    return yaml.dump(
        laid_out,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=10**6,
    )


def _laid_out(field: str, value: Any) -> Any:
    if field in {"mask", "score"}:
        return [
            {kind: _inline(inner) for kind, inner in item.items()}
            if isinstance(item, Mapping)
            else item
            for item in value
        ]
    if field == "shapes":
        return [_inline(item) for item in value]
    if field == "inputs":
        return {name: _inline(item) for name, item in value.items()}
    return _inline(value)


def _inline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _OnOneLine({key: _inline(item) for key, item in value.items()})
    if isinstance(value, list):
        return _OneLineList(_inline(item) for item in value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN
        return value if plain else _Quoted(value)
    return value


class _OneLineList(list[Any]):
    """A list to be written in brackets."""


def _represent_list(dumper: yaml.SafeDumper, items: _OneLineList) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(_OneLineList, _represent_list)
