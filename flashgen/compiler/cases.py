"""Which calls a plan is verified on: lengths at the edges of its tiles, for each of its schedules.

On a GPU every schedule gets all edges that its shape buckets contain, and others where these are
few: a schedule for long sequences is right or wrong at short ones too. The interpreter needs about
`SECONDS_PER_STEP` for each program and key tile, so there the schedules of the spec's shapes, and
one of every kind of kernel, get a few edges, the most telling first, until `INTERPRETER_STEPS` are
spent; then the mask's own edges, as far as `MASK_STEPS` go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from flashgen.codegen.options import kernel_kinds
from flashgen.passes.score_tile import score_tile
from flashgen.runtime.artifact import Plan
from flashgen.schedule.model import (
    HOPPER,
    Q_LEN_LIMITS,
    SINGLE_TILE_MAX,
    Bucket,
    Schedule,
    bucket_of,
)
from flashgen.spec.expr import Number, parse_expression, walk
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Expr, Shape, Window

if TYPE_CHECKING:
    from flashgen.runtime.draw import Strides

STRIDES: tuple[Strides, ...] = ("plain", "unaligned", "transposed", "strided", "expanded")
ALIGNED_STRIDES: tuple[Strides, ...] = ("plain", "transposed", "expanded")
TMA_STRIDES: tuple[Strides, ...] = ("plain", "transposed")

# Buckets whose schedules stand for the others: prefill and decode, long and short.
REPRESENTATIVE = (
    Bucket(None, None),
    Bucket(None, SINGLE_TILE_MAX),
    Bucket(16, None),
    Bucket(16, 16),
)
ANY_GROUPS = (2, 1, 6)  # query heads per K/V head where the spec says `any`
SECONDS_PER_STEP = 0.04  # one program, or one key tile of one, interpreted (2 GHz core, 2026-11)
INTERPRETER_STEPS = 80
MASK_STEPS = 80
FEWEST = 12  # cases of a schedule on a GPU
MANY_BATCHES = 96  # of two K/V heads: programs for every SM of any NVIDIA GPU in the catalogue
MAX_EDGE = 2**16  # mask constants beyond this are not reached by a case of their own
MIN_EDGE = 17  # below this every case reaches them


@dataclass(frozen=True)
class Case:
    """One call: sizes, the schedule that serves them, how its tensors lie in memory.

    `index` turns the patterns of lengths, ids and sinks, so that cases differ in them.
    """

    schedule: Schedule
    shape: Shape
    strides: Strides
    index: int

    def __str__(self) -> str:
        s = self.shape
        heads = f"{s.q_heads}:{s.kv_heads}"
        return f"b{s.batch} h{heads} q{s.q_len} k{s.kv_len} {self.strides}"

    @property
    def steps(self) -> int:
        """Programs and key tiles: what the interpreter's time is proportional to."""
        return programs(self.schedule, self.shape) * (1 + key_tiles(self.schedule, self.shape))

    def is_chosen(self, plan: Plan) -> bool:
        """Whether a call of this shape gets the schedule; if not, it has to be told to."""
        return dict(plan.choices)[bucket_of(self.shape.q_len, self.shape.kv_len)] == self.schedule


