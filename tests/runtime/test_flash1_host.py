"""The host side of flash1 modules: splits, kernels, workspace; and the merge of the splits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flashgen import AttentionSpec, reference
from flashgen.codegen.options import options
from flashgen.compiler import choose
from flashgen.passes.count import visits
from flashgen.problem import Problem
from flashgen.runtime.interpret import interpreting
from flashgen.runtime.load import load_module
from flashgen.runtime.merge import merge
from flashgen.schedule.budget import budget_for
from flashgen.schedule.dram import for_shape, grid_programs, splits_that_fill
from flashgen.schedule.model import Schedule
from flashgen.spec.parts import Shape
from flashgen.target import get_target

H200 = get_target("nvidia-h200")
SPEC = AttentionSpec(
    name="ordered", head_dim=16, dtype="fp16", sink="per_head", mask=["causal"], loop_order="flash1"
)
SCHEDULE = Schedule(
    loop_order="flash1", block_m=16, block_n=32, num_warps=4, num_stages=1, num_kv_splits=None
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield choose.plan(SPEC, H200, schedule=SCHEDULE, has_lse=True)[1]


class Recorder:
    """Stands in for a kernel: keeps grid and arguments of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


KERNELS = ("attention_fwd_flash1", "attention_fwd_flash1_split", "attention_merge")


def launches(
    module: ModuleType, patch: pytest.MonkeyPatch, *sizes: int, schedule: Schedule = SCHEDULE
) -> dict[str, Recorder]:
    """What `run` launches for (batch, heads, q_len, kv_len)."""
    batch, heads, q_len, kv_len = sizes
    recorders = {name: Recorder() for name in KERNELS}
    for name, recorder in recorders.items():
        patch.setattr(module, name, recorder)
    q = torch.empty(batch, heads, q_len, 16, dtype=torch.float16)
    k = torch.empty(batch, heads, kv_len, 16, dtype=torch.float16)
    lse = torch.empty(batch, heads, q_len)
    sink = torch.zeros(heads)
    module.run(recorders[KERNELS[0]], options(schedule), q, k, k, sink, torch.empty_like(q), lse)
    return recorders


