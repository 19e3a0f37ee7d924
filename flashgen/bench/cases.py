"""The grid of the comparison with FlexAttention: each case once, as data, for all contestants.

16,384 tokens a case and 2,048 elements of all heads together, so that a case at head_dim 64, 128 or
256 has the same bytes and, unmasked, the same FLOPs. A case gives the spec for flashgen here; what
FlexAttention is given for it is in `peers.py`, and a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

TOKENS = 16384
HIDDEN = 2048
HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 2048, 8192, 16384)

# One packed row of 16,384 tokens: mixed lengths in no order, only some of them multiples of a tile.
DOCUMENTS = (1536, 96, 5120, 320, 768, 48, 2560, 1280, 144, 3072, 512, 256, 32, 640)

PLAIN = "plain"
MASK_GROUPS = ("window", "prefix", "documents", "softcap")  # their masks are remade for each batch
GROUPS = (PLAIN, *MASK_GROUPS, "alibi")


@dataclass(frozen=True, kw_only=True)
class FlexCase:
    """A variant at one size.

    window: how many keys a query sees, its own included; prefix: for each batch, how many keys all
    queries see; documents: lengths of what is packed into a row (batch 1).
    """

    group: str
    head_dim: int
    length: int
    causal: bool = True
    window: int | None = None
    prefix: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    alibi: bool = False
    tokens: int = TOKENS
    hidden: int = HIDDEN

    @property
    def id(self) -> str:
        """E.g. `window512/d128/n8192/causal`."""
        size = "" if self.window is None else str(self.window)
        mask = "causal" if self.causal else "full"
        return f"{self.group}{size}/d{self.head_dim}/n{self.length}/{mask}"

    @property
    def shape(self) -> Shape:
        heads = self.hidden // self.head_dim
        return Shape(self.tokens // self.length, heads, heads, self.length, self.length)

    @property
    def name(self) -> str:
        """The spec's name."""
        size = "" if self.window is None else str(self.window)
        return f"{self.group}{size}_d{self.head_dim}{'' if self.causal else '_full'}"

    @property
    def spec(self) -> AttentionSpec:
        """What flashgen is asked for."""
        return AttentionSpec(name=self.name, **self.fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The spec's other fields."""
        mask: list[object] = []
        inputs: dict[str, object] = {}
        score: list[object] = []
        if self.prefix:
            mask.append({"expr": "k < prefix[b] or k <= q"})
            inputs["prefix"] = {"shape": ["batch"], "dtype": "int32"}
        elif self.causal:
            mask.append("causal")
        if self.window is not None:
            mask.append({"window": {"left": self.window - 1, "right": 0}})
        if self.documents:
            mask.append({"same": "doc"})
            inputs["doc"] = {"shape": ["batch", "kv_len"], "dtype": "int32"}
        if self.softcap is not None:
            score.append({"softcap": self.softcap})
        if self.alibi:
            score.append({"alibi": "slopes"})
            inputs["slopes"] = {"shape": ["q_heads"], "dtype": "fp32"}
        return {
            "head_dim": self.head_dim,
            "dtype": "bf16",
            "heads": {"group": 1},
            "mask": mask,
            "score": score,
            "inputs": inputs,
        }


def flex_cases() -> tuple[FlexCase, ...]:
    """The grid: plain attention, then the variants, one of each kind in turn, ALiBi last.

    So a run that ends early has something of every kind that a goal is set for.
    """
    plain = [
        FlexCase(group=PLAIN, head_dim=head_dim, length=length, causal=causal)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for length in LENGTHS
    ]
    windows = [
        FlexCase(group="window", head_dim=head_dim, length=length, window=window)
        for head_dim, length in ((128, 16384), (128, 8192), (64, 16384), (256, 16384))
        for window in ((512, 4096) if head_dim == 128 else (512,))
    ]
    prefixes = [
        FlexCase(group="prefix", head_dim=head_dim, length=length, prefix=_prefixes(length))
        for head_dim, length in ((128, 2048), (128, 8192), (256, 4096))
    ]
    documents = [
        FlexCase(
            group="documents", head_dim=head_dim, length=TOKENS, causal=causal, documents=DOCUMENTS
        )
        for head_dim, causal in ((128, True), (128, False), (64, True))
    ]
    softcaps = [
        FlexCase(group="softcap", head_dim=head_dim, length=length, softcap=50.0)
        for head_dim, length in ((128, 4096), (128, 16384), (256, 8192))
    ]
    alibis = [
        FlexCase(group="alibi", head_dim=head_dim, length=length, alibi=True)
        for head_dim, length in ((128, 2048), (128, 8192), (64, 4096))
    ]
    in_turn = zip_longest(windows, prefixes, documents, softcaps)
    masked = (case for turn in in_turn for case in turn if case is not None)
    return (*plain, *masked, *alibis)


def _prefixes(length: int) -> tuple[int, ...]:
    """A prefix for each batch: between a fifth and two thirds of the row, at no tile's end."""
    return tuple(length * (3 + 4 * (batch % 3)) // 16 + 13 for batch in range(TOKENS // length))
