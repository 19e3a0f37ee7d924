"""`verify` passes right kernels, finds wrong ones, and draws what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen import AttentionSpec, settings
from flashgen.codegen.options import kernel_kinds
from flashgen.compiler import choose, verification, verify
from flashgen.compiler.cases import (
    STRIDES,
    Case,
    cases_of,
    representatives,
    unreached,
    unreached_by_kernel,
)
from flashgen.compiler.mask_edges import mask_edges
from flashgen.compiler.verification import Verification, verify_plan
from flashgen.errors import NotServedError, VerificationError
from flashgen.runtime.artifact import Plan
from flashgen.runtime.draw import draw, embed, needs_positive
from flashgen.schedule.model import Bucket, Schedule, Sm90, bucket_of
from flashgen.spec.parse import load_spec
from flashgen.spec.parts import Shape
from flashgen.target import get_target

TARGET = "nvidia-h200"
CPU = torch.device("cpu")
TILE = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)


def everything(**fields: object) -> AttentionSpec:
    """Documents, a prefix, a dense mask, a bias, a table, a sink and kv_lens in one spec."""
    return AttentionSpec(
        **{
            "name": "everything",
            "head_dim": {"qk": 24, "v": 16},
            "dtype": "fp16",
            "mask": [
                {"expr": "k <= q or k < prefix[b]"},
                {"same": "doc"},
                {"expr": "shown[b, row, k]"},
            ],
            "score": [
                {"bias": {"tensor": "rel"}},
                {"expr": "s + table[h, max(min(k - q, 4), -4) + 4]"},
            ],
            "inputs": {
                "prefix": {"shape": ["batch"], "dtype": "int32"},
                "doc": {"shape": ["batch", "kv_len"], "dtype": "int64"},
                "shown": {"shape": ["batch", "q_len", "kv_len"], "dtype": "bool"},
                "rel": {"shape": ["q_heads", "q_len", "kv_len"], "dtype": "fp16"},
                "table": {"shape": ["q_heads", 9], "dtype": "fp32"},
            },
            "sink": "per_head",
            "kv_lens": "per_batch",
            **fields,
        }
    )


def test_right_kernels_pass() -> None:
    steps: list[str] = []
    result = verify(everything(), target=TARGET, device="cpu", progress=steps.append)
    assert result.ok, str(result)
    result.check()
    assert len(steps) == len(result.results)
    kinds = {case.case.schedule.kernel for case in result.results}
    assert kinds == {"loop", "single_tile"}
    assert 0 < result.worst.share <= 1
    assert result.to_dict()["ok"] is True
    assert "the CPU, interpreted" in result.summary


def test_bf16_and_the_other_layout() -> None:
    spec = AttentionSpec(name="bshd", head_dim=16, dtype="bf16", layout="bshd", mask="causal")
    result = verify(spec, target=TARGET, device="cpu", schedule=TILE)
    assert result.ok, str(result)
    assert result.schedules == (TILE,)
    assert "bf16 in fp32" in result.notes[-1]


def test_given_shapes() -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp16")
    shapes = [Shape(1, 2, 1, 5, 40), Shape(2, 1, 1, 1, 3)]
    result = verify(spec, target=TARGET, device="cpu", shapes=shapes)
    assert [case.case.shape for case in result.results] == shapes
    assert result.ok


def test_unserved_specs_are_refused() -> None:
    with pytest.raises(NotServedError):
        verify(AttentionSpec(head_dim=16, dtype="fp16", dropout=0.5), device="cpu")


# What is changed in the generated text, and how the verdict must notice.
FAULTS = {
    "mask off by one": ("(kv_idx <= q_idx)", "(kv_idx < q_idx)"),
    "lse in base 2": ("LN_2 = tl.constexpr(0.6931471805599453)", "LN_2 = tl.constexpr(1.0)"),
    "output not written": ("tl.store(out_base", "tl.store(lse_base"),
    "masked value leaks": (
        "v_tile = tl.where(v_finite[:, None] > 0",
        "v_tile = tl.where(v_finite[:, None] >= 0",
    ),
    "scale missing": ("QK_SCALE_LOG2 = tl.constexpr(", "QK_SCALE_LOG2 = tl.constexpr(2 * "),
    "wrong head": ("hk = h // GQA_GROUP", "hk = h * 0"),
}


@pytest.fixture(scope="module")
def causal() -> tuple[AttentionSpec, Plan]:
    spec = AttentionSpec(name="wrong", head_dim=16, dtype="fp16", heads={"group": 2}, mask="causal")
    plan, _ = choose.plan(spec, get_target(TARGET), schedule=TILE, has_lse=True)
    return spec, plan


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, causal: tuple[AttentionSpec, Plan], tmp_path: Path) -> None:
    spec, plan = causal
    right, wrong = FAULTS[fault]
    assert right in plan.text
    result = _verified(spec, replace(plan, text=plan.text.replace(right, wrong)), tmp_path)
    assert not result.ok
    with pytest.raises(VerificationError, match="WRONG in"):
        result.check()


def _verified(spec: AttentionSpec, plan: Plan, folder: Path) -> Verification:
    path = folder / "kernel.py"
    path.write_text(plan.text)
    return verify_plan(spec, get_target(TARGET), plan, path, device=CPU)


def test_a_kernel_that_raises_is_wrong(causal: tuple[AttentionSpec, Plan], tmp_path: Path) -> None:
    spec, plan = causal
    result = _verified(
        spec, replace(plan, text=plan.text.replace("tl.dot(", "tl.missing(")), tmp_path
    )
    assert all(case.failure and "missing" in case.failure for case in result.results)
    assert result.to_dict()["ok"] is False


# ---- cases ---------------------------------------------------------------------------------------


def plan_of(spec: AttentionSpec) -> Plan:
    return choose.plan(spec, get_target(TARGET), has_lse=True)[0]


def test_on_a_gpu_every_schedule_has_cases() -> None:
    spec = AttentionSpec(head_dim=64, dtype="bf16", mask="causal")
    plan = plan_of(spec)
    cases = cases_of(spec, plan, interpreted=False)
    assert {case.schedule for case in cases} == {schedule for _, schedule in plan.choices}
    assert {case.strides for case in cases} == set(STRIDES)
    groups = {case.shape.q_heads // case.shape.kv_heads for case in cases}
    assert groups == {1, 2, 6}
    lengths = [(case.shape.q_len, case.shape.kv_len) for case in cases]
    assert any(q > k for q, k in lengths)
    assert any(0 < q < k for q, k in lengths)
    assert any(k == 0 for _, k in lengths)
    general = plan.choices[-1][1]
    m, n = general.block_m, general.block_n
    own = [c.shape for c in cases if c.schedule == general]
    assert {m - 1, 0, 1} <= {s.q_len % m for s in own}
    assert 2 * m + 3 in {s.q_len for s in own}
    assert any(s.kv_len % n == n - 1 for s in own)
    assert any(s.kv_len % n == 1 for s in own)


def test_interpreted_cases_are_few_and_cross_tiles() -> None:
    spec = AttentionSpec(head_dim=128, dtype="bf16", heads={"group": 8}, mask="causal")
    plan = plan_of(spec)
    cases = cases_of(spec, plan, interpreted=True)
    assert {case.schedule for case in cases} == set(representatives(spec, plan))
    first = cases[0]
    assert first.shape.q_len > first.schedule.block_m
    assert first.shape.kv_len > 2 * first.schedule.block_n
    assert any(case.shape.kv_heads > 1 for case in cases)


SHIPPED = sorted(settings.specs_dir().glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_schedules_of_committed_tables_get_cases(path: Path) -> None:
    """A schedule tuned for long sequences has no short lengths of its own; it runs there too."""
    spec = load_spec(path)
    plan = plan_of(spec)
    schedules = {schedule for _, schedule in plan.choices}
    cases = cases_of(spec, plan, interpreted=False)
    assert {case.schedule for case in cases} == schedules
    few = {case.schedule for case in cases_of(spec, plan, interpreted=True)}
    used = {dict(plan.choices)[bucket_of(s.q_len, s.kv_len)] for s in spec.shapes}
    assert used <= few
    assert {kernel_kinds(each) for each in few} == {kernel_kinds(each) for each in schedules}


def test_a_schedule_runs_where_another_is_chosen(
    causal: tuple[AttentionSpec, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, plan = causal
    long = Schedule(block_m=32, block_n=32, num_warps=4, num_stages=2)
    choices = tuple((b, long if b == Bucket(None, 16384) else s) for b, s in plan.choices)
    spec = spec.replace(
        shapes=[{"batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 9000, "kv_len": 9000}]
    )
    made: list[Plan] = []
    attention = verification.attention_of
    monkeypatch.setattr(
        verification,
        "attention_of",
        lambda s, p, f, **how: made.append(p) or attention(s, p, f, **how),
    )
    result = _verified(spec, replace(plan, choices=choices), tmp_path)
    result.check()
    told = [each.case for each in result.results if each.case.schedule == long]
    assert told and all(case.shape.kv_len < 4096 for case in told)
    assert any({schedule for _, schedule in each.choices} == {long} for each in made)


def test_a_single_tile_gets_no_more_keys_than_it_holds() -> None:
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 200}
    shapes = [{**sizes, "kv_len": 30}, {**sizes, "kv_len": 100}]
    spec = AttentionSpec(head_dim=64, dtype="bf16", shapes=shapes)
    plan = plan_of(spec)
    single = {schedule for _, schedule in plan.choices if schedule.kernel == "single_tile"}
    cases = cases_of(spec, plan, interpreted=True)
    used = {dict(plan.choices)[bucket_of(200, kv_len)] for kv_len in (30, 100)}
    assert len(used & single) == 2
    assert used <= {case.schedule for case in cases}
    for case in (*cases, *cases_of(spec, plan, interpreted=False)):
        assert case.schedule.kernel == "loop" or case.shape.kv_len <= case.schedule.block_n


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_kind_of_kernel_reads_two_batches_of_two_heads(path: Path) -> None:
    """Each with memory of its own: a kernel that ignores a stride of batches or heads is found."""
    spec = load_spec(path)
    cases = cases_of(spec, plan_of(spec), interpreted=True)
    telling = [
        case
        for case in cases
        if min(case.shape.batch, case.shape.kv_heads) > 1 and case.strides != "expanded"
    ]
    kinds = {kernel_kinds(case.schedule) for case in cases}
    assert {kernel_kinds(case.schedule) for case in telling} == kinds


# Of whose strides along batches the generated text is told nothing.
BATCHED = {
    "q": "b * stride_qb",
    "k": "b * stride_kb",
    "v": "b * stride_vb",
    "out": "b * stride_ob",
    "input": "prefix_ptr + b",
}


@pytest.mark.parametrize("tensor", BATCHED)
def test_batches_that_are_ignored_are_found(tensor: str, tmp_path: Path) -> None:
    spec = AttentionSpec(
        head_dim=64,
        dtype="bf16",
        heads={"group": 8},
        mask=[{"expr": "k < prefix[b] or k <= q"}],
        inputs={"prefix": {"shape": ["batch"], "dtype": "int32"}},
    )
    plan = plan_of(spec)
    right = BATCHED[tensor]
    assert right in plan.text
    wrong = plan.text.replace(right, right.replace("b *", "0 *").replace("+ b", "+ 0"))
    assert not _verified(spec, replace(plan, text=wrong), tmp_path).ok


# ---- edges of the mask ---------------------------------------------------------------------------


def masked(*mask: object, **fields: object) -> AttentionSpec:
    return AttentionSpec(head_dim=80, dtype="bf16", heads={"group": 4}, mask=list(mask), **fields)


def window(left: int | None = None, right: int | None = None) -> dict[str, object]:
    sides = {"left": left, "right": right}
    return {"window": {side: length for side, length in sides.items() if length is not None}}


# A mask, and the same without one of its edges.
EDGES = {
    **{
        f"causal, left {left}": (masked("causal", window(left)), masked("causal"))
        for left in (100, 200, 517, 1023, 1100)
    },
    "left": (masked(window(300, 200)), masked(window(None, 200))),
    "right": (masked(window(300, 200)), masked(window(300))),
    "right 700": (masked(window(None, 700)), masked()),
    "left, top_left": (
        masked("causal", window(300), align="top_left"),
        masked("causal", align="top_left"),
    ),
    "right, top_left": (masked(window(None, 300), align="top_left"), masked(align="top_left")),
    "chunk": (masked("causal", {"expr": "q // 300 == k // 300"}), masked("causal")),
    "chunk both ways": (masked({"expr": "q // 700 == k // 700"}), masked()),
    "number": (masked("causal", {"expr": "k < 400"}), masked("causal")),
    "period": (masked({"expr": "q - k < 40 or (q - k) % 333 == 0"}), masked(window(39))),
    "lengths": (
        masked("causal", window(300), kv_lens="per_batch"),
        masked("causal", kv_lens="per_batch"),
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_kernel_without_an_edge_of_the_mask_is_found(name: str, tmp_path: Path) -> None:
    """The kernel of the mask without it is wrong, whatever else is verified."""
    spec, without = EDGES[name]
    result = _verified(spec, plan_of(without), tmp_path)
    assert not result.ok
    assert not [note for note in result.notes if "mask" in note]


@pytest.mark.parametrize("left", [100, 230, 517, 1100])
def test_a_mask_left_out_at_the_edge_is_found(left: int, tmp_path: Path) -> None:
    """Where the loop begins at the right tile, too: several rows cut key tiles at the edge."""
    spec = masked("causal", window(left))
    plan = plan_of(spec)
    right = f"(kv_idx >= q_idx - {left})"
    assert right in plan.text
    wrong = plan.text.replace(right, "(kv_idx >= 0)")
    assert not _verified(spec, replace(plan, text=wrong), tmp_path).ok


def test_some_case_lies_across_an_affordable_edge() -> None:
    spec = masked("causal", window(700))
    case = cases_of(spec, plan_of(spec), interpreted=True)[-1]
    assert case.shape.q_len > 1
    assert case.shape.kv_len > 702  # the last query does not see the first key
    assert not unreached(spec, [case])


def test_edges_of_the_mask_get_cases() -> None:
    spec = AttentionSpec(
        head_dim=64,
        dtype="bf16",
        mask=[window(511, 100), {"expr": "k < 900 or q % 100 == 3"}],
    )
    assert [(edge.length, edge.side) for edge in mask_edges(spec)] == [
        (100, "right"),
        (100, None),
        (511, "left"),
        (900, None),
    ]
    cases = cases_of(spec, plan_of(spec), interpreted=False)
    assert not unreached(spec, cases)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_gpu_reaches_all_edges_of_shipped_masks(path: Path) -> None:
    spec = load_spec(path)
    cases = cases_of(spec, plan_of(spec), interpreted=False)
    assert not any(unreached_by_kernel(spec, cases).values())


def test_every_kernel_of_a_plan_reaches_the_edges() -> None:
    """Those of Hopper are other code than the portable one."""
    spec = load_spec(settings.specs_dir() / "gemma2_local.yaml")
    plan = plan_of(spec)
    kinds = {kernel_kinds(schedule) for _, schedule in plan.choices}
    assert {("loop",), ("sm90",)} <= kinds
    found = unreached_by_kernel(spec, cases_of(spec, plan, interpreted=True))
    assert set(found) == kinds - {("single_tile",)}
    assert not any(found.values())


@pytest.mark.parametrize("length", [60_000, 2_000_000])
def test_unreached_edges_are_noted(length: int) -> None:
    spec = AttentionSpec(head_dim=16, dtype="fp16", mask=["causal", window(length, 0)])
    result = verify(spec, target=TARGET, device="cpu", shapes=[Shape(1, 1, 1, 2, 5)])
    assert any(f"{length} (mask[1].window.left)" in note for note in result.notes)
    assert not any("right" in note for note in result.notes)


def test_an_edge_is_reached_by_more_than_length() -> None:
    """A single query sees one key more than the window's length to the left."""
    spec = masked("causal", window(64))
    plan = plan_of(spec)
    cases = [Case(plan.choices[-1][1], Shape(1, 4, 1, 1, k), "plain", 0) for k in (65, 66)]
    assert unreached(spec, cases[:1])
    assert not unreached(spec, cases)


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_views_lie_in_poison(strides: str, dtype: torch.dtype) -> None:
    buffer = embed([2, 3, 4, 8], dtype, strides, CPU)  # type: ignore[arg-type]
    assert tuple(buffer.view.shape) == (2, 3, 4, 8)
    assert buffer.whole.isnan().all()
    assert buffer.intact_around()
    buffer.view[:1].fill_(1.0)
    assert buffer.intact_around()
    assert int((~buffer.whole.isnan()).sum()) == 3 * 4 * 8
    aligned = buffer.view.data_ptr() % 16 == 0 and buffer.view.stride(-1) == 1
    assert aligned == (strides in ("plain", "transposed", "expanded"))
    first, last = buffer.view.storage_offset(), buffer.view[-1, -1, -1, -1].storage_offset()
    for place in (first - 1, last + 1):
        saved = buffer.whole[place].item()
        buffer.whole[place] = 0.0
        assert not buffer.intact_around()
        buffer.whole[place] = saved


