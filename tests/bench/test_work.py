"""Counts of pairs, keys and bytes, against every cell of the dense mask."""

from __future__ import annotations

import pytest
import torch

from flashgen import reference, settings
from flashgen.bench import work as work_module
from flashgen.bench.cases import DOCUMENTS, TOKENS, flex_cases
from flashgen.bench.flex_suite import draw_sets
from flashgen.bench.work import count_visible, count_work
from flashgen.passes.count import all_visible_pairs
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.tune.tensors import draw

READ = ("doc", "prefix")  # inputs that some shipped spec's mask reads
SPECS = {path.stem: path for path in sorted(settings.specs_dir().glob("*.yaml"))}


def brute(spec: AttentionSpec, shape: Shape, inputs: dict, kv_lens: torch.Tensor | None) -> tuple:
    mask = reference.mask(
        spec,
        batch=shape.batch,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        inputs=inputs,
        kv_lens=kv_lens,
    )
    return int(mask.sum()), int(mask.any(dim=2).any(dim=1).sum())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lengths", [(40, 40), (1, 150), (33, 300), (50, 20)])
def test_counts_of_shipped_specs(name: str, lengths: tuple[int, int]) -> None:
    spec = load_spec(SPECS[name])
    group = spec.heads.group or 2
    shape = Shape(3, group, 1, *lengths)
    arguments = draw(spec, shape, seed=1, device="cpu")
    found = count_visible(spec, shape, arguments.inputs)
    assert (found.pairs, found.keys) == brute(spec, shape, arguments.inputs, None)
    given = {name: tensor.tolist() for name, tensor in arguments.inputs.items() if name in READ}
    assert all_visible_pairs(spec, shape, given) == found.pairs


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    "mask",
    [
        [],
        ["causal"],
        [{"window": {"left": 5}}],
        [{"window": {"left": 2, "right": 7}}],
        ["causal", {"window": {"left": 0, "right": 0}}],
        [{"expr": "h % 2 == 0 or k <= q"}],
    ],
)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 30), (30, 4), (0, 5), (5, 0)])
def test_counts_of_masks(align: str, mask: list, lengths: tuple[int, int]) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=mask, align=align)
    shape = Shape(2, 4, 2, *lengths)
    found = count_visible(spec, shape, {})
    assert (found.pairs, found.keys) == brute(spec, shape, {}, None)


def test_counts_with_kv_lens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "CELLS_AT_A_TIME", 64)  # several chunks
    spec = AttentionSpec(head_dim=16, dtype="fp32", mask=["causal"], kv_lens="per_batch")
    kv_lens = torch.tensor([3, 20, 0])
    found = count_visible(spec, Shape(3, 2, 1, 7, 20), {}, kv_lens=kv_lens)
    assert (found.pairs, found.keys) == brute(spec, Shape(3, 2, 1, 7, 20), {}, kv_lens)


def test_work_of_a_causal_square() -> None:
    """theory: N=2048, d=64 causal has N(N+1)/2 pairs; here with the bytes of bf16."""
    spec = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])
    found = count_work(spec, Shape(2, 8, 2, 2048, 2048), {})
    assert found.visible_pairs == 2 * 8 * 2048 * 2049 // 2
    assert found.matmul_flops == 4 * 64 * found.visible_pairs
    assert found.dram_bytes == 2 * 2 * 64 * 2048 * (8 + 8 + 2 + 2)


def test_work_of_a_window_in_decode_counts_only_the_keys_it_shows() -> None:
    spec = load_spec(SPECS["mistral_7b"])
    found = count_work(spec, Shape(1, 32, 8, 1, 16384), {})
    assert found.visible_pairs == 32 * 4096
    assert found.dram_bytes == 2 * 2 * 128 * (32 + 8 * 4096)


def test_the_long_shapes_are_counted_at_once() -> None:
    spec = load_spec(SPECS["qwen_27b"])
    found = count_work(spec, Shape(1, 24, 4, 262144, 262144), {})
    assert found.visible_pairs == 24 * 262144 * 262145 // 2


def test_grid_of_the_flex_suite() -> None:
    cases = flex_cases()
    assert len({case.id for case in cases}) == len(cases)
    plain = [case for case in cases if case.group == "plain"]
    assert len(plain) == 3 * 4 * 2
    assert {(c.head_dim, c.length, c.causal) for c in plain} == {
        (d, n, causal)
        for d in (64, 128, 256)
        for n in (512, 2048, 8192, 16384)
        for causal in (False, True)
    }
    for case in cases:
        shape = case.shape
        assert shape.batch * shape.q_len == TOKENS
        assert shape.q_heads * case.head_dim == 2048
        assert case.spec.dtype.q == "bf16"
        assert not case.prefix or len(case.prefix) == shape.batch
        assert all(0 < prefix < case.length for prefix in case.prefix)
        assert not case.documents or (shape.batch, sum(case.documents)) == (1, TOKENS)
    assert sum(DOCUMENTS) == TOKENS
    assert {c.window for c in cases} == {None, 512, 4096}


def test_documents_of_the_suite_have_the_pairs_of_their_squares() -> None:
    case = next(c for c in flex_cases() if c.id == "documents/d128/n16384/full")
    (arguments,) = draw_sets(case, 1, torch.device("cpu"))
    lengths = torch.bincount(arguments.inputs["doc"][0].long())
    assert tuple(lengths.tolist()) == DOCUMENTS
    assert sum(n * n for n in DOCUMENTS) < TOKENS**2 / 5  # far from a full square
