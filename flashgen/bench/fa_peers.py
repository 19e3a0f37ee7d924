"""The peers of suite `fa-paper`, and FlashAttention-4's figures where it cannot be installed.

Each peer gets its tensors contiguous in its own layout: [batch, heads, length, dim] for SDPA and
FlexAttention, [batch, length, heads, dim] for FlashAttention-3.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flashgen.bench.fa_cases import (
    CUDNN,
    FA3,
    FA3_PLAIN,
    FLASH,
    FLEX,
    FLEX_TUNED,
    GRID,
    FaCase,
)
from flashgen.bench.peers import Attend, Contestant, Flex, Modifier, score_mod
from flashgen.tune.tensors import Arguments

MODES: Mapping[str, str | None] = {FLEX: None, FLEX_TUNED: "max-autotune-no-cudagraphs"}
FA3_MODULE = "flash_attn_interface"
TUNED_GRID = "grid/d128/n8192/"  # cases of the grid that FlexAttention is tuned for, too


def peers_of(case: FaCase, arguments: Arguments) -> list[Contestant]:
    """Who takes part in a case beside flashgen, those whose kernels are ready first."""
    found = []
    if case.is_plain:
        for name, backend in (
            (FLASH, SDPBackend.FLASH_ATTENTION),
            (CUDNN, SDPBackend.CUDNN_ATTENTION),
        ):
            found.append(Contestant(name, partial(sdpa, case, backend)))
    if has_fa3():
        if serves_fa3(case):
            found.append(Contestant(FA3, lambda: fa3(case, arguments)))
        if not case.is_plain:
            found.append(Contestant(FA3_PLAIN, lambda: fa3(case.baseline, arguments)))
    found.append(Contestant(FLEX, lambda: flex(case, arguments, FLEX)))
    if wants_tuned_flex(case):
        found.append(Contestant(FLEX_TUNED, lambda: flex(case, arguments, FLEX_TUNED)))
    return found


def wants_tuned_flex(case: FaCase) -> bool:
    """Its tuning takes up to half a minute a case."""
    return case.group != GRID or case.id.startswith(TUNED_GRID)


# **** SDPA ****


def sdpa(case: FaCase, backend: SDPBackend) -> Attend:
    """torch's scaled_dot_product_attention through one back end; causal or full, grouped heads."""
    grouped = case.shape.q_heads != case.shape.kv_heads

    def attend(a: Arguments) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                a.q, a.k, a.v, is_causal=case.causal, enable_gqa=grouped
            )

    return attend


# **** FlexAttention ****


def flex(case: FaCase, arguments: Arguments, name: str) -> Attend:
    """FlexAttention's kernel in one of its modes; the block mask is made beforehand."""
    return FaFlex(case, arguments, MODES[name]).kernel()


class FaFlex(Flex):
    """FlexAttention with what only this suite's cases have: a bias, a sink, grouped heads."""

    def __init__(self, case: FaCase, arguments: Arguments, mode: str | None) -> None:
        super().__init__(case, arguments)
        self._score_mod = fa_score_mod(case, arguments)
        self._mode = mode
        self._grouped = case.shape.q_heads != case.shape.kv_heads
        self._function: Callable[..., torch.Tensor] | None = None

    def _attend(self, a: Arguments, block_mask: Any) -> torch.Tensor:
        if self._function is None:
            function = flex_attention if a.sink is None else with_sink
            self._function = torch.compile(function, dynamic=False, mode=self._mode)
        options = {} if a.sink is None else {"sink": a.sink}
        return self._function(
            a.q,
            a.k,
            a.v,
            score_mod=self._score_mod,
            block_mask=block_mask,
            enable_gqa=self._grouped,
            **options,
        )


def fa_score_mod(case: FaCase, arguments: Arguments) -> Modifier | None:
    """FlexAttention's score function of a case; None where scores stay as they are."""
    if case.bias:
        bias = arguments.inputs["rel"][0]
        return lambda s, b, h, q, k: s + bias[h, q, k]
    return score_mod(case, arguments)


def with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sink: torch.Tensor, **options: Any
) -> torch.Tensor:
    """A logit for each head in the denominator scales the rows: by 1 / (1 + exp(sink - lse))."""
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    return (out * torch.sigmoid(aux.lse - sink[None, :, None])[..., None]).to(q.dtype)


# **** FlashAttention-3 ****


def has_fa3() -> bool:
    return importlib.util.find_spec(FA3_MODULE) is not None


def serves_fa3(case: FaCase) -> bool:
    """It has no ALiBi and no bias; builds without soft capping say so in their configuration."""
    if case.alibi or case.bias:
        return False
    return case.softcap is None or not _disabled("SOFTCAP")


