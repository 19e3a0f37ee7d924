"""Why a kernel is cut as it is: formulas, what fits, both loop orders and naive side by side.

Everything here is derived from the spec, a shape and the GPU catalogue, for the schedule that a
call of the shape gets: a table of tuned configs may name it. Nothing is measured here, and neither
torch nor triton is imported. `explain` gives one target's explanation, `compare` a row for
each target of the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import sympy as sp

from flashgen.compiler.arguments import shape_argument, spec_argument, target_argument
from flashgen.compiler.chosen import Choice, chosen_for
from flashgen.compiler.explanation import (
    Algorithm,
    Comparison,
    Explanation,
    FamilyFacts,
    Formula,
    MaskFacts,
    RejectedTile,
    RejectionGroup,
    TargetRow,
    TileCell,
    TileUse,
    shape_text,
)
from flashgen.compiler.report import loop_bounds
from flashgen.errors import ScheduleError
from flashgen.ir import symbols as sym
from flashgen.passes.count import Visits, visible_pairs, visits
from flashgen.passes.lower import Kernel, Order
from flashgen.passes.visibility import visibility
from flashgen.problem import Problem
from flashgen.schedule import budget as budgets
from flashgen.schedule.budget import Budget, Figures, budget_for, naive_budget
from flashgen.schedule.dram import (
    DramTraffic,
    dram_bytes_model,
    for_shape,
    grid_programs,
    resident_programs,
)
from flashgen.schedule.families import PORTABLE
from flashgen.schedule.model import HOPPER, Family, Rejection, Schedule, bucket_of
from flashgen.schedule.orders import estimate, faster
from flashgen.schedule.roofline import matmul_rate, roofline
from flashgen.schedule.space import (
    ORDERS,
    Space,
    default_schedule,
    enumerate_space,
    programs_per_sm,
    unserved,
)
from flashgen.spec.model import AttentionSpec, Shape
from flashgen.target import TARGETS, Target, get_target

DEFAULT_TARGET = "nvidia-h200"
ASSUMED_LENGTH, ASSUMED_KV_HEADS = 4096, 8  # of a spec that names no shape

UNITS: Mapping[str, str] = {
    "textbook_smem_bytes": "B",
    "smem_bytes": "B",
    "regs_per_thread": "",
    "tile_traffic_bytes": "B",
    "dram_bytes": "B",
    "matmul_flops": "FLOP",
    "flops": "FLOP",
    "visited_flops": "FLOP",
}


def explain(
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    shape: Shape | Mapping[str, int] | None = None,
) -> Explanation:
    """What `spec` costs on `target` (default nvidia-h200) for `shape` (default: its first one).

    TargetError for an unknown GPU or one without a matmul unit for the dtype, SpecError for a shape
    that the spec does not allow, ScheduleError for one that no GPU in the catalogue can hold.
    """
    gpu = target_argument(target) or get_target(DEFAULT_TARGET)
    found, assumed = _shape(spec_argument("explain", spec), shape)
    _check_memory(spec, found)
    return _Explaining(spec, gpu, found).explanation(assumed)


def compare(spec: AttentionSpec, *, shape: Shape | Mapping[str, int] | None = None) -> Comparison:
    """`spec` on every target of the catalogue; errors as for `explain`, but for targets' own."""
    found, assumed = _shape(spec_argument("compare", spec), shape)
    _check_memory(spec, found)
    rows = tuple(_row(spec, target, found) for target in TARGETS.values())
    return Comparison(spec, found, assumed, rows)


# **** the shape ****


def _shape(spec: AttentionSpec, given: Shape | Mapping[str, int] | None) -> tuple[Shape, bool]:
    """The shape to explain, checked as those of a spec are, and whether it had to be assumed."""
    if given is not None:
        return shape_argument(spec, given), False
    if spec.shapes:
        return spec.shapes[0], False
    q_heads = ASSUMED_KV_HEADS * (spec.heads.group or 1)
    return Shape(1, q_heads, ASSUMED_KV_HEADS, ASSUMED_LENGTH, ASSUMED_LENGTH), True


