"""Arguments of the public functions that are no spec, GPU, schedule, shape, folder or device."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen import AttentionSpec, FlashgenError, Schedule, reference
from flashgen.compiler import compare
from flashgen.spec.model import HeadDim, Window
from flashgen.spec.parts import Shape

SPEC = AttentionSpec(name="plain", head_dim=16, dtype="fp16")
SCHEDULE = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1}
NOT_SPECS: dict[str, Any] = {"none": None, "fields": SPEC.canonical(), "name": "llama3_8b"}
FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "build": lambda spec: flashgen.build(spec, "unused"),
    "compile": flashgen.compile,
    "verify": flashgen.verify,
    "explain": flashgen.explain,
    "compare": compare,
}
CALLS: dict[str, Callable[[], object]] = {
    **{
        f"spec-{function}-{kind}": lambda call=call, value=value: call(value)
        for function, call in FUNCTIONS.items()
        for kind, value in NOT_SPECS.items()
    },
    "target-number": lambda: flashgen.compile(SPEC, target=90),  # type: ignore[arg-type]
    "target-empty": lambda: flashgen.explain(SPEC, target=""),
    "target-list": lambda: flashgen.verify(SPEC, target=["nvidia-h200"]),  # type: ignore[arg-type]
    "schedule-text": lambda: flashgen.compile(SPEC, schedule="fast"),  # type: ignore[arg-type]
    "schedule-dict": lambda: flashgen.build(SPEC, "unused", schedule=SCHEDULE),  # type: ignore[arg-type]
    "schedule-zero": lambda: flashgen.verify(SPEC, schedule=Schedule(**{**SCHEDULE, "block_m": 0})),
    "out-none": lambda: flashgen.build(SPEC, None),  # type: ignore[arg-type]
    "out-empty": lambda: flashgen.build(SPEC, ""),
    "kernels": lambda: flashgen.build(SPEC, "unused", kernels="some"),  # type: ignore[arg-type]
    "device-unknown": lambda: flashgen.verify(SPEC, device="gpu"),
    "device-meta": lambda: flashgen.verify(SPEC, device="meta"),
    "shapes-number": lambda: flashgen.verify(SPEC, shapes=5),  # type: ignore[arg-type]
    "shapes-empty": lambda: flashgen.verify(SPEC, shapes=[]),
    "shapes-tuples": lambda: flashgen.verify(SPEC, shapes=[(1, 1, 1, 8, 8)]),  # type: ignore[list-item]
    "shape-number": lambda: flashgen.explain(SPEC, shape=5),  # type: ignore[arg-type]
    "parse-none": lambda: flashgen.parse_spec(None),  # type: ignore[arg-type]
    "parse-bytes": lambda: flashgen.parse_spec(b"flashgen: 1"),  # type: ignore[arg-type]
    "load-none": lambda: flashgen.load_spec(None),  # type: ignore[arg-type]
    "load-empty": lambda: flashgen.load_spec(""),
    "scale-400-digits": lambda: AttentionSpec(head_dim=16, dtype="fp16", scale=10**400),
    "scale-fraction": lambda: AttentionSpec(head_dim=16, dtype="fp16", scale=Fraction(10**400)),
    "scale-inf": lambda: AttentionSpec(head_dim=16, dtype="fp16", scale=float("inf")),
    "scale-numpy-nan": lambda: AttentionSpec(head_dim=16, dtype="fp16", scale=np.float32("nan")),
    "softcap-nan": lambda: AttentionSpec(
        head_dim=16, dtype="fp16", score={"softcap": float("nan")}
    ),
    "softcap-complex": lambda: AttentionSpec(head_dim=16, dtype="fp16", score={"softcap": 1j}),
    "dropout-400-digits": lambda: AttentionSpec(head_dim=16, dtype="fp16", dropout=10**400),
    "head-dim-tensor": lambda: AttentionSpec(head_dim=torch.tensor(64), dtype="fp16"),
    "head-dim-numpy-bool": lambda: AttentionSpec(head_dim=np.True_, dtype="fp16"),
}


@pytest.mark.parametrize("name", CALLS)
def test_unfit_arguments(
    name: str, golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlashgenError) as raised:
        CALLS[name]()
    golden(f"errors/argument-{name}.txt", str(raised.value))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_spec_file(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(FlashgenError) as raised:
        flashgen.load_spec(tmp_path)
    golden("errors/argument-load-folder.txt", str(raised.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("count", [0, 2])
def test_a_gpu_that_is_not_there(
    count: int, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(FlashgenError) as raised:
        flashgen.verify(SPEC, device="cuda:3")
    golden(f"errors/argument-device-absent-{count}.txt", str(raised.value))


@pytest.mark.parametrize("integer", [np.int64(64), np.uint8(64), np.array(64)[()]])
def test_whole_numbers_of_numpy(integer: Any) -> None:
    spec = AttentionSpec(
        head_dim=integer,
        dtype="fp16",
        mask=[{"window": {"left": integer}}],
        shapes=[
            {**dict.fromkeys(("batch", "q_heads", "kv_heads"), 1), "q_len": 5, "kv_len": integer}
        ],
    )
    assert spec.head_dim == HeadDim(64, 64)
    assert spec.mask == (Window(left=64),)
    assert spec.shapes == (Shape(1, 1, 1, 5, 64),)
    assert (
        spec.fingerprint == spec.replace(head_dim=64, mask=[{"window": {"left": 64}}]).fingerprint
    )


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)]
)
def test_numbers_of_other_libraries(number: Any) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp16", scale=number, score={"softcap": number})
    assert spec == AttentionSpec(head_dim=16, dtype="fp16", scale=0.5, score={"softcap": 0.5})
    assert type(spec.scale) is float


def test_booleans_of_numpy() -> None:
    assert AttentionSpec(head_dim=16, dtype="fp16", deterministic=np.False_).deterministic is False


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
@pytest.mark.parametrize("kv_len", [1, 32, 33, 200])
def test_a_single_tile_serves_no_more_keys_than_it_holds(kv_len: int) -> None:
    """Longer ones get the usual schedule: they were cut after 32 keys."""
    one_tile = Schedule(kernel="single_tile", block_m=16, block_n=32, num_warps=4, num_stages=1)
    q, k, v = (torch.randn(1, 1, length, 16).half() for length in (9, kv_len, kv_len))
    attend = flashgen.compile(SPEC, target="nvidia-h200", schedule=one_tile)
    expected, _ = reference.attention(SPEC, q, k, v)
    torch.testing.assert_close(attend(q, k, v).double(), expected, atol=2e-3, rtol=0)