def draws(spec: AttentionSpec, count: int = 6) -> list[object]:
    shape = Shape(2, 2, 1, 9, 12)
    return [draw(spec, Case(TILE, shape, "plain", i), CPU, wide=False) for i in range(count)]


def test_inputs_cover_what_matters() -> None:
    found = draws(everything())
    lens = {int(n) for call in found for n in call.kv_lens}  # type: ignore[attr-defined]
    assert {0, 12} <= lens
    prefixes = {int(n) for call in found for n in call.inputs["prefix"]}  # type: ignore[attr-defined]
    assert 0 in prefixes
    assert max(prefixes) > 12
    sinks = {float(x) for call in found for x in call.sink}  # type: ignore[attr-defined]
    assert {100.0, -100.0} <= sinks
    in_order = [
        bool((ids.diff(dim=-1) >= 0).all())
        for call in found
        for ids in [call.inputs["doc"]]  # type: ignore[attr-defined]
    ]
    assert set(in_order) == {True, False}
    shown = found[0].inputs["shown"]  # type: ignore[attr-defined]
    assert (~shown).all(dim=2).any()
    biases = [call.inputs["rel"] for call in found]  # type: ignore[attr-defined]
    assert any(bias.isinf().any() for bias in biases)


def test_unseen_keys_are_poison() -> None:
    for call in draws(AttentionSpec(head_dim=16, dtype="fp16", kv_lens="per_batch")):
        for batch, used in enumerate(call.kv_lens.tolist()):  # type: ignore[attr-defined]
            assert call.k[batch, :, used:].isnan().all()  # type: ignore[attr-defined]
            assert call.v[batch, :, used:].isnan().all()  # type: ignore[attr-defined]
            assert not call.k[batch, :, :used].isnan().any()  # type: ignore[attr-defined]


