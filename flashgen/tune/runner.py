"""In a measuring worker: check a schedule against the oracle, then time it. One case, one device.

Checked are a small call with poison all around, and some rows of the call that is timed; the oracle
is asked once for both. Outputs start as NaN for each schedule. Inputs are summed afterwards: a
kernel that wrote elsewhere has spoilt them for those after it, so the worker is given up.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from triton.runtime.errors import OutOfResources

from flashgen.dtypes import get_dtype
from flashgen.errors import TargetError
from flashgen.problem import Problem
from flashgen.runtime.check import Sizes
from flashgen.runtime.draw import Arguments as Poisoned
from flashgen.runtime.draw import Buffer, Strides, draw, embed
from flashgen.runtime.launch import Attention
from flashgen.schedule.model import Schedule, bucket_of
from flashgen.spec.parts import Shape
from flashgen.tune import tensors
from flashgen.tune.candidates import Case, key_unit
from flashgen.tune.measurement import Measurement, State
from flashgen.tune.oracle import Expected, slabs
from flashgen.tune.summary import rounded, summarise
from flashgen.tune.timing import (
    LONG_MS,
    Burst,
    Call,
    Clock,
    Failure,
    alternate,
    describe,
    plan_burst,
)

ROUNDS_ALONE = 3  # a race decides between close ones
ROUNDS_RACE = 12
LONG_SHARE, LONG_LEAST = 4, 2  # of those rounds, where a launch takes LONG_MS: a part, at least
WARM_MS = 40.0  # of work before the first sample: an idle GPU is back at its clock after some ms
# Longer than two tiles of any schedule and odd, so that all tiles have a rest; a few milliseconds.
SMALL_Q_LEN, SMALL_KV_LEN = 261, 331


class Runner(Protocol):
    """What a worker runs. An exception of `check` or of a timing is a result, not an end."""

    def measure(self, schedule: Schedule) -> Measurement: ...

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]: ...

    def intact(self) -> bool:
        """Whether what comes next can be trusted; False: this process is to be replaced."""
        ...


@dataclass(frozen=True)
class _SmallCall:
    """What `draw` asks for."""

    shape: Shape
    strides: Strides
    index: int


@dataclass(frozen=True)
class _Checked:
    """A small call and what it must give."""

    call: Poisoned
    expected: Expected


@dataclass(frozen=True)
class _Timed:
    """One set of tensors to rotate through, with an output of its own inside poison."""

    arguments: tensors.Arguments
    others: Mapping[str, object]
    out: Buffer
    lse: Buffer


class _WrongError(Exception):
    """The schedule's output is not what the oracle says."""


