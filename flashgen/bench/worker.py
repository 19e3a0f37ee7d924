"""A worker of `preparation.py`: `python -m flashgen.bench.worker KIND NAME...`.

spec: build the shipped spec, verify it, and run what will be timed on small shapes; kernels: run
flashgen's and FlexAttention's kernel of a case; mask: make a case's block mask, compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen import settings
from flashgen.bench.cases import FlexCase, flex_cases
from flashgen.bench.flex_suite import contestants_of, draw_sets
from flashgen.bench.peers import Flex, flashgen_attention, forget_compiled
from flashgen.bench.preparation import work_through
from flashgen.bench.specs_suite import proof_shapes, prove
from flashgen.spec.parse import load_spec
from flashgen.tune.tensors import draw

COMPILED = ("flashgen", "flex")  # contestants whose kernels are compiled, and found again by others


def work_on_spec(name: str, device: torch.device) -> dict[str, Any]:
    """What building and verifying said; and the callable's kernels, without lse, are compiled."""
    spec = load_spec(settings.specs_dir() / f"{name}.yaml")
    facts = prove(spec, device)
    attend = flashgen_attention(spec)
    for shape in proof_shapes(spec, device):
        attend(draw(spec, shape, seed=0, device=device))
    return facts


def work_on_kernels(case_id: str, device: torch.device) -> dict[str, Any]:
    case = _case(case_id)
    forget_compiled()
    (arguments,) = draw_sets(case, 1, device)
    for contestant in contestants_of(case, arguments):
        if contestant.name in COMPILED:
            contestant.build()(arguments)
    return {}


def work_on_mask(case_id: str, device: torch.device) -> dict[str, Any]:
    case = _case(case_id)
    forget_compiled()
    (arguments,) = draw_sets(case, 1, device)
    Flex(case, arguments).block_mask(compiled=True)
    return {}


KINDS: Mapping[str, Callable[[str, torch.device], dict[str, Any]]] = {
    "spec": work_on_spec,
    "kernels": work_on_kernels,
    "mask": work_on_mask,
}


def _case(case_id: str) -> FlexCase:
    return next(case for case in flex_cases() if case.id == case_id)


def main(kind: str, names: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not end up between the lines
    with torch.no_grad():
        work_through(names, lambda name: KINDS[kind](name, device), lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