def _check_memory(spec: AttentionSpec, shape: Shape) -> None:
    """ScheduleError if no GPU could hold the inputs and the output."""
    needed = _array_bytes(spec, shape)
    largest = max(TARGETS.values(), key=lambda target: target.dram_bytes)
    if needed > largest.dram_bytes:
        raise ScheduleError(
            f"shape: inputs and output take {needed / 1e9:,.0f} GB; the largest GPU in the "
            f"catalogue, {largest.id}, has {largest.dram_bytes / 1e9:,.0f} GB\n"
            f"  hint: {shape_text(shape)}: is an extent in the wrong place? "
            "--shape is batch,q_heads,kv_heads,q_len,kv_len."
        )


def _array_bytes(spec: AttentionSpec, shape: Shape) -> int:
    """Bytes of all inputs and outputs."""
    needs = budgets.budget(Problem(spec, get_target(DEFAULT_TARGET)), loop_order="flash2")
    return needs.figures(None, shape, visited_tiles=0, visible_pairs=0).footprint_bytes


# **** one order on one target ****


@cache
def _visits(
    spec: AttentionSpec,
    shape: Shape,
    block_m: int,
    block_n: int,
    num_kv_splits: int = 1,
    kernel: Kernel = "loop",
) -> Visits:
    """Inputs are not known here: what they hide counts as visited."""
    return visits(spec, shape, block_m, block_n, num_kv_splits=num_kv_splits, kernel=kernel)


@cache
def _pairs(spec: AttentionSpec, shape: Shape) -> int:
    return visible_pairs(spec, shape)


@dataclass(frozen=True)
class _Order:
    """One loop order of a spec on a target: the problem, its space, the schedule of the shape."""

    problem: Problem
    shape: Shape

    @classmethod
    def of(cls, spec: AttentionSpec, target: Target, shape: Shape, order: Order) -> _Order:
        return cls(Problem(_in_order(spec, order), target), shape)

    @property
    def space(self) -> Space:
        """Of the portable family: whose tile shapes are shown."""
        bucket = bucket_of(self.shape.q_len, self.shape.kv_len)
        return enumerate_space(self.problem, bucket, (PORTABLE,))

    def schedule(self) -> Schedule | None:
        """The untuned choice; None where nothing fits."""
        bucket = bucket_of(self.shape.q_len, self.shape.kv_len)
        try:
            found = default_schedule(self.problem, bucket)
        except ScheduleError:
            return None
        return for_shape(self.problem, found, self.shape)

    def visits(self, schedule: Schedule) -> Visits:
        spec = self.problem.spec
        tile = schedule.positions, schedule.block_n
        splits = schedule.splits_for(self.shape.kv_len)
        return _visits(_any_order(spec), self.shape, *tile, splits, schedule.kernel)

    def budget(self, schedule: Schedule) -> Budget:
        return budget_for(self.problem, schedule, return_lse=False)

    def figures(self, schedule: Schedule) -> Figures:
        seen = self.visits(schedule)
        return self.budget(schedule).figures(
            schedule,
            self.shape,
            visited_tiles=seen.tiles,
            visible_pairs=_pairs(_any_order(self.problem.spec), self.shape),
            first_visits=seen.first_visits,
            visited_keys=seen.keys,
            key_tiles=seen.key_tiles,
        )

    def dram(self, schedule: Schedule, figures: Figures) -> DramTraffic:
        seen = self.visits(schedule)
        return dram_bytes_model(self.problem, schedule, self.shape, figures, seen)

    def algorithm(self, schedule: Schedule) -> Algorithm:
        figures = self.figures(schedule)
        return _algorithm(
            schedule.loop_order,
            self.problem,
            figures,
            dram_bytes=self.dram(schedule, figures).total_bytes,
            matmul_flops=figures.matmul_flops,
            schedule=schedule,
            programs=grid_programs(schedule, self.shape),
        )


def _any_order(spec: AttentionSpec) -> AttentionSpec:
    """The spec whose mask is counted: one for both orders, so that nothing is counted twice."""
    return _in_order(spec, "flash2")


@cache
def _in_order(spec: AttentionSpec, order: Order) -> AttentionSpec:
    return spec.replace(loop_order=order)


