"""The cases of suite `fa-paper`: the grid of plain attention, then what masks and scores cost.

16,384 tokens a case and 2,048 elements of all query heads together, bf16, forward. A variant is
also held against plain causal attention of its own shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from flashgen.bench.cases import HEAD_DIMS, HIDDEN, TOKENS, FlexCase
from flashgen.spec.parts import Shape

GRID = "grid"
VARIANT = "variant"
# The peers' names in a record.
FLASH, CUDNN, FLEX, FLEX_TUNED, FA3, FA3_PLAIN = (
    "sdpa_flash", "sdpa_cudnn", "flex", "flex_max_autotune", "fa3", "fa3 plain causal",
)  # fmt: skip
LENGTHS = (16384, 512, 8192, 2048, 4096, 1024)  # the ends first: a run may be short of time

# One packed row of 16,384 tokens, longest document first.
DOCUMENTS = (4096, 3072, 2048, 1536, 1024, 896, 736, 640, 512, 480, 384, 320, 256, 192, 128, 64)


@dataclass(frozen=True, kw_only=True)
class FaCase(FlexCase):
    """A case of the grid or a variant.

    kind: what the variant is called; heads: query and K/V heads where they differ; bias: a dense
    bf16 [1, heads, q_len, kv_len]; sink: a logit for each head in the denominator.
    """

    kind: str = ""
    heads: tuple[int, int] | None = None
    bias: bool = False
    sink: bool = False

    @property
    def id(self) -> str:
        """E.g. `grid/d128/n8192/causal`, `variant/window512/d128/n8192/causal`."""
        mask = "causal" if self.causal else "full"
        parts = (self.group, self.kind, f"d{self.head_dim}", f"n{self.length}", mask)
        return "/".join(part for part in parts if part)

    @property
    def shape(self) -> Shape:
        heads = self.heads or (self.hidden // self.head_dim,) * 2
        return Shape(self.tokens // self.length, *heads, self.length, self.length)

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        kind = re.sub("[^a-z0-9]", "_", self.kind) or "plain"
        return f"{kind}_d{self.head_dim}_{mask}"

    @property
    def fields(self) -> dict[str, Any]:
        fields = super().fields
        fields["heads"] = {"group": self.shape.q_heads // self.shape.kv_heads}
        if self.bias:
            sizes = [1, "q_heads", "q_len", "kv_len"]
            fields["score"] = [*fields["score"], {"bias": {"tensor": "rel"}}]
            fields["inputs"] = {"rel": {"shape": sizes, "dtype": "bf16"}}
        if self.sink:
            fields["sink"] = "per_head"
        return fields

    @property
    def is_plain(self) -> bool:
        """Whether no more than causality and grouped heads is asked for."""
        return not self.causal or self.baseline.spec.fingerprint == self.spec.fingerprint

    @property
    def baseline(self) -> FaCase:
        """Plain causal attention of the same shape."""
        return replace(
            self,
            kind="",
            group=GRID,
            causal=True,
            window=None,
            documents=(),
            softcap=None,
            alibi=False,
            bias=False,
            sink=False,
        )


def grid() -> tuple[FaCase, ...]:
    """Head dims and masks, d=128 first, each at all lengths."""
    return tuple(
        FaCase(group=GRID, head_dim=head_dim, length=length, causal=causal)
        for head_dim in (128, 64, 256)
        for causal in (True, False)
        for length in LENGTHS
    )


def variants() -> tuple[FaCase, ...]:
    """The variants, those with a goal first."""
    return (
        *(_variant("window512", length, window=512) for length in (16384, 8192)),
        _variant("softcap50", 4096, softcap=50.0),
        _variant("documents", TOKENS, documents=DOCUMENTS),
        _variant("alibi", 4096, alibi=True),
        _variant("bias", 4096, bias=True),
        *(_variant("window4096", length, window=4096) for length in (16384, 8192)),
        _variant("gqa32:8", 8192, heads=(32, 8), hidden=4096),
        _variant("gqa24:4", 16384, head_dim=256, heads=(24, 4), hidden=6144),
        _variant("sinks-window128", 8192, head_dim=64, window=128, sink=True),
    )


def _variant(kind: str, length: int, *, head_dim: int = 128, **more: object) -> FaCase:
    return FaCase(group=VARIANT, kind=kind, head_dim=head_dim, length=length, **more)  # type: ignore[arg-type]


def fa_cases() -> tuple[FaCase, ...]:
    """The grid, then the variants: what matters most first."""
    return (*grid(), *variants())


def find(case_id: str) -> FaCase:
    """The case of this id."""
    return next(case for case in fa_cases() if case.id == case_id)


assert {case.head_dim for case in grid()} == set(HEAD_DIMS)
assert all(case.hidden == HIDDEN for case in grid())