def test_modules_count_splits_as_the_model_does(path: Path) -> None:
    module = load_module(path, interpreted=False)
    problem = Problem(SPEC, H200)
    for heads in (1, 2, 3, 16, 59, 60, 118, 119, 1000):
        for kv_len in (0, 1, 32, 33, 64, 65, 1000, 16384):
            shape = Shape(batch=1, q_heads=heads, kv_heads=heads, q_len=100, kv_len=kv_len)
            wanted = splits_that_fill(problem, SCHEDULE, shape)
            assert module.kv_splits(heads, -(-kv_len // 32)) == wanted


def test_few_heads_split_their_keys_and_many_do_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module(path, interpreted=False)
    whole, split, merged = launches(module, monkeypatch, 2, 64, 40, 70).values()
    assert [call[0] for call in whole.calls] == [(128,)]
    assert not split.calls
    assert not merged.calls
    whole, split, merged = launches(module, monkeypatch, 1, 4, 40, 320).values()
    assert not whole.calls
    assert [call[0] for call in split.calls] == [(4 * 8,)]
    assert [call[0] for call in merged.calls] == [(3 * 4,)]
    assert split.calls[0][1][-1] == merged.calls[0][1][-1] == 8
    state = {tuple(a.shape) for a in split.calls[0][1] if torch.is_tensor(a) and a.dim() < 4}
    assert state == {(32, 40, 16), (32, 40)}
    assert merged.calls[0][2] == {"BLOCK_M": 16, "num_warps": 4, "ALIGN": 8}


@pytest.mark.parametrize(("kv_len", "splits"), [(0, 1), (32, 1), (33, 2), (70, 3), (32_000, 1000)])
def test_there_are_no_more_splits_than_key_tiles(
    kv_len: int, splits: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 splits are asked for; the workspace has a part for each that is launched."""
    module = load_module(path, interpreted=False)
    asked = replace(SCHEDULE, num_kv_splits=1000)
    shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=40, kv_len=kv_len)
    assert for_shape(Problem(SPEC, H200), asked, shape).splits_for(kv_len) == splits
    whole, split, merged = launches(module, monkeypatch, 1, 2, 40, kv_len, schedule=asked).values()
    assert not whole.calls
    found = [(call[0], call[1][-1]) for call in (*split.calls, *merged.calls)]
    assert found == [((2 * splits,), splits), ((3 * 2,), splits)]
    args = split.calls[0][1]
    state = {
        tuple(a.shape) for a in args if torch.is_tensor(a) and a.dim() < 4 and a.shape[-1] == 16
    }
    assert state == {(2 * splits, 40, 16)}


@pytest.mark.parametrize("asked", [None, 1, 2, 3, 1000])
@pytest.mark.parametrize("kv_len", [0, 1, 32, 33, 70, 4096])
def test_the_model_prices_the_kernels_that_run(
    asked: int | None, kv_len: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module(path, interpreted=False)
    problem, schedule = Problem(SPEC, H200), replace(SCHEDULE, num_kv_splits=asked)
    shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=40, kv_len=kv_len)
    priced = for_shape(problem, schedule, shape)
    needs = budget_for(problem, priced, return_lse=True)
    ran = launches(module, monkeypatch, 1, 2, 40, kv_len, schedule=schedule)
    counts = [len(recorder.calls) for recorder in ran.values()]
    assert counts == ([1, 0, 0] if not needs.others else [0, 1, 1])
    ((grid, args, _), *_) = (call for recorder in ran.values() for call in recorder.calls)
    assert grid == (grid_programs(priced, shape),)
    state = [a for a in args if torch.is_tensor(a) and 1 < a.dim() < 4 and len(a) == grid[0]]
    seen = visits(SPEC, shape, 16, 32, num_kv_splits=priced.splits_for(kv_len))
    figures = needs.figures(
        priced,
        shape,
        visited_tiles=seen.tiles,
        visible_pairs=0,
        first_visits=seen.first_visits,
        visited_keys=seen.keys,
        key_tiles=seen.key_tiles,
    )
    assert figures.workspace_bytes == sum(4 * a.numel() for a in state)


def test_one_variant_of_each_kernel_serves_every_shape(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module(path, interpreted=False)
    kernels = {name: getattr(module, name) for name in KERNELS}
    backend = make_backend(GPUTarget("cuda", 90, 32))
    found: dict[str, set[str]] = {name: set() for name in KERNELS}
    shapes = [(1, 1, 1, 1), (1, 16, 128, 1024), (2, 64, 33, 65), (3, 50, 16, 16), (1, 3, 7, 4096)]
    for sizes in shapes:
        for name, recorder in launches(module, monkeypatch, *sizes).items():
            bind = create_function_from_signature(
                kernels[name].signature, kernels[name].params, backend
            )
            for _, args, kwargs in recorder.calls:
                _, specialization, _ = bind(*args, debug=False, **kwargs)
                found[name].add(str(specialization))
    assert {name: len(variants) for name, variants in found.items()} == dict.fromkeys(KERNELS, 1)


def test_the_module_alone_computes_it(path: Path) -> None:
    module = load_module(path, interpreted=True)
    q, k, v = (torch.randn(1, 2, n, 16).half() for n in (20, 40, 40))
    sink = torch.tensor([0.5, -1.0])
    with interpreting():
        out, lse = module.ordered(q, k, v, sink=sink)
    expected, expected_lse = reference.attention(SPEC, q, k, v, sink=sink)
    assert torch.allclose(out.double(), expected, atol=2e-3)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


# ---- the merge


def merged(
    path: Path, acc: torch.Tensor, m: torch.Tensor, sums: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the merge kernel: acc [batch, heads, splits, len, dim], m and sums without dim."""
    batch, heads, splits, q_len, dim = acc.shape
    module = load_module(path, interpreted=True)
    d = torch.arange(dim)
    kept = torch.full_like(acc, math.nan)  # as templates/macros/program.jinja lays a row out
    kept[..., d // 4 % 2 * (dim // 2) + d // 8 * 4 + d % 4] = acc
    out = torch.full((batch, heads, q_len, dim), math.nan, dtype=torch.float16)
    lse = torch.full((batch, heads, q_len), math.nan)
    with interpreting():
        module.attention_merge[(-(-q_len // 16) * heads * batch,)](
            out, lse, out.stride(0), out.stride(1), out.stride(2), sink, sink.stride(0),
            heads, q_len, kept, m, sums, splits, BLOCK_M=16, ALIGN=1, num_warps=4,
        )  # fmt: skip
    return out, lse


def states(splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random states of 2 batches, 2 heads and 20 rows; a third of the parts is not there."""
    generator = torch.Generator().manual_seed(splits)
    acc = torch.randn(2, 2, splits, 20, 16, generator=generator)
    m = torch.randn(2, 2, splits, 20, generator=generator) * 3
    sums = torch.rand(2, 2, splits, 20, generator=generator) * 5 + 1
    empty = torch.rand(2, 2, splits, 20, generator=generator) < 0.3
    empty[:, :, :, 7] = True  # a row of which no split saw a key
    acc[empty] = math.nan  # was never written
    m[empty], sums[empty] = -math.inf, -1.0
    return acc, m, sums


NO_SINK = torch.full((2,), -math.inf)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_merge_equals_that_of_normalised_parts(path: Path, splits: int) -> None:
    acc, m, sums = states(splits)
    out, lse = merged(path, acc, m, sums, NO_SINK)
    parts, lses = [], []
    for split in range(splits):
        part = sums[:, :, split]
        parts.append(acc[:, :, split] / part[..., None])
        lses.append(torch.where(part < 0, -math.inf, m[:, :, split] + part.log()))
    wanted, wanted_lse = merge(parts, lses)
    assert torch.allclose(out.float(), wanted, atol=2e-3)
    assert torch.allclose(lse, wanted_lse, atol=1e-5)
    assert torch.equal(out[:, :, 7], torch.zeros(2, 2, 16).half())
    assert bool((lse[:, :, 7] == -math.inf).all())


def test_the_sink_joins_once(path: Path) -> None:
    """With a sink that outweighs all keys, and in a row without keys, lse is the sink."""
    acc, m, sums = states(3)
    sink = torch.tensor([80.0, 0.25])
    out, lse = merged(path, acc, m, sums, sink)
    assert torch.equal(lse[:, :, 7], sink.expand(2, 2))
    assert torch.equal(out[:, :, 7], torch.zeros(2, 2, 16).half())
    assert torch.allclose(lse[:, 0], torch.full((2, 20), 80.0))
    plain, plain_lse = merged(path, acc, m, sums, NO_SINK)
    total = torch.logaddexp(plain_lse[:, 1].double(), torch.tensor(0.25).double())
    assert torch.allclose(lse[:, 1].double(), total, atol=1e-5)
    share = torch.exp(plain_lse[:, 1].double() - total)[..., None]
    assert torch.allclose(out[:, 1].double(), plain[:, 1].double() * share, atol=2e-3)


def test_nan_of_a_part_reaches_its_row_alone(path: Path) -> None:
    acc, m, sums = states(3)
    sums[0, 0, 1, 4], m[0, 0, 1, 4] = math.nan, 1.0
    out, lse = merged(path, acc, m, sums, NO_SINK)
    assert bool(out[0, 0, 4].isnan().all())
    assert bool(lse[0, 0, 4].isnan())
    assert int(out.isnan().any(-1).sum()) == 1


def test_what_a_merge_gives_does_not_depend_on_who_was_first(path: Path) -> None:
    """States of splits, not their order in time, decide: the same bits each time."""
    acc, m, sums = states(5)
    first = merged(path, acc, m, sums, NO_SINK)
    again = merged(path, acc, m, sums, NO_SINK)
    assert all(map(torch.equal, first, again))