def _naive(problem: Problem, shape: Shape) -> Algorithm:
    """Naive attention computes every pair, whatever the mask, and writes S and P out."""
    pairs = _pairs(_any_order(problem.spec), shape)
    needs = naive_budget(problem)
    figures = needs.figures(None, shape, visited_tiles=0, visible_pairs=pairs)
    every = needs.figures(None, shape, visited_tiles=0, visible_pairs=shape.q_len * shape.kv_len)
    return _algorithm(
        "naive",
        problem,
        figures,
        dram_bytes=figures.dram_bytes,
        matmul_flops=every.matmul_flops,
        schedule=None,
        programs=0,
    )


def _algorithm(
    name: str,
    problem: Problem,
    figures: Figures,
    *,
    dram_bytes: int,
    matmul_flops: int,
    schedule: Schedule | None,
    programs: int,
) -> Algorithm:
    floor = roofline(matmul_flops, dram_bytes, problem.target, problem.spec.dtype.q)
    return Algorithm(
        name=name,
        schedule=str(schedule) if schedule else None,
        matmul_flops=figures.matmul_flops,
        flops=figures.flops,
        executed_flops=figures.visited_flops,
        tile_traffic_bytes=figures.tile_traffic_bytes,
        dram_floor_bytes=figures.dram_bytes,
        dram_bytes=dram_bytes,
        intensity=figures.flops / dram_bytes if dram_bytes else 0.0,
        compute_ms=floor.compute_us / 1e3,
        memory_ms=floor.memory_us / 1e3,
        bound_ms=floor.time_us / 1e3,
        bound=floor.bound,
        programs=programs,
        workspace_bytes=figures.workspace_bytes,
    )


# **** an explanation ****


@dataclass(frozen=True)
class _Explaining:
    """The parts of one explanation."""

    spec: AttentionSpec
    target: Target
    shape: Shape

    def explanation(self, assumed: bool) -> Explanation:
        peak = matmul_rate(self.target, self.spec.dtype.q)
        orders = {order: _Order.of(self.spec, self.target, self.shape, order) for order in ORDERS}
        schedules = {order: of.schedule() for order, of in orders.items()}
        choice = _choice(self.spec, self.target, self.shape)
        chosen, reason = self._order(orders, schedules, choice)
        schedules[chosen] = choice.schedule if choice else None
        algorithms = {
            order: orders[order].algorithm(schedule)
            for order, schedule in schedules.items()
            if schedule is not None
        }
        order, schedule = orders[chosen], schedules[chosen]
        space = order.space
        needs = order.budget(schedule) if schedule else None
        return Explanation(
            spec=self.spec,
            target=self.target,
            shape=self.shape,
            shape_assumed=assumed,
            loop_order=chosen,
            order_reason=reason,
            schedule=schedule,
            choice=choice,
            formulas=tuple(_formulas(order, schedule)),
            tiles=tuple(_tile_uses(needs, schedule)) if needs and schedule else (),
            smem_bytes=needs.smem_bytes_of(schedule) if needs and schedule else 0,
            textbook_smem_bytes=(
                needs.textbook_smem_bytes_of(schedule.block_m, schedule.block_n)
                if needs and schedule
                else 0
            ),
            regs_per_thread=needs.regs_per_thread_of(schedule) if needs and schedule else 0,
            families=(_family(PORTABLE, space, None), self._hopper()),
            feasible=len(space.feasible),
            tried=len(space.feasible) + len(space.rejections),
            rejections=tuple(_rejection_groups(space)),
            frontier=_frontier(space),
            grid=tuple(_cells(order, space)),
            algorithms=(*algorithms.values(), _naive(orders["flash2"].problem, self.shape)),
            mask=self._mask(schedule),
            peak_flops_per_s=peak,
            limits=tuple(self._limits(order, schedule, algorithms.get(chosen))),
        )

    def _hopper(self) -> FamilyFacts:
        problem = Problem(self.spec, self.target)
        bucket = bucket_of(self.shape.q_len, self.shape.kv_len)
        space = enumerate_space(problem, bucket, (HOPPER,))
        return _family(HOPPER, space, unserved(HOPPER, problem, bucket))

    def _order(
        self,
        orders: Mapping[Order, _Order],
        schedules: Mapping[Order, Schedule | None],
        choice: Choice | None,
    ) -> tuple[Order, str]:
        """The loop order that is explained, and why that one."""
        asked = self.spec.loop_order
        if asked != "auto":
            return asked, "as the spec asks"
        found = {
            order: estimate(orders[order].problem, schedule, self.shape)
            for order, schedule in schedules.items()
            if schedule is not None
        }
        if len(found) < len(ORDERS):
            only: Order = next(iter(found), ORDERS[0])
            return only, f"auto: only {only} fits" if found else "auto: neither order fits"
        first = faster(found)
        second: Order = "flash2" if first == "flash1" else "flash1"
        ratio = found[second].tile_traffic_bytes / max(1, found[first].tile_traffic_bytes)
        used = choice.schedule.loop_order if choice else first
        other = "" if used == first else f"{_who(choice)}; for this shape {first} is "
        return used, (
            f"auto: {other}predicted {found[first].time_us / 1e3:.3g} ms against "
            f"{found[second].time_us / 1e3:.3g} ms of {second}, which moves {ratio:.2f} times the "
            "tile traffic"
        )

    def _mask(self, schedule: Schedule | None) -> MaskFacts:
        spec, shape = _any_order(self.spec), self.shape
        block_m, block_n = (schedule.positions, schedule.block_n) if schedule else (64, 64)
        kernel: Kernel = schedule.kernel if schedule else "loop"
        return MaskFacts(
            predicate=str(visibility(spec).predicate),
            bounds=tuple(line.replace("`", "") for line in loop_bounds(spec, kernel)),
            visible_pairs=_pairs(spec, shape),
            pairs=shape.q_len * shape.kv_len,
            visited_tiles=_visits(spec, shape, block_m, block_n, kernel=kernel).tiles,
            tiles=math.ceil(shape.q_len / block_m) * math.ceil(shape.kv_len / block_n),
        )

    def _limits(
        self, order: _Order, schedule: Schedule | None, found: Algorithm | None
    ) -> Iterator[str]:
        """What keeps the kernel from being faster, most important first."""
        needed = _array_bytes(self.spec, self.shape)
        if needed > self.target.dram_bytes:
            yield (
                f"memory: inputs and output take {needed / 1e9:,.1f} GB, more than the "
                f"{self.target.dram_bytes / 1e9:,.0f} GB of {self.target.id}"
            )
        if schedule is None or found is None:
            yield f"on-chip memory: no tile shape fits {self.target.id}"
            return
        yield _roofline_limit(order.problem, found)
        yield _occupancy_limit(order.problem, schedule)
        yield _grid_limit(order.problem, schedule, self.shape)
        yield from _waste_limit(found)
        yield from _padding_limit(order.problem)
        yield _l2_limit(order.dram(schedule, order.figures(schedule)))


