"""The oracle on inputs small enough to work out by hand, and against torch in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashgen.errors import NotServedError, TensorError
from flashgen.reference import attention, eager, mask
from flashgen.spec.model import AttentionSpec

INF = math.inf
NAN = math.nan


def spec(**fields: object) -> AttentionSpec:
    fields = {"head_dim": 1, "dtype": "fp32", "scale": 1.0, **fields}
    return AttentionSpec(**fields)


def column(*values: float) -> Tensor:
    """One head of one batch, head_dim 1, one row for each value."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, -1, 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def visible_keys(visible: Tensor) -> list[list[int]]:
    """The keys that each query row of batch 0, head 0 sees."""
    return [row.nonzero().flatten().tolist() for row in visible[0, 0]]


def mask_of(q_len: int, kv_len: int, /, **fields: object) -> list[list[int]]:
    return visible_keys(
        mask(spec(**fields), batch=1, q_heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len)
    )


# theory.md, section 3: scores [1, 3] then [5].


def test_online_softmax_numbers() -> None:
    q, k = column(1.0), column(1.0, 3.0, 5.0)
    one_hot = torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)  # the output is the weights
    weights, lse = attention(spec(head_dim={"qk": 1, "v": 3}), q, k, one_hot)
    first = math.exp(-2) + 1
    total = first * math.exp(-2) + 1
    assert round(first, 3) == 1.135
    assert round(total, 3) == 1.154
    assert lse.item() == pytest.approx(5 + math.log(total), abs=1e-15)
    assert weights.flatten().tolist() == pytest.approx(
        [math.exp(-4) / total, math.exp(-2) / total, 1 / total], abs=1e-15
    )
    assert round(weights.flatten()[1].item(), 3) == 0.117  # a softmax of [1, 3] alone says 0.881


def test_two_keys_by_hand() -> None:
    out, lse = attention(spec(), column(2.0), column(0.0, math.log(3) / 2), column(10.0, 20.0))
    assert out.item() == pytest.approx(17.5, abs=1e-14)  # weights 1/4 and 3/4
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.25])
def test_scale_is_taken_as_it_is(scale: float) -> None:
    q, k, v = random(1, 1, 3, 1), random(1, 1, 4, 1, seed=1), random(1, 1, 4, 1, seed=2)
    out, _ = attention(spec(scale=scale), q, k, v)
    expected = torch.softmax(scale * q @ k.transpose(2, 3), dim=3) @ v
    torch.testing.assert_close(out, expected)
    if scale == 0:
        torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out))


# Alignment and windows.


def test_bottom_right_alignment() -> None:
    assert mask_of(2, 5, mask="causal") == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert mask_of(5, 2, mask="causal") == [[], [], [], [0], [0, 1]]


def test_top_left_alignment() -> None:
    assert mask_of(2, 5, mask="causal", align="top_left") == [[0], [0, 1]]
    assert mask_of(5, 2, mask="causal", align="top_left") == [[0], [0, 1], [0, 1], [0, 1], [0, 1]]


def test_window_ends_are_inclusive() -> None:
    window = {"window": {"left": 3, "right": 0}}
    assert mask_of(16, 16, mask=[window])[10] == [7, 8, 9, 10]
    assert mask_of(16, 16, mask=["causal", window])[10] == [7, 8, 9, 10]
    assert mask_of(8, 8, mask=[{"window": {"left": 1, "right": 2}}])[4] == [3, 4, 5, 6]
    assert mask_of(1, 16, mask=[window]) == [[12, 13, 14, 15]]  # decode: the same window


def test_right_end_zero_is_not_the_same_as_no_end() -> None:
    assert mask_of(4, 4, mask=[{"window": {"left": 3, "right": 0}}])[1] == [0, 1]
    assert mask_of(4, 4, mask=[{"window": {"left": 3}}])[1] == [0, 1, 2, 3]


def test_window_wider_than_the_sequence_hides_nothing() -> None:
    assert mask_of(8, 8, mask=[{"window": {"left": 100, "right": 100}}]) == [list(range(8))] * 8