def _disabled(feature: str) -> bool:
    """Whether the build that is installed says that it lacks a feature."""
    try:
        config = importlib.import_module("flash_attn_config").CONFIG
    except ImportError:
        return False
    return bool(config["build_flags"].get(f"FLASHATTENTION_DISABLE_{feature}", False))


def fa3(case: FaCase, arguments: Arguments) -> Attend:
    """FlashAttention-3; documents packed in a row are sequences of their own for it."""
    library = importlib.import_module(FA3_MODULE)
    copies = {id(arguments): _bshd(arguments)}

    def tensors(a: Arguments) -> tuple[torch.Tensor, ...]:
        if id(a) not in copies:
            copies[id(a)] = _bshd(a)
        return copies[id(a)]

    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.sink and arguments.sink is not None:
        options["sinks"] = arguments.sink.to(arguments.q.dtype)
    if case.documents:
        ends = torch.tensor((0, *case.documents)).cumsum(0).to(arguments.q.device, torch.int32)
        longest = max(case.documents)

        def attend_documents(a: Arguments) -> torch.Tensor:
            q, k, v = (tensor[0] for tensor in tensors(a))
            out = library.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **options)
            return _first(out).transpose(0, 1)[None]

        return attend_documents

    def attend(a: Arguments) -> torch.Tensor:
        return _first(library.flash_attn_func(*tensors(a), **options)).transpose(1, 2)

    return attend


def _bshd(a: Arguments) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in (a.q, a.k, a.v))


def _first(found: Any) -> torch.Tensor:
    """The output, where a version returns the log-sum-exp with it."""
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


# **** FlashAttention-4 and what a build of FlashAttention-3 lacks, scaled ****

# TFLOP/s in bursts of FlashAttention-3 and -4 in one run on an H200 (FlashAttention-3
# 3.0.0.post20260810, FlashAttention-4 4.0.0b36), head dim -> length -> full and causal.
_GRID_BURSTS: Mapping[int, Mapping[int, tuple[tuple[int, int], tuple[int, int]]]] = {
    64: {
        512: ((331, 332), (228, 183)),
        2048: ((486, 505), (422, 386)),
        8192: ((586, 565), (539, 533)),
        16384: ((591, 599), (568, 538)),
    },
    128: {
        512: ((532, 460), (338, 274)),
        2048: ((696, 636), (620, 542)),
        4096: ((0, 0), (696, 642)),
        8192: ((734, 734), (725, 633)),
        16384: ((752, 755), (762, 727)),
    },
    256: {
        512: ((554, 494), (360, 311)),
        2048: ((757, 724), (642, 574)),
        8192: ((810, 773), (787, 775)),
        16384: ((820, 824), (818, 812)),
    },
}
# Kind and length -> TFLOP/s of FlashAttention-3 with the feature (None: it has it not), of
# FlashAttention-4, and of what they are scaled by: FlashAttention-3 here, or on the plain case.
_VARIANT_BURSTS: Mapping[tuple[str, int], tuple[int | None, int, int]] = {
    ("window512", 8192): (426, 363, 725),
    ("window512", 16384): (423, 383, 762),
    ("window4096", 8192): (697, 623, 725),
    ("window4096", 16384): (702, 672, 762),
    ("alibi", 4096): (None, 554, 696),
    ("softcap50", 4096): (562, 277, 696),
    ("gqa32:8", 8192): (746, 698, 746),
    ("gqa24:4", 16384): (829, 737, 829),
    ("documents", 16384): (592, 528, 762),
}


def scaled_rates(case: FaCase, fa3_rate: float | None, fa3_plain: float | None) -> dict[str, float]:
    """TFLOP/s that stand in for who is not here, from FlashAttention-3's in this run and the ratio
    of both in another run; nothing where that run had no such case."""
    found = {}
    if case.group == GRID:
        bursts = _GRID_BURSTS[case.head_dim].get(case.length, ((0, 0), (0, 0)))[case.causal]
        if fa3_rate and bursts[0]:
            found["fa4 (scaled)"] = fa3_rate * bursts[1] / bursts[0]
        return found
    three, four, plain = _VARIANT_BURSTS.get((case.kind, case.length), (None, 0, 0))
    if fa3_rate and three and four:
        found["fa4 (scaled)"] = fa3_rate * four / three
    elif fa3_plain and plain:
        if three:
            found["fa3 (scaled)"] = fa3_plain * three / plain
        found["fa4 (scaled)"] = fa3_plain * four / plain
    return found