def _family(family: Family, space: Space, missing: str | None) -> FamilyFacts:
    rejected = tuple((reason, len(each)) for reason, each in space.grouped().items())
    tried = len(space.feasible) + len(space.rejections)
    return FamilyFacts(family, len(space.feasible), tried, rejected, missing)


def _who(choice: Choice | None) -> str:
    """Why another order is used than the one that the model takes for the shape."""
    tuned = choice is not None and choice.entry is not None
    return "the tuned schedule's" if tuned else "of all calls of such lengths"


def _choice(spec: AttentionSpec, target: Target, shape: Shape) -> Choice | None:
    """What a call of the shape gets, splits counted for it; None where nothing fits."""
    problem = Problem(spec, target)
    try:
        found = chosen_for(problem, bucket_of(shape.q_len, shape.kv_len))
    except ScheduleError:
        return None
    return replace(
        found,
        schedule=for_shape(problem, found.schedule, shape),
        untuned=for_shape(problem, found.untuned, shape),
    )


def _roofline_limit(problem: Problem, found: Algorithm) -> str:
    target = problem.target
    rate = matmul_rate(target, problem.spec.dtype.q)
    critical = rate / target.dram_bytes_per_s
    name = "the matmul units" if found.bound == "compute" else "memory bandwidth"
    return (
        f"roofline: {name}. Matmuls take {found.compute_ms:.3g} ms at {rate / 1e12:.4g} TFLOP/s, "
        f"memory {found.memory_ms:.3g} ms at {target.dram_bytes_per_s / 1e12:.3g} TB/s "
        f"({found.intensity:.4g} FLOP/B; the two are even at {critical:.3g})"
    )


