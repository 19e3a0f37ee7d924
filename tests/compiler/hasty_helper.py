"""The helper that compiles, with a deadline too short for any compiler here."""

from __future__ import annotations

from multiprocessing.connection import Connection

from flashgen.compiler import machine_code


def serve(channel: Connection) -> None:
    machine_code.COMPILE_S = 0.05
    machine_code.serve(channel)
