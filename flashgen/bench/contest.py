"""One case, all contestants: build, check against fp64, then time those that are right."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flashgen.bench.accuracy import Oracle, fault, poison
from flashgen.bench.peers import Attend, Contestant
from flashgen.bench.record import Accuracy, Result
from flashgen.tune.summary import rounded, summarise
from flashgen.tune.tensors import Arguments
from flashgen.tune.timing import Burst, Call, Clock, Failure, alternate, describe, plan_burst


class DeviceLostError(Exception):
    """The device no longer answers: nothing after it in this process can be measured."""


@dataclass(frozen=True)
class _Ready:
    """A contestant that computed the right result, and how long its first one took."""

    attend: Attend
    first_result_s: float
    accuracy: Accuracy


@dataclass(frozen=True)
class Field:
    """Contestants after their outputs were checked; who was right has a burst to be timed by."""

    ready: Mapping[str, _Ready | str]
    bursts: Mapping[str, Burst]

    def race(self, clock: Clock, *, rounds: int | None = None) -> tuple[Result, ...]:
        """Everybody's result; who was right is timed, in turns."""
        # What compiling left behind is not collected in the middle of a measurement.
        gc.collect()
        timed = alternate(self.bursts, clock, rounds=rounds)
        return tuple(_result(name, self.ready[name], self.bursts, timed) for name in self.ready)


def contest(
    contestants: Sequence[Contestant],
    sets: Sequence[Arguments],
    oracle: Oracle,
    clock: Clock,
    *,
    rounds: int | None = None,
) -> tuple[Result, ...]:
    """How each contestant did; all are compiled and checked before any is timed.

    sets: tensors of the same case to rotate through. A contestant's error is its result; when the
    device is gone, DeviceLostError is raised.
    """
    return qualify(contestants, sets, oracle, clock).race(clock, rounds=rounds)


def qualify(
    contestants: Sequence[Contestant],
    sets: Sequence[Arguments],
    oracle: Oracle,
    clock: Clock,
) -> Field:
    """Compile and check each contestant, and plan the bursts of those that are right."""
    ready: dict[str, _Ready | str] = {}
    bursts: dict[str, Burst] = {}
    for contestant in contestants:
        ready[contestant.name] = found = _prepare(contestant, sets[0], oracle)
        _check_device(sets[0].q.device, contestant.name)
        if isinstance(found, str):
            continue
        calls = [_call(found.attend, arguments) for arguments in sets]
        try:
            bursts[contestant.name] = plan_burst(calls, clock, graph=contestant.graph)
        except Exception as error:  # one contestant's failure is a result
            ready[contestant.name] = describe(error)
        _check_device(sets[0].q.device, contestant.name)
    return Field(ready, bursts)


def _prepare(contestant: Contestant, arguments: Arguments, oracle: Oracle) -> _Ready | str:
    """The contestant with its first result checked, or why it has none."""
    try:
        start = time.perf_counter()
        attend = contestant.build()
        out = attend(arguments)
        _synchronise(out.device)
        first = time.perf_counter() - start
        address = poison(out)  # while this output is held, the next one goes where the NaN are
        again = attend(arguments)
        accuracy = oracle.judge(again, poisoned=again.data_ptr() == address)
    except Exception as error:  # one contestant's failure is a result
        return describe(error)
    return fault(accuracy) or _Ready(attend, rounded(first, 3), accuracy)


def _call(attend: Attend, arguments: Arguments) -> Call:
    return lambda: attend(arguments)


def _result(
    name: str,
    ready: _Ready | str,
    bursts: Mapping[str, Burst],
    timed: Mapping[str, tuple[float, ...] | Failure],
) -> Result:
    if isinstance(ready, str):
        return Result(name, error=ready)
    samples = timed[name]
    known = Result(
        name,
        how=bursts[name].how,
        first_result_s=ready.first_result_s,
        accuracy=ready.accuracy,
    )
    if isinstance(samples, Failure):
        return Result(**{**vars(known), "error": samples.reason})
    return Result(
        **{
            **vars(known),
            "ms": summarise(samples),
            "samples_ms": tuple(rounded(sample) for sample in samples),
        }
    )


def free_memory(device: torch.device) -> None:
    """Give back what the case before held; graphs hold on to device memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_device(device: torch.device, name: str) -> None:
    """A kernel that faults takes the whole context with it, so that every later call fails too."""
    try:
        _synchronise(device)
    except Exception as error:
        raise DeviceLostError(f"the device was lost while {name} ran: {describe(error)}") from error
