"""Triton's interpreter does a launch's work once, nothing that it throws away, and leaves nothing.

Every test here ends with Triton as it was before; fixture `nothing_left` compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

import flashgen
from flashgen.runtime import interpret
from flashgen.runtime.interpret import check_interpreter, interpreting
from flashgen.runtime.load import load_module
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

# Calls of its own function and of two of Triton's library, in a loop. BLOCK 3 is refused in `part`.
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def part(x_ptr, start, n, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), 0)


@triton.jit
def sums(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = 0.0
    for j in range(tl.cdiv(n, BLOCK)):
        total += part(x_ptr, j * BLOCK, n, BLOCK)
    tl.store(y_ptr, total)
"""


def _state() -> dict[str, object]:
    """What interpreting changes: the names of Triton's language and library, and its switches."""
    spaces = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base, tl.core.dtype)
    found: dict[str, object] = {
        f"{space.__name__}.{name}": value for space in spaces for name, value in vars(space).items()
    }
    # The interpreter adds its imports to the names of each module with a function that it calls.
    found |= {name: vars(standard)[name] for name in vars(tl) if name in vars(standard)}
    found |= {name: getattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")}
    return found | {
        "options": interpreter.interpreter_builder.options,
        "interpret": knobs.runtime.interpret,
    }


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    check_interpreter()
    before = _state()
    yield
    after = _state()
    assert [n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)] == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sums" / "kernel.py"
    path.parent.mkdir()
    path.write_text(KERNELS, encoding="utf-8")
    return path


@pytest.fixture
def patches(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions for which the interpreter patches the language."""
    done: list[str] = []
    patch = interpreter._patch_lang

    def counted(function: Any) -> Any:
        done.append(function.__name__)
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    return done


def interpreted_sum(module: ModuleType, n: int = 100, block: int = 16) -> bool:
    """Whether the kernel's sum is right."""
    x, y = torch.arange(n, dtype=torch.float32), torch.zeros(1)
    with interpreting():
        module.sums[(1,)](x, y, n, BLOCK=block)
    return bool(y.item() == x.sum().item())


# **** once a launch ****


def test_the_language_is_patched_once_a_launch_and_again_for_the_next(
    patches: list[str], path: Path
) -> None:
    module = load_module(path, interpreted=True)
    counts = []
    with interpreting():
        for _ in range(2):
            assert interpreted_sum(module)
            counts.append(len(patches))
    first, both = counts
    # By the modules through which functions see the language, and not for each of 15 calls.
    assert first <= 3
    assert 2 <= both - first <= 3
    assert patches.count("sums") == 2
    assert "part" not in patches
    assert interpreter._patch_lang.__name__ == "counted"  # and that is put back


def test_overflow_is_computed_only_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    found = builder.options
    with interpreting():
        assert builder.options == replace(found, sanitize_overflow=False)
    assert builder.options is found
    with monkeypatch.context() as debugging:
        debugging.setattr(builder, "options", replace(found, debug=True))
        with interpreting():
            assert builder.options.sanitize_overflow


# **** nothing is left ****


def test_a_process_interprets_and_compiles_by_turns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}

    def compiled() -> str:
        module = load_module(path, interpreted=False)
        source = ASTSource(module.sums, signature, {"BLOCK": 16})
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])

    before, state = compiled(), _state()
    module = load_module(path, interpreted=True)
    for _ in range(2):
        assert interpreted_sum(module)
        assert _state() == state
        assert compiled() == before


@pytest.mark.parametrize("nested", [False, True])
def test_a_kernel_that_raises_takes_everything_back(nested: bool, path: Path) -> None:
    """In a called function, two levels below the launch; also where the block goes on."""
    module = load_module(path, interpreted=True)
    state = _state()
    with pytest.raises(InterpreterError, match="power of 2"):
        interpreted_sum(module, block=3)
    assert _state() == state
    with interpreting():
        if nested:
            inside = _state()
            with interpreting():
                assert _state() == inside
                assert interpreted_sum(module)
            assert interpreter._patch_lang is inside["_patch_lang"]
        with pytest.raises(InterpreterError, match="power of 2"):
            interpreted_sum(module, block=3)
        assert interpreted_sum(module)
    assert _state() == state