def test_chunked_and_strided() -> None:
    chunked = mask_of(8, 8, mask=["causal", {"expr": "q // 3 == k // 3"}])
    assert chunked == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6], [6, 7]]
    strided = mask_of(9, 9, mask=["causal", {"expr": "q - k < 2 or (q - k) % 4 == 0"}])
    assert strided[8] == [0, 4, 7, 8]
    # // and % round towards minus infinity: q is -2, -1, 0 here, and -1 // 3 is -1, not 0.
    assert mask_of(3, 1, mask=[{"expr": "q // 3 == k // 3"}]) == [[], [], [0]]
    assert mask_of(3, 1, mask=[{"expr": "q % 3 == k + 1"}]) == [[0], [], []]


def test_prefix() -> None:
    prefix = spec(
        mask=[{"expr": "k < prefix[b] or k <= q"}],
        inputs={"prefix": {"shape": ["batch"], "dtype": "int32"}},
    )
    sizes = {"batch": 2, "q_heads": 1, "kv_heads": 1, "q_len": 4, "kv_len": 4}
    visible = mask(prefix, **sizes, inputs={"prefix": torch.tensor([2, 0], dtype=torch.int32)})
    assert visible_keys(visible) == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert visible_keys(visible[1:]) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_documents() -> None:
    documents = spec(
        mask=[{"same": "doc"}], inputs={"doc": {"shape": [1, "kv_len"], "dtype": "int32"}}
    )
    sizes = {"batch": 3, "q_heads": 1, "kv_heads": 1, "q_len": 2, "kv_len": 4}
    visible = mask(documents, **sizes, inputs={"doc": torch.tensor([[7, 8, 8, 7]])})
    assert visible_keys(visible) == [[1, 2], [0, 3]]  # rows stand at positions 2 and 3
    assert bool((visible == visible[:1]).all())  # an axis of extent 1 broadcasts over the batch
    # More queries than keys: the first row stands at position -1, which has no document.
    sizes |= {"q_len": 5}
    visible = mask(documents, **sizes, inputs={"doc": torch.tensor([[7, 8, 8, 7]])})
    assert visible_keys(visible) == [[], [0, 3], [1, 2], [1, 2], [0, 3]]


