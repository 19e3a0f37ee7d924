"""Schedules, the reasons why one is rejected, and shape buckets: plain data, no heavy imports.

This module is on the path of every warm call (a call's lengths choose a bucket, a bucket a schedule
and a kernel), so it imports neither SymPy nor networkx.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import total_ordering
from typing import Any, Literal

from flashgen.errors import ScheduleError

Family = Literal["triton", "gluon_sm90"]
HOPPER: Family = "gluon_sm90"  # whose kernels have barriers that can wait for ever
Scheduler = Literal["grid", "static", "dynamic"]
KernelKind = Literal["loop", "single_tile"]
LoopOrder = Literal["flash2", "flash1"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "family": ("triton", "gluon_sm90"),
    "kernel": ("loop", "single_tile"),
    "loop_order": ("flash2", "flash1"),
}
_NUMBERS = ("block_m", "block_n", "num_warps", "num_stages")
# With their defaults; None leaves the number to the compiler, or to the call.
_OPTIONAL: Mapping[str, int | None] = {"maxnreg": None, "num_kv_splits": 1}


@dataclass(frozen=True, order=True, kw_only=True)
class Sm90:
    """What only schedules of the family gluon_sm90 choose.

    scheduler: a program for each query tile ("grid"), or one for each SM, whose next tile is a
    fixed number away ("static") or the next that is free ("dynamic"); q_buffers: query tiles that
    a program has room for; separate_out: whether output leaves through a buffer of its own, not
    through q's; group_mb: MiB of K and V of the heads that are worked on side by side; overlapped:
    whether a warpgroup multiplies q·k of a key tile together with probs·v of the one before (else
    in turn, with fewer registers); direct_out: whether output goes from registers to memory, so
    that it needs no buffer; programs_per_sm: programs that share an SM; packed_heads: query heads
    of one K/V head that share a query tile, each with so many fewer positions, for calls with few
    of those.
    """

    scheduler: Scheduler = "grid"
    q_buffers: int = 1
    separate_out: bool = False
    group_mb: int = 32
    overlapped: bool = True
    direct_out: bool = False
    programs_per_sm: int = 1
    packed_heads: int = 1

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict; `packed_heads` only where heads share tiles."""
        found = asdict(self)
        if self.packed_heads == 1:
            del found["packed_heads"]
        return found

    @classmethod
    def from_dict(cls, data: object) -> Sm90:
        """The inverse of `to_dict`; ScheduleError names the first field that is wrong."""
        known = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping):
            raise ScheduleError(f"schedule.sm90: must be a mapping (got {data!r})")
        for name in data:
            if name not in known:
                raise ScheduleError(
                    f"schedule.sm90.{name}: unknown field, known: {', '.join(known)}"
                )
        found = cls(**data)
        if found.scheduler not in SCHEDULERS:
            raise ScheduleError(
                f"schedule.sm90.scheduler: must be one of {', '.join(SCHEDULERS)} "
                f"(got {found.scheduler!r})"
            )
        for name in ("separate_out", "overlapped", "direct_out"):
            if not isinstance(getattr(found, name), bool):
                raise ScheduleError(
                    f"schedule.sm90.{name}: must be true or false (got {getattr(found, name)!r})"
                )
        for name in ("q_buffers", "group_mb", "programs_per_sm", "packed_heads"):
            _check_number(f"sm90.{name}", getattr(found, name))
        return found

    def __str__(self) -> str:
        out = "own output buffer" if self.separate_out else "output through q's buffer"
        out = "output from registers" if self.direct_out else out
        buffers = "" if self.q_buffers == 1 else f" {self.q_buffers} q buffers"
        order = "" if self.overlapped else ", products in turn"
        programs = "" if self.programs_per_sm == 1 else f", {self.programs_per_sm} programs an SM"
        packed = "" if self.packed_heads == 1 else f" {self.packed_heads} heads a tile"
        return (
            f"{self.scheduler}{buffers} {out} {self.group_mb} MiB abreast{order}{programs}{packed}"
        )


SCHEDULERS: tuple[Scheduler, ...] = ("grid", "static", "dynamic")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"schedule.{name}: must be a positive integer (got {value!r})")


