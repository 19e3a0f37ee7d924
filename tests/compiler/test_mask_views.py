"""Masks by element and by tile, as pictures show them: one must follow from the other."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen import load_spec, settings
from flashgen.compiler.mask_sample import sample_mask
from flashgen.passes.count import EMPTY, FULL, PARTIAL, tile_classes, visible_matrix, visits
from flashgen.spec.model import AttentionSpec, Shape

SHIPPED = sorted(path.stem for path in settings.specs_dir().glob("*.yaml"))
CAUSAL = AttentionSpec(head_dim=64, dtype="bf16", mask=["causal"])


def one_head(q_len: int, kv_len: int) -> Shape:
    return Shape(batch=1, q_heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len)


def test_a_causal_mask() -> None:
    assert visible_matrix(CAUSAL, one_head(2, 4), {}).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    classes = tile_classes(CAUSAL, one_head(256, 256), 64, 128, {})
    assert classes.tolist() == [
        [PARTIAL, EMPTY],
        [PARTIAL, EMPTY],
        [FULL, PARTIAL],
        [FULL, PARTIAL],
    ]


def test_the_tile_that_the_end_cuts_is_partial() -> None:
    plain = AttentionSpec(head_dim=64, dtype="bf16")
    assert tile_classes(plain, one_head(64, 100), 64, 64, {}).tolist() == [[FULL, PARTIAL]]


def test_a_single_tile_skips_nothing_and_masks_everywhere() -> None:
    shape = one_head(256, 64)
    assert tile_classes(CAUSAL, shape, 64, 64, {}).ravel().tolist() == [EMPTY] * 3 + [PARTIAL]
    classes = tile_classes(CAUSAL, shape, 64, 64, {}, "single_tile")
    assert classes.ravel().tolist() == [PARTIAL] * 4
    assert sample_mask(CAUSAL, shape, 64, 64, "single_tile").classes.tolist() == classes.tolist()


def test_only_some_rows_and_keys() -> None:
    picked = visible_matrix(
        CAUSAL, one_head(8, 8), {}, rows=np.array([0, 7]), keys=np.array([0, 3, 7])
    )
    assert picked.tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (70, 497)])
def test_skipped_tiles_show_nothing_and_full_ones_everything(
    name: str, q_len: int, kv_len: int
) -> None:
    spec = load_spec(settings.specs_dir() / f"{name}.yaml")
    sample = sample_mask(spec, one_head(q_len, kv_len), 16, 32)
    assert sample.density.shape == (sample.q_len, sample.kv_len)  # small: a pixel is a pair
    for (row, key), kind in np.ndenumerate(sample.classes):
        pairs = sample.density[16 * row : 16 * row + 16, 32 * key : 32 * key + 32]
        if kind == EMPTY:
            assert not pairs.any(), (row, key)
        if kind == FULL:
            assert pairs.all(), (row, key)
    if not sample.drawn:
        shape = one_head(sample.q_len, sample.kv_len)
        assert visits(spec, shape, 16, 32).tiles == (sample.classes != EMPTY).sum()


def test_drawn_inputs_are_named_and_always_the_same() -> None:
    spec = load_spec(settings.specs_dir() / "modernbert_local.yaml")
    first, second = (sample_mask(spec, one_head(400, 400), 32, 32) for _ in range(2))
    assert first.drawn == ("doc",)
    assert (first.density == second.density).all()
    assert 0 < first.density.mean() < 0.5


def test_a_large_shape_is_sampled() -> None:
    spec = load_spec(settings.specs_dir() / "llama4_chunked.yaml")
    sample = sample_mask(spec, one_head(262_144, 262_144), 64, 64)
    assert sample.density.shape == (512, 512)
    assert not sample.whole
    assert sample.density.mean() == pytest.approx(0.125, abs=0.01)  # 4 chunks of 8,192, causal