def test_threads_take_turns(path: Path) -> None:
    module = load_module(path, interpreted=True)
    state = _state()
    start = Barrier(4)

    def calls(number: int) -> list[bool]:
        start.wait(timeout=60)
        right = []
        for n in range(3):
            if number % 2:
                with pytest.raises(InterpreterError):
                    interpreted_sum(module, block=3)
            right.append(interpreted_sum(module, n=20 * number + n + 1))
        return right

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(calls, range(4))) == [[True] * 3] * 4
    assert _state() == state


# **** the same results as in Triton's own way ****

FLASH1 = Schedule(
    block_m=16, block_n=16, num_warps=1, num_stages=1, loop_order="flash1", num_kv_splits=2
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CASES: dict[str, tuple[dict[str, Any], Schedule]] = {
    "causal": (
        {"mask": ["causal"], "dtype": "fp16"},
        Schedule(block_m=16, block_n=32, num_warps=4, num_stages=2),
    ),
    "documents": (
        {
            "mask": ["causal", {"same": "doc"}],
            "inputs": {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}},
            "dtype": "bf16",
        },
        Schedule(block_m=32, block_n=16, num_warps=4, num_stages=2),
    ),
    "two kernels of one call": (
        {"mask": [{"window": {"left": 9}}], "dtype": "fp32", "loop_order": "flash1"},
        FLASH1,
    ),
}


def attended(name: str) -> tuple[torch.Tensor, ...]:
    fields, schedule = CASES[name]
    spec = AttentionSpec(head_dim=16, **fields)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[
        str(fields["dtype"])
    ]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator).to(dtype) for _ in range(3))
    doc = {"doc": torch.arange(40, dtype=torch.int32)[None] // 13} if spec.inputs else {}
    found = flashgen.compile(spec, schedule=schedule, return_lse=True)(q, k, v, **doc)
    assert isinstance(found, tuple)
    return found


def other_triton(without: str) -> Any:
    """Triton's interpreter, as seen from here, in a version that lacks something."""
    names = dict(vars(interpreter))
    if without in names:
        del names[without]
    elif without == "restore":
        names["_LangPatchScope"] = type("_LangPatchScope", (), {})
    else:
        known = {"debug": False, "sanitize_overflow": True}
        del known[without]
        names["interpreter_builder"] = SimpleNamespace(options=SimpleNamespace(**known))
    return SimpleNamespace(**names)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_results_are_those_of_tritons_own_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = attended(name)
    with monkeypatch.context() as patched:
        patched.setattr(interpret, "interpreter", SimpleNamespace())
        theirs = attended(name)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().any()
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "without",
    [
        "_patch_lang",
        "_LangPatchScope",
        "restore",
        "interpreter_builder",
        "sanitize_overflow",
        "debug",
    ],
)
def test_a_triton_without_what_is_patched_goes_its_own_way(
    without: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_triton(without)
    monkeypatch.setattr(interpret, "interpreter", other)
    module = load_module(path, interpreted=True)
    before = dict(vars(other))
    assert interpreted_sum(module)
    assert vars(other) == before


def test_a_scope_that_is_not_known_is_never_taken_for_a_patched_language(
    patches: list[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would say when its patches are taken back; so each call patches, as in Triton."""
    counted = interpreter._patch_lang
    scope = interpreter._LangPatchScope

    def patch_lang(function: Any) -> Any:
        made = counted(function)
        return SimpleNamespace(restore=lambda: scope.restore(made))

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
    module = load_module(path, interpreted=True)
    assert interpreted_sum(module)
    assert patches.count("part") == 7
    assert len(patches) >= 15
