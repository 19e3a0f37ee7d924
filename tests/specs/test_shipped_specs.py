"""Every spec of specs/: well formed, described, told apart, and computed by the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.reference import attention, compare, eager, torch_dtype
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import load_spec, parse_spec

SPECS = Path(__file__).parents[2] / "specs"
FILES = sorted(SPECS.glob("*.yaml"))
WANTED = [
    "block_dilated",
    "bloom_7b1",
    "deepseek_v3_prefill",
    "gemma2_27b_local",
    "gemma2_global",
    "gemma2_local",
    "gemma3_local",
    "gpt2",
    "gpt_oss_global",
    "gpt_oss_local",
    "llama3_8b",
    "llama4_chunked",
    "mistral_7b",
    "modernbert_global",
    "modernbert_local",
    "mpt_7b",
    "paligemma",
    "qwen_27b",
    "siglip_so400m",
    "sparse_transformer_strided",
    "t5_encoder",
    "t5_encoder_table",
    "whisper_cross",
]


def test_the_specs_that_models_need_are_there() -> None:
    assert [file.stem for file in FILES] == WANTED
    assert [path.name for path in SPECS.iterdir() if path.suffix != ".yaml"] == ["README.md"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_spec(file: Path) -> None:
    spec = load_spec(file)
    assert spec.name == file.stem
    assert spec.warnings() == ()
    assert spec.description
    assert parse_spec(spec.to_yaml()) == spec
    assert file.read_text().startswith("# ")  # what model, and where its figures are from
    assert spec.shapes
    for shape in spec.shapes:
        assert spec.heads.group in {None, shape.q_heads // shape.kv_heads}


def test_no_two_specs_are_the_same() -> None:
    fingerprints = {load_spec(file).fingerprint for file in FILES}
    assert len(fingerprints) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_readme_names_every_spec(file: Path) -> None:
    rows = [line for line in (SPECS / "README.md").read_text().splitlines() if line[:3] == "| `"]
    assert sum(f"| `{file.stem}` |" in row for row in rows) == 1
    assert len(rows) == len(FILES)


def inputs_of(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Some values for each declared input: small, and sorted where they are whole numbers."""
    made = {}
    for declared in spec.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in declared.shape]
        values = torch.rand(shape, generator=torch.Generator().manual_seed(4))
        if declared.dtype == "int32":
            values = (values * 4).sort(dim=-1).values.floor()
        made[declared.name] = values.to(torch_dtype(declared.dtype))
    return made


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_eager_agrees_with_the_oracle(file: Path) -> None:
    spec = load_spec(file)
    sizes = {
        "batch": 2,
        "q_heads": spec.shapes[0].q_heads,
        "kv_heads": spec.shapes[0].kv_heads,
        "q_len": 5,
        "kv_len": 9,
    }
    generator = torch.Generator().manual_seed(5)

    def random(heads: str, length: str, head_dim: int) -> torch.Tensor:
        shape = (2, sizes[heads], sizes[length], head_dim)
        return torch.randn(shape, generator=generator).to(torch_dtype(spec.dtype.q))

    qkv = (
        random("q_heads", "q_len", spec.head_dim.qk),
        random("kv_heads", "kv_len", spec.head_dim.qk),
        random("kv_heads", "kv_len", spec.head_dim.v),
    )
    sink = torch.linspace(-1, 1, sizes["q_heads"]) if spec.sink == "per_head" else None
    inputs = inputs_of(spec, sizes)
    out, lse = attention(spec, *qkv, inputs=inputs, sink=sink)
    usual, usual_lse = eager(spec, *qkv, inputs=inputs, sink=sink)
    result = compare(usual, usual_lse, out, lse, usual, eager_lse=usual_lse, sink=sink)
    assert result.ok, str(result)
    assert 0 < result.max_error < 0.1
    assert bool(torch.isfinite(out).all())
