"""Groups 14 and 15: caches, threads, plans, and what a spec may not say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from asked import TILE, oracle, randn, schedule

from flashgen import pipeline
from flashgen.compiler.choose import compile as compile_spec
from flashgen.compiler.choose import plan
from flashgen.errors import FlashgenWarning, SpecError, TensorError
from flashgen.runtime import said
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parse import parse_spec
from flashgen.target import get_target

SPEC = AttentionSpec(name="cached", head_dim=16, dtype="fp32", mask=["causal"])
H200 = get_target("nvidia-h200")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has said nothing yet."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    said.forget()
    return tmp_path


def call_is_right(spec: AttentionSpec = SPEC) -> None:
    q, k, v = (randn(1, 2, 8, 16, seed=n) for n in range(3))
    out = compile_spec(spec, schedule=schedule(TILE))(q, k, v)
    assert torch.allclose(out.double(), oracle(spec, q, k, v)[0], atol=1e-5)


@pytest.mark.parametrize("content", ["{", "", "[]", '{"version": 99}', None])
@pytest.mark.parametrize("name", ["plan.json", "kernel.py"])
def test_c5_a_damaged_cache_is_rebuilt_and_said(
    name: str, content: str | None, cache: Path
) -> None:
    call_is_right()
    (path,) = cache.glob(f"kernels/*/{name}")
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2] if content is None else content)
    said.forget()
    with pytest.warns(FlashgenWarning, match="it is rebuilt"):
        call_is_right()
    assert path.read_text() == whole
    call_is_right()


def test_c7_c8_one_entry_for_each_dtype_target_and_schedule(cache: Path) -> None:
    specs = [SPEC, SPEC.replace(dtype="fp16"), SPEC.replace(dtype="tf32"), SPEC.replace(scale=0.5)]
    targets = [H200, get_target("nvidia-l4"), get_target("nvidia-rtx-4090")]
    folders = {
        plan(spec, target, schedule=chosen, has_lse=has_lse)[1].parent
        for spec in specs
        for target in targets
        for chosen in (schedule(TILE), schedule(("loop", 16, 16)))
        for has_lse in (True, False)
    }
    assert len(folders) == 4 * 3 * 2 * 2
    assert {folder.name for folder in folders} == {
        p.parent.name for p in cache.glob("kernels/*/kernel.py")
    }


def test_c3_threads_of_a_first_call_build_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    plain = pipeline.generate

    def noted(*args: object, **options: object) -> object:
        built.append("plan")
        return plain(*args, **options)

    monkeypatch.setattr(pipeline, "generate", noted)
    kernel = compile_spec(SPEC, schedule=schedule(TILE))
    q, k, v = (randn(1, 1, 8, 16, seed=n) for n in range(3))
    with pytest.warns(FlashgenWarning), ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: kernel(q, k, v), range(8)))
    assert built == ["plan"]
    assert all(torch.equal(result, results[0]) for result in results)


def test_c16_lengths_share_one_plan(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_spec(SPEC)
    for length in (33, 25, 19, 12, 5):
        x = randn(1, 1, length, 16)
        kernel(x, x, x)
    assert len(list(cache.glob("kernels/*"))) == 1


def test_u14_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be: works, and says so once."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file"))
    said.forget()
    with pytest.warns(FlashgenWarning) as warnings:
        call_is_right()
        call_is_right(SPEC.replace(scale=0.25))
    about = [
        str(w.message) for w in warnings if "the kernel cache cannot be written" in str(w.message)
    ]
    assert len(about) == 1
    assert "FLASHGEN_CACHE_DIR" in about[0]


# ---- group 15: specs -----------------------------------------------------------------------------

HEAD = "flashgen: 1\nname: x\n"


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("head_dim: 64\ndtype: bf16\nmask: causal\nmask: causal\n", 6, "mask"),
        ('head_dim: "64"\ndtype: bf16\n', 3, "head_dim"),
        ("head_dim: 64\ndtype: bf16\nbock_m: 64\n", 5, "bock_m"),
        ("head_dim: 64\ndtype: bf16\nbackward: yes\n", 5, "backward"),
        ("head_dim: 64\ndtype: bf16\ndeterministic: no\n", 5, "deterministic"),
    ],
)
def test_u3_faults_have_a_line(text: str, line: int, part: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(HEAD + text, source="x.yaml")
    (problem,) = error.value.problems
    assert (problem.line, part in str(error.value)) == (line, True)


def test_u4_order_and_comments_change_nothing() -> None:
    one = parse_spec(HEAD + "head_dim: 64\ndtype: bf16\nmask: [causal]\nscale: 0.5\n")
    two = parse_spec(
        "# 1\nscale: 0.5\nmask: causal  # 2\ndtype: bf16\nname: z\nhead_dim: 64\nflashgen: 1\n"
    )
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    "name", ['"x\\n import os"', "'{{ x }}'", '"a\\"b"', "../x", "a/b", '"x\'y"']
)
def test_u12_names_that_could_become_code(name: str) -> None:
    with pytest.raises(SpecError, match="name"):
        parse_spec(f"flashgen: 1\nname: {name}\nhead_dim: 64\ndtype: bf16\n")


def test_u12_a_description_stays_text(cache: Path) -> None:
    """Quotes, backslashes and braces in a description or an expression end nothing."""
    call_is_right(SPEC.replace(description='"""\nimport os\n{{ 7 * 7 }} \\'))


def test_u10_gradients_are_refused_unless_unwanted() -> None:
    kernel = compile_spec(SPEC, schedule=schedule(TILE))
    q, k, v = (randn(1, 1, 8, 16, seed=n) for n in range(3))
    expected = kernel(q, k, v)
    graded = q.clone().requires_grad_()
    with pytest.raises(TensorError, match=r"^q: got a tensor that requires grad"):
        kernel(graded, k, v)
    with torch.no_grad():
        assert torch.equal(kernel(graded, k, v), expected)
    assert torch.equal(kernel(graded.detach(), k, v), expected)


def test_u9_gradients_of_expanded_keys_are_refused() -> None:
    kernel = compile_spec(SPEC, schedule=schedule(TILE))
    q, one = randn(1, 2, 8, 16), randn(1, 1, 8, 16, seed=1).requires_grad_()
    for given in ((q, one.expand(1, 2, 8, 16), q), (q, q, one.expand(1, 2, 8, 16))):
        with pytest.raises(TensorError, match=r"^[kv]: got a tensor that requires grad"):
            kernel(*given)