@total_ordering
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a kernel is cut into tiles and warps; everything that codegen may choose, and no more.

    `block_m` query rows and `block_n` keys make one tile. `kernel` "single_tile" handles at most
    `block_n` keys, without a key loop and without rescaling; "loop" any number. `num_stages` is the
    depth of the software pipeline over key tiles. `maxnreg` caps registers per thread (None: the
    compiler's choice). `num_kv_splits` programs share the key tiles of a head (flash1), and a merge
    kernel joins what they leave (None: as many as the GPU has room for, decided at each call).
    Schedules sort by their fields in the order given here.

    Family gluon_sm90 (Hopper): `block_m` is 64 rows for each consumer warpgroup, `num_warps` counts
    those and a producer's, `num_stages` the buffers of K and of V, and `sm90` has the rest.
    """

    family: Family = "triton"
    kernel: KernelKind = "loop"
    loop_order: LoopOrder = "flash2"
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    num_kv_splits: int | None = 1
    sm90: Sm90 | None = None

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of the family gluon_sm90."""
        return self.block_m // 64

    @property
    def packed_heads(self) -> int:
        """Query heads of one K/V head that share a query tile; 1 but in the family gluon_sm90."""
        return self.sm90.packed_heads if self.sm90 else 1

    @property
    def positions(self) -> int:
        """Query positions of a tile: its rows, `packed_heads` of which have the same one."""
        return self.block_m // self.packed_heads

    def tile_heads(self, q_heads: int, kv_heads: int) -> int:
        """Of one batch: query heads that have tiles of their own, packs of them counting as one.

        >>> tile = {"block_m": 128, "block_n": 64, "num_warps": 12, "num_stages": 2}
        >>> packed = Schedule(family="gluon_sm90", **tile, sm90=Sm90(packed_heads=4))
        >>> packed.tile_heads(12, 2)
        4
        """
        if self.packed_heads == 1 or not kv_heads:
            return q_heads
        return kv_heads * -(-(q_heads // kv_heads) // self.packed_heads)

    @property
    def splits(self) -> int:
        """`num_kv_splits` of a schedule that leaves it open no more (`schedule.dram.for_shape`)."""
        assert self.num_kv_splits is not None, f"{self}: the number of splits depends on the shape"
        return self.num_kv_splits

    def splits_for(self, kv_len: int) -> int:
        """Splits that a call with so many keys launches: none is without a key tile."""
        return min(self.splits, max(1, -(-kv_len // self.block_n)))

    @property
    def keys_outside(self) -> bool:
        """Whether the kernel's outer loop walks key tiles; one without a loop has no order."""
        return self.kernel == "loop" and self.loop_order == "flash1"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict with every field, in declaration order; `sm90` only where it is used."""
        found = asdict(self)
        if self.sm90 is None:
            del found["sm90"]
        else:
            found["sm90"] = self.sm90.to_dict()
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Schedule:
        """The inverse of `to_dict`; ScheduleError names the first field that is wrong."""
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ScheduleError(f"schedule.{name}: unknown field, known: {', '.join(known)}")
        for name, allowed in _CHOICES.items():
            if name in data and data[name] not in allowed:
                raise ScheduleError(
                    f"schedule.{name}: must be one of {', '.join(allowed)} (got {data[name]!r})"
                )
        for name in (*_NUMBERS, *_OPTIONAL):
            value = data.get(name, _OPTIONAL.get(name))
            if name in _OPTIONAL and value is None:
                continue
            _check_number(name, value)
        is_hopper = data.get("family") == "gluon_sm90"
        if is_hopper != (data.get("sm90") is not None):
            wanted = "needs it" if is_hopper else "has none"
            raise ScheduleError(f"schedule.sm90: family {data.get('family', 'triton')} {wanted}")
        if is_hopper:
            data = {**data, "sm90": Sm90.from_dict(data["sm90"])}
        return cls(**data)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """One line, e.g. `loop flash2 128x64 8 warps 3 stages maxnreg 128`."""
        cap = "" if self.maxnreg is None else f" maxnreg {self.maxnreg}"
        splits = {1: "", None: " splits to fill"}.get(
            self.num_kv_splits, f" {self.num_kv_splits} splits"
        )
        if self.sm90 is not None:
            return (
                f"{self.family} {self.block_m}x{self.block_n} {self.num_warps} warps "
                f"{self.num_stages} stages {self.sm90}"
            )
        return (
            f"{self.kernel} {self.loop_order} {self.block_m}x{self.block_n} "
            f"{self.num_warps} warps {self.num_stages} stages{cap}{splits}"
        )

    @property
    def sort_key(self) -> tuple[str | int, ...]:
        """What schedules are sorted by: their fields, in order."""
        return (
            self.family,
            self.kernel,
            self.loop_order,
            self.block_m,
            self.block_n,
            self.num_warps,
            self.num_stages,
            self.maxnreg or 0,
            self.num_kv_splits or 0,
            *(astuple(self.sm90) if self.sm90 else ()),
        )

    def __lt__(self, other: object) -> bool:
        return self.sort_key < other.sort_key if isinstance(other, Schedule) else NotImplemented


def field_names(family: object) -> list[str]:
    """Fields of a schedule of this family, in the order of `Schedule.to_dict`."""
    return [f.name for f in fields(Schedule) if f.name != "sm90" or family == "gluon_sm90"]


# What a target has a limited amount of, and the unit in which messages give it.
_RESOURCES = {
    "smem_bytes": " B",
    "regs_per_thread": " registers",
    "threads_per_block": " threads",
    "smem_bytes of an SM": " B",
    "tmem_columns": " columns",
}


Relation = Literal[
    "at most",
    "at least",
    "exactly",
    "128, 192 or 256",
    "64 or 128",
    "power of two",
    "as in the spec",
    "not served",
]


@dataclass(frozen=True, order=True)
class Rejection:
    """Why a schedule cannot be used: a quantity, how much of it is needed, how much there is.

    `relation` says how `required` should have stood to `limit`: a resource or an upper bound is
    exceeded ("at most"), a lower bound missed ("at least"), a number another one ("exactly"); the
    others need no limit.
    """

    reason: str
    required: int
    limit: int
    relation: Relation = "at most"

    def __str__(self) -> str:
        unit = _RESOURCES.get(self.reason, "")
        if self.relation == "at most" and self.reason in _RESOURCES:
            return f"{self.reason}: needs {self.required}{unit}, target has {self.limit}{unit}"
        if self.relation == "power of two":
            return f"{self.reason}: must be a power of two (got {self.required})"
        if self.relation == "not served":
            return f"{self.reason}: not served"
        if self.relation in {"128, 192 or 256", "64 or 128"}:
            return f"{self.reason}: must be {self.relation} (got {self.required})"
        if self.relation == "as in the spec":
            return f"{self.reason}: the spec asks for another one"
        return f"{self.reason}: must be {self.relation} {self.limit} (got {self.required})"


@dataclass(frozen=True)
class Bucket:
    """A range of shapes that share one schedule: up to `q_len_max` rows and `kv_len_max` keys.

    None means no upper limit. Buckets of at most `SINGLE_TILE_MAX` keys prefer the kernel that
    holds all keys in one tile.
    """

    q_len_max: int | None
    kv_len_max: int | None

    @property
    def kernel(self) -> KernelKind:
        """The kind of kernel that this bucket prefers (one that fits may not exist)."""
        short = self.kv_len_max is not None and self.kv_len_max <= SINGLE_TILE_MAX
        return "single_tile" if short else "loop"

    def to_dict(self) -> dict[str, int | None]:
        return {"q_len_max": self.q_len_max, "kv_len_max": self.kv_len_max}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Bucket:
        """The inverse of `to_dict`; ScheduleError for a bucket that `bucket_of` never returns."""
        for row in _BUCKETS:
            for bucket in row:
                if data == bucket.to_dict():
                    return bucket
        raise ScheduleError(f"bucket: unknown shape bucket {dict(data)!r}")

    def __str__(self) -> str:
        rows = "any" if self.q_len_max is None else f"<= {self.q_len_max}"
        keys = "any" if self.kv_len_max is None else f"<= {self.kv_len_max}"
        return f"q_len {rows}, kv_len {keys}"


SINGLE_TILE_MAX = 128
Q_LEN_LIMITS: tuple[int, ...] = (16, 32, 64)
KV_LEN_LIMITS: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_BUCKETS: tuple[tuple[Bucket, ...], ...] = tuple(
    tuple(Bucket(q_max, kv_max) for kv_max in (*KV_LEN_LIMITS, None))
    for q_max in (*Q_LEN_LIMITS, None)
)


def bucket_of(q_len: int, kv_len: int) -> Bucket:
    """The smallest bucket that holds `q_len` query rows and `kv_len` keys (0 is a length)."""
    return _BUCKETS[bisect_left(Q_LEN_LIMITS, q_len)][bisect_left(KV_LEN_LIMITS, kv_len)]


def all_buckets() -> tuple[Bucket, ...]:
    """Every bucket that `bucket_of` can return, from small to large."""
    return tuple(bucket for row in _BUCKETS for bucket in row)
