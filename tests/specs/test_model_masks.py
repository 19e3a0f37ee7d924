"""Each spec against its model's own definition, restated here from the source the spec names.

Windows are checked where they end: the last rows of a sequence a little longer than the window.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashgen.reference import attention, mask
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec

SPECS = Path(__file__).parents[2] / "specs"


def spec_of(name: str) -> AttentionSpec:
    return load_spec(SPECS / f"{name}.yaml")


def visible(name: str, q_len: int, kv_len: int, batch: int = 1, **inputs: Tensor) -> Tensor:
    """[q_len, kv_len] of the first head ([batch, q_len, kv_len] for more than one batch)."""
    spec = spec_of(name)
    heads = {"q_heads": spec.shapes[0].q_heads, "kv_heads": spec.shapes[0].kv_heads}
    result = mask(spec, batch=batch, q_len=q_len, kv_len=kv_len, inputs=inputs, **heads)
    assert torch.equal(result, result[:, :1].expand_as(result))  # none depends on the head
    return result[0, 0] if batch == 1 else result[:, 0]


def positions(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Queries are the last of the sequence, as in a chunk of a prefill or a decode step."""
    return torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)[None, :]


# name -> the most keys that a query sees, its own included
MOST_KEYS = {
    "mistral_7b": 4096,
    "gemma2_local": 4096,
    "gemma2_27b_local": 4096,
    "gemma3_local": 1024,
    "gpt_oss_local": 128,
    "modernbert_local": 129,
    "llama4_chunked": 8192,
}


@pytest.mark.parametrize(("name", "most"), MOST_KEYS.items())
def test_most_keys_a_query_sees(name: str, most: int) -> None:
    inputs = {"doc": torch.zeros(1, 9000, dtype=torch.int32)} if name == "modernbert_local" else {}
    seen = visible(name, 900, 9000, **inputs)
    assert int(seen.sum(dim=1).max()) == most
    assert bool(seen.diagonal(9000 - 900).all())  # a query always sees its own key


def test_mistral_decodes_from_a_ring_of_4096_slots() -> None:
    # mistral-inference: position p is written to slot p % 4096; a step reads every slot.
    ring: dict[int, int] = {}
    for position in range(4100):
        ring[position % 4096] = position
    seen = visible("mistral_7b", 1, 4100)[0]
    assert seen.nonzero().flatten().tolist() == sorted(ring.values())


@pytest.mark.parametrize(
    ("name", "window"),
    [("mistral_7b", 4096), ("gemma2_local", 4096), ("gemma3_local", 1024), ("gpt_oss_local", 128)],
)
def test_causal_windows_of_transformers(name: str, window: int) -> None:
    q, k = positions(40, window + 20)
    assert torch.equal(visible(name, 40, window + 20), (k > q - window) & (k <= q))


@pytest.mark.parametrize(
    ("name", "window"),
    [("gemma2_local", 4096), ("gemma2_27b_local", 4096), ("gpt_oss_local", 128)],
)
def test_windows_as_an_added_band(name: str, window: int) -> None:
    # gemma_pytorch (Gemma 2) and gpt-oss: -inf above the diagonal, and from `window` below it on.
    length = window + 20
    added = torch.full((length, length), -math.inf).triu(1)
    added += torch.full((length, length), -math.inf).tril(-window)
    assert torch.equal(visible(name, 40, length), added[-40:] == 0)


def test_gemma3_keeps_a_band() -> None:
    length = 1044  # gemma3_model.py: ones from 1,023 below the diagonal upwards, and causal
    kept = torch.ones(length, length).triu(-1023).bool() & torch.ones(length, length).tril().bool()
    assert torch.equal(visible("gemma3_local", length, length), kept)


def test_modernbert_local() -> None:
    lengths = [70, 1, 200, 29]  # documents in one row
    doc = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).int()[None]
    half = 128 // 2  # the model halves local_attention
    expected = torch.zeros(300, 300, dtype=torch.bool)
    start = 0
    for length in lengths:
        for q in range(length):  # its window in its own document, both ends included
            first, last = max(q - half, 0), min(q + half, length - 1)
            expected[start + q, start + first : start + last + 1] = True
        start += length
    assert torch.equal(visible("modernbert_local", 300, 300, doc=doc), expected)
    whole = torch.block_diag(*[torch.ones(length, length) for length in lengths]).bool()
    assert torch.equal(visible("modernbert_global", 300, 300, doc=doc), whole)