class CaseRunner:
    """Checks and times schedules of a case on a device; on the CPU in Triton's interpreter."""

    def __init__(
        self, case: Case, device: torch.device, clock: Clock, *, l2_bytes: int = 0
    ) -> None:
        self._case, self._device, self._clock = case, device, clock
        self._has_lse = case.candidates.plan.has_lse
        spec, shape = case.spec, case.shape
        number = tensors.sets_needed(tensors.argument_bytes(spec, shape), l2_bytes)
        self._sets = [self._timed_set(seed) for seed in range(number)]
        self._small = [self._small_call(shape, index) for index in range(2)]
        self._expected = Expected.of(spec, self._sets[0].arguments, slabs(shape))
        self._sums = [_sum(tensor) for tensor in self._kept()]

    # ---- the protocol

    def measure(self, schedule: Schedule) -> Measurement:
        """The schedule's time, or why it has none."""
        return self._measured((schedule,), ROUNDS_ALONE)[schedule]

    def race(self, schedules: Sequence[Schedule]) -> Mapping[Schedule, Measurement]:
        """All of them, taking turns."""
        return self._measured(schedules, ROUNDS_RACE)

    def intact(self) -> bool:
        """Whether inputs and expected results are as they were, and the device answers."""
        try:
            self._synchronise()
            return self._sums == [_sum(tensor) for tensor in self._kept()]
        except Exception:  # a context that is lost answers everything with an error
            return False

    # ---- measuring

    def _measured(self, schedules: Sequence[Schedule], rounds: int) -> dict[Schedule, Measurement]:
        found: dict[Schedule, Measurement] = {}
        bursts: dict[str, Burst] = {}
        named = {str(schedule): schedule for schedule in schedules}
        for name, schedule in named.items():
            try:
                bursts[name] = self._ready(schedule)
            except Exception as error:  # one schedule's failure is its result
                found[schedule] = failed(schedule, error)
        gc.collect()  # not in the middle of a measurement
        for burst in bursts.values():
            self._warm_up(burst)
        if any(burst.estimate_ms > LONG_MS for burst in bursts.values()):
            rounds = max(LONG_LEAST, rounds // LONG_SHARE)
        for name, times in alternate(bursts, self._clock, rounds=rounds).items():
            found[named[name]] = _measurement(named[name], times)
        return {schedule: found[schedule] for schedule in schedules}

    def _ready(self, schedule: Schedule) -> Burst:
        """The schedule checked, and what is to be timed of it."""
        attention = self._case.candidates.attention(schedule)
        for small in self._small:
            self._check_small(attention, small)
        self._check_timed(attention)
        calls = [self._call(attention, each) for each in self._sets]
        return plan_burst(calls, self._clock, graph=True)

    def _warm_up(self, burst: Burst) -> None:
        once = max(burst.estimate_ms * burst.calls, 1e-3)
        if once >= WARM_MS:  # estimating it has done that
            return
        self._clock.times_ms(burst.replay, max(1, min(100, math.ceil(WARM_MS / once))))

    def _check_small(self, attention: Attention, small: _Checked) -> None:
        call = small.call
        call.out.view.fill_(math.nan)
        call.lse.view.fill_(math.nan)
        run = attention.interpret if self._interpreted else attention.launch
        lse = call.lse.view if self._has_lse else call.lse.view[:0]
        run(call.sizes, call.q, call.k, call.v, call.others, call.out.view, lse)
        self._synchronise()
        where = f"at {_lengths(call.sizes.q_len, call.sizes.kv_len)}"
        self._judge(small.expected, call.out, call.lse, where)

    def _check_timed(self, attention: Attention) -> None:
        timed = self._sets[0]
        timed.out.view.fill_(math.nan)
        timed.lse.view.fill_(math.nan)
        self._call(attention, timed)()
        self._synchronise()
        shape = self._case.shape
        where = f"at {_lengths(shape.q_len, shape.kv_len)}"
        self._judge(self._expected, timed.out, timed.lse, where)
        if not bool(torch.isfinite(timed.out.view).all()):
            raise _WrongError(f"{where}: the output holds NaN or infinity")

    def _judge(self, expected: Expected, out: Buffer, lse: Buffer, where: str) -> None:
        comparison = expected.compare(out.view, lse.view if self._has_lse else None)
        if not comparison.ok:
            raise _WrongError(f"{where}: {comparison}")
        if not (out.intact_around() and lse.intact_around()):
            raise _WrongError(f"{where}: wrote outside the output")

    def _call(self, attention: Attention, timed: _Timed) -> Call:
        arguments, shape = timed.arguments, self._case.shape
        sizes = Sizes(shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len)
        lse = timed.lse.view if self._has_lse else timed.lse.view[:0]
        run = attention.interpret if self._interpreted else attention.launch

        def call() -> None:
            run(sizes, arguments.q, arguments.k, arguments.v, timed.others, timed.out.view, lse)

        return call

    # ---- tensors

    @property
    def _interpreted(self) -> bool:
        return self._device.type == "cpu"

    def _timed_set(self, seed: int) -> _Timed:
        spec, shape = self._case.spec, self._case.shape
        arguments = tensors.draw(spec, shape, seed=seed, device=self._device)
        heads, length = shape.q_heads, shape.q_len
        middle = (heads, length) if spec.layout == "bhsd" else (length, heads)
        extents = (shape.batch, *middle, spec.head_dim.v)
        dtype = getattr(torch, get_dtype(spec.dtype.out).torch_name)
        return _Timed(
            arguments,
            arguments.others,
            embed(extents, dtype, "plain", self._device),
            embed((shape.batch, heads, length), torch.float32, "plain", self._device),
        )

    def _small_call(self, shape: Shape, index: int) -> _Checked:
        spec = self._case.spec
        small = small_shape(self._case.candidates.problem, shape)
        strides: Strides = "transposed" if index else "plain"
        call = draw(spec, _SmallCall(small, strides, index), self._device, wide=self._interpreted)
        return _Checked(call, Expected.of(spec, call, [range(small.q_len)]))

    def _kept(self) -> list[torch.Tensor]:
        """Everything that no schedule may change."""
        found = [self._expected.out64, self._expected.lse64]
        for timed in self._sets:
            a = timed.arguments
            found += [a.q, a.k, a.v, *a.inputs.values()]
            found += [each for each in (a.sink, a.kv_lens) if each is not None]
        for small in self._small:
            found += [small.call.q, small.call.k, small.call.v, small.expected.out64]
        return found

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def small_shape(problem: Problem, shape: Shape) -> Shape:
    """A small call of the same shape bucket, with rows as aligned as those of `shape`: two batches
    and K/V heads, lengths with a rest in most tiles."""
    bucket = bucket_of(shape.q_len, shape.kv_len)
    group = problem.spec.heads.group or shape.q_heads // shape.kv_heads
    q_len = min(SMALL_Q_LEN, bucket.q_len_max - 3 if bucket.q_len_max else SMALL_Q_LEN)
    kv_len = min(SMALL_KV_LEN, bucket.kv_len_max - 3 if bucket.kv_len_max else SMALL_KV_LEN)
    unit = key_unit(problem)
    if shape.kv_len % unit == 0:
        kv_len = -(-kv_len // unit) * unit
    return Shape(2, 2 * group, 2, q_len, kv_len)


def cuda_runner(case: Case, index: int) -> CaseRunner:
    """A runner on the CUDA device `index`. TargetError if that is no GPU of the case's target."""
    from flashgen.tune.clock import CudaClock

    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    target = case.candidates.problem.target
    if 10 * properties.major + properties.minor != target.compute_capability:
        raise TargetError(
            f"tune: {target.id} has compute capability {target.compute_capability / 10:.1f}, "
            f"{device} ({properties.name}) has {properties.major}.{properties.minor}\n"
            "  hint: schedules are measured on the GPU that they are for."
        )
    with torch.no_grad():
        return CaseRunner(case, device, CudaClock(), l2_bytes=properties.L2_cache_size)


# What an error says of a schedule; the first kind that fits.
_STATES: tuple[tuple[Callable[[BaseException], bool], State], ...] = (
    (lambda error: isinstance(error, _WrongError), "wrong"),
    (lambda error: isinstance(error, OutOfResources), "does_not_fit"),
    (lambda error: True, "failed"),
)


def failed(schedule: Schedule, error: BaseException) -> Measurement:
    """The measurement of a schedule that raised `error`."""
    state = next(state for fits, state in _STATES if fits(error))
    reason = str(error) if state == "wrong" else describe(error)
    return Measurement(schedule, state, reason=reason)


def _measurement(schedule: Schedule, times: tuple[float, ...] | Failure) -> Measurement:
    if isinstance(times, Failure):
        return Measurement(schedule, "failed", reason=times.reason)
    samples = tuple(rounded(1e3 * ms) for ms in times)
    summary = summarise(samples)
    return Measurement(
        schedule, "measured", summary.median, summary.p20, summary.p80, samples_us=samples
    )


def _sum(tensor: torch.Tensor) -> int:
    """A checksum of the tensor's bits; an order of elements has no part in it."""
    plain = tensor.detach().contiguous().view(-1)
    if not plain.numel():
        return 0
    return int(plain.view(_WHOLE[plain.element_size()]).sum(dtype=torch.int64))


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _lengths(q_len: int, kv_len: int) -> str:
    return f"q_len {q_len}, kv_len {kv_len}"
