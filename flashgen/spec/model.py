"""AttentionSpec: what attention is wanted, as frozen data with one canonical form.

Whatever form a spec was written in, its attributes hold the same canonical values, so equal specs
are equal objects with equal fingerprints.

A plain frozen dataclass, not a pydantic model: `spec/read.py` validates (it knows lines, columns
and what was likely meant), and importing pydantic and building one model took 0.2 s of the 0.3 s
in which a cached kernel must give its first result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashgen.errors import SpecError
from flashgen.fingerprint import fingerprint
from flashgen.spec.document import Problems, from_fields, written_form
from flashgen.spec.parts import (
    Alibi,
    Align,
    Bias,
    Causal,
    DTypes,
    Expr,
    HeadDim,
    Heads,
    Input,
    KvLens,
    Layout,
    LoopOrder,
    MaskItem,
    Paged,
    Same,
    ScoreItem,
    Shape,
    Sink,
    Softcap,
    Window,
)
from flashgen.spec.read import FIELDS, REQUIRED_IN_PYTHON, read_spec
from flashgen.spec.redundant import redundancies

PYTHON_SOURCE = "<AttentionSpec>"

# What describes a spec, or says where to use it, but not what it computes.
NOT_SEMANTIC: frozenset[str] = frozenset({"name", "description", "shapes"})


@dataclass(frozen=True, init=False)
class AttentionSpec:
    """An attention variant: fields as in the spec language, in canonical form.

    The constructor takes the same values as YAML (numbers, text, lists, mappings; also the parts
    themselves) and raises SpecError with every fault. `flashgen` and `name` may be left out, and
    None counts as left out.

    >>> spec = AttentionSpec(
    ...     head_dim=128, dtype="bf16", mask=["causal", {"window": {"left": 4095}}]
    ... )
    >>> spec.mask
    (Causal(), Window(left=4095, right=None))
    """

    flashgen: int
    name: str | None
    description: str | None
    head_dim: HeadDim
    dtype: DTypes
    heads: Heads
    scale: float | None
    mask: tuple[MaskItem, ...]
    align: Align
    score: tuple[ScoreItem, ...]
    inputs: tuple[Input, ...]
    sink: Sink
    kv_lens: KvLens
    kv_cache: str | Paged
    layout: Layout
    dropout: float
    loop_order: LoopOrder
    backward: bool
    deterministic: bool
    shapes: tuple[Shape, ...]

    def __init__(self, **fields: Any) -> None:
        problems = Problems(PYTHON_SOURCE)
        canonical = read_spec(from_fields(fields), problems, REQUIRED_IN_PYTHON)
        if problems.found:
            raise SpecError(problems.found)
        for field, value in canonical.items():
            object.__setattr__(self, field, value)

    @property
    def softmax_scale(self) -> float:
        """The factor of q·k: `scale`, or 1/sqrt(head_dim.qk) where it is auto."""
        return 1.0 / math.sqrt(self.head_dim.qk) if self.scale is None else self.scale

    @property
    def display_name(self) -> str:
        """`name`, or for an unnamed spec one made from the fingerprint."""
        return self.name if self.name is not None else f"spec-{self.fingerprint[:12]}"

    def input(self, name: str) -> Input:
        """The declared input `name`; KeyError if there is none."""
        for declared in self.inputs:
            if declared.name == name:
                return declared
        raise KeyError(name)

    def replace(self, **changes: Any) -> AttentionSpec:
        """This spec with some fields changed, checked as a new one is."""
        return AttentionSpec(**{**{field: getattr(self, field) for field in FIELDS}, **changes})

    def canonical(self) -> dict[str, Any]:
        """The semantic fields as JSON types, in canonical form: what the fingerprint covers."""
        return {
            field: value for field, value in self._written().items() if field not in NOT_SEMANTIC
        }

    @property
    def fingerprint(self) -> str:
        """64 hex characters of content; name, description and shapes play no part in it."""
        return _fingerprint(self)

    def warnings(self) -> tuple[str, ...]:
        """A sentence for each thing in the spec that has no effect, or probably another one."""
        return redundancies(self)

    def to_yaml(self) -> str:
        """The spec as YAML; fields at their default are left out.

        `parse_spec` of it is equal to this spec. YAML needs a name, so an unnamed spec is written
        with its `display_name`.
        """
        from flashgen.spec.write import to_yaml

        written: Mapping[str, Any] = self._written()
        return to_yaml({**written, "name": self.display_name})

    def _written(self) -> dict[str, Any]:
        """Every field as JSON types, in canonical form."""
        return {
            "flashgen": self.flashgen,
            "name": self.name,
            "description": self.description,
            "head_dim": written_form(self.head_dim),
            "dtype": written_form(self.dtype),
            "heads": written_form(self.heads),
            "scale": "auto" if self.scale is None else self.scale,
            "mask": [written_form(item) for item in self.mask],
            "align": self.align,
            "score": [written_form(item) for item in self.score],
            "inputs": {declared.name: written_form(declared) for declared in self.inputs},
            "sink": self.sink,
            "kv_lens": self.kv_lens,
            "kv_cache": (
                written_form(self.kv_cache) if isinstance(self.kv_cache, Paged) else self.kv_cache
            ),
            "layout": self.layout,
            "dropout": self.dropout,
            "loop_order": self.loop_order,
            "backward": self.backward,
            "deterministic": self.deterministic,
            "shapes": [written_form(shape) for shape in self.shapes],
        }


@lru_cache(maxsize=256)
def _fingerprint(spec: AttentionSpec) -> str:
    return fingerprint(spec.canonical())


__all__ = [
    "Alibi",
    "AttentionSpec",
    "Bias",
    "Causal",
    "DTypes",
    "Expr",
    "HeadDim",
    "Heads",
    "Input",
    "MaskItem",
    "Paged",
    "Same",
    "ScoreItem",
    "Shape",
    "Softcap",
    "Window",
]
