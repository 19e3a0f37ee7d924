"""A process of suite `fa-paper` that owns a GPU for a while: it answers one task after the other.

Before each contestant's first call it says what it is about to do and how long that may take: a
kernel with a wrong barrier never ends, and then whoever listens ends this process.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from flashgen.bench.accuracy import Oracle
from flashgen.bench.cases import TOKENS
from flashgen.bench.ceilings import measure_ceilings, measure_settled
from flashgen.bench.contest import DeviceLostError, Field, free_memory, qualify
from flashgen.bench.fa_cases import FA3_PLAIN, FLEX, FLEX_TUNED, FaCase
from flashgen.bench.fa_outside import Outside
from flashgen.bench.fa_peers import peers_of
from flashgen.bench.fa_tasks import (
    ROUNDS,
    SLOW_ROUNDS,
    CeilingsTask,
    CheckTask,
    CompileTask,
    Entrant,
    SettleTask,
    TimeTask,
)
from flashgen.bench.gluon_first import counted
from flashgen.bench.peers import Attend, Contestant, forget_compiled
from flashgen.bench.record import CaseRecord, Ceiling, Result
from flashgen.bench.work import case_record, count_work
from flashgen.tune.clock import CudaClock
from flashgen.tune.summary import summarise
from flashgen.tune.tensors import (
    Arguments,
    argument_bytes,
    document_ids,
    draw,
    sets_needed,
    slopes,
)
from flashgen.tune.timing import Burst, Clock

OURS_S = 30.0  # a first call of ours, whose kernel was compiled before
PEER_S = 150.0  # a first call of somebody else's, that may compile or tune
TIMING_S = 60.0
SLOW = 1.25  # of the fastest one's time, from which on fewer rounds will do
BURST_MS = 9.0
LOAD_S, SETTLED_MS = 0.3, 60.0

Say = Callable[[str, float], None]


def serve(channel: Connection) -> None:
    """Main function of the process; messages are ("step", text, seconds), ("lost", name, text),
    ("found", answer)."""
    work = Work(lambda text, limit_s: channel.send(("step", text, limit_s)))
    with torch.no_grad():
        while True:
            task = channel.recv()
            if work.clock is None:
                work.begin(torch.device("cuda", 0), CudaClock())
            try:
                channel.send(("found", work.do(task)))
            except DeviceLostError as error:
                channel.send(("lost", work.step, str(error)))
                os._exit(1)  # the context is gone, and ending it properly may hang


class Work:
    """What a process does, and what it keeps between tasks."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.step = ""
        self.clock: Clock | None = None
        self.device: torch.device | None = None
        self.l2_bytes = 0
        self._bursts: Mapping[str, Burst] = {}

    def begin(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock = device, clock
        if device.type == "cuda":
            self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def do(self, task: object) -> Any:
        """The answer to a task."""
        if not isinstance(task, SettleTask):
            self._forget()
        for kind, method in self._methods.items():
            if isinstance(task, kind):
                return method(task)
        raise TypeError(f"not a task: {task!r}")

    @property
    def _methods(self) -> dict[type, Callable[[Any], Any]]:
        return {
            TimeTask: self._time,
            SettleTask: self._settle,
            CheckTask: self._check,
            CompileTask: self._compile,
            CeilingsTask: self._ceilings,
        }

    def say(self, step: str, limit_s: float) -> None:
        self.step = step
        self._say(step, limit_s)

    def _forget(self) -> None:
        """Beyond its limit of versions dynamo compiles nothing."""
        forget_compiled()
        self._bursts = {}
        if self.device is None:
            gc.collect()
        else:
            free_memory(self.device)

    # ---- timing

    def _time(self, task: TimeTask) -> CaseRecord:
        assert self.clock is not None and self.device is not None
        case = task.case
        self.say("drawing tensors", PEER_S)
        sets = draw_sets(case, self.l2_bytes, self.device)
        spec, shape = case.spec, case.shape
        work = count_work(spec, shape, sets[0].inputs, device=self.device)
        plain = case.baseline
        plain_work = count_work(plain.spec, plain.shape, {}, device=self.device)
        plain_sets = [replace(each, inputs={}, sink=None) for each in sets]
        sides = [(case, sets)] if case.is_plain else [(case, sets), (plain, plain_sets)]
        fields = []
        for each, tensors in sides:
            entered = self._contestants(task, each, tensors[0])
            if entered:
                self.say("computing the reference", PEER_S)
                oracle = Oracle(each.spec, each.shape, tensors[0])
                fields.append(qualify(entered, tensors, oracle, self.clock))
        field = joined(fields)
        self.say("timing", TIMING_S)
        results = race(field, self.clock, rounds=task.rounds)
        self._bursts = field.bursts
        facts = {
            "tensor sets": len(sets),
            "plain flops": plain_work.matmul_flops,
            "schedules": {each.name: each.schedule.to_dict() for each in task.ours},
        }
        return case_record(case.id, case.group, spec, shape, work, results, facts)

    def _contestants(self, task: TimeTask, case: FaCase, arguments: Arguments) -> list[Contestant]:
        """Those of the case itself, or of the plain case beside it; announced one by one."""
        found = [
            self._announced(Contestant(each.name, entrant_builder(each)), OURS_S)
            for each in task.ours
            if each.candidates.problem.spec.fingerprint == case.spec.fingerprint
        ]
        left_out = {
            *task.skip,
            *((FLEX,) if not task.flex else ()),
            *((FLEX_TUNED,) if not task.tuned_flex else ()),
        }
        beside = case.id != task.case.id
        for peer in peers_of(task.case, arguments):
            if (peer.name == FA3_PLAIN) == beside:
                found.append(self._announced(peer, PEER_S))
        if not beside:
            asked = [each for each in task.outside if each.name not in left_out]
            found += self._outside(case, asked)
        return [each for each in found if each.name not in left_out]

    def _outside(self, case: FaCase, asked: Sequence[Outside]) -> list[Contestant]:
        """Those that serve the case; one that cannot be loaded takes part and fails."""
        found = []
        for each in asked:
            self.say(f"checking {each.name}", PEER_S)
            contestant = outside_contestant(each, case)
            if contestant is not None:
                found.append(self._announced(contestant, PEER_S))
        return found

    def _announced(self, contestant: Contestant, limit_s: float) -> Contestant:
        def build() -> Attend:
            self.say(f"checking {contestant.name}", limit_s)
            return contestant.build()

        return replace(contestant, build=build)

    def _settle(self, task: SettleTask) -> dict[str, float]:
        """ms a call, after some time of the same load."""
        assert self.clock is not None
        found = {}
        for name in task.names:
            burst = self._bursts.get(name)
            if burst is None:
                continue
            self.say(f"loading with {name}", TIMING_S)
            ms = max(burst.estimate_ms * burst.calls, 1e-3)
            self.clock.times_ms(burst.replay, 1 + int(1e3 * LOAD_S / ms))
            samples = self.clock.times_ms(burst.replay, 3 + int(SETTLED_MS / ms))
            found[name] = summarise([sample / burst.calls for sample in samples]).median
            self.clock.idle(LOAD_S)
        return found

    # ---- before timing

    def _check(self, task: CheckTask) -> dict[str, str]:
        """Schedule by name -> why it is not to be timed."""
        assert self.device is not None
        bad: dict[str, str] = {}
        for case in task.cases:
            self.say("computing the reference", PEER_S)
            arguments = draw_sets(case, 0, self.device)[0]
            oracle = Oracle(case.spec, case.shape, arguments)
            for each in task.ours:
                if each.name in bad:
                    continue
                entrant = self._announced(_contestant(each), OURS_S)
                found = qualify([entrant], [arguments], oracle, _Untimed()).ready[each.name]
                if isinstance(found, str):
                    bad[each.name] = f"{case.id}: {found}"
        return bad

    def _compile(self, task: CompileTask) -> int:
        """For how many cases FlexAttention was compiled."""
        assert self.device is not None
        count = 0
        for case in task.cases:
            self._forget()
            arguments = draw_sets(case, 0, self.device)[0]
            flexes = [p for p in peers_of(case, arguments) if p.name in (FLEX, FLEX_TUNED)]
            others = self._outside(case, task.outside)
            for each in (*flexes, *others):
                if each.name in task.skip.get(case.id, ()):
                    continue
                self.say(f"compiling {each.name} of {case.id}", PEER_S)
                with suppress(Exception):  # timing meets it again, and records it
                    each.build()(arguments)
                    count += each in flexes
        return count

    def _ceilings(self, task: CeilingsTask) -> tuple[Ceiling, ...]:
        assert self.clock is not None and self.device is not None
        self.say("measuring ceilings", PEER_S)
        return (
            *measure_ceilings(("bf16",), self.clock, self.device),
            measure_settled("bf16", self.clock, self.device, load_s=LOAD_S),
        )


def _contestant(entrant: Entrant) -> Contestant:
    return Contestant(entrant.name, entrant_builder(entrant), graph=False)


class _Untimed:
    """A clock for what is only to be run once."""

    def times_ms(self, call: Callable[[], object], count: int) -> list[float]:
        return [1e3] * count

    def capture(self, calls: Sequence[Callable[[], object]]) -> None:
        return None

    def idle(self, seconds: float) -> None:
        return None


class AnotherKernelError(Exception):
    """A call was not served by the schedule that it was meant for."""


def entrant_builder(entrant: Entrant) -> Callable[[], Attend]:
    """AnotherKernelError at the first call if the module's host code takes another kernel."""

    def build() -> Attend:
        attention = entrant.candidates.attention(entrant.schedule)
        launched = counted(attention)

        def attend(a: Arguments) -> torch.Tensor:
            out: torch.Tensor = attention(a.q, a.k, a.v, **a.others)
            if not launched and a.q.is_cuda:
                raise AnotherKernelError("the portable kernel of the module served the call")
            return out

        return attend

    return build


def outside_contestant(outside: Outside, case: FaCase) -> Contestant | None:
    """None where it does not serve the case."""
    try:
        attend = outside.attend(case)
    except Exception as error:  # it belongs to this contestant
        failure = error

        def fail() -> Attend:
            raise failure

        return Contestant(outside.name, fail)
    if attend is None:
        return None
    return Contestant(outside.name, lambda: lambda a: attend(a.q, a.k, a.v, **a.others))


def draw_sets(case: FaCase, l2_bytes: int, device: torch.device) -> list[Arguments]:
    """Random tensors; a sink has values that bf16 holds, since some peers take no others."""
    spec, shape = case.spec, case.shape
    given: dict[str, torch.Tensor] = {"slopes": slopes(shape.q_heads)}
    if case.documents:
        given["doc"] = document_ids(case.documents)[None]
    if case.bias:  # drawn where it is needed: half a gigabyte takes seconds on the host
        generator = torch.Generator(device=device).manual_seed(TOKENS)
        sizes = (1, shape.q_heads, shape.q_len, shape.kv_len)
        given["rel"] = torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    number = sets_needed(argument_bytes(spec, shape), l2_bytes) if l2_bytes else 1
    sets = [draw(spec, shape, seed=seed, device=device, given=given) for seed in range(number)]
    return [
        each if each.sink is None else replace(each, sink=each.sink.to(torch.bfloat16).float())
        for each in sets
    ]


def joined(fields: Sequence[Field]) -> Field:
    """Those of the case, and those of the plain case beside it."""
    ready = {name: each for field in fields for name, each in field.ready.items()}
    bursts = {name: shortened(each) for field in fields for name, each in field.bursts.items()}
    return Field(ready, bursts)


def shortened(burst: Burst) -> Burst:
    """So short that the GPU keeps its clock through it."""
    most = int(BURST_MS / max(burst.estimate_ms * burst.calls, 1e-4))
    return replace(burst, replays=max(1, min(burst.replays, most)))


def race(field: Field, clock: Clock, *, rounds: int = ROUNDS) -> tuple[Result, ...]:
    """Who is far behind is timed in fewer rounds, which leaves time for the others."""
    fastest = min((each.estimate_ms for each in field.bursts.values()), default=0.0)
    slow = {n for n, each in field.bursts.items() if each.estimate_ms > SLOW * fastest}
    results: dict[str, Result] = {}
    parts = ((field.ready.keys() - slow, rounds), (slow, min(rounds, SLOW_ROUNDS)))
    for names, number in parts:
        part = Field(
            {name: each for name, each in field.ready.items() if name in names},
            {name: each for name, each in field.bursts.items() if name in names},
        )
        results |= {each.name: each for each in part.race(clock, rounds=number)}
    return tuple(results[name] for name in field.ready)