def _occupancy_limit(problem: Problem, schedule: Schedule) -> str:
    by_resource = programs_per_sm(schedule, problem)
    least = max(1, min(by_resource.values()))
    name = min(by_resource, key=lambda resource: (by_resource[resource], resource))
    warps = least * schedule.num_warps
    return (
        f"occupancy: {name} allow{'s' if name == 'shared memory' else ''} {least} "
        f"program{'s' if least > 1 else ''} ({warps} warps) on an SM at a time"
    )


def _grid_limit(problem: Problem, schedule: Schedule, shape: Shape) -> str:
    programs = grid_programs(schedule, shape)
    at_once = max(1, min(programs_per_sm(schedule, problem).values()))
    room = at_once * problem.target.sm_count
    waves = programs / room
    if programs < problem.target.sm_count:
        idle = problem.target.sm_count - programs
        return f"grid: {programs} programs leave {idle} of {problem.target.sm_count} SMs idle"
    resident = resident_programs(problem, schedule, shape)
    tail = programs % room
    last = f", the last one {tail / room:.0%} full" if tail and waves > 1 else ""
    return f"grid: {programs} programs, {resident} at a time: {waves:.1f} waves{last}"


def _waste_limit(found: Algorithm) -> Iterator[str]:
    ratio = found.executed_flops / found.flops if found.flops else 1.0
    if ratio >= 1.01:
        more = f"{ratio:.3g} times" if ratio >= 2 else f"{ratio - 1:.1%} more than"
        yield (
            f"partial tiles: visited tiles compute {more} what is visible, for masked pairs and "
            "rows past the end"
        )


def _l2_limit(dram: DramTraffic) -> str:
    extra = dram.missed_bytes + dram.written_back_bytes
    if extra:
        return (
            f"L2: programs in flight use {_mib(dram.working_set_bytes)} again, the cache holds "
            f"{_mib(dram.held_bytes)}: {_mib(extra)} to and from memory above the floor"
        )
    if not dram.reused_bytes:
        return "L2: nothing is read again; memory traffic is the floor"
    return (
        f"L2: what programs in flight use again, {_mib(dram.working_set_bytes)}, fits in "
        f"the {_mib(dram.held_bytes)} that it holds; memory traffic is the floor"
    )


def _padding_limit(problem: Problem) -> Iterator[str]:
    true = problem.head_dim_qk + problem.head_dim_v
    padded = problem.head_dim_qk_padded + problem.head_dim_v_padded
    if padded > true:
        yield (
            f"padding: head dims {problem.head_dim_qk} and {problem.head_dim_v} are multiplied in "
            f"tiles {problem.head_dim_qk_padded} and {problem.head_dim_v_padded} wide, "
            f"{padded / true - 1:.0%} more than they need"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.4g} MiB"


# **** formulas and tiles ****


def _formulas(order: _Order, schedule: Schedule | None) -> Iterator[Formula]:
    """Every formula; without a feasible schedule, for the smallest tile of the grid."""
    schedule = schedule or Schedule(
        loop_order="flash1" if order.problem.spec.loop_order == "flash1" else "flash2",
        block_m=16,
        block_n=16,
        num_warps=4,
        num_stages=1,
    )
    needs, figures = order.budget(schedule), order.figures(schedule)
    seen = order.visits(schedule)
    numbers = _problem_numbers(order, schedule, seen)
    formulas = dict(needs.formulas)
    formulas["smem_bytes"] = budgets.smem_bytes(needs.graph, needs.unit(schedule))
    values = {
        "textbook_smem_bytes": needs.textbook_smem_bytes_of(schedule.block_m, schedule.block_n),
        "smem_bytes": needs.smem_bytes_of(schedule),
        "regs_per_thread": needs.regs_per_thread_of(schedule),
        **{name: getattr(figures, name) for name in UNITS if hasattr(figures, name)},
    }
    for name, formula in formulas.items():
        yield Formula(
            name=name,
            text=_printed(formula),
            with_numbers=_printed(formula.xreplace(numbers)),
            value=values[name],
            unit=UNITS[name],
        )