def test_llama4_chunks() -> None:
    q, k = positions(30, 8210)  # rows 8180 … 8209: the chunk ends after 8191
    expected = ((q // 8192 - k // 8192).abs() == 0) & (k - q <= 0)
    assert torch.equal(visible("llama4_chunked", 30, 8210), expected)
    counts = expected.sum(dim=1)
    assert counts[11] == 8192
    assert counts[12] == 1  # position 8192 sees itself alone


def test_paligemma_prefix() -> None:
    prefix = torch.tensor([5, 0, 9], dtype=torch.int32)
    ahead = (torch.arange(9)[None, :] >= prefix[:, None]).int()  # big_vision: mask_ar
    group = ahead.cumsum(dim=1)
    expected = group[:, None, :] <= group[:, :, None]
    assert torch.equal(visible("paligemma", 9, 9, batch=3, prefix=prefix), expected)
    # transformers: causal, or both tokens of type 0.
    first = torch.arange(9)[None, :] < prefix[:, None]
    either = torch.ones(9, 9).tril().bool() | (first[:, None, :] & first[:, :, None])
    assert torch.equal(expected, either)


def test_sparse_transformer_strided() -> None:
    length, stride = 700, 128
    local = torch.ones(length, length).tril().triu(-(stride - 1)).bool()
    q, k = positions(length, length)
    strided = (q >= k) & ((q - k).remainder(stride) == 0)
    seen = visible("sparse_transformer_strided", length, length)
    assert torch.equal(seen, local | strided)
    rows = torch.arange(length)
    assert torch.equal(seen.sum(dim=1), (rows + 1).clamp(max=128) + rows // 128)


def test_block_dilated() -> None:
    length = 640
    expected = torch.zeros(length, length, dtype=torch.bool)
    for block in range(10):
        for other in range(block, -1, -4):
            rows, columns = (slice(64 * i, 64 * i + 64) for i in (block, other))
            expected[rows, columns] = True
    expected &= torch.ones(length, length).tril().bool()
    assert torch.equal(visible("block_dilated", length, length), expected)


@pytest.mark.parametrize(
    "name", ["llama3_8b", "gpt2", "gemma2_global", "qwen_27b", "gpt_oss_global"]
)
def test_plain_causal(name: str) -> None:
    assert torch.equal(visible(name, 50, 50), torch.ones(50, 50).tril().bool())
    assert bool(visible(name, 1, 50).all())  # a decode step sees the whole cache


def test_no_mask() -> None:
    assert bool(visible("siglip_so400m", 30, 30).all())
    assert bool(visible("whisper_cross", 5, 30).all())
    assert bool(visible("whisper_cross", 30, 5).all())


# Scales and scores.


def test_scales() -> None:
    assert spec_of("gemma2_27b_local").softmax_scale == pytest.approx(
        (4608 / 32) ** -0.5, rel=1e-15
    )
    assert spec_of("gemma2_local").softmax_scale == 256**-0.5
    yarn = 0.1 * 1.0 * math.log(40) + 1.0
    assert spec_of("deepseek_v3_prefill").softmax_scale == pytest.approx(
        192**-0.5 * yarn * yarn, rel=1e-15
    )
    assert spec_of("t5_encoder").softmax_scale == 1.0
    # Whisper scales q and k, each by head_dim ** -0.25.
    assert spec_of("whisper_cross").softmax_scale == pytest.approx((64**-0.25) ** 2, rel=1e-15)


def qkv(name: str, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    spec = spec_of(name)
    generator = torch.Generator().manual_seed(6)
    q_heads, kv_heads = spec.shapes[0].q_heads, spec.shapes[0].kv_heads
    q, k, v = (
        torch.randn(1, heads, length, head_dim, generator=generator, dtype=torch.float64)
        for heads, length, head_dim in (
            (q_heads, q_len, spec.head_dim.qk),
            (kv_heads, kv_len, spec.head_dim.qk),
            (kv_heads, kv_len, spec.head_dim.v),
        )
    )
    return q, k, v


def hidden_future(length: int) -> Tensor:
    return torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)


def slopes(heads: int) -> Tensor:
    """Of a power of two of heads, where BLOOM and MPT agree."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


@pytest.mark.parametrize(
    ("name", "key_bias"),
    [
        ("bloom_7b1", lambda k, length: k),  # slope * position of the key
        ("mpt_7b", lambda k, length: k - (length - 1)),  # slope * (key - last key)
    ],
)
def test_alibi_of_bloom_and_mpt(name: str, key_bias: object) -> None:
    assert callable(key_bias)
    length, heads = 20, 32
    q, k, v = qkv(name, length, length)
    slope = slopes(heads)
    bias = slope.view(heads, 1, 1) * key_bias(torch.arange(length, dtype=torch.float64), length)
    scores = q @ k.transpose(2, 3) / math.sqrt(128) + bias + hidden_future(length)
    out, lse = attention(spec_of(name), q, k, v, inputs={"slopes": slope})
    torch.testing.assert_close(out, torch.softmax(scores, dim=3) @ v)
    # The models' scores are higher by one number in each row: that of the query's own position.
    own = slope.view(heads, 1) * key_bias(torch.arange(length, dtype=torch.float64), length)
    torch.testing.assert_close(lse + own, torch.logsumexp(scores, dim=3))


def test_softcap_of_gemma2() -> None:
    q, k, v = qkv("gemma2_global", 12, 12)
    q = q * 30  # scores large enough for the cap to bend them
    scores = (q * 256**-0.5) @ k.repeat_interleave(2, dim=1).transpose(2, 3)
    scores = torch.tanh(scores / 50.0) * 50.0 + hidden_future(12)
    out, _ = attention(spec_of("gemma2_global"), q, k, v)
    torch.testing.assert_close(out, torch.softmax(scores, dim=3) @ v.repeat_interleave(2, dim=1))


def test_sinks_of_gpt_oss() -> None:
    q, k, v = qkv("gpt_oss_local", 140, 140)
    sinks = torch.linspace(-2, 3, 64, dtype=torch.float64)
    # gpt_oss/torch/model.py: the sink is one more column, dropped after the softmax.
    scores = q @ k.repeat_interleave(8, dim=1).transpose(2, 3) / math.sqrt(64)
    scores = scores + hidden_future(140)
    scores = scores + torch.full((140, 140), -math.inf, dtype=torch.float64).tril(-128)
    with_sink = torch.cat([scores, sinks.view(1, 64, 1, 1).expand(1, 64, 140, 1)], dim=3)
    expected = torch.softmax(with_sink, dim=3)[..., :-1] @ v.repeat_interleave(8, dim=1)
    out, _ = attention(spec_of("gpt_oss_local"), q, k, v, sink=sinks)
    torch.testing.assert_close(out, expected)


def t5_bucket(distance: int) -> int:
    """Of key minus query, bidirectional, 32 buckets, 128 the distance from which one is shared."""
    side = 16 if distance > 0 else 0
    distance = abs(distance)
    if distance < 8:
        return side + distance
    return side + min(8 + int(math.log(distance / 8) / math.log(128 / 8) * 8), 15)


def test_relative_bias_of_t5() -> None:
    length, heads = 300, 12
    learned = torch.randn(32, heads, generator=torch.Generator().manual_seed(7))
    bucket = torch.tensor([[t5_bucket(k - q) for k in range(length)] for q in range(length)])
    bias = learned[bucket].permute(2, 0, 1)[None]  # [1, heads, q_len, kv_len]
    q, k, v = (t * 0.3 for t in qkv("t5_encoder", length, length))
    out, lse = attention(spec_of("t5_encoder"), q, k, v, inputs={"position_bias": bias})
    expected = torch.softmax(q @ k.transpose(2, 3) + bias, dim=3) @ v
    torch.testing.assert_close(out, expected)
    table = torch.stack([learned[t5_bucket(d)] for d in range(-128, 129)], dim=1)
    looked_up = attention(spec_of("t5_encoder_table"), q, k, v, inputs={"by_distance": table})
    torch.testing.assert_close(looked_up, (out, lse))


def test_head_dims_and_groups() -> None:
    figures = {
        name: (spec.head_dim.qk, spec.head_dim.v, spec.heads.group)
        for name, spec in ((path.stem, load_spec(path)) for path in SPECS.glob("*.yaml"))
    }
    assert figures["llama3_8b"] == (4096 // 32, 4096 // 32, 32 // 8)
    assert figures["mistral_7b"] == (128, 128, 32 // 8)
    assert figures["gpt2"] == (768 // 12, 64, 1)
    assert figures["bloom_7b1"] == figures["mpt_7b"] == (4096 // 32, 128, 1)
    assert figures["gpt_oss_local"] == figures["gpt_oss_global"] == (64, 64, 64 // 8)
    assert figures["qwen_27b"] == (256, 256, 24 // 4)
    assert figures["paligemma"] == (256, 256, 8)
    assert figures["siglip_so400m"] == (1152 // 16, 72, 1)
    assert figures["deepseek_v3_prefill"] == (128 + 64, 128, 1)
    assert figures["llama4_chunked"] == (128, 128, 40 // 8)
    assert figures["whisper_cross"] == (1280 // 20, 64, 1)