def test_dense_mask_with_its_own_strides() -> None:
    dense = spec(
        mask=[{"expr": "m[b,h,row,k]"}],
        inputs={"m": {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": "bool"}},
    )
    given = (torch.arange(12).view(1, 1, 3, 4) % 3 == 0).expand(2, 2, 3, 4)
    sizes = {"batch": 2, "q_heads": 2, "kv_heads": 1, "q_len": 3, "kv_len": 4}
    assert torch.equal(mask(dense, **sizes, inputs={"m": given}), given)


# Rows without keys, sinks, lengths.


def test_rows_without_a_key() -> None:
    out, lse = attention(
        spec(mask="causal"), random(1, 1, 5, 1), random(1, 1, 2, 1), random(1, 1, 2, 1)
    )
    assert lse[0, 0, :3].tolist() == [-INF] * 3
    assert out[0, 0, :3].tolist() == [[0.0]] * 3
    assert bool(torch.isfinite(lse[0, 0, 3:]).all())


@pytest.mark.parametrize("sink", [0.5, 100.0, -100.0])
def test_sink(sink: float) -> None:
    with_sink = spec(sink="per_head")
    q, k, v = column(1.0), column(0.0, math.log(2)), column(3.0, 6.0)
    out, lse = attention(with_sink, q, k, v, sink=torch.tensor([sink]))
    total = 1 + 2 + math.exp(sink)
    assert out.item() == pytest.approx((3 + 12) / total, rel=1e-12)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-12)


@pytest.mark.parametrize("sink", [0.5, 100.0])
def test_sink_of_rows_without_a_key(sink: float) -> None:
    causal = spec(sink="per_head", mask="causal")
    values = torch.tensor([sink])
    out, lse = attention(causal, random(1, 1, 3, 1), random(1, 1, 1, 1), column(1.0), sink=values)
    assert lse[0, 0, :2].tolist() == [sink, sink]
    assert out[0, 0, :2].tolist() == [[0.0], [0.0]]
    out, lse = attention(causal, column(1.0), random(1, 1, 0, 1), random(1, 1, 0, 1), sink=values)
    assert (out.item(), lse.item()) == (0.0, sink)


def test_no_keys_no_queries_no_batch() -> None:
    out, lse = attention(spec(), random(1, 1, 2, 1), random(1, 1, 0, 1), random(1, 1, 0, 1))
    assert out.flatten().tolist() == [0.0, 0.0]
    assert lse.flatten().tolist() == [-INF, -INF]
    for batch, q_len in ((1, 0), (0, 3)):
        keys = random(batch, 1, 4, 1)
        out, lse = attention(spec(), random(batch, 1, q_len, 1), keys, keys)
        assert (out.shape, lse.shape) == ((batch, 1, q_len, 1), (batch, 1, q_len))


def test_kv_lens_hides_keys_and_moves_the_alignment() -> None:
    lengths = spec(mask="causal", kv_lens="per_batch")
    sizes = {"batch": 3, "q_heads": 1, "kv_heads": 1, "q_len": 2, "kv_len": 6}
    visible = mask(lengths, **sizes, kv_lens=torch.tensor([4, 1, 0]))
    assert visible_keys(visible) == [[0, 1, 2], [0, 1, 2, 3]]
    assert visible_keys(visible[1:]) == [[], [0]]
    assert visible_keys(visible[2:]) == [[], []]


def test_kv_lens_equals_shorter_tensors() -> None:
    q, k, v = random(2, 4, 3, 8), random(2, 2, 9, 8, seed=1), random(2, 2, 9, 8, seed=2)
    k[:, :, 7:], v[:, :, 7:] = NAN, NAN
    fields = {"head_dim": 8, "scale": "auto", "mask": "causal"}
    used = torch.tensor([7, 5])
    out, lse = attention(spec(kv_lens="per_batch", **fields), q, k, v, kv_lens=used)
    for b, length in enumerate(used.tolist()):
        one = slice(b, b + 1)
        expected = attention(spec(**fields), q[one], k[one, :, :length], v[one, :, :length])
        torch.testing.assert_close((out[one], lse[one]), expected)


# NaN and infinity.


def test_hidden_nan_does_not_leak_and_seen_nan_shows() -> None:
    q, k, v = random(1, 1, 4, 1), random(1, 1, 4, 1, seed=1), random(1, 1, 4, 1, seed=2)
    clean, clean_lse = attention(spec(mask="causal"), q, k, v)
    poisoned_v, poisoned_k = v.clone(), k.clone()
    poisoned_v[0, 0, 2], poisoned_k[0, 0, 2] = NAN, NAN
    for keys, values in ((k, poisoned_v), (poisoned_k, v), (poisoned_k, poisoned_v)):
        out, lse = attention(spec(mask="causal"), q, keys, values)
        assert torch.equal(out[0, 0, :2], clean[0, 0, :2])
        assert torch.equal(lse[0, 0, :2], clean_lse[0, 0, :2])
        assert bool(out[0, 0, 2:].isnan().all())
    assert torch.equal(attention(spec(mask="causal"), q, k, poisoned_v)[1], clean_lse)


def test_nan_reaches_only_its_own_element_of_a_value() -> None:
    q, k, v = random(1, 1, 1, 1), random(1, 1, 3, 1), random(1, 1, 3, 2)
    v[0, 0, 1, 0] = NAN
    out, _ = attention(spec(head_dim={"qk": 1, "v": 2}), q, k, v)
    assert out.isnan().flatten().tolist() == [True, False]


def test_infinite_values() -> None:
    q, k = column(1.0, 1.0, 1.0), column(0.0, 0.0, 0.0)
    out, _ = attention(spec(mask="causal"), q, k, column(1.0, INF, -INF))
    assert out[0, 0, 0, 0] == 1.0
    assert out[0, 0, 1, 0] == INF
    assert out[0, 0, 2, 0].isnan()


def test_nan_in_a_query_stays_in_its_row() -> None:
    q = column(1.0, NAN, 1.0)
    out, lse = attention(spec(), q, column(1.0, 2.0), column(1.0, 2.0))
    assert out.isnan().flatten().tolist() == [False, True, False]
    assert lse.isnan().flatten().tolist() == [False, True, False]


def test_a_score_that_is_nan_only_on_hidden_keys() -> None:
    logs = spec(mask="causal", score=[{"expr": "s + log(q - k + 1)"}])
    q, k, v = random(1, 1, 3, 1), random(1, 1, 3, 1, seed=1), random(1, 1, 3, 1, seed=2)
    assert bool(torch.isfinite(attention(logs, q, k, v)[0]).all())


def test_very_negative_logits_are_not_masked_ones() -> None:
    out, lse = attention(spec(), column(-448.0), column(1170.0), column(3.0))
    assert (out.item(), lse.item()) == (3.0, -448.0 * 1170.0)


def test_score_of_minus_infinity_hides_the_key() -> None:
    biased = spec(
        score=[{"bias": {"tensor": "x"}}], inputs={"x": {"shape": ["kv_len"], "dtype": "fp32"}}
    )
    q, k, v = column(1.0), column(1.0, 2.0), column(5.0, 7.0)
    out, lse = attention(biased, q, k, v, inputs={"x": torch.tensor([0.0, -INF])})
    assert (out.item(), lse.item()) == (5.0, 1.0)
    out, lse = attention(biased, q, k, v, inputs={"x": torch.tensor([-INF, -INF])})
    assert (out.item(), lse.item()) == (0.0, -INF)


# Scores.


def alibi() -> AttentionSpec:
    return spec(
        head_dim=4,
        mask="causal",
        score=[{"alibi": "slopes"}],
        inputs={"slopes": {"shape": ["q_heads"], "dtype": "fp32"}},
    )


def test_alibi_lowers_the_score_with_distance() -> None:
    zero = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    one_hot = torch.eye(4, dtype=torch.float64).expand(1, 2, 4, 4)
    slopes = torch.tensor([1.0, 0.5])
    weights, _ = attention(alibi(), zero, zero, one_hot, inputs={"slopes": slopes})
    distances = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    for head, slope in enumerate(slopes):
        torch.testing.assert_close(weights[0, head, 3], torch.softmax(-slope * distances, dim=0))


def test_alibi_of_a_decode_step_equals_the_last_row() -> None:
    q, k, v = random(1, 2, 64, 4), random(1, 2, 64, 4, seed=1), random(1, 2, 64, 4, seed=2)
    slopes = {"slopes": torch.tensor([0.5, 0.25])}
    out, lse = attention(alibi(), q, k, v, inputs=slopes)
    step, step_lse = attention(alibi(), q[:, :, 63:], k, v, inputs=slopes)
    torch.testing.assert_close(step, out[:, :, 63:])
    torch.testing.assert_close(step_lse, lse[:, :, 63:])


def test_score_items_act_in_order() -> None:
    q, k, v = random(1, 2, 3, 4), random(1, 2, 5, 4, seed=1), random(1, 2, 5, 4, seed=2)
    table = random(1, 2, 3, 5, seed=3)
    both = spec(
        head_dim=4,
        scale="auto",
        score=[{"softcap": 0.5}, {"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": "fp32"}},
    )
    out, lse = attention(both, q, k, v, inputs={"rel": table})
    scores = 0.5 * torch.tanh(q @ k.transpose(2, 3) / 2 / 0.5) + table  # the bias is not scaled
    torch.testing.assert_close(out, torch.softmax(scores, dim=3) @ v)
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=3))


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        (["q_len", "kv_len"], (3, 5)),
        (["kv_len"], (5,)),
        (["batch", 1, 1, "kv_len"], (2, 1, 1, 5)),
        ([1, "q_heads", "q_len", "kv_len"], (1, 2, 3, 5)),
    ],
)
def test_bias_shapes_align_from_the_right(shape: list[object], extents: tuple[int, ...]) -> None:
    q, k, v = random(2, 2, 3, 4), random(2, 2, 5, 4, seed=1), random(2, 2, 5, 4, seed=2)
    table = random(*extents, seed=3)
    fields = {"head_dim": 4, "score": [{"bias": {"tensor": "x"}}]}
    biased = spec(**fields, inputs={"x": {"shape": shape, "dtype": "fp32"}})
    out, _ = attention(biased, q, k, v, inputs={"x": table})
    torch.testing.assert_close(out, torch.softmax(q @ k.transpose(2, 3) + table, dim=3) @ v)


