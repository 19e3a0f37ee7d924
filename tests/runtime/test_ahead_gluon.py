"""What makes machine code of the Hopper family unusable, and launches that cannot be repeated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashgen.errors import ScheduleError
from flashgen.runtime.ahead import CompiledKernel
from flashgen.runtime.ahead_gluon import check_compiled
from flashgen.runtime.repeat import Seen, repeat_of
from flashgen.schedule.model import Schedule, Sm90
from flashgen.spec.model import AttentionSpec

SCHEDULE = Schedule(
    family="gluon_sm90", block_m=192, block_n=128, num_warps=16, num_stages=4, sm90=Sm90()
)
NAMED = (
    "attention_fwd_sm90, schedule gluon_sm90 192x128 16 warps 4 stages grid output through q's "
    "buffer 32 MiB abreast: "
)


def compiled(spill_bytes: int | None, serialised: tuple[str, ...]) -> CompiledKernel:
    return CompiledKernel(
        *("attention_fwd_sm90", 156100, 0, 128, spill_bytes, "ptx", "", "cubin", b""), serialised
    )


@pytest.mark.parametrize("spill_bytes", [0, None])
def test_clean_machine_code_is_accepted(spill_bytes: int | None) -> None:
    check_compiled(SCHEDULE, compiled(spill_bytes, ()))


def test_spills_and_serialised_products_are_refused_with_that_reason() -> None:
    with pytest.raises(ScheduleError) as refused:
        check_compiled(SCHEDULE, compiled(208, ("C7510", "C7514")))
    assert str(refused.value) == (
        f"{NAMED}serialised wgmma (ptxas C7510, C7514): must be at most 0 (got 2); "
        "spill_bytes: must be at most 0 (got 208)\n"
        "  hint: pass a schedule with fewer keys a tile or fewer consumers, or one of family "
        "triton."
    )
    assert len(refused.value.rejections) == 2


def test_a_launch_with_a_tensor_map_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map holds the address of the tensors of its own call."""
    monkeypatch.setattr("flashgen.runtime.repeat.CompiledKernel", SimpleNamespace)
    seen = Seen(None)
    seen.compiled, seen.launches, seen.grid = SimpleNamespace(), 1, (1,)
    seen.values = {"q_desc": object(), "q_len": 3}
    spec = AttentionSpec(head_dim=64, dtype="bf16")
    tensors = {"q": torch.zeros(1), "out": torch.zeros(1), "lse": torch.zeros(1)}
    assert repeat_of(spec, seen, tensors, returns_lse=False) is None
