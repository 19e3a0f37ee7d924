"""The contestants: flashgen and, for the same case and the same tensors, its peers in torch.

FlexAttention is called as its documentation says, with its default options:
`torch.compile(flex_attention, dynamic=False)`, a block mask for every mask, score changes as a
score_mod. Its mask functions are written for each variant as a user would write them. A mask is
made anew by `create_block_mask`, uncompiled as is its default, or compiled, as torch advises; both
are timed and the faster one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flashgen.bench.cases import FlexCase
from flashgen.compiler.choose import compile as compile_spec
from flashgen.spec.model import AttentionSpec
from flashgen.tune.tensors import Arguments

Attend = Callable[[Arguments], torch.Tensor]
Modifier = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Contestant:
    """Someone who computes the case. `build` prepares, and may compile; its result computes.

    graph: timed as device time alone, from a graph; else as a program's calls, one after the other.
    """

    name: str
    build: Callable[[], Attend]
    graph: bool = True


def flashgen_attention(spec: AttentionSpec) -> Attend:
    """The compiled callable with its default, untuned schedules."""
    attention = compile_spec(spec)
    return lambda a: attention(a.q, a.k, a.v, **a.others)


def sdpa(backend: SDPBackend, *, causal: bool) -> Attend:
    """torch's scaled_dot_product_attention through one of its back ends, and no other."""

    def attend(a: Arguments) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(a.q, a.k, a.v, is_causal=causal)

    return attend


def mask_mod(case: FlexCase, arguments: Arguments) -> Modifier | None:
    """FlexAttention's mask function of a case; None where every key is seen."""
    if case.prefix:
        prefix = arguments.inputs["prefix"]
        return lambda b, h, q, k: (k < prefix[b]) | (k <= q)
    if case.documents:
        doc = arguments.inputs["doc"][0]
        if case.causal:
            return lambda b, h, q, k: (k <= q) & (doc[q] == doc[k])
        return lambda b, h, q, k: doc[q] == doc[k]
    if case.window is not None:
        window = case.window
        return lambda b, h, q, k: (k <= q) & (q - k < window)
    if case.causal:
        return lambda b, h, q, k: k <= q
    return None


def score_mod(case: FlexCase, arguments: Arguments) -> Modifier | None:
    """FlexAttention's score function of a case; None where scores stay as they are."""
    if case.softcap is not None:
        cap = case.softcap
        return lambda s, b, h, q, k: cap * torch.tanh(s / cap)
    if case.alibi:
        slopes = arguments.inputs["slopes"]
        return lambda s, b, h, q, k: s - slopes[h] * (q - k)
    return None


class Flex:
    """FlexAttention on one case: one compiled kernel, and the ways to come by its block mask."""

    def __init__(self, case: FlexCase, arguments: Arguments) -> None:
        self._case = case
        self._mask_mod = mask_mod(case, arguments)
        self._score_mod = score_mod(case, arguments)
        self._device = arguments.q.device
        self._compiled: Any = None
        self._compiled_creation: Any = None

    def kernel(self) -> Attend:
        """The kernel alone: the block mask is made beforehand."""
        block_mask = self.block_mask(compiled=False) if self._mask_mod else None
        return lambda a: self._attend(a, block_mask)

    def with_mask(self, *, compiled: bool) -> Attend:
        """The kernel and, before it, its block mask, as each new batch with other data needs it."""
        return lambda a: self._attend(a, self.block_mask(compiled=compiled))

    def block_mask(self, *, compiled: bool) -> Any:
        """A new block mask; the batch is an axis of it only where the mask depends on the batch."""
        shape = self._case.shape
        batch = shape.batch if self._case.prefix else None
        if compiled and self._compiled_creation is None:
            self._compiled_creation = torch.compile(create_block_mask)
        create = self._compiled_creation if compiled else create_block_mask
        return create(self._mask_mod, batch, None, shape.q_len, shape.kv_len, device=self._device)

    def _attend(self, a: Arguments, block_mask: Any) -> torch.Tensor:
        if self._compiled is None:
            self._compiled = torch.compile(flex_attention, dynamic=False)
        out: torch.Tensor = self._compiled(
            a.q, a.k, a.v, score_mod=self._score_mod, block_mask=block_mask
        )
        return out


def forget_compiled() -> None:
    """Drop what torch.compile keeps: beyond its limit of versions it runs uncompiled."""
    torch._dynamo.reset()


def plain_contestants(case: FlexCase, arguments: Arguments) -> list[Contestant]:
    """For plain attention: kernels against kernels."""
    flex = Flex(case, arguments)
    return [
        Contestant("flashgen", lambda: flashgen_attention(case.spec)),
        Contestant("flex", flex.kernel),
        Contestant("sdpa_flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION, causal=case.causal)),
        Contestant("sdpa_cudnn", lambda: sdpa(SDPBackend.CUDNN_ATTENTION, causal=case.causal)),
    ]


def variant_contestants(case: FlexCase, arguments: Arguments) -> list[Contestant]:
    """For a variant: kernels alone, and whole calls, in which FlexAttention makes its mask anew."""
    flex = Flex(case, arguments)
    attend = flashgen_attention(case.spec)
    return [
        Contestant("flashgen", lambda: attend),
        Contestant("flex", flex.kernel),
        Contestant("flashgen_call", lambda: attend, graph=False),
        Contestant("flex_call_eager_mask", lambda: flex.with_mask(compiled=False), graph=False),
        Contestant("flex_call_compiled_mask", lambda: flex.with_mask(compiled=True), graph=False),
    ]
