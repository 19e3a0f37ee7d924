"""Main functions of child processes."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection


def echo(channel: Connection) -> None:
    """Sends back what it gets, until it is told to end."""
    while (message := channel.recv()) != "end":
        channel.send(message)
    print("about to end", flush=True)
    sys.exit(5)