def test_a_large_negative_bias_in_bf16_equals_a_mask() -> None:
    q, k, v = random(1, 1, 4, 4), random(1, 1, 4, 4, seed=1), random(1, 1, 4, 4, seed=2)
    hidden = torch.ones(4, 4).triu(1).bool()
    table = torch.zeros(4, 4, dtype=torch.bfloat16)
    table[hidden] = torch.finfo(torch.bfloat16).min
    biased = spec(
        head_dim=4,
        score=[{"bias": {"tensor": "x"}}],
        inputs={"x": {"shape": ["q_len", "kv_len"], "dtype": "bf16"}},
    )
    expected = attention(spec(head_dim=4, mask="causal"), q, k, v)
    torch.testing.assert_close(attention(biased, q, k, v, inputs={"x": table}), expected)


# Against torch in fp64.


@pytest.mark.parametrize("kv_heads", [12, 4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch(kv_heads: int, causal: bool) -> None:
    q, k, v = (
        random(2, 12, 7, 8),
        random(2, kv_heads, 11, 8, seed=1),
        random(2, kv_heads, 11, 5, seed=2),
    )
    same = spec(
        head_dim={"qk": 8, "v": 5},
        scale="auto",
        mask="causal" if causal else [],
        align="top_left",  # what torch's is_causal means
    )
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(attention(same, q, k, v)[0], expected, rtol=1e-12, atol=1e-12)


def test_layouts_and_blocks_change_nothing() -> None:
    q, k, v = random(2, 6, 9, 8), random(2, 3, 13, 8, seed=1), random(2, 3, 13, 8, seed=2)
    fields = {
        "head_dim": 8,
        "mask": ["causal", {"window": {"left": 4}}],
        "score": [{"softcap": 2.0}],
    }
    out, lse = attention(spec(**fields), q, k, v)
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    bshd_out, bshd_lse = attention(spec(**fields, layout="bshd"), *turned)
    torch.testing.assert_close((bshd_out.transpose(1, 2), bshd_lse), (out, lse))
    for chunk in (1, 4, 100):
        torch.testing.assert_close(attention(spec(**fields), q, k, v, chunk=chunk), (out, lse))
    rows = range(3, 8)
    some = attention(spec(**fields), q, k, v, rows=rows, chunk=2)
    torch.testing.assert_close(some, (out[:, :, 3:8], lse[:, :, 3:8]))


def test_many_batches_go_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random(5, 2, 3, 4), random(5, 2, 6, 4, seed=1), random(5, 2, 6, 4, seed=2)
    per_batch = spec(
        head_dim=4,
        kv_lens="per_batch",
        mask=[{"expr": "k >= first[b]"}],
        inputs={"first": {"shape": ["batch"], "dtype": "int32"}},
    )
    given = {
        "inputs": {"first": torch.tensor([0, 1, 2, 3, 4])},
        "kv_lens": torch.tensor([6, 5, 4, 3, 2]),
    }
    whole = attention(per_batch, q, k, v, **given)
    monkeypatch.setattr("flashgen.reference.BLOCK_SCORES", 24)
    torch.testing.assert_close(attention(per_batch, q, k, v, **given), whole)
    assert bool((whole[1][3:] == -INF).all())


# Eager.


@pytest.mark.parametrize(
    ("dtype", "error"), [("fp32", 1e-6), ("tf32", 1e-2), ("fp16", 5e-3), ("bf16", 4e-2)]
)
def test_eager_errs_as_its_dtype_does(dtype: str, error: float) -> None:
    fields = {"head_dim": 16, "dtype": dtype, "scale": "auto", "mask": "causal"}
    stored = {"tf32": "fp32"}.get(dtype, dtype)
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[stored]
    q, k, v = (random(2, 4, 33, 16, seed=seed).to(torch_dtype) for seed in range(3))
    exact, exact_lse = attention(spec(**fields), q, k, v)
    out, lse = eager(spec(**fields), q, k, v)
    assert (out.dtype, lse.dtype) == (torch_dtype, torch.float32)
    worst = float((out.double() - exact).abs().max())
    assert error / 1000 < worst < error
    assert float((lse.double() - exact_lse).abs().max()) < error


def test_eager_keeps_hidden_nan_out() -> None:
    q, k, v = (random(1, 1, 4, 8, seed=seed).to(torch.bfloat16) for seed in range(3))
    v[0, 0, 3] = NAN
    out, _ = eager(spec(head_dim=8, dtype="bf16", mask="causal"), q, k, v)
    assert out.isnan().any(dim=3).flatten().tolist() == [False, False, False, True]


def test_eager_in_fp32_ignores_the_process_wide_precision() -> None:
    q, k, v = (random(1, 1, 4, 8, seed=seed).float() for seed in range(3))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        out, _ = eager(spec(head_dim=8), q, k, v)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(out, eager(spec(head_dim=8), q, k, v)[0], rtol=0, atol=0)


# Refusals.


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"kv_cache": {"paged": {"page_size": 16}}}, "paged"),
        ({"layout": "packed"}, "packed"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_is_not_served(fields: dict[str, object], feature: str) -> None:
    with pytest.raises(NotServedError, match=feature):
        attention(spec(**fields), column(1.0), column(1.0), column(1.0))


def test_wrong_arguments_are_named() -> None:
    one = column(1.0)
    with pytest.raises(TensorError, match=r"^q: got shape"):
        attention(spec(head_dim=2), one, one, one)
    with pytest.raises(TensorError, match=r"^k, v: got shapes"):
        attention(spec(), one, one, column(1.0, 2.0))
    with pytest.raises(TensorError, match=r"^k: got 2 heads for 33 query heads"):
        attention(spec(), random(1, 33, 1, 1), random(1, 2, 1, 1), random(1, 2, 1, 1))
    with pytest.raises(TensorError, match=r"^k: got 1 heads for 4 query heads"):
        attention(spec(heads={"group": 2}), random(1, 4, 1, 1), random(1, 1, 1, 1), one)
    with pytest.raises(TensorError, match=r"^sink: got nothing"):
        attention(spec(sink="per_head"), one, one, one)
    with pytest.raises(TensorError, match=r"^sink: got a tensor"):
        attention(spec(), one, one, one, sink=torch.zeros(1))
    with pytest.raises(TensorError, match=r"^sink: got shape"):
        attention(spec(sink="per_head"), one, one, one, sink=torch.zeros(2))
    with pytest.raises(TensorError, match=r"^kv_lens: got nothing"):
        attention(spec(kv_lens="per_batch"), one, one, one)
    with pytest.raises(TensorError, match=r"^kv_lens: got \[2\]"):
        attention(spec(kv_lens="per_batch"), one, one, one, kv_lens=torch.tensor([2]))
    with pytest.raises(TensorError, match=r"^slopes: got nothing"):
        attention(alibi(), random(1, 1, 1, 4), random(1, 1, 1, 4), random(1, 1, 1, 4))
    with pytest.raises(TensorError, match=r"^slopes: got shape \[2\], expected shape \[1\]"):
        given = {"slopes": torch.zeros(2)}
        attention(alibi(), random(1, 1, 1, 4), random(1, 1, 1, 4), random(1, 1, 1, 4), inputs=given)
    with pytest.raises(TensorError, match=r"^other: got an argument"):
        attention(spec(), one, one, one, inputs={"other": torch.zeros(1)})
