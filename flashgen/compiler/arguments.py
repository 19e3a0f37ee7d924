"""What the public functions are given, checked: a spec, a GPU, a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError, ScheduleError, TargetError
from flashgen.schedule.families import FAMILIES
from flashgen.schedule.model import Family, Schedule
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import Target, get_target

if TYPE_CHECKING:
    import torch


def spec_argument(function: str, spec: object) -> AttentionSpec:
    """`spec`, if it is one."""
    if isinstance(spec, AttentionSpec):
        return spec
    hint = "flashgen.load_spec(path) reads one from a file."
    if isinstance(spec, dict):
        hint = "flashgen.AttentionSpec(**fields) makes one of fields."
    raise FlashgenError(
        f"{function}: got {type(spec).__name__}, expected an AttentionSpec\n  hint: {hint}"
    )


def target_argument(target: object) -> Target | None:
    """The catalogue's entry for an id; None for none, which leaves the choice to flashgen."""
    if target is None or isinstance(target, Target):
        return target
    if isinstance(target, str):
        return get_target(target)
    raise TargetError(
        f"target: got {type(target).__name__}, expected the id of a GPU, a Target or None\n"
        "  hint: `flashgen list --targets` shows the ids."
    )


def family_argument(family: object) -> Family | None:
    """The name of a family of kernels; None for none, which leaves the choice to flashgen."""
    found = next((each for each in FAMILIES if each == family), None)
    if family is not None and found is None:
        raise FlashgenError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
    return found


def schedule_argument(schedule: object) -> Schedule | None:
    """`schedule`, if it is one, with fields that a schedule can have."""
    if schedule is None:
        return None
    if not isinstance(schedule, Schedule):
        hint = "flashgen.Schedule(block_m=128, block_n=64, num_warps=8, num_stages=2) is one."
        raise ScheduleError(
            f"schedule: got {type(schedule).__name__}, expected a Schedule or None\n  hint: {hint}"
        )
    return Schedule.from_dict(schedule.to_dict())


def shape_argument(spec: AttentionSpec, shape: object) -> Shape:
    """A shape, or its fields, checked as those of a spec are."""
    if not isinstance(shape, (Shape, Mapping)):
        raise FlashgenError(
            f"shape: got {type(shape).__name__}, expected a Shape or its fields\n"
            "  hint: dict(batch=1, q_heads=32, kv_heads=8, q_len=4096, kv_len=4096) is one."
        )
    (checked,) = spec.replace(shapes=[shape]).shapes
    return checked


def shapes_argument(shapes: object) -> tuple[Shape, ...] | None:
    """Some shapes; unlike those of a spec they may have lengths of 0."""
    if shapes is None:
        return None
    listed = tuple(shapes) if isinstance(shapes, (list, tuple)) else ()
    if not listed or not all(isinstance(shape, Shape) for shape in listed):
        raise FlashgenError(
            f"shapes: got {_listed(shapes)}, expected a list of one or more Shapes\n"
            "  hint: flashgen.spec.model.Shape(batch=1, q_heads=2, kv_heads=1, q_len=9, kv_len=9)"
        )
    return listed


def device_argument(device: str | torch.device | None) -> torch.device:
    """The CPU, or a GPU that is there, with its number; None: a GPU if there is one."""
    import torch

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in {"cpu", "cuda"}:
        raise FlashgenError(f"device: got {device!r}, expected cpu, cuda or cuda:N")
    if where.type == "cpu":
        return where
    count = torch.cuda.device_count()
    index = where.index if where.index is not None or not count else torch.cuda.current_device()
    if index is None or index >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "cpu, as PyTorch sees no GPU"
        raise FlashgenError(
            f"device: got {device!r}, expected {there}\n"
            "  hint: `flashgen doctor` says what is installed and which GPU is there."
        )
    return torch.device("cuda", index)


def _listed(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    other = [item for item in value if not isinstance(item, Shape)]
    return f"a list with {type(other[0]).__name__}" if other else "an empty list"
