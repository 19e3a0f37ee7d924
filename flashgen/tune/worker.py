"""A measuring worker: the process that may crash, hang or lose its GPU without harm to the search.

The parent's side is `Worker`, the child's `serve`. What runs in the child is named by the parent as
"package.module:function", so that tests can put something in the place of a GPU.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal

from flashgen.errors import TuningError
from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement
from flashgen.tune.processes import Child, ChildEndedError, SilentError

if TYPE_CHECKING:
    from flashgen.tune.runner import Runner

CUDA_RUNNER = "flashgen.tune.runner:cuda_runner"
START_S = 180.0  # torch's import, a CUDA context, the tensors and the oracle of a large case


@dataclass(frozen=True)
class Order:
    """What a worker is to be: the runner of a case on a device."""

    runner: str
    case: object
    device: int


@dataclass(frozen=True)
class Asked:
    """Schedules to measure (one) or to race."""

    what: Literal["measure", "race"]
    schedules: tuple[Schedule, ...]


@dataclass(frozen=True)
class Answer:
    """What came of it; `intact`: whether this process can be asked again."""

    measurements: tuple[Measurement, ...]
    intact: bool


@dataclass(frozen=True)
class Refusal:
    """The worker cannot do the case at all."""

    reason: str


class Worker:
    """A measuring process on one device, started when it is needed and again after each end.

    Asked from one thread at a time. An answer always comes: what the process did instead is one.
    """

    def __init__(self, order: Order, environment: Mapping[str, str] | None = None) -> None:
        self._order, self._environment = order, environment
        self._child: Child | None = None
        self._is_ready = False

    @property
    def device(self) -> int:
        return self._order.device

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Begin to start; `ask` waits for it."""
        if self._child is None:
            self._child = Child("flashgen.tune.worker:serve", environment=self._environment)
            self._is_ready = False
            try:
                self._child.send(self._order)
            except ChildEndedError as error:
                self._fail(str(error))

    def take(self, order: Order) -> None:
        """Turn to another case, in the same process where one is there."""
        self._order = order
        if self._child is None:
            return
        try:
            self._await_ready()
            self._is_ready = False
            self._child.send(order)
        except (ChildEndedError, TuningError):
            self.stop()

    def ask(self, asked: Asked, deadline_s: float) -> Mapping[Schedule, Measurement]:
        """The measurements. TuningError if no process can be had that does the case."""
        self.start()
        self._await_ready()
        assert self._child is not None
        try:
            self._child.send(asked)
            answer = self._child.receive(deadline_s)
        except SilentError:
            self.stop()
            return _all(asked, "hung", f"no answer within {deadline_s:g} s")
        except ChildEndedError as error:
            self.stop()
            return _all(asked, "crashed", str(error))
        except BaseException:  # Ctrl-C: its answer would be taken for that to the next question
            self.stop()
            raise
        if not answer.intact:
            self.stop()
        return {each.schedule: each for each in answer.measurements}

    def stop(self) -> None:
        """End the process; the next question starts another one."""
        if self._child is not None:
            self._child.kill()
        self._child = None

    def _await_ready(self) -> None:
        if self._is_ready or self._child is None:
            return
        try:
            said = self._child.receive(START_S)
        except SilentError:
            self._fail(f"it was not ready after {START_S:g} s")
        except ChildEndedError as error:
            self._fail(str(error))
        except BaseException:
            self.stop()
            raise
        if isinstance(said, Refusal):
            self._fail(said.reason)
        self._is_ready = True

    def _fail(self, reason: str) -> None:
        self.stop()
        raise TuningError(
            f"tune: the measuring worker of GPU {self._order.device} cannot start: {reason}\n"
            "  hint: `flashgen doctor` says what is installed and which GPU is there."
        )


def _all(
    asked: Asked, state: Literal["hung", "crashed"], reason: str
) -> Mapping[Schedule, Measurement]:
    return {each: Measurement(each, state, reason=reason) for each in asked.schedules}


# ---- in the child --------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Main function of the child: be what is ordered, answer until the parent is gone."""
    runner: Runner | None = None
    while True:
        message = channel.recv()
        if isinstance(message, Order):
            runner = None  # its tensors are freed before the next case asks for memory
            runner = _made(message, channel)
        elif runner is not None:
            channel.send(_answer(runner, message))


def _made(order: Order, channel: Connection) -> Runner | None:
    """The runner; None after saying why there is none."""
    module, _, function = order.runner.partition(":")
    try:
        make: Callable[[object, int], Runner] = getattr(importlib.import_module(module), function)
        runner = make(order.case, order.device)
    except Exception as error:  # whatever the reason, the parent says it
        channel.send(Refusal(_text(error)))
        return None
    channel.send("ready")
    return runner


def _answer(runner: Runner, asked: Asked) -> Answer:
    try:
        if asked.what == "measure":
            found: Sequence[Measurement] = [runner.measure(each) for each in asked.schedules]
        else:
            found = list(runner.race(asked.schedules).values())
        pickle.dumps(found)
    except Exception as error:  # the runner itself failed: one schedule's failure is its result
        reason = _text(error)
        found = [Measurement(each, "failed", reason=reason) for each in asked.schedules]
        return Answer(tuple(found), intact=False)
    return Answer(tuple(found), runner.intact())


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