def _problem_numbers(
    order: _Order, schedule: Schedule, seen: Visits
) -> dict[sp.Symbol, sp.Integer]:
    """Everything but the schedule's own numbers; what a tile shape decides is the schedule's."""
    problem, shape = order.problem, order.shape
    numbers = {
        sym.HEAD_DIM_QK: problem.head_dim_qk,
        sym.HEAD_DIM_V: problem.head_dim_v,
        sym.HEAD_DIM_QK_PADDED: problem.head_dim_qk_padded,
        sym.HEAD_DIM_V_PADDED: problem.head_dim_v_padded,
        sym.BATCH: shape.batch,
        sym.NUM_Q_HEADS: shape.q_heads,
        sym.NUM_KV_HEADS: shape.kv_heads,
        sym.Q_LEN: shape.q_len,
        sym.KV_LEN: shape.kv_len,
        sym.VISIBLE_PAIRS: _pairs(_any_order(problem.spec), shape),
        sym.VISITED_TILES: seen.tiles,
        sym.FIRST_VISITS: seen.first_visits,
        sym.VISITED_KEYS: seen.keys,
        sym.WALKED_KEY_TILES: seen.key_tiles,
        sym.NUM_KV_SPLITS: schedule.splits_for(shape.kv_len),
    }
    return {symbol: sp.Integer(value) for symbol, value in numbers.items()}


def _printed(formula: sp.Expr) -> str:
    """As SymPy prints it; the two branches of a pipeline are told apart in words."""
    if not isinstance(formula, sp.Piecewise):
        return str(formula)
    (plain, condition), (pipelined, _) = formula.args
    if condition != sp.Le(sym.NUM_STAGES, 1):
        return str(formula)
    return f"{pipelined}; with num_stages = 1: {plain}"


def _tile_uses(needs: Budget, schedule: Schedule) -> Iterator[TileUse]:
    """Tiles on chip, in the order in which they are made; updates in place take no room."""
    problem = needs.problem
    sizes = {
        sym.BLOCK_M: schedule.block_m,
        sym.BLOCK_N: schedule.block_n,
        sym.HEAD_DIM_QK_PADDED: problem.head_dim_qk_padded,
        sym.HEAD_DIM_V_PADDED: problem.head_dim_v_padded,
    }
    asynchronous = needs.unit(schedule) in ("wgmma", "tcgen05")
    for tile in needs.graph.tiles:
        if tile.space == "hbm" or tile.in_place_of is not None:
            continue
        copies = 1
        if tile.staged and schedule.num_stages > 1:
            copies = schedule.num_stages - (0 if asynchronous and len(tile.shape) > 1 else 1)
        yield TileUse(
            name=tile.name,
            space=tile.space,
            dtype=tile.dtype,
            loop=needs.graph.loops[tile.level].name,
            shape=tuple(str(extent) for extent in tile.shape),
            extents=tuple(int(extent.xreplace(sizes)) for extent in tile.shape),
            copies=copies,
            bytes=int(tile.bytes.xreplace(sizes)),
        )


# **** what fits ****


def _rejection_groups(space: Space) -> Iterator[RejectionGroup]:
    """Rejected tile shapes by reason, the most frequent reason first."""
    tried: dict[tuple[int, int], int] = {}
    for schedule in (*space.feasible, *(s for s, _ in space.rejections)):
        tile = schedule.block_m, schedule.block_n
        tried[tile] = tried.get(tile, 0) + 1
    fits = {(s.block_m, s.block_n) for s in space.feasible}
    for reason, found in space.grouped().items():
        by_tile: dict[tuple[int, int], list[Rejection]] = {}
        for schedule, rejection in found:
            by_tile.setdefault((schedule.block_m, schedule.block_n), []).append(rejection)
        yield RejectionGroup(
            reason,
            tuple(
                _rejected_tile(tile, rejections, tried[tile], tile in fits)
                for tile, rejections in sorted(by_tile.items())
            ),
        )


def _rejected_tile(
    tile: tuple[int, int], rejections: list[Rejection], tried: int, any_fits: bool
) -> RejectedTile:
    closest = min(rejections, key=lambda found: (abs(found.required - found.limit), found))
    return RejectedTile(
        block_m=tile[0],
        block_n=tile[1],
        required=closest.required,
        limit=closest.limit,
        schedules=len(rejections),
        tried=tried,
        any_fits=any_fits,
        text=str(closest),
    )