def test_divisors_are_positive() -> None:
    spec = AttentionSpec(
        head_dim=16,
        dtype="fp16",
        mask=[{"expr": "k // width[b] == q // width[b]"}],
        score=[{"expr": "s * log(temperature)"}],
        inputs={
            "width": {"shape": ["batch"], "dtype": "int32"},
            "temperature": {"shape": [], "dtype": "fp32"},
        },
    )
    assert needs_positive(spec, "width")
    assert needs_positive(spec, "temperature")
    assert not needs_positive(everything(), "prefix")
    for call in draws(spec):
        assert int(call.inputs["width"].min()) > 0  # type: ignore[attr-defined]


def test_hopper_kernels_are_emulated_on_a_cpu() -> None:
    """In their own dtype, on tensors that TMA could take."""
    spec = AttentionSpec(name="hopper", head_dim=64, dtype="bf16", mask=["causal"])
    found = verify(spec, target="nvidia-h200", family="gluon_sm90", device="cpu")
    assert found.ok, str(found)
    assert "gluon_sm90" in {schedule.family for schedule in found.schedules}
    assert any("flashgen's emulator" in note for note in found.notes)
    ran = [each.case.strides for each in found.results if each.case.schedule.family != "triton"]
    assert set(ran) <= {"plain", "transposed"}


def test_it_says_when_no_hopper_kernel_ran() -> None:
    """Rows of 75 numbers of a bias: the portable kernel serves, in a dtype that is interpreted."""
    spec = AttentionSpec(
        name="biased",
        head_dim=64,
        dtype="bf16",
        score=[{"bias": {"tensor": "rel"}}],
        inputs={"rel": {"shape": ["q_len", "kv_len"], "dtype": "bf16"}},
    )
    shape = Shape(batch=1, q_heads=1, kv_heads=1, q_len=70, kv_len=75)
    schedule = Schedule(
        family="gluon_sm90", block_m=128, block_n=64, num_warps=12, num_stages=2, sm90=Sm90()
    )
    found = verify(spec, target="nvidia-h200", schedule=schedule, device="cpu", shapes=[shape])
    assert found.ok, str(found)
    assert any("no kernel of the family gluon_sm90 ran" in note for note in found.notes)
