"""dtypes, fingerprint, problem, and what importing the spec language costs."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from flashgen.dtypes import DTYPES, INPUT_DTYPES, MATMUL_DTYPES, OUTPUT_DTYPES, get_dtype
from flashgen.fingerprint import canonical_json, fingerprint
from flashgen.problem import Problem, padded_dim
from flashgen.spec import AttentionSpec
from flashgen.target import TARGETS


def test_every_dtype_has_one_row() -> None:
    assert set(DTYPES) == {*MATMUL_DTYPES, *OUTPUT_DTYPES, *INPUT_DTYPES}
    assert all(name == dtype.name for name, dtype in DTYPES.items())
    assert {name: dtype.bytes for name, dtype in DTYPES.items()} == {
        "fp32": 4,
        "tf32": 4,
        "fp16": 2,
        "bf16": 2,
        "fp8_e4m3": 1,
        "int32": 4,
        "int64": 8,
        "bool": 1,
    }


def test_matmul_operands_accumulate_in_fp32() -> None:
    assert all(DTYPES[name].accumulates == "fp32" for name in MATMUL_DTYPES)
    assert get_dtype("int32").accumulates is None
    with pytest.raises(KeyError):
        get_dtype("fp64")


def test_torch_and_triton_know_the_names() -> None:
    torch = pytest.importorskip("torch")
    language = pytest.importorskip("triton.language")
    for dtype in DTYPES.values():
        assert getattr(torch, dtype.torch_name).itemsize == dtype.bytes
        assert hasattr(language, dtype.triton_name)


def test_fingerprint_is_of_content() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "ß"]}) == '{"a":[1.5,null,"\\u00df"],"b":1}'
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.0})
    # The SHA-256 of "{}", as any other tool gives it.
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    with pytest.raises(ValueError, match="JSON"):
        fingerprint(float("nan"))


@pytest.mark.parametrize(
    ("extent", "padded"),
    [(1, 16), (16, 16), (17, 32), (31, 32), (72, 128), (256, 256), (513, 1024)],
)
def test_padded_dim(extent: int, padded: int) -> None:
    assert padded_dim(extent) == padded


def test_problem_speaks_the_vocabulary_of_kernels() -> None:
    spec = AttentionSpec(
        head_dim={"qk": 192, "v": 80}, dtype={"q": "bf16", "kv": "fp8_e4m3", "out": "fp32"}
    )
    problem = Problem(spec, TARGETS["nvidia-h200"])
    assert (problem.head_dim_qk, problem.head_dim_v) == (192, 80)
    assert (problem.head_dim_qk_padded, problem.head_dim_v_padded) == (256, 128)
    assert (problem.elem_bytes, problem.kv_elem_bytes, problem.out_elem_bytes) == (2, 1, 4)
    assert problem.gqa_group is None
    assert problem.softmax_scale == 1 / math.sqrt(192)
    assert problem.name == spec.display_name
    assert problem == Problem(spec.replace(), TARGETS["nvidia-h200"])
    assert hash(problem) == hash(Problem(spec.replace(), TARGETS["nvidia-h200"]))


def test_reading_a_spec_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from flashgen.spec.parse import parse_spec\n"
        "spec = parse_spec('flashgen: 1\\nname: x\\nhead_dim: 64\\ndtype: bf16\\n"
        "mask: {expr: k <= q}\\n')\n"
        "spec.fingerprint, spec.to_yaml(), spec.warnings()\n"
        "heavy = {'torch', 'triton', 'sympy', 'networkx', 'jinja2', 'numpy', 'optuna'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout.strip()
    assert printed == "[]"
