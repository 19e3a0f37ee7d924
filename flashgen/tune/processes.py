"""Child processes that cannot outlive whoever started them, and a channel to talk to them.

A child is a session of its own, so Ctrl-C in a terminal reaches only the parent. It holds one end
of a pipe, its lifeline; when the other end closes, because the parent says so or has died of
whatever cause, the kernel kills the child's whole process group. No thread and no Python code is
needed for that, so a child that hangs inside a driver or a compiler ends too.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

KILL_WAIT_S = 10.0  # a process in the middle of a call of the GPU's driver takes a while to end

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from flashgen.tune.processes import run; run(*sys.argv[2:])"
)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ChildEndedError(Exception):
    """The child is gone; the message says how it ended and what it last wrote."""


class SilentError(Exception):
    """The child did not answer in time; it still runs."""


class Child:
    """A process that runs `main(channel)`, given as "package.module:function".

    What it prints is kept for `last_words`. Objects are sent and received by pickle. One thread may
    send while another one receives, and `kill` may come from any.
    """

    def __init__(self, main: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._sending, self._receiving, self._ending = (threading.Lock() for _ in range(3))
        self._channel, theirs = Pipe()
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the child
        listening, self._lifeline = os.pipe()
        options = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
        fds = (theirs.fileno(), listening)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", *options, "-c", _PROGRAM, json.dumps(sys.path), main]
                + [str(fd) for fd in fds],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                env=_of_child(os.environ if environment is None else environment),
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(listening)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def channel(self) -> Connection:
        """To wait for several children at once."""
        return self._channel

    def send(self, message: object) -> None:
        """ChildEndedError if nobody is there to read it."""
        with self._sending:
            try:
                self._channel.send(message)
            except OSError:
                raise self._ended() from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. ChildEndedError, or SilentError after `timeout_s`."""
        with self._receiving:
            try:
                if timeout_s is not None and not self._channel.poll(max(0.0, timeout_s)):
                    raise SilentError
                return self._channel.recv()
            except (EOFError, OSError):
                raise self._ended() from None

    def kill(self) -> None:
        """End the process and all that it started; may be called twice, and from two threads."""
        with self._ending:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            if self.runs:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.killpg(self._process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # it dies when the driver returns
                    self._process.wait(KILL_WAIT_S)
        self._close()

    def _close(self) -> None:
        """Close the descriptors once nobody is in the middle of using them: their numbers go to
        other files at once. Where the driver has the process, that is when this object goes."""
        with ExitStack() as held:
            for lock in (self._sending, self._receiving):  # both hear of the end now
                if not lock.acquire(timeout=KILL_WAIT_S):
                    return
                held.callback(lock.release)
            self._channel.close()
            self._written.close()

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        return ending(self._process.poll())

    def last_words(self) -> str:
        """The last line that the process printed; empty if there is none, or after `kill`."""
        return "".join(line.strip()[:300] for line in self.last_lines(1))

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the process printed and that are not blank; none after `kill`."""
        if self._written.closed:
            return []
        size = os.fstat(self._written.fileno()).st_size
        tail = os.pread(self._written.fileno(), 4000, max(0, size - 4000))
        lines = [line.rstrip() for line in tail.decode(errors="replace").splitlines()]
        return [line for line in lines if line][-count:]

    def _ended(self) -> ChildEndedError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)
        words = self.last_words()
        return ChildEndedError(f"the process ended {self.ending}{f': {words}' if words else ''}")


def in_time(work: Callable[[Any], Any], given: Any, limit_s: float) -> Any:
    """`work(given)` in a process forked for it; ChildEndedError, or SilentError after `limit_s`,
    when it and all that it started are gone.

    For a process without threads: only the one that forks goes on in the child.
    """
    theirs, ours = Pipe(duplex=False)
    listening, lifeline = os.pipe()
    process = get_context("fork").Process(
        target=_answer_in_time, args=(work, given, ours, listening, lifeline)
    )
    process.start()
    ours.close()
    os.close(listening)
    try:
        if not theirs.poll(limit_s):
            raise SilentError
        return theirs.recv()
    except EOFError:
        process.join(KILL_WAIT_S)
        raise ChildEndedError(f"the process ended {ending(process.exitcode)}") from None
    finally:
        os.close(lifeline)  # kills its group
        process.join(KILL_WAIT_S)
        theirs.close()


def _answer_in_time(
    work: Callable[[Any], Any], given: Any, answer: Connection, listening: int, lifeline: int
) -> None:
    os.close(lifeline)
    os.setpgid(0, 0)
    tie(listening)
    answer.send(work(given))


def ending(status: int | None) -> str:
    """An exit status in words.

    >>> ending(-6), ending(3)
    ('by SIGABRT', 'with exit status 3')
    """
    if status is None:
        return "but is not gone yet"
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def _of_child(environment: Mapping[str, str]) -> dict[str, str]:
    """Kernels are compiled there, and nothing is tried in a process of its own: this is one."""
    kept = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
    return kept | {"FLASHGEN_TRY_FIRST": "0"}


# ---- in the child --------------------------------------------------------------------------------


def run(main: str, channel: str, lifeline: str) -> None:
    """Tie the child to its parent, then call its main function."""
    tie(int(lifeline))
    module, _, function = main.partition(":")
    found: Callable[[Connection], None] = getattr(importlib.import_module(module), function)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or is going
        found(Connection(int(channel)))


def tie(lifeline: int) -> None:
    """Have this process group killed once nobody holds the other end of `lifeline`.

    The kernel does it by the signal that it sends when a pipe closes; a thread does it where there
    is no such signal, as in some sandboxes.
    """
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before
        os.killpg(os.getpgrp(), signal.SIGKILL)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
