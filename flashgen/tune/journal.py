"""Optuna's journal file, made safe against what a killed process or a full disk leaves behind.

Optuna appends a line to the journal for every operation. Killed in the middle of one, a process
leaves half a line, to which the next append would be glued: the journal could not be read again.
Here half a line at the end is cut off before anything is appended, and a line that Optuna cannot
replay ends the journal: the file is kept beside and said. The lock's link names its
holder, so that a dead one on this machine is passed over at once instead of after half a minute.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.storages.journal._storage import JournalStorageReplayResult

from flashgen.errors import TuningError
from flashgen.runtime.said import say_once
from flashgen.tune.owner import Owner, here, me

GRACE_S = 30.0  # a lock of another machine that is older than this is taken for left behind
LONGEST_WAIT_S = 60.0
FIRST_WAIT_S, LAST_WAIT_S = 0.001, 0.05
LONGEST_FIRST_LINE = 1 << 16  # a journal's is the name of a study


_State = tuple[str, int, int]


class JournalLock(BaseJournalFileLock):
    """A symbolic link beside the journal, made in one step also on NFS; it points to its holder."""

    def __init__(self, journal: Path) -> None:
        self._link = journal.with_name(journal.name + ".lock")
        self._takeover = journal.with_name(journal.name + ".takeover")

    def acquire(self) -> bool:
        """Wait for the lock. TuningError after a minute, with the name of who holds it."""
        begun = since = time.monotonic()
        seen: _State = ("", 0, 0)
        wait = FIRST_WAIT_S
        while True:
            try:
                self._link.symlink_to(str(me()))
            except FileExistsError:
                now = self._state()
                if now != seen:
                    seen, since = now, time.monotonic()
                self._pass_over_the_dead(now, time.monotonic() - since)
            else:
                return True
            if time.monotonic() - begun > LONGEST_WAIT_S:
                raise TuningError(
                    f"{self._link}: held for {LONGEST_WAIT_S:.0f} s by {self._holder()}\n"
                    "  hint: if no tuning runs there, delete this file."
                )
            time.sleep(wait)
            wait = min(2 * wait, LAST_WAIT_S)

    def release(self) -> None:
        """Remove the link, if it is this process's."""
        if self._holder() == str(me()):
            with suppress(OSError):
                self._link.unlink()

    def _holder(self) -> str:
        try:
            return str(self._link.readlink())
        except OSError:
            return ""

    def _state(self) -> _State:
        """What tells one holding of the lock from the next."""
        try:
            status = self._link.lstat()
        except OSError:
            return "", 0, 0
        return self._holder(), status.st_ino, status.st_mtime_ns

    def _pass_over_the_dead(self, seen: _State, age_s: float) -> None:
        """Remove a dead holder's link, one process of this machine at a time, so that none removes
        the link that another has just made in its place."""
        if not _is_left_behind(seen[0], age_s):
            return
        with suppress(OSError), self._takeover.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if self._state() == seen:
                self._link.unlink()


def _is_left_behind(holder: str, age_s: float) -> bool:
    """Dead, if that can be told from here; else held for longer than any operation takes, by this
    process's own clock: those of two machines differ."""
    owner = Owner.parse(holder)
    if owner is not None and owner.place == here():
        return owner.is_dead
    return bool(holder) and age_s > GRACE_S


class Journal(JournalFileBackend):
    """The journal file at `path`, made if it is not there, mended if its end is half a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own_lock = JournalLock(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise TuningError(f"{path}: is no file\n  hint: name a journal file, or a folder.")
        if path.exists() and path.stat().st_size:
            _check_first_line(path)
            with self._locked():
                _mend(path)
        super().__init__(str(path), lock_obj=self._own_lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._own_lock.acquire()
        try:
            yield
        finally:
            self._own_lock.release()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """All lines or none. OSError where the disk is full; the journal is then as before."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._locked(), self.path.open("r+b") as stream:
            end = _end_of_last_line(stream)
            stream.truncate(end)
            stream.seek(end)
            try:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    os.ftruncate(stream.fileno(), end)
                raise


def _end_of_last_line(stream: Any) -> int:
    """Where the last whole line ends."""
    size = int(stream.seek(0, os.SEEK_END))
    end = size
    while end:
        start = max(0, end - 4096)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _check_first_line(path: Path) -> None:
    """TuningError for a file that is something else: it is not ours to mend."""
    with path.open("rb") as stream:
        line = stream.readline(LONGEST_FIRST_LINE)
    whole = line.endswith(b"\n") or len(line) == LONGEST_FIRST_LINE
    if whole and _operation(line) is None:
        raise TuningError(
            f"{path}: is no journal of Optuna\n"
            "  hint: --storage takes a new file, a journal, a folder, postgresql://… or grpc://…"
        )


def _mend(path: Path) -> None:
    """Keep the lines before the first one that cannot be used; the damaged file stays beside.

    Lines refer to earlier ones by their number, so nothing behind a lost line can be used.
    """
    data = path.read_bytes()
    good, lines = _usable(data)
    rest = data[good:]
    if b"\n" not in rest:  # whole, or half a line at the end: what a killed process leaves
        return
    damaged = path.with_name(f"{path.name}.damaged-{int(time.time())}")
    damaged.write_bytes(data)
    with path.open("r+b") as stream:
        stream.truncate(good)
    say_once(
        f"{path}:{lines + 1}: the journal is damaged here; {lines} operations before it are used, "
        f"the rest is lost\n  hint: the file as it was is {damaged.name}."
    )


def _usable(data: bytes) -> tuple[int, int]:
    """How many bytes and lines there are before the first line that Optuna cannot replay."""
    replayed = JournalStorageReplayResult("mending-")
    good, lines = 0, 0
    for line in data.splitlines(keepends=True):
        operation = _operation(line)
        if operation is None:
            break
        try:
            replayed.apply_logs([operation])
        except Exception:  # Optuna trusts its lines: KeyError, AssertionError, TypeError and others
            break
        good += len(line)
        lines += 1
    return good, lines


def _operation(line: bytes) -> dict[str, Any] | None:
    """What a whole line says; None for one that is no operation."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(value, dict) and "op_code" in value and line.endswith(b"\n")
    return value if is_one else None