def _frontier(space: Space) -> tuple[Schedule, ...]:
    """Feasible tile shapes that no larger feasible one contains, each with its deepest pipeline."""
    best: dict[tuple[int, int], Schedule] = {}
    for schedule in space.feasible:
        tile = schedule.block_m, schedule.block_n
        before = best.get(tile)
        if before is None or _preference(schedule) > _preference(before):
            best[tile] = schedule
    return tuple(
        best[m, n]
        for m, n in sorted(best)
        if not any(a >= m and b >= n and (a, b) != (m, n) for a, b in best)
    )


def _preference(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.num_stages, schedule.num_warps, -(schedule.maxnreg or 0)


def _cells(order: _Order, space: Space) -> Iterator[TileCell]:
    """Each tile shape of the grid, with its deepest schedule or the reason that hits it most."""
    feasible: dict[tuple[int, int], list[Schedule]] = {}
    rejected: dict[tuple[int, int], list[tuple[Schedule, Rejection]]] = {}
    for schedule in space.feasible:
        feasible.setdefault((schedule.block_m, schedule.block_n), []).append(schedule)
    for schedule, rejection in space.rejections:
        tile = schedule.block_m, schedule.block_n
        rejected.setdefault(tile, []).append((schedule, rejection))
    for tile in sorted({*feasible, *rejected}):
        if tile in feasible:
            yield _cell(order, max(feasible[tile], key=_preference), fits=True)
            continue
        reasons = [rejection.reason for _, rejection in rejected[tile]]
        reason = max(sorted(set(reasons)), key=reasons.count)
        schedule, closest = min(
            ((s, found) for s, found in rejected[tile] if found.reason == reason),
            key=lambda item: (abs(item[1].required - item[1].limit), item[0].sort_key),
        )
        cell = _cell(order, schedule, fits=False)
        yield replace(cell, reason=reason, required=closest.required, limit=closest.limit)


def _cell(order: _Order, schedule: Schedule, *, fits: bool) -> TileCell:
    schedule = for_shape(order.problem, schedule, order.shape)
    return TileCell(
        block_m=schedule.block_m,
        block_n=schedule.block_n,
        schedule=str(schedule) if fits else None,
        num_stages=schedule.num_stages,
        smem_bytes=order.budget(schedule).smem_bytes_of(schedule),
        tile_traffic_bytes=order.figures(schedule).tile_traffic_bytes,
    )


# **** all targets ****


def _row(spec: AttentionSpec, target: Target, shape: Shape) -> TargetRow:
    blank = TargetRow(
        target=target.id,
        arch=target.arch,
        schedule=None,
        chosen_by=None,
        smem_bytes=None,
        smem_limit=target.smem_per_block_bytes,
        feasible=None,
        tried=None,
        flash2_ms=None,
        flash1_ms=None,
        naive_ms=None,
        bound=None,
        note="",
    )
    dtype = spec.dtype.q
    if dtype not in target.matmul_flops_per_s:
        return replace(blank, note=f"no {dtype} matmul unit")
    orders = {order: _Order.of(spec, target, shape, order) for order in ORDERS}
    schedules = {order: of.schedule() for order, of in orders.items()}
    choice = _choice(spec, target, shape)
    chosen: Order = "flash1" if spec.loop_order == "flash1" else "flash2"
    if spec.loop_order == "auto" and choice is not None:
        chosen = choice.schedule.loop_order
    schedules[chosen] = choice.schedule if choice else None
    found = {o: orders[o].algorithm(s) for o, s in schedules.items() if s is not None}
    schedule, space = schedules[chosen], orders[chosen].space
    needed = _array_bytes(spec, shape)
    full = f"needs {needed / 1e9:.0f} GB of memory" if needed > target.dram_bytes else ""
    return replace(
        blank,
        schedule=str(schedule) if schedule else None,
        chosen_by=choice.origin if choice else None,
        smem_bytes=orders[chosen].budget(schedule).smem_bytes_of(schedule) if schedule else None,
        feasible=len(space.feasible),
        tried=len(space.feasible) + len(space.rejections),
        flash2_ms=found["flash2"].bound_ms if "flash2" in found else None,
        flash1_ms=found["flash1"].bound_ms if "flash1" in found else None,
        naive_ms=_naive(orders["flash2"].problem, shape).bound_ms,
        bound=found[chosen].bound if chosen in found else None,
        note=full or ("" if schedule else "no tile shape fits"),
    )