def programs(schedule: Schedule, shape: Shape) -> int:
    heads = schedule.tile_heads(shape.q_heads, shape.kv_heads)
    return -(-shape.q_len // schedule.positions) * heads * shape.batch


def key_tiles(schedule: Schedule, shape: Shape) -> int:
    return -(-shape.kv_len // schedule.block_n)


def cases_of(
    spec: AttentionSpec, plan: Plan, *, interpreted: bool, shapes: Sequence[Shape] | None = None
) -> tuple[Case, ...]:
    """The cases of a plan; `shapes`: these sizes instead of the edges of its tiles."""
    if shapes is not None:
        chosen = dict(plan.choices)
        return tuple(
            _case(chosen[bucket_of(s.q_len, s.kv_len)], s, index, interpreted=interpreted)
            for index, s in enumerate(shapes)
        )
    return _few(spec, plan) if interpreted else tuple(_all(spec, plan))


def _case(schedule: Schedule, shape: Shape, index: int, *, interpreted: bool) -> Case:
    """A case whose tensors lie as its number says; what runs emulated takes what TMA takes."""
    usual = TMA_STRIDES if interpreted and schedule.family == HOPPER else STRIDES
    return Case(schedule, shape, usual[index % len(usual)], index)


def _emulable(spec: AttentionSpec, case: Case) -> Case:
    """Of a Hopper kernel that has tiles of the score brought: with rows of it that TMA takes."""
    if case.schedule.family != HOPPER or score_tile(spec) is None:
        return case
    shape = replace(case.shape, kv_len=-(-case.shape.kv_len // 8) * 8)
    return replace(case, shape=shape, strides="plain")


def representatives(spec: AttentionSpec, plan: Plan) -> tuple[Schedule, ...]:
    """The schedules of the spec's shapes, small tiles first: of a kind the first one gets the most
    cases. Then one of every other kind of kernel, for many rows and for few."""
    chosen = dict(plan.choices)
    wanted = {chosen[bucket_of(shape.q_len, shape.kv_len)] for shape in spec.shapes}
    found = dict.fromkeys(sorted(wanted, key=lambda each: (each.block_m * each.block_n, each)))
    for bucket in (*REPRESENTATIVE, *chosen):
        if all(_kind(chosen[bucket]) != _kind(other) for other in found):
            found[chosen[bucket]] = None
    return tuple(found)


def _kind(schedule: Schedule) -> tuple[object, ...]:
    """Schedules of the same kind differ in tile, warps and stages: in constants of a kernel."""
    return (*kernel_kinds(schedule), schedule.block_m <= Q_LEN_LIMITS[0], schedule.packed_heads > 1)


def _all(spec: AttentionSpec, plan: Plan) -> Iterator[Case]:
    chosen = dict(plan.choices)
    both = representatives(spec, plan)
    index = 0
    for schedule in dict.fromkeys(chosen.values()):
        strides = STRIDES if schedule in both else ALIGNED_STRIDES
        for q_len, kv_len in _edges(spec, schedule, plan):
            shape = _sized(spec, q_len, kv_len, index, batch=2)
            yield Case(schedule, shape, strides[index % len(strides)], index)
            index += 1
        if schedule.num_kv_splits is None:  # few heads split the keys, many do not
            q_len, kv_len = _edges(spec, schedule, plan)[0]
            shape = _sized(spec, q_len, kv_len, index, batch=MANY_BATCHES)
            yield Case(schedule, shape, strides[index % len(strides)], index)
            index += 1


def _few(spec: AttentionSpec, plan: Plan) -> tuple[Case, ...]:
    """Round by round over the schedules, the first round whatever it costs."""
    schedules = representatives(spec, plan)
    queues = [_queue(spec, schedules, place) for place in range(len(schedules))]
    found: list[Case] = []
    spent = 0
    for number, lengths_of_round in enumerate(zip_longest(*queues)):
        for schedule, lengths in zip(schedules, lengths_of_round, strict=True):
            if lengths is None:
                continue
            # The cheapest schedule's first case shows which K/V head a query head reads.
            two_heads = not number and schedule == schedules[-1]
            case = _cheap(spec, schedule, lengths, len(found), two_heads=two_heads)
            if number and spent + case.steps > INTERPRETER_STEPS:
                continue
            spent += case.steps
            found.append(case)
    return (*found, *_mask_edges(spec, schedules, found))


def _queue(spec: AttentionSpec, schedules: Sequence[Schedule], place: int) -> list[tuple[int, int]]:
    """Lengths for one schedule; where one of its kind is before it, a cheap pair comes first."""
    schedule = schedules[place]
    lengths = _telling(spec, schedule)
    if any(_kind(earlier) == _kind(schedule) for earlier in schedules[:place]):
        lengths.insert(0, (schedule.positions - 1, schedule.block_n + 1))
    return _served(lengths, schedule)


def _mask_edges(
    spec: AttentionSpec, schedules: Sequence[Schedule], found: Sequence[Case]
) -> Iterator[Case]:
    """One row and just enough keys for each edge of the mask that no case reaches, while it is
    affordable."""
    reached = max((case.shape.kv_len for case in found), default=0)
    beyond = [edge for edge in edge_lengths(spec) if edge >= reached]
    left = MASK_STEPS
    for index, edge in enumerate(beyond, len(found)):
        shape = _sized(spec, 1, edge + 1, index, batch=1, kv_heads=1)
        cases = [Case(s, shape, "plain", index) for s in schedules if _serves(s, edge + 1)]
        case = min(cases, key=lambda each: each.steps)
        left -= case.steps
        if left < 0:
            return
        yield case


def _cheap(
    spec: AttentionSpec,
    schedule: Schedule,
    lengths: tuple[int, int],
    index: int,
    *,
    two_heads: bool,
) -> Case:
    """Two batches and two K/V heads where that is cheap, one of each where it is not."""
    sizes = [(2, 2), (1, 2)] if two_heads else [(2, 2), (2, 1), (1, 2), (1, 1)]
    cases = [
        _emulable(
            spec,
            _case(
                schedule,
                _sized(spec, *lengths, index, batch=batch, kv_heads=heads),
                index,
                interpreted=True,
            ),
        )
        for batch, heads in sizes
    ]
    return next((case for case in cases if case.steps <= INTERPRETER_STEPS // 8), cases[-1])


def _sized(
    spec: AttentionSpec, q_len: int, kv_len: int, index: int, *, batch: int, kv_heads: int = 2
) -> Shape:
    group = spec.heads.group or ANY_GROUPS[index % len(ANY_GROUPS)]
    return Shape(batch, group * kv_heads, kv_heads, q_len, kv_len)


def _edges(spec: AttentionSpec, schedule: Schedule, plan: Plan) -> list[tuple[int, int]]:
    """(q_len, kv_len) on a GPU: those for which `schedule` is chosen; others too if few."""
    chosen = dict(plan.choices)
    lengths = _served([*_telling(spec, schedule), *_far(schedule)], schedule)
    own = [each for each in lengths if chosen[bucket_of(*each)] == schedule]
    others = [each for each in lengths if each not in own]
    return own + others[: max(0, FEWEST - len(own))]


def _served(lengths: list[tuple[int, int]], schedule: Schedule) -> list[tuple[int, int]]:
    """Those that the kernel can serve, no pair twice."""
    return [each for each in dict.fromkeys(lengths) if _serves(schedule, each[1])]


def _serves(schedule: Schedule, kv_len: int) -> bool:
    return schedule.kernel == "loop" or kv_len <= schedule.block_n


def _past(schedule: Schedule) -> tuple[int, int]:
    """The first whole tiles of rows and keys beyond all shape buckets of short ones."""
    rows = -(-(Q_LEN_LIMITS[-1] + 1) // schedule.positions) * schedule.positions
    return rows, -(-(SINGLE_TILE_MAX + 1) // schedule.block_n) * schedule.block_n


def _telling(spec: AttentionSpec, schedule: Schedule) -> list[tuple[int, int]]:
    """(q_len, kv_len) at edges of tiles, the most telling first."""
    m, n = schedule.positions, schedule.block_n
    rows, past = _past(schedule)
    return [
        (m + 1, 2 * n + 3),
        (m + 1, past + n + 3),
        (m - 1, n - 1),
        (1, n),
        (1, past + 1),
        (1, 1),
        (m, 0),
        (2 * m + 3, n + 1),
        (2 * m + 3, past - 1),
        (m - 1, past),
        (rows, past),
        *((1, edge + 1) for edge in edge_lengths(spec)),
        *((m, edge + n + 3) for edge in edge_lengths(spec)),
    ]


def _far(schedule: Schedule) -> list[tuple[int, int]]:
    """More of them: every edge of rows with some edges of keys."""
    m, n = schedule.positions, schedule.block_n
    rows, past = _past(schedule)
    q_lens = (1, m - 1, m, m + 1, 2 * m + 3, rows - 1, rows, rows + 1)
    kv_lens = (0, 1, n - 1, n, n + 1, 2 * n + 3, past - 1, past, past + 1, past + n + 3)
    pairs = [(q, kv_lens[(i + j) % len(kv_lens)]) for i, q in enumerate(q_lens) for j in range(4)]
    return pairs + [(m + 1, kv_len) for kv_len in kv_lens]


def edge_lengths(spec: AttentionSpec) -> tuple[int, ...]:
    """Distances at which the mask changes, beyond those that every case reaches: window sides, and
    numbers in expressions."""
    found: set[int] = set()
    for item in spec.mask:
        if isinstance(item, Window):
            found |= {side for side in (item.left, item.right) if side is not None}
        if isinstance(item, Expr):
            numbers = (n.value for n in walk(parse_expression(item.expr)) if isinstance(n, Number))
            found |= {value for value in numbers if isinstance(value, int)}
    return tuple(sorted(edge for edge in found if MIN_EDGE <= edge <= MAX_EDGE))
