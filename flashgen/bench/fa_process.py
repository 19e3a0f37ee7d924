"""Processes that measure on one GPU, and are ended when they do not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flashgen.tune.processes import Child, ChildEndedError, SilentError

MAIN = "flashgen.bench.fa_worker:serve"
START_S = 120.0  # torch's import and a CUDA context, on a machine that may be busy


class LostError(Exception):
    """The process is gone, or had to be ended; `step`: what it was doing."""

    def __init__(self, step: str, reason: str) -> None:
        self.step = step
        super().__init__(reason)


class Asked(Protocol):
    """Who answers tasks: a process, or in tests something that plays one."""

    def ask(self, task: object, until: float) -> Any:
        """The answer. LostError, also where there is none at `until` (of `time.monotonic`)."""

    def close(self) -> None:
        """End it; may be called twice."""


class Worker:
    """A process on one GPU. It imports as soon as it is made and waits for its first task."""

    def __init__(self, gpu: str, more: Mapping[str, str] | None = None) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **(more or {})}
        self._child = Child(MAIN, environment=environment)

    def ask(self, task: object, until: float) -> Any:
        step, limit_s = "starting", START_S
        try:
            self._child.send(task)
            while True:
                left = until - time.monotonic()
                message = self._child.receive(min(limit_s, left))
                if message[0] == "found":
                    return message[1]
                if message[0] == "lost":
                    raise LostError(message[1], message[2])
                _, step, limit_s = message
        except SilentError:
            late = time.monotonic() >= until
            reason = "the time was over" if late else f"ended: nothing for {limit_s:.0f} s"
            raise LostError("" if late else step, f"{reason} while {step}") from None
        except ChildEndedError as error:
            raise LostError(step, f"{error}, while {step}") from None

    def close(self) -> None:
        self._child.kill()


Start = Callable[[str, Mapping[str, str]], Asked]


def visible_gpus(count: int) -> list[str]:
    """What a process is to be given as CUDA_VISIBLE_DEVICES to see one of this process's GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [each.strip() for each in named.split(",")] if named else []
    return names[:count] if names else [str(index) for index in range(count)]


class Lane:
    """A GPU's process, and the next one, which imports meanwhile."""

    def __init__(self, gpu: str, start: Start) -> None:
        self.gpu = gpu
        self._new = lambda: start(gpu, {"TORCHINDUCTOR_COMPILE_THREADS": "4"})
        self._worker, self._spare = self._new(), self._new()

    def ask(self, task: object, until: float) -> Any:
        return self._worker.ask(task, until)

    def next(self) -> None:
        """End the process and take the next one."""
        self._worker.close()
        self._worker, self._spare = self._spare, self._new()

    def close(self) -> None:
        self._worker.close()
        self._spare.close()
