"""What `flashgen explain` says, as plain data: frozen, printable, JSON-able.

`compiler.explaining` makes these; neither module imports torch or triton.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flashgen.compiler.chosen import Choice, measured
from flashgen.compiler.report import not_served
from flashgen.passes.lower import Order
from flashgen.schedule.model import Family, Schedule
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import Target


@dataclass(frozen=True)
class Formula:
    """A quantity as SymPy prints it, with the problem's numbers in, and for the schedule."""

    name: str
    text: str
    with_numbers: str
    value: int
    unit: str


@dataclass(frozen=True)
class TileUse:
    """A tile on chip: `copies` of `bytes` each; `loop` is the one that loads or makes it."""

    name: str
    space: str
    dtype: str
    loop: str
    shape: tuple[str, ...]
    extents: tuple[int, ...]
    copies: int
    bytes: int


@dataclass(frozen=True)
class RejectedTile:
    """A tile shape that some schedules of the grid cannot have, for one reason.

    `required` and `limit` are those of the schedule that comes closest; `schedules` counts how many
    of the `tried` with this shape are rejected for this reason. `any_fits`: another can be used.
    """

    block_m: int
    block_n: int
    required: int
    limit: int
    schedules: int
    tried: int
    any_fits: bool
    text: str


@dataclass(frozen=True)
class RejectionGroup:
    """All tile shapes that are rejected for one reason."""

    reason: str
    tiles: tuple[RejectedTile, ...]


@dataclass(frozen=True)
class FamilyFacts:
    """How many schedules of a family fit, of how many, and how many are rejected for which reason.

    missing: why there are none for the target, the spec or such lengths (None: there may be some).
    """

    family: Family
    feasible: int
    tried: int
    rejected: tuple[tuple[str, int], ...]
    missing: str | None

    def __str__(self) -> str:
        """In a sentence, without the family."""
        if self.missing is not None:
            return f"none: {self.missing}"
        reasons = ", ".join(f"{count} for {reason}" for reason, count in self.rejected)
        rejected = f"; rejected: {reasons}" if reasons else ""
        return f"{self.feasible} of {self.tried} schedules of the grid fit{rejected}"


@dataclass(frozen=True)
class TileCell:
    """One tile shape of the grid: the feasible schedule with the deepest pipeline, or why none is.

    `reason` is the most frequent one, `required` and `limit` those of the schedule that comes
    closest; shared memory is that schedule's, or the feasible one's.
    """

    block_m: int
    block_n: int
    schedule: str | None
    num_stages: int
    smem_bytes: int
    tile_traffic_bytes: int
    reason: str | None = None
    required: int = 0
    limit: int = 0


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm does for the shape, and the least time that takes on the target.

    `flops` count visible pairs; `executed_flops` what visited tiles cost, or all pairs (naive).
    `dram_bytes` is the model's figure, `dram_floor_bytes` every input and output once, but for keys
    and values in tiles that nothing visits (naive attention reads all of them). Intensity is flops
    per byte of `dram_bytes`. The roofline takes `matmul_flops` (naive: of all pairs).
    """

    name: str
    schedule: str | None
    matmul_flops: int
    flops: int
    executed_flops: int
    tile_traffic_bytes: int
    dram_floor_bytes: int
    dram_bytes: int
    intensity: float
    compute_ms: float
    memory_ms: float
    bound_ms: float
    bound: str
    programs: int
    workspace_bytes: int


@dataclass(frozen=True)
class MaskFacts:
    """What the mask leaves to do, per batch and query head, and the loop bounds in words."""

    predicate: str
    bounds: tuple[str, ...]
    visible_pairs: int
    pairs: int
    visited_tiles: int
    tiles: int


@dataclass(frozen=True)
class Explanation:
    """Everything that `flashgen explain` says about a spec, a shape and a target.

    schedule: what a call of the shape gets; choice: who chose it, and the untuned one (None: no
    schedule fits). families: what there is of each; the grid, from `feasible` to `grid`, is the
    portable family's.
    """

    spec: AttentionSpec
    target: Target
    shape: Shape
    shape_assumed: bool
    loop_order: Order
    order_reason: str
    schedule: Schedule | None
    choice: Choice | None
    formulas: tuple[Formula, ...]
    tiles: tuple[TileUse, ...]
    smem_bytes: int
    textbook_smem_bytes: int
    regs_per_thread: int
    families: tuple[FamilyFacts, ...]
    feasible: int
    tried: int
    rejections: tuple[RejectionGroup, ...]
    frontier: tuple[Schedule, ...]
    grid: tuple[TileCell, ...]
    algorithms: tuple[Algorithm, ...]
    mask: MaskFacts
    peak_flops_per_s: float
    limits: tuple[str, ...]

    @property
    def not_served(self) -> tuple[str, ...]:
        """What no kernel serves, a sentence each: the explanation is of the spec without it."""
        return not_served(self.spec)

    def __str__(self) -> str:
        from flashgen.compiler.explanation_text import explanation_text

        return explanation_text(self)

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("spec", "target", "shape", "schedule", "choice", "frontier")
        }
        choice = self.choice
        holder = {name: _plain(value) for name, value in plain.items()}
        return {
            "spec": self.spec.display_name,
            "fingerprint": self.spec.fingerprint,
            "not_served": list(self.not_served),
            "target": self.target.id,
            "shape": asdict(self.shape),
            "schedule": self.schedule and self.schedule.to_dict(),
            "chosen_by": choice and choice.origin,
            "measured": choice and measured(choice.entry),
            "untuned": choice and choice.untuned.to_dict(),
            "notes": list(choice.notes) if choice else [],
            "frontier": [schedule.to_dict() for schedule in self.frontier],
            **holder,
        }


@dataclass(frozen=True)
class TargetRow:
    """One target's line in a comparison; `note` says why there are no numbers."""

    target: str
    arch: str
    schedule: str | None
    chosen_by: str | None
    smem_bytes: int | None
    smem_limit: int
    feasible: int | None
    tried: int | None
    flash2_ms: float | None
    flash1_ms: float | None
    naive_ms: float | None
    bound: str | None
    note: str


@dataclass(frozen=True)
class Comparison:
    """A spec and a shape on every target of the catalogue."""

    spec: AttentionSpec
    shape: Shape
    shape_assumed: bool
    rows: tuple[TargetRow, ...]

    @property
    def not_served(self) -> tuple[str, ...]:
        """As of an explanation."""
        return not_served(self.spec)

    def __str__(self) -> str:
        from flashgen.compiler.explanation_text import comparison_text

        return comparison_text(self)

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        return {
            "spec": self.spec.display_name,
            "fingerprint": self.spec.fingerprint,
            "not_served": list(self.not_served),
            "shape": asdict(self.shape),
            "shape_assumed": self.shape_assumed,
            "targets": [asdict(row) for row in self.rows],
        }


def shape_text(shape: Shape) -> str:
    """A shape in words: the order of `--shape`."""
    return (
        f"batch {shape.batch}, heads {shape.q_heads}:{shape.kv_heads}, "
        f"q_len {shape.q_len}, kv_len {shape.kv_len}"
    )


def _plain(value: object) -> object:
    """Dataclasses and tuples as JSON types."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)  # type: ignore[call-overload]
    return value
