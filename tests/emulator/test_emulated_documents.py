"""Documents in the Hopper kernel: limits of rows where keys lie side by side, elsewhere ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_runs import Sizes, compared
from hopper_cases import hopper

from flashgen.schedule.model import Schedule
from flashgen.spec.model import AttentionSpec

INT32 = {"doc": {"shape": ["batch", "kv_len"], "dtype": "int32"}}
CAUSAL = AttentionSpec(
    name="documents", head_dim=32, dtype="fp16", mask=["causal", {"same": "doc"}], inputs=INT32
)
BOTH_WAYS = CAUSAL.replace(mask=[{"same": "doc"}])
WINDOW = CAUSAL.replace(mask=[{"window": {"left": 70, "right": 20}}, {"same": "doc"}])
BLOCKS = CAUSAL.replace(mask=[{"expr": "k // 96 == q // 96"}, {"same": "doc"}])
TOP_LEFT = CAUSAL.replace(align="top_left")
SMALL = hopper(2, 64, 2, scheduler="dynamic", separate_out=True)
LARGE = hopper(2, 128, 2, scheduler="static", separate_out=True)
LENGTH = 333
IDS = torch.tensor([3, 64, 1, 60, 64, 64, 7, 50, 20])  # lengths of documents; both on and off edges


def runs(*lengths_and_ids: tuple[int, int]) -> torch.Tensor:
    """Ids of documents one after the other."""
    lengths, ids = map(torch.tensor, zip(*lengths_and_ids, strict=True))
    return ids.repeat_interleave(lengths)


SIDE_BY_SIDE = {
    "one": runs((LENGTH, 5)),
    "each key its own": torch.arange(LENGTH),
    "on tile edges": runs((64, 0), (64, 1), (128, 2), (77, 3)),
    "off tile edges": torch.arange(len(IDS)).repeat_interleave(IDS),
    "short ones": torch.arange(LENGTH) // 9,
    "descending": runs((100, 9), (150, 8), (83, -4)),
    "any order": runs((100, 4), (90, 9), (70, -3), (73, 5)),
    "padding last": runs((100, 1), (90, 2), (70, 3), (73, -1)),
    "padding first": runs((73, 0), (100, 1), (90, 2), (70, 3)),
    "ends of the format": runs((150, -(2**31)), (183, 2**31 - 1)),
}
SCATTERED = {
    "random": torch.randint(0, 3, (LENGTH,), generator=torch.Generator().manual_seed(1)),
    "interleaved": torch.arange(LENGTH) % 2,
    "padding between": runs((70, 1), (30, 0), (90, 2), (33, 0), (70, 3), (40, 0)),
    "one key astray": torch.where(torch.arange(LENGTH) == 200, 0, torch.arange(LENGTH) // 80),
    "of three the middle again": runs((140, 2), (20, 1), (10, 2), (20, 3), (143, 2)),
    "back again in a tile": runs((10, 0), (300, 1), (5, 2), (9, 1), (9, 3)),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host allocates holds numbers that would be found in the result."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -12345)

    monkeypatch.setattr(torch, "empty", filled)


def having(ids: torch.Tensor) -> Callable[[dict[str, Any]], None]:
    """Give the call these ids, its batches each as many places further on."""

    def spoil(given: dict[str, Any]) -> None:
        batch, length = given["k"].shape[0], given["k"].shape[2]
        given["doc"] = torch.stack([ids[b : b + length].to(ids.dtype) for b in range(batch)])

    return spoil


def ids_of(name: str) -> torch.Tensor:
    return {**SIDE_BY_SIDE, **SCATTERED}[name].to(torch.int32)


@pytest.mark.parametrize(
    ("spec", "name"),
    [(WINDOW, name) for name in [*SIDE_BY_SIDE, *SCATTERED]]
    + [(spec, name) for spec in (CAUSAL, BOTH_WAYS) for name in SCATTERED],
)
def test_documents_of_all_kinds(name: str, spec: AttentionSpec, tmp_path: Path) -> None:
    """Those side by side without a window: below, by a module that is right without comparing."""
    found = compared(tmp_path, spec, SMALL, Sizes(LENGTH, LENGTH), spoil=having(ids_of(name)))
    assert found.ok, found


@pytest.mark.parametrize("name", ["off tile edges", "padding between"])
@pytest.mark.parametrize(
    "lengths", [(130, 320), pytest.param((70, 331), marks=pytest.mark.slow), (200, 90)]
)
@pytest.mark.parametrize("spec", [CAUSAL, BOTH_WAYS, TOP_LEFT, BLOCKS])
def test_fewer_or_more_queries_than_keys(
    name: str, lengths: tuple[int, int], spec: AttentionSpec, tmp_path: Path
) -> None:
    """Two batches with other ids; queries before the first key or after the last see nothing."""
    sizes = Sizes(*lengths, batch=2)
    found = compared(tmp_path, spec, LARGE, sizes, spoil=having(ids_of(name)))
    assert found.ok, found


@pytest.mark.parametrize(
    "schedule",
    [
        hopper(3, 64, 2, scheduler="grid"),
        hopper(2, 64, 2, scheduler="static", separate_out=True, q_buffers=2),
        hopper(2, 128, 2, scheduler="dynamic", separate_out=True, q_buffers=2),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["short ones", "off tile edges", pytest.param("random", marks=pytest.mark.slow)]
)
def test_schedules(name: str, schedule: Schedule, tmp_path: Path) -> None:
    """Without lse; tiles of which each warpgroup sees other keys, piped and not."""
    spoil = having(ids_of(name))
    sizes = Sizes(LENGTH, LENGTH, q_heads=3)
    found = compared(tmp_path, CAUSAL, schedule, sizes, has_lse=False, spoil=spoil)
    assert found.ok, found


def hidden_by_ids(text: str) -> str:
    """The module, in which every comparison of ids hides all keys."""
    by_ids = "(doc_at_q == doc_at_k)"
    changed = text.replace(f"({by_ids} | ~is_here)", f"({by_ids} & (kv_idx < 0) | ~is_here)")
    assert changed != text
    return changed


@pytest.mark.parametrize("spec", [CAUSAL, BOTH_WAYS], ids=["causal", "both"])
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_no_ids_are_compared_side_by_side(name: str, spec: AttentionSpec, tmp_path: Path) -> None:
    """Tiles with parts of one or two documents in any order, or of more whose ids grow."""
    found = compared(
        tmp_path,
        spec,
        SMALL,
        Sizes(LENGTH, LENGTH),
        spoil=having(ids_of(name)),
        text=hidden_by_ids,
    )
    assert found.ok, found


@pytest.mark.parametrize("name", SCATTERED)
def test_ids_are_compared_elsewhere(name: str, tmp_path: Path) -> None:
    spoil = having(ids_of(name))
    sizes = Sizes(LENGTH, LENGTH)
    found = compared(tmp_path, CAUSAL, SMALL, sizes, spoil=spoil, text=hidden_by_ids)
    assert not found.ok


@pytest.mark.parametrize(
    ("spec", "lengths_and_ids"),
    [
        (CAUSAL, [(4096, 5), (40, 4), (70, 5)]),
        (BOTH_WAYS.replace(align="top_left"), [(70, 5), (40, 6), (4096, 5)]),
    ],
    ids=["before", "after"],
)
def test_many_keys_of_a_document_lie_apart(
    spec: AttentionSpec, lengths_and_ids: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The rows are of two documents, one of which has 4,096 keys elsewhere: 2^12, which a sum of
    powers of two in 32 bits would take for none."""
    ids = runs(*lengths_and_ids).int()
    sizes = Sizes(100, len(ids), q_heads=1)
    found = compared(tmp_path, spec, SMALL, sizes, spoil=having(ids))
    assert found.ok, found


