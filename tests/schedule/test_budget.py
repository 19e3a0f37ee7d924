"""Every Flash-2 number of the theory, out of the walk; and shared memory as Triton reports it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sympy as sp

from flashgen.ir import symbols as sym
from flashgen.problem import Problem
from flashgen.schedule import budget as budgets
from flashgen.schedule.budget import Budget, budget
from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import get_target

MIB = 2**20


def budget_of(target: str = "nvidia-h200", kernel: str = "loop", **fields: Any) -> Budget:
    problem = Problem(AttentionSpec(**fields), get_target(target))
    return budget(problem, kernel)  # type: ignore[arg-type]


def schedule_of(block_m: int, block_n: int, **fields: Any) -> Schedule:
    return Schedule(**{"num_warps": 4, "num_stages": 2, **fields}, block_m=block_m, block_n=block_n)


def one_head(length: int) -> Shape:
    return Shape(batch=1, q_heads=1, kv_heads=1, q_len=length, kv_len=length)


def figures(needs: Budget, length: int, block: tuple[int, int]) -> budgets.Figures:
    """Figures of one head, no mask."""
    tiles = -(-length // block[0]) * -(-length // block[1])
    return needs.figures(
        schedule_of(*block), one_head(length), visited_tiles=tiles, visible_pairs=length**2
    )


# **** theory: traffic, FLOPs, textbook on-chip bytes ****


def test_flash2_traffic_of_n_2048_d_64_fp32() -> None:
    found = figures(budget_of(head_dim=64, dtype="fp32"), 2048, (64, 64))
    assert found.tile_traffic_bytes == 34_603_008 == 33 * MIB
    assert found.flops == 1_094_713_344
    assert found.matmul_flops == 4 * 2048**2 * 64
    assert found.visited_flops == found.flops
    assert found.dram_bytes == 4 * 4 * 2048 * 64


@pytest.mark.parametrize(("block_m", "traffic"), [(64, 541_065_216), (128, 272_629_760)])
def test_flash2_traffic_of_n_8192_d_128_fp16(block_m: int, traffic: int) -> None:
    found = figures(budget_of(head_dim=128, dtype="fp16"), 8192, (block_m, 64))
    assert found.tile_traffic_bytes == traffic
    assert found.flops / found.dram_bytes > 1000


def test_flash2_traffic_formula_is_the_papers() -> None:
    """w*N*d*(2 + 2*T_r) where every tile is visited and the tiles divide N."""
    length, tiles = sp.symbols("N T_r", positive=True, integer=True)
    formula = budgets.tile_traffic_bytes(budget_of(head_dim=64, dtype="fp16").graph)
    bound = formula.subs(
        {
            sym.QUERY_TILES: length / sym.BLOCK_M,
            sym.VISITED_TILES: tiles * length / sym.BLOCK_N,
            sym.HEAD_DIM_V: sym.HEAD_DIM_QK,
            sym.BATCH: 1,
            sym.NUM_Q_HEADS: 1,
        }
    )
    assert sp.expand(bound - 2 * length * sym.HEAD_DIM_QK * (2 + 2 * tiles)) == 0


@pytest.mark.parametrize(
    ("visited", "mask"),
    [
        (8_256, "causal"),
        (1_116, ["causal", {"window": {"left": 511}}]),
    ],
)
def test_traffic_follows_the_visited_tiles(visited: int, mask: Any) -> None:
    """N = 8192, 64x64 tiles: of 16,384 tiles a causal mask visits 8,256, a window of 512 1,116."""
    needs = budget_of(head_dim=128, dtype="fp16", mask=mask)
    found = needs.figures(
        schedule_of(64, 64), one_head(8192), visited_tiles=visited, visible_pairs=1
    )
    q_and_out = 2 * 8192 * 128 * 2
    assert found.tile_traffic_bytes == q_and_out + visited * 2 * 64 * 128 * 2
    assert found.visited_flops == visited * 64 * 64 * (4 * 128 + 5)


def test_causal_matmul_flops_count_visible_pairs_only() -> None:
    pairs = 8192 * 8193 // 2
    needs = budget_of(head_dim={"qk": 192, "v": 128}, dtype="bf16", mask="causal")
    found = needs.figures(
        schedule_of(64, 64), Shape(2, 24, 4, 8192, 8192), visited_tiles=8256, visible_pairs=pairs
    )
    assert found.matmul_flops == 2 * 24 * 2 * (192 + 128) * pairs
    assert found.flops == found.matmul_flops + 2 * 24 * 5 * pairs
    assert found.visited_flops > found.flops
    kv = 2 * 4 * 8192 * (192 + 128) * 2
    assert found.dram_bytes == kv + 2 * 24 * 8192 * (192 + 128) * 2


def test_textbook_constraint() -> None:
    needs = budget_of(head_dim=64, dtype="fp32")
    assert needs.textbook_smem_bytes_of(64, 64) == 65_536
    formula = budgets.textbook_smem_bytes(needs.graph).subs(sym.HEAD_DIM_V, sym.HEAD_DIM_QK)
    block_m, block_n = sym.BLOCK_M, sym.BLOCK_N
    papers = 4 * block_m * block_n + 4 * sym.HEAD_DIM_QK * (block_m + 2 * block_n)
    assert sp.expand(formula - papers) == 0


def test_a_key_tile_of_128_rows_at_d256_takes_64_kib() -> None:
    graph = budget_of(head_dim=256, dtype="bf16").graph
    sizes = {sym.BLOCK_N: 128, sym.HEAD_DIM_QK_PADDED: 256, sym.HEAD_DIM_V_PADDED: 256}
    tiles = {tile.name: tile.bytes.subs(sizes) for tile in graph.tiles}
    assert tiles["k_tile"] == tiles["v_tile"] == 65_536


def test_largest_block_n_from_the_formula() -> None:
    """d128, bf16, block_m 128, 2 stages, 227 KiB on sm_90: 195 keys."""
    formula = budgets.smem_bytes(budget_of(head_dim=128, dtype="bf16").graph, "wgmma")
    pipelined = formula.args[1][0].subs(
        {
            sym.BLOCK_M: 128,
            sym.NUM_STAGES: 2,
            sym.HEAD_DIM_QK_PADDED: 128,
            sym.HEAD_DIM_V_PADDED: 128,
        }
    )
    largest = max(n for n in range(1, 400) if pipelined.subs(sym.BLOCK_N, n).doit() <= 227 * 1024)
    assert largest == 195


def test_inputs_and_lse_add_their_bytes() -> None:
    plain = figures(budget_of(head_dim=64, dtype="bf16"), 1024, (64, 64))
    bias = figures(
        budget_of(
            head_dim=64,
            dtype="bf16",
            score=[{"bias": {"tensor": "rel"}}],
            inputs={"rel": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "fp16"}},
        ),
        1024,
        (64, 64),
    )
    assert bias.tile_traffic_bytes - plain.tile_traffic_bytes == 2 * 1024**2
    assert bias.dram_bytes - plain.dram_bytes == 2 * 1024**2
    problem = Problem(AttentionSpec(head_dim=64, dtype="bf16"), get_target("nvidia-h200"))
    lse = figures(budget(problem, return_lse=True), 1024, (64, 64))
    assert lse.tile_traffic_bytes - plain.tile_traffic_bytes == 4 * 1024


def test_a_single_tile_reads_keys_once_per_query_tile() -> None:
    needs = budget_of(head_dim=64, dtype="bf16", kernel="single_tile")
    schedule = schedule_of(32, 128, kernel="single_tile", num_stages=1)
    found = needs.figures(schedule, one_head(128), visited_tiles=4, visible_pairs=128**2)
    assert found.tile_traffic_bytes == 2 * 2 * 128 * 64 + 4 * 2 * 2 * 128 * 64
    assert found.visited_flops == found.flops == 128**2 * (4 * 64 + 5)


def test_empty_shapes_cost_nothing() -> None:
    needs = budget_of(head_dim=64, dtype="bf16")
    for shape in (Shape(0, 8, 8, 128, 128), Shape(2, 8, 8, 0, 0)):
        found = needs.figures(schedule_of(64, 64), shape, visited_tiles=0, visible_pairs=0)
        assert (found.tile_traffic_bytes, found.dram_bytes, found.flops) == (0, 0, 0)


def test_registers_hold_the_accumulator_and_the_scores() -> None:
    needs = budget_of(head_dim=128, dtype="bf16")
    formula = budgets.regs_per_thread(needs.graph)
    tiles = 4 * sym.BLOCK_M * (sym.BLOCK_N + sym.HEAD_DIM_V_PADDED + 3)  # and m_i, l_i, alpha
    assert sp.expand(formula - tiles / (4 * 32 * sym.NUM_WARPS)) == 0
    assert needs.regs_per_thread_of(schedule_of(128, 64, num_warps=8)) == 98
    assert (
        budget_of("amd-mi300x", head_dim=128, dtype="bf16").regs_per_thread_of(
            schedule_of(128, 64, num_warps=8)
        )
        == 49
    )


# **** shared memory as the compiler reports it ****


@dataclass(frozen=True)
class Compiled:
    """A row of triton_shared_bytes.csv."""

    arch: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    kernel: str
    reads: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shared_bytes: int

    @property
    def predicted(self) -> int:
        targets = {"sm_120": "nvidia-rtx-5090", "gfx942": "amd-mi300x"}
        doc = {"shape": ["kv_len"], "dtype": "int32"}
        bias = {"shape": ["batch", "q_heads", "q_len", "kv_len"], "dtype": self.dtype}
        reads: dict[str, dict[str, Any]] = {
            "": {},
            "doc": {"mask": {"same": "doc"}, "inputs": {"doc": doc}},
            "bias": {"score": [{"bias": {"tensor": "rel"}}], "inputs": {"rel": bias}},
        }
        needs = budget_of(
            targets[self.arch],
            self.kernel,
            head_dim={"qk": self.head_dim_qk, "v": self.head_dim_v},
            dtype=self.dtype,
            **reads[self.reads],
        )
        return needs.smem_bytes_of(
            Schedule(
                kernel=self.kernel,  # type: ignore[arg-type]
                block_m=self.block_m,
                block_n=self.block_n,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
            )
        )


def compiled() -> Iterator[Compiled]:
    """What Triton 3.7.1 reported for a plain kernel of this structure, compiled without a GPU."""
    with (Path(__file__).parent / "triton_shared_bytes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            words = ("arch", "dtype", "kernel", "reads")
            yield Compiled(**{k: v if k in words else int(v) for k, v in row.items()})  # type: ignore[arg-type]


def test_the_model_never_promises_less_than_the_compiler_takes() -> None:
    """On targets that `benchmarks/compiler` does not cover."""
    rows = list(compiled())
    assert {row.arch for row in rows} == {"sm_120", "gfx942"}
    assert [row for row in rows if row.predicted < row.shared_bytes] == []


def test_the_model_is_exact_on_sm_120() -> None:
    rows = [row for row in compiled() if row.arch == "sm_120"]
    assert [row.predicted for row in rows] == [row.shared_bytes for row in rows]


@pytest.mark.parametrize(
    ("target", "dims", "tile", "shared_bytes"),
    [
        ("nvidia-h200", (128, 128), (128, 64, 8, 3), 131_072),
        ("nvidia-h200", (256, 128), (64, 64, 4, 2), 131_072),
        ("nvidia-a100-80gb", (128, 128), (128, 64, 8, 3), 98_304),
        ("nvidia-a100-80gb", (128, 128), (64, 32, 4, 3), 53_248),
        ("nvidia-a100-80gb", (256, 256), (128, 32, 8, 2), 106_496),
        ("nvidia-a100-80gb", (256, 128), (64, 64, 4, 2), 90_112),
    ],
)
def test_examples_as_triton_36_compiles_them(
    target: str, dims: tuple[int, int], tile: tuple[int, int, int, int], shared_bytes: int
) -> None:
    needs = budget_of(target, head_dim={"qk": dims[0], "v": dims[1]}, dtype="bf16")
    block_m, block_n, num_warps, num_stages = tile
    schedule = schedule_of(block_m, block_n, num_warps=num_warps, num_stages=num_stages)
    assert needs.smem_bytes_of(schedule) == shared_bytes


@pytest.mark.parametrize(
    ("bias", "tile", "shared_bytes"),
    [
        ("", (64, 16, 4, 2), 16_416),
        ("", (64, 16, 8, 2), 16_928),  # two warps read the same lanes of tensor memory
        ("", (64, 64, 8, 2), 41_984),
        ("", (128, 64, 8, 2), 49_696),
        ("", (256, 64, 8, 2), 65_568),
        ("bf16", (64, 16, 4, 1), 10_248),
        ("bf16", (64, 64, 8, 1), 24_576),
        ("bf16", (128, 32, 4, 1), 22_528),
        ("bf16", (128, 32, 8, 1), 28_672),
        ("fp32", (64, 64, 8, 1), 24_576),
        ("fp32", (128, 64, 4, 1), 28_672),
    ],
)
def test_examples_of_tensor_memory(
    bias: str, tile: tuple[int, int, int, int], shared_bytes: int
) -> None:
    """As Triton 3.6 to 3.8 compile them for sm_100."""
    rel = {"shape": [1, "q_heads", "q_len", "kv_len"], "dtype": bias}
    score = {"score": [{"bias": {"tensor": "rel"}}], "inputs": {"rel": rel}} if bias else {}
    needs = budget_of("nvidia-b200", head_dim=64, dtype="bf16", mask="causal", **score)
    block_m, block_n, num_warps, num_stages = tile
    schedule = schedule_of(block_m, block_n, num_warps=num_warps, num_stages=num_stages)
    assert needs.smem_bytes_of(schedule) == shared_bytes
