"""Explanations: their numbers are the budget's, their text is golden, bad input is said so."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashgen import AttentionSpec, explain, load_spec, settings
from flashgen.compiler import Explanation, choose, compare
from flashgen.compiler.pictures import draw, schedule_line
from flashgen.errors import FlashgenError, ScheduleError, SpecError, TargetError
from flashgen.problem import Problem
from flashgen.schedule.budget import budget_for
from flashgen.schedule.dram import for_shape
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.schedule.space import check, enumerate_space
from flashgen.spec.model import LoopOrder, Shape
from flashgen.target import TARGETS, get_target
from flashgen.tune import lookup

PLAIN = AttentionSpec(name="plain", head_dim=64, dtype="fp32")


def shipped(name: str) -> AttentionSpec:
    return load_spec(settings.specs_dir() / f"{name}.yaml")


def one_head(length: int) -> Shape:
    return Shape(batch=1, q_heads=1, kv_heads=1, q_len=length, kv_len=length)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tables, in place of the packaged ones."""
    monkeypatch.setattr(settings, "tuned_configs_dir", lambda: tmp_path)
    lookup.forget()
    yield tmp_path
    lookup.forget()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gemma2_local", "nvidia-h200"),
        ("deepseek_v3_prefill", "nvidia-a10"),
        ("modernbert_global", "nvidia-b200"),
    ],
)
@pytest.mark.usefixtures("tables")
def test_golden_text(name: str, target: str, golden: Callable[[str, str], None]) -> None:
    golden(f"explain/{name}.txt", str(explain(shipped(name), target=target)))


@pytest.mark.usefixtures("tables")
def test_golden_comparison(golden: Callable[[str, str], None]) -> None:
    golden("explain/all-targets.txt", str(compare(shipped("llama3_8b"))))


def test_the_theorys_numbers_are_in_it() -> None:
    """N = 2048, d = 64, fp32: naive 69,206,016 B; 1,094,713,344 FLOPs in all three."""
    found = {a.name: a for a in explain(PLAIN, shape=one_head(2048)).algorithms}
    assert list(found) == ["flash2", "flash1", "naive"]
    assert {a.flops for a in found.values()} == {1_094_713_344}
    assert found["naive"].dram_bytes == found["naive"].tile_traffic_bytes == 69_206_016
    assert found["flash2"].dram_floor_bytes == 4 * 4 * 2048 * 64
    assert found["naive"].intensity == pytest.approx(1_094_713_344 / 69_206_016)


def test_it_explains_the_schedule_that_would_be_compiled() -> None:
    spec = shipped("gemma2_local")
    found = explain(spec)
    problem = Problem(spec, get_target("nvidia-h200"))
    bucket = bucket_of(8192, 8192)
    space = enumerate_space(problem, bucket, ("triton",))
    plan, _ = choose.plan(spec, problem.target, has_lse=False)
    assert found.schedule == dict(plan.choices)[bucket]
    assert found.feasible == len(space.feasible)
    rejected = sum(tile.schedules for group in found.rejections for tile in group.tiles)
    assert rejected == len(space.rejections) == found.tried - found.feasible
    values = {formula.name: formula.value for formula in found.formulas}
    assert values["smem_bytes"] == found.smem_bytes == 197_848
    assert values["tile_traffic_bytes"] == found.algorithms[0].tile_traffic_bytes


TILES = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}


def tuned_table(folder: Path, gpu: str = "nvidia-h200") -> Schedule:
    """A table of llama3_8b with 128x64 for up to 8192 keys, 1.25 times as fast as the untuned."""
    committed = Path(__file__).parents[2] / "tuned_configs" / "nvidia-h200" / "llama3_8b.json"
    table = json.loads(committed.read_text("utf-8")) | {"gpu": gpu}
    (entry,) = (e for e in table["entries"] if e["bucket"] == LONG)
    entry["schedule"] |= TILES
    entry["measured"] |= {"time_us": 1000.0, "low_us": 990.0, "high_us": 1010.0}
    entry["default"]["time_us"] = 1250.0
    table["entries"] = [entry]
    (folder / gpu).mkdir()
    (folder / gpu / "llama3_8b.json").write_text(json.dumps(table), "utf-8")
    lookup.forget()
    return Schedule.from_dict(entry["schedule"])


