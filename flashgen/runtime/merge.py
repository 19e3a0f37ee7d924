"""Exact merge of attention over disjoint sets of keys, from the partial outputs and their lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from flashgen.errors import TensorError
from flashgen.runtime.check import AXES

Parts: TypeAlias = Sequence[torch.Tensor] | torch.Tensor


def merge(outs: Parts, lses: Parts, *, layout: str = "bhsd") -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over all keys of the parts, as one call over them together would give.

    outs: [batch, heads, len, dim] each (layout bshd: [batch, len, heads, dim]); lses: [batch,
    heads, len] each, natural logarithm, fp32; either may be one tensor, stacked along a first axis
    of parts. A part whose lse is -inf saw no key and adds nothing,
    whatever its output holds; a row that no part saw gives output 0 and lse -inf. A sink must be in
    one part only. Computed in fp32; the output has the dtype of the first part.
    """
    if layout not in AXES:
        raise TensorError("layout", repr(layout), "'bhsd' or 'bshd'")
    outs = _parts("outs", outs, AXES[layout])
    lses = _parts("lses", lses, AXES["bhsd"][:3])
    _check(outs, lses, layout)
    stacked = torch.stack([lse.float() for lse in lses])
    highest = stacked.amax(0)
    shift = torch.where(highest.isinf() & (highest < 0), torch.zeros_like(highest), highest)
    weights = torch.exp(stacked - shift)
    total = weights.sum(0)
    shares = weights / torch.where(total == 0, torch.ones_like(total), total)
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, share in zip(outs, shares, strict=True):
        spread = (share.transpose(1, 2) if layout == "bshd" else share).unsqueeze(-1)
        out += torch.where(spread == 0, 0.0, part.float() * spread)
    return out.to(outs[0].dtype), shift + torch.log(total)


def _parts(name: str, given: object, axes: tuple[str, ...]) -> list[torch.Tensor]:
    """The parts one by one, of a list or stacked."""
    each = f"[{', '.join(axes)}]"
    expected = f"a list of tensors {each}, one a part, or one tensor [parts, {each[1:]}"
    if isinstance(given, torch.Tensor):
        if given.dim() != len(axes) + 1:
            raise TensorError(name, f"a tensor of shape {list(given.shape)}", expected)
        return list(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TensorError(name, type(given).__name__, expected)
    for index, part in enumerate(given):
        if not isinstance(part, torch.Tensor):
            raise TensorError(f"{name}[{index}]", type(part).__name__, f"a tensor {each}")
        if part.dim() != len(axes):
            raise TensorError(f"{name}[{index}]", f"shape {list(part.shape)}", each)
    return list(given)


def _check(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], layout: str) -> None:
    if not outs or len(outs) != len(lses):
        raise TensorError(
            "lses", f"{len(lses)} parts", f"as many as outs, which has {len(outs)}, at least one"
        )
    first = outs[0].shape
    rows = (first[0], first[2], first[1]) if layout == "bshd" else tuple(first[:3])
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first:
            raise TensorError(
                f"outs[{index}]", f"shape {list(out.shape)}", f"shape {list(first)}, as outs[0]"
            )
        if tuple(lse.shape) != rows:
            raise TensorError(f"lses[{index}]", f"shape {list(lse.shape)}", f"shape {list(rows)}")
