"""Who holds something: a process, named so that another one can tell whether it is still there.

A process id alone is not enough: ids are used again, and mean nothing in another container or on
another machine. A holder that cannot be judged from here is not called dead.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """place: machine, boot and process namespace; pid in that place; start: ticks since boot."""

    place: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.place}/{self.pid}/{self.start}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The inverse of `str`; None for what is not one."""
        place, _, rest = text.partition("/")
        pid, _, start = rest.partition("/")
        if place and pid.isdecimal() and start.isdecimal():
            return cls(place, int(pid), int(start))
        return None

    @property
    def is_dead(self) -> bool:
        """Whether it ended for certain: it was in this place, and no process is what it was."""
        return self.place == here() and _start_of(self.pid) != self.start


def me() -> Owner:
    """This process; not cached, so that a fork is somebody else."""
    pid = os.getpid()
    return Owner(here(), pid, _start_of(pid) or 0)


@cache
def here() -> str:
    """This machine, since its last start, and its process namespace."""
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()[:8]
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{boot}-{namespace}".replace("/", "_")


def _start_of(pid: int) -> int | None:
    """When the process began; None: there is none. A zombie has ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in {"Z", "X"} else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