LONG = {"q_len_max": None, "kv_len_max": 8192}


def test_a_tuned_schedule_is_explained_and_says_who_chose_it(
    tables: Path, golden: Callable[[str, str], None]
) -> None:
    spec = shipped("llama3_8b")
    untuned = explain(spec)
    assert (str(untuned.choice), untuned.to_dict()["measured"]) == ("untuned", None)
    schedule = tuned_table(tables)
    found = explain(spec)
    assert found.schedule == schedule != untuned.schedule
    assert found.smem_bytes == shared_bytes(schedule)
    golden("explain/tuned-head.txt", "\n".join(str(found).splitlines()[:16]))
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert facts["chosen_by"] == "tuned"
    assert facts["untuned"] == untuned.schedule.to_dict()
    assert facts["measured"]["time_us"] == 1000.0
    assert facts["measured"]["speedup"] == 1.25
    assert facts["measured"]["measured_with"]["triton"] == "3.6.0"
    flash2 = {a.name: a for a in found.algorithms}["flash2"]
    assert flash2.schedule == str(schedule)
    assert flash2.programs == 32 * 8192 // 128
    assert found.mask.tiles == (8192 // 128) * (8192 // 64)


def shared_bytes(schedule: Schedule) -> int:
    problem = Problem(shipped("llama3_8b"), get_target("nvidia-h200"))
    return budget_for(problem, schedule).smem_bytes_of(schedule)


@pytest.mark.filterwarnings("ignore:.*the table is ignored")
@pytest.mark.parametrize("order", ["flash1", "flash2", "auto"])
@pytest.mark.parametrize("lengths", [(1, 16384), (100, 100), (512, 30_000)])
def test_explain_and_plan_choose_alike(order: LoopOrder, lengths: tuple[int, int]) -> None:
    spec = shipped("llama3_8b").replace(loop_order=order)
    target, shape = get_target("nvidia-h200"), Shape(1, 32, 8, *lengths)
    plan, _ = choose.plan(spec, target, has_lse=False)
    found = explain(spec, shape=shape)
    served = dict(plan.choices)[bucket_of(*lengths)]
    assert found.schedule == for_shape(Problem(spec, target), served, shape)
    if order == "auto" and served.kernel == "loop":
        assert found.loop_order == served.loop_order


def test_a_near_schedule_and_one_of_a_relative_say_so(
    tables: Path, golden: Callable[[str, str], None]
) -> None:
    schedule = tuned_table(tables)
    near = explain(shipped("llama3_8b"), shape=Shape(1, 32, 8, 4096, 4096))
    assert near.schedule == schedule
    assert str(near.choice).startswith("tuned on this GPU for near lengths (q_len any, kv_len <=")
    relative = explain(shipped("llama3_8b"), target="nvidia-h100-sxm")
    assert relative.schedule == schedule
    golden("explain/tuned-on-a-relative.txt", "\n".join(str(relative).splitlines()[:12]))
    far = explain(shipped("llama3_8b"), shape=Shape(1, 32, 8, 1, 4096))
    assert far.choice is not None
    assert far.choice.origin == "untuned"
    rows = {row.target: row for row in compare(shipped("llama3_8b")).rows}
    origins = [rows[name].chosen_by for name in ("nvidia-h200", "nvidia-h100-sxm", "nvidia-l4")]
    assert origins == ["tuned", "tuned on nvidia-h200", "untuned"]
    assert rows["nvidia-h200"].schedule == str(schedule)


def test_a_tuned_schedule_is_in_picture_and_page(tables: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashgen.compiler.explanation_html import write_html

    tuned_table(tables)
    found = explain(shipped("llama3_8b"))
    write_html(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Schedule chosen: tuned on this GPU: 1000 us measured" in page
    assert "<br>Untuned: loop flash2 64x64 4 warps 3 stages" in page
    assert schedule_line(found) == (
        "loop flash2 128x64 8 warps 2 stages (untuned: loop flash2 64x64 4 warps 3 stages)"
    )
    draw(found, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_frontier_cannot_be_enlarged() -> None:
    found = explain(shipped("gemma2_local"))
    problem = Problem(found.spec, found.target)
    assert found.frontier
    for schedule in found.frontier:
        assert check(schedule, problem) is None
        for change in ({"block_m": 2 * schedule.block_m}, {"block_n": 2 * schedule.block_n}):
            larger = dataclasses.replace(schedule, **change)
            if max(larger.block_m, larger.block_n) <= 256:
                tile = (larger.block_m, larger.block_n)
                fits = {
                    (cell.block_m, cell.block_n) for cell in found.grid if cell.schedule is not None
                }
                assert tile not in fits


def test_rejected_tiles_name_what_they_need() -> None:
    found = explain(shipped("gemma2_local"))
    groups = {group.reason: group for group in found.rejections}
    assert set(groups) == {"smem_bytes", "regs_per_thread"}
    for tile in groups["smem_bytes"].tiles:
        assert tile.required > tile.limit == 232_448
    cells = {(c.block_m, c.block_n): c for c in found.grid}
    assert cells[256, 256].reason == "smem_bytes"
    assert cells[128, 64].reason is None


def test_the_spec_decides_the_order_and_auto_says_why() -> None:
    spec = shipped("llama3_8b")
    assert explain(spec).loop_order == "flash2"
    flash1 = explain(spec.replace(loop_order="flash1"))
    assert (flash1.loop_order, flash1.order_reason) == ("flash1", "as the spec asks")
    assert flash1.schedule is not None
    assert flash1.schedule.loop_order == "flash1"
    assert [t.name for t in flash1.tiles if (t.space, t.loop) == ("smem", "query tile")] == [
        "q_tile"
    ]
    auto = explain(spec.replace(loop_order="auto"))
    assert auto.loop_order == "flash2"
    assert auto.order_reason.startswith("auto: predicted ")
    assert "tile traffic" in auto.order_reason
    decode = explain(spec.replace(loop_order="auto"), shape=Shape(1, 32, 8, 1, 16384))
    assert decode.loop_order == "flash1"
    assert decode.schedule is not None
    assert decode.schedule.splits > 1


@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-rtx-4090"])
def test_flash1_is_explained_in_words_and_as_a_page(target: str, tmp_path: Path) -> None:
    """Its frontier's schedules leave the splits to the call; what is counted has a number."""
    from flashgen.compiler.explanation_html import write_html

    found = explain(shipped("mistral_7b").replace(loop_order="flash1"), target=target)
    assert found.frontier
    text = str(found)
    assert all(f"{schedule}: " in text for schedule in found.frontier)
    write_html(found, tmp_path / "page.html")
    assert str(found.frontier[0]) in (tmp_path / "page.html").read_text("utf-8")


def test_flash1_splits_the_keys_until_the_gpu_is_full() -> None:
    spec = shipped("llama3_8b").replace(loop_order="flash1")
    few = explain(spec, shape=Shape(1, 32, 8, 8192, 8192)).schedule
    many = explain(spec, shape=Shape(8, 32, 8, 8192, 8192)).schedule
    assert few is not None
    assert many is not None
    assert (few.num_kv_splits, many.num_kv_splits) == (4, 1)


def test_a_spec_without_shapes_gets_one_and_says_so() -> None:
    found = explain(PLAIN)
    assert found.shape_assumed
    assert "(assumed: the spec names none)" in str(found)
    assert not explain(shipped("llama3_8b")).shape_assumed


def test_nothing_fits_is_an_explanation_too() -> None:
    found = explain(AttentionSpec(name="wide", head_dim=1024, dtype="bf16"), target="nvidia-l4")
    assert found.schedule is None
    assert found.limits[-1] == "on-chip memory: no tile shape fits nvidia-l4"
    assert [a.name for a in found.algorithms] == ["naive"]
    assert "schedule  none of" in str(found)


def test_more_memory_than_this_gpu_has_comes_first() -> None:
    found = explain(
        shipped("llama3_8b"), target="nvidia-l4", shape=Shape(32, 32, 8, 65_536, 65_536)
    )
    assert found.limits[0].startswith("memory: inputs and output take 42.9 GB, more than the 24 GB")


def test_hidden_keys_take_memory_and_move_no_bytes() -> None:
    """A decode with a window of 64 of 131,072 keys: 32 GiB of K and V, of which 64 are read."""
    spec = AttentionSpec(
        head_dim=128, dtype="bf16", mask=["causal", {"window": {"left": 63, "right": 0}}]
    )
    found = explain(spec, target="nvidia-l4", shape=Shape(16, 32, 32, 1, 131_072))
    assert found.limits[0].startswith("memory: inputs and output take 34.4 GB, more than the 24 GB")
    flash2, _, naive = found.algorithms
    assert found.schedule is not None and 64 % found.schedule.block_n == 0
    assert flash2.dram_bytes == flash2.dram_floor_bytes == 16 * 32 * 128 * 2 * (2 * 64 + 2)
    assert naive.dram_floor_bytes > 34e9  # it reads all of them
    assert flash2.memory_ms < naive.memory_ms / 500


@pytest.mark.parametrize("length", [1, 16, 100, 128])
def test_short_keys_take_a_single_tile(length: int) -> None:
    found = explain(shipped("gpt2"), shape=Shape(2, 12, 12, length, length))
    assert found.schedule is not None
    assert found.schedule.kernel == "single_tile"
    assert str(found)


@pytest.mark.parametrize("order", ["flash2", "flash1"])
def test_a_single_tile_is_computed_by_query_tiles_that_see_nothing(order: str) -> None:
    """512 queries, of which the last 64 see the 64 keys: no bounds skip the others' one tile."""
    spec = AttentionSpec(head_dim=64, dtype="fp16", mask=["causal"], loop_order=order)
    found = explain(spec, shape=Shape(1, 12, 12, 512, 64))
    assert found.schedule is not None
    assert found.schedule.kernel == "single_tile"
    tiles = 512 // found.schedule.block_m
    assert (found.mask.visited_tiles, found.mask.tiles) == (tiles, tiles)
    (sentence,) = found.mask.bounds
    assert sentence.startswith("No loop: all keys are one tile; every tile of query rows computes")
    assert "skipped" not in str(found)
    for algorithm in found.algorithms[:2]:
        assert algorithm.programs == 12 * tiles
        assert algorithm.dram_bytes == 12 * 64 * 2 * (2 * 512 + 2 * 64)


def test_no_query_tile_skips_the_keys_of_a_single_tile() -> None:
    """A mask that shows nothing: the loop kernel reads no key, the single tile reads them all."""
    spec = AttentionSpec(head_dim=64, dtype="fp16", mask=[{"expr": "k > q + 5000"}])
    short, long = (explain(spec, shape=Shape(1, 4, 4, 512, n)).algorithms[0] for n in (64, 4096))
    rows = 4 * 512 * 64 * 2 * 2
    assert short.dram_bytes == rows + 4 * 64 * 64 * 2 * 2
    assert long.dram_bytes == rows


# **** bad input ****


def test_a_shape_that_no_gpu_holds() -> None:
    with pytest.raises(ScheduleError) as caught:
        explain(shipped("llama3_8b"), shape=Shape(1_000_000, 32, 8, 8192, 8192))
    text = str(caught.value)
    assert "inputs and output take 167,772 GB" in text
    assert "amd-mi300x, has 192 GB" in text
    assert "--shape is batch,q_heads,kv_heads,q_len,kv_len" in text


def test_a_shape_that_the_spec_forbids() -> None:
    with pytest.raises(SpecError, match="5 does not divide q_heads = 32"):
        explain(shipped("llama3_8b"), shape=Shape(1, 32, 5, 8, 8))


def test_an_unknown_target() -> None:
    with pytest.raises(TargetError, match=r"did you mean 'nvidia-h200'.*nvidia-rtx-4090"):
        explain(PLAIN, target="h200")


def test_a_dtype_that_a_target_cannot_multiply() -> None:
    spec = AttentionSpec(name="narrow", head_dim=64, dtype="fp8_e4m3")
    with pytest.raises(TargetError, match="has no fp8_e4m3 matmul unit"):
        explain(spec, target="nvidia-a10")
    rows = {row.target: row for row in compare(spec).rows}
    assert rows["nvidia-a10"].note == "no fp8_e4m3 matmul unit"
    assert rows["nvidia-h200"].flash2_ms is not None


# **** data ****


def test_it_is_data() -> None:
    found = explain(shipped("gemma2_local"))
    assert pickle.loads(pickle.dumps(found)) == found
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert facts["schedule"]["block_m"] == 128
    assert facts["algorithms"][2]["name"] == "naive"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.feasible = 0  # type: ignore[misc]


def test_a_comparison_covers_the_catalogue() -> None:
    found = compare(shipped("llama3_8b"))
    assert [row.target for row in found.rows] == list(TARGETS)
    own = {row.target: row for row in found.rows}["nvidia-rtx-4090"]
    alone = explain(shipped("llama3_8b"), target="nvidia-rtx-4090")
    assert own.flash2_ms == alone.algorithms[0].bound_ms
    assert (own.schedule, own.smem_bytes) == (str(alone.schedule), alone.smem_bytes)
    json.dumps(found.to_dict(), allow_nan=False)


# **** pictures ****


def explained(name: str) -> Explanation:
    return explain(shipped(name))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{suffix}"
    draw(explained("modernbert_local"), path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 10_000


def test_a_picture_where_nothing_fits(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wide = AttentionSpec(name="wide", head_dim=1024, dtype="bf16", mask="causal")
    draw(explain(wide, target="nvidia-l4"), tmp_path / "wide.png")
    assert (tmp_path / "wide.png").exists()


def test_a_page_holds_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashgen.compiler.explanation_html import write_html

    path = tmp_path / "out.html"
    write_html(explained("gemma2_local"), path)
    page = path.read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "(k &lt;= q) &amp; (k &gt;= q - 4095)" in page
    assert "http" not in page  # whole in itself


def test_without_the_extra_a_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FlashgenError) as caught:
        draw(explained("gpt2"), tmp_path / "out.png")
    assert "pip install -c constraints.txt '.[plot]', in a checkout" in str(caught.value)


def test_a_picture_of_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(FlashgenError, match=r"ends in .png, .svg, .pdf \(got '.jpeg2'\)"):
        draw(explained("gpt2"), tmp_path / "out.jpeg2")


# **** families ****

FAMILIES: dict[str, tuple[AttentionSpec, str, dict[str, int] | None, str]] = {
    "served": (
        AttentionSpec(head_dim=256, dtype="bf16"),
        "nvidia-h200",
        None,
        "46 of 672 schedules of the grid fit; rejected: 560 for smem_bytes, 48 for "
        "regs_per_thread, 18 for smem_bytes of an SM",
    ),
    "arch": (
        AttentionSpec(head_dim=64, dtype="bf16"),
        "nvidia-a10",
        None,
        "none: kernels of family gluon_sm90 run on sm_90, nvidia-a10 is sm_86",
    ),
    "spec": (
        AttentionSpec(head_dim=64, dtype="fp32"),
        "nvidia-h200",
        None,
        "none: dtype fp32 of gluon_sm90: not served",
    ),
    "lengths": (
        AttentionSpec(head_dim=64, dtype="bf16"),
        "nvidia-h200",
        {"batch": 8, "q_heads": 8, "kv_heads": 8, "q_len": 1, "kv_len": 4096},
        "none: short lengths of gluon_sm90: not served",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_there_is_of_each_family(name: str) -> None:
    spec, target, shape, said = FAMILIES[name]
    found = explain(spec, target=target, shape=shape)
    triton, hopper = found.families
    assert (triton.family, hopper.family) == ("triton", "gluon_sm90")
    assert str(hopper) == said
    assert (triton.feasible, triton.tried, triton.missing) == (found.feasible, found.tried, None)
    assert sum(count for _, count in triton.rejected) == triton.tried - triton.feasible
    facts = found.to_dict()["families"]
    assert json.loads(json.dumps(facts))[1]["feasible"] == hopper.feasible
    told = " ".join(str(found).split())
    assert f"gluon_sm90 {said}" in told
