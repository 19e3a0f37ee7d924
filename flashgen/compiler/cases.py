"""Which calls a plan is verified on: lengths at the edges of its tiles, for each of its schedules.

On a GPU every schedule gets all edges that its shape buckets contain, and others where these are
few: a schedule for long sequences is right or wrong at short ones too. The interpreter needs about
`SECONDS_PER_STEP` for each program and key tile, so there the schedules of the spec's shapes, and
one of every kind of kernel, get a few edges, the most telling first, until `INTERPRETER_STEPS` are
spent; then two batches of two K/V heads for every kind of kernel that had none, and the edges of
the mask that no case of a kind of kernel reaches, as far as `MASK_STEPS` go for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from flashgen.codegen.options import kernel_kinds
from flashgen.compiler.mask_edges import Edge, mask_edges, reaches
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
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape

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
SECONDS_PER_STEP = 0.005  # one program, or one key tile of one, interpreted (2 GHz core, 2026-11)
INTERPRETER_STEPS = 80
MASK_STEPS = 300
FEWEST = 12  # cases of a schedule on a GPU
MANY_BATCHES = 96  # of two K/V heads: programs for every SM of any NVIDIA GPU in the catalogue
MAX_EDGE = 2**16  # edges of the mask beyond this get no case of their own
AT_LENGTH = 3  # pairs of lengths at which an edge is looked for
PATTERNS = 5  # after so many cases the patterns of lengths and ids are the first ones again


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
    if interpreted:
        return _few(spec, plan)
    found = tuple(_all(spec, plan))
    schedules = representatives(spec, plan)
    return (*found, *_mask_edges(spec, schedules, found, batch=2, steps=None))


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
            case = _cheap(spec, schedule, lengths, len(found))
            if number and spent + case.steps > INTERPRETER_STEPS:
                continue
            spent += case.steps
            found.append(case)
    found += _batches(spec, schedules, found)
    return (*found, *_mask_edges(spec, schedules, found, batch=1, steps=MASK_STEPS))


def _batches(
    spec: AttentionSpec, schedules: Sequence[Schedule], found: Sequence[Case]
) -> list[Case]:
    """A small case of two batches and two K/V heads, each with memory of its own, for every kind of
    kernel without one: which show what a query head, and a batch, reads."""
    from flashgen.runtime.draw import has_nan

    shown = {_kind(case.schedule) for case in found if _tells_batches(case)}
    more: list[Case] = []
    for schedule in schedules:
        if _kind(schedule) in shown:
            continue
        shown.add(_kind(schedule))
        index = len(found) + len(more)
        if schedule.family == HOPPER and has_nan(index):  # seconds in the emulator
            index += 1
        keys = schedule.block_n + (1 if "flash1_split" in kernel_kinds(schedule) else -1)
        shape = _sized(spec, schedule.positions - 1, keys, index, batch=2)
        strides = TMA_STRIDES[index % len(TMA_STRIDES)]
        more.append(_emulable(spec, Case(schedule, shape, strides, index)))
    return more


def _tells_batches(case: Case) -> bool:
    shape = case.shape
    apart = case.strides != "expanded"  # or all batches have the keys of the first
    return apart and min(shape.batch, shape.kv_heads) > 1 and min(shape.q_len, shape.kv_len) > 1


def _queue(spec: AttentionSpec, schedules: Sequence[Schedule], place: int) -> list[tuple[int, int]]:
    """Lengths for one schedule; where one of its kind is before it, a cheap pair comes first."""
    schedule = schedules[place]
    lengths = _telling(spec, schedule)
    if any(_kind(earlier) == _kind(schedule) for earlier in schedules[:place]):
        lengths.insert(0, (schedule.positions - 1, schedule.block_n + 1))
    return _served(lengths, schedule)


def _mask_edges(
    spec: AttentionSpec,
    schedules: Sequence[Schedule],
    found: Sequence[Case],
    *,
    batch: int,
    steps: int | None,
) -> tuple[Case, ...]:
    """Of each kind of kernel a case for each edge of the mask that none of its cases reaches, while
    `steps` last (None: always)."""
    more: list[Case] = []
    for kinds, edges in unreached_by_kernel(spec, found).items():
        own = [schedule for schedule in schedules if kernel_kinds(schedule) == kinds]
        count = len(found) + len(more)
        more += _at_edges(spec, own, edges, count, batch=batch, steps=steps)
    return tuple(more)


def unreached_by_kernel(
    spec: AttentionSpec, cases: Sequence[Case]
) -> dict[tuple[str, ...], tuple[Edge, ...]]:
    """Of each kind of kernel, which is code of its own, what `unreached` says of its cases.

    A single tile holds few keys: it is judged where there are no other kernels.
    """
    by_kinds: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        by_kinds.setdefault(kernel_kinds(case.schedule), []).append(case)
    if len(by_kinds) > 1:
        by_kinds.pop(("single_tile",), None)
    return {kinds: unreached(spec, own) for kinds, own in by_kinds.items()}


def _at_edges(
    spec: AttentionSpec,
    schedules: Sequence[Schedule],
    edges: Sequence[Edge],
    count: int,
    *,
    batch: int,
    steps: int | None,
) -> list[Case]:
    """A case for each of these edges that the cases before it do not reach, while `steps` last."""
    more: list[Case] = []
    for edge in edges:
        if edge.length > MAX_EDGE or any(reaches(spec, case, edge) for case in more):
            continue
        left = None if steps is None else steps - sum(case.steps for case in more)
        case = _at_edge(spec, schedules, edge, count + len(more), batch=batch, steps=left)
        more += [] if case is None else [case]
    return more


def unreached(spec: AttentionSpec, cases: Sequence[Case]) -> tuple[Edge, ...]:
    """The edges of the mask without which it would show the same pairs in all cases."""
    longest = sorted(cases, key=lambda case: case.shape.q_len + case.shape.kv_len, reverse=True)
    return tuple(
        edge for edge in mask_edges(spec) if not any(reaches(spec, case, edge) for case in longest)
    )


def _at_edge(
    spec: AttentionSpec,
    schedules: Sequence[Schedule],
    edge: Edge,
    index: int,
    *,
    batch: int,
    steps: int | None,
) -> Case | None:
    """The most telling case that reaches an edge, of those with at most so many steps.

    Inputs may hide an edge, so the first `PATTERNS` of them are tried.
    """
    for lengths in range(AT_LENGTH):
        cases = [
            _emulable(
                spec,
                Case(schedule, _sized(spec, q, k, index, batch=batch, kv_heads=1), "plain", index),
            )
            for schedule in schedules
            for q, k in [_at_length(edge.length, schedule)[lengths]]
            if _serves(schedule, k)
        ]
        cases = [case for case in cases if steps is None or case.steps <= steps]
        for case in sorted(cases, key=lambda each: each.steps)[:1]:
            for number in range(index, index + PATTERNS):
                numbered = replace(case, index=number)
                if reaches(spec, numbered, edge):
                    return numbered
    return None


def _at_length(length: int, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """(q_len, kv_len) at which a mask may change: for the last rows of many keys, so that key tiles
    are hidden, cut and seen whole; where rows lie before the first key, or at 0; for both."""
    m, n = schedule.positions, schedule.block_n
    return (m, length + n + 3), (length + m, n + 3), (length + m, length + n + 3)


def _cheap(spec: AttentionSpec, schedule: Schedule, lengths: tuple[int, int], index: int) -> Case:
    """Two batches and two K/V heads where that is cheap, one of each where it is not."""
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
        for batch, heads in [(2, 2), (2, 1), (1, 2), (1, 1)]
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
        *((1, length + 2) for length in _edge_lengths(spec)),
        *((m, length + n + 3) for length in _edge_lengths(spec)),
    ]


def _edge_lengths(spec: AttentionSpec) -> tuple[int, ...]:
    lengths = (edge.length for edge in mask_edges(spec))
    return tuple(dict.fromkeys(length for length in lengths if length <= MAX_EDGE))


def _far(schedule: Schedule) -> list[tuple[int, int]]:
    """More of them: every edge of rows with some edges of keys."""
    m, n = schedule.positions, schedule.block_n
    rows, past = _past(schedule)
    q_lens = (1, m - 1, m, m + 1, 2 * m + 3, rows - 1, rows, rows + 1)
    kv_lens = (0, 1, n - 1, n, n + 1, 2 * n + 3, past - 1, past, past + 1, past + n + 3)
    pairs = [(q, kv_lens[(i + j) % len(kv_lens)]) for i, q in enumerate(q_lens) for j in range(4)]
    return pairs + [(m + 1, kv_len) for kv_len in kv_lens]
