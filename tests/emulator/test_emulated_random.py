"""Random specs, shapes and values on the Hopper kernel, emulated, against the fp64 oracle."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_runs import TARGET, generated, written
from hopper_cases import hopper
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from property.drawn import Call, Drawn, built, guarded, guards_intact, held_against_oracle
from property.strategies_calls import calls

from flashgen.emulator import emulated
from flashgen.passes.score_tile import score_tile
from flashgen.problem import Problem
from flashgen.runtime.interpret import interpreting
from flashgen.schedule.model import Schedule
from flashgen.schedule.sm90 import check
from flashgen.spec.model import AttentionSpec

EXAMPLES = int(os.environ.get("FLASHGEN_PROPERTY_EXAMPLES", "100")) // 8
SEED = int(os.environ.get("FLASHGEN_PROPERTY_SEED", "0"))
SCHEDULES = (
    hopper(2, 64, 2, separate_out=True),
    hopper(2, 128, 1, separate_out=True, scheduler="dynamic"),
    hopper(3, 64, 2, separate_out=True, scheduler="static"),
    hopper(2, 64, 2, separate_out=True, scheduler="static", q_buffers=2),
    hopper(2, 64, 2, separate_out=True, scheduler="dynamic", packed_heads=4),
    hopper(3, 64, 1, separate_out=True, packed_heads=2),
)


@st.composite
def hopper_calls(draw: st.DrawFn) -> tuple[Drawn, Schedule]:
    """A drawn call in 16 bits that the family serves; of those of others what it is serves."""
    drawn = draw(calls().filter(lambda call: min(call.sizes) > 0))
    dtype = draw(st.sampled_from(("fp16", "bf16")))
    spec = {**drawn.spec, "dtype": dtype, "kv_lens": "none", "loop_order": "flash2"}
    forms = {name: form for name, form in drawn.forms.items() if name not in {"q", "k", "v"}}
    for name in ("q", "k", "v"):
        forms[name] = draw(st.sampled_from(("contiguous", "length_first", "padded_16")))
    head_dim = spec["head_dim"]
    dims = [head_dim] if isinstance(head_dim, int) else list(head_dim.values())
    if any(dim % 8 for dim in dims):  # strides that TMA cannot take
        spec["head_dim"] = draw(st.sampled_from((8, 40, 64, 72, {"qk": 96, "v": 64})))
    if score_tile(AttentionSpec(**spec)) is not None:  # TMA may not take it, and what serves then
        spec["dtype"] = "fp16"  # is interpreted, where bf16 is multiplied wrongly
    return Drawn(
        spec=spec,
        sizes=drawn.sizes,
        forms=forms,
        magnitude=drawn.magnitude,
        poison=drawn.poison,
        seed=drawn.seed,
    ), draw(st.sampled_from(SCHEDULES))


def is_served(asked: tuple[Drawn, Schedule]) -> bool:
    drawn, schedule = asked
    return check(schedule, Problem(AttentionSpec(**drawn.spec), TARGET)) is None


def run(path: Path, call: Call, order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the Hopper kernel; the memory around them is untouched."""
    spec = call.spec
    heads_first = call.q.transpose(1, 2) if spec.layout == "bshd" else call.q
    out = guarded(torch.empty(*call.q.shape[:3], spec.head_dim.v, dtype=call.q.dtype))
    lse = guarded(torch.empty(heads_first.shape[:3]))
    sink = None if call.sink is None else call.sink.float()
    with interpreting():
        module = emulated(path, seed=order)
        kernel, options = module.SCHEDULES[-1][2:]
        assert module.fits_tma(call.q)
        have: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "sink": sink, **call.inputs}
        have |= {"kernel": kernel, "options": options, "out": out, "lse": lse}
        names = inspect.signature(module.run).parameters
        module.run(**{name: have[name] for name in names})
    assert guards_intact(out), "wrote past the ends of out"
    assert guards_intact(lse), "wrote past the ends of lse"
    return out, lse


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@seed(SEED)
@pytest.mark.slow  # .ci/run draws more besides
@settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    print_blob=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(hopper_calls().filter(is_served))
def test_random_calls_of_the_hopper_kernel(
    tmp_path_factory: pytest.TempPathFactory, asked: tuple[Drawn, Schedule]
) -> None:
    drawn, schedule = asked
    call = built(drawn)
    path = written(tmp_path_factory.mktemp("module"), generated(call.spec, schedule, True))
    comparison = held_against_oracle(call, *run(path, call, order=drawn.seed))
    assert comparison.ok, f"{comparison}\n{drawn!r}\n{schedule}"
