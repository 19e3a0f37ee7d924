"""The work of a launch whose mask reads data is that of the data which is timed."""

from __future__ import annotations

import pytest
import torch

from flashgen.problem import Problem
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import get_target
from flashgen.tune import tensors
from flashgen.tune.work import work_of

SHAPE = Shape(3, 4, 4, 700, 700)
TILE = Schedule(block_m=64, block_n=64, num_warps=4, num_stages=2)
DOCUMENTS = AttentionSpec(
    name="documents",
    head_dim=64,
    dtype="fp16",
    mask=["causal", {"same": "doc"}],
    score=[{"alibi": "slopes"}],
    inputs={
        "doc": {"shape": ["batch", "kv_len"], "dtype": "int32"},
        "slopes": {"shape": ["q_heads"], "dtype": "fp32"},
    },
)
LENGTHS = AttentionSpec(name="lengths", head_dim=64, dtype="fp16", kv_lens="per_batch")


@pytest.mark.parametrize("spec", [DOCUMENTS, LENGTHS], ids=lambda spec: spec.display_name)
def test_pairs_are_those_of_the_drawn_data(spec: AttentionSpec) -> None:
    drawn = tensors.draw(spec, SHAPE, seed=0, device="cpu")
    visible = torch.ones(SHAPE.batch, SHAPE.q_len, SHAPE.kv_len, dtype=torch.bool)
    if spec is DOCUMENTS:
        doc = drawn.inputs["doc"]
        visible = (doc[:, :, None] == doc[:, None, :]).tril()
    else:
        assert drawn.kv_lens is not None
        visible &= torch.arange(SHAPE.kv_len) < drawn.kv_lens[:, None, None]
    pairs = int(visible.sum()) * SHAPE.q_heads
    assert pairs < SHAPE.batch * SHAPE.q_heads * SHAPE.q_len * SHAPE.kv_len
    work = work_of(Problem(spec, get_target("nvidia-h200")), TILE, SHAPE)
    rounding = 0.5 * SHAPE.batch * SHAPE.q_heads / pairs
    assert work.matmul_flops == pytest.approx(4 * 64 * pairs, rel=2 * rounding)


def test_what_the_mask_reads_is_drawn_as_for_a_call() -> None:
    drawn = tensors.draw(DOCUMENTS, SHAPE, seed=3, device="cpu")
    found = tensors.mask_inputs(DOCUMENTS, SHAPE, seed=3)
    assert list(found) == ["doc"]
    assert torch.equal(found["doc"], drawn.inputs["doc"])