@pytest.mark.parametrize("name", ["off tile edges", "random"])
@pytest.mark.parametrize("dtype", ["int64", "fp32", "fp16"])
def test_ids_of_any_format(dtype: str, name: str, tmp_path: Path) -> None:
    """64 bits are not cut to 32; -0.0 is 0.0; of a NaN no row sees anything, its own neither."""
    spec = CAUSAL.replace(
        mask=["causal", {"expr": "doc[b, q] == doc[b, k]"}],
        inputs={"doc": {"shape": ["batch", "kv_len"], "dtype": dtype}},
    )
    given = {
        "int64": lambda ids: ids.long() << 32,
        "fp32": lambda ids: torch.where(ids == 2, float("nan"), ids * -0.5),
        "fp16": lambda ids: torch.where(torch.arange(LENGTH) % 3 == 0, -0.0, ids.half() // 8),
    }[dtype](ids_of(name))
    found = compared(tmp_path, spec, SMALL, Sizes(LENGTH, LENGTH), spoil=having(given))
    assert found.ok, found


@pytest.mark.parametrize("name", ["off tile edges", "random"])
@pytest.mark.parametrize("shape", [["kv_len"], ["q_len"], [1, "kv_len"], [400]])
def test_ids_of_any_shape(shape: list[Any], name: str, tmp_path: Path) -> None:
    """Of all batches, along queries, or longer than the keys; every second number of a tensor."""
    at = "0, " if len(shape) > 1 else ""
    spec = TOP_LEFT.replace(
        mask=["causal", {"expr": f"ids[{at}q] == ids[{at}k]"}],
        inputs={"ids": {"shape": shape, "dtype": "int32"}},
    )

    def spoil(given: dict[str, Any]) -> None:
        ids = ids_of(name).repeat(2)[: given["ids"].numel()].reshape(given["ids"].shape)
        given["ids"] = torch.stack([ids, ids + 9], dim=-1)[..., 0]
        assert given["ids"].stride(-1) == 2

    found = compared(tmp_path, spec, SMALL, Sizes(200, 150, batch=2), spoil=spoil)
    assert found.ok, found


@pytest.mark.parametrize("name", ["off tile edges", "random"])
def test_a_nan_of_another_document(name: str, tmp_path: Path) -> None:
    """Values are walked over again; a NaN reaches only rows of its document."""
    spec = CAUSAL.replace(dtype="bf16")

    def spoil(given: dict[str, Any]) -> None:
        having(ids_of(name))(given)
        given["v"][:, :, 66] = float("nan")

    found = compared(tmp_path, spec, SMALL, Sizes(130, 130), spoil=spoil)
    assert found.ok, found
