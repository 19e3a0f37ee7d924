"""Where trials are kept: a journal file, a database, or a server in front of one; and its errors.

Everything that a storage can raise becomes one TuningError here: what cannot be reached or written,
that nothing measured so far is lost, and what to do.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flashgen import settings
from flashgen.errors import TuningError, install_hint

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

CONNECT_S = 5
# Drivers by preference, as SQLAlchemy calls them.
_POSTGRESQL = ("psycopg2", "psycopg", "pg8000")
_DATABASES = ("postgresql", "mysql", "sqlite")


@dataclass(frozen=True)
class Place:
    """What `--storage` names: kind "journal" (a file, or a folder of them), "database", "grpc" or
    "memory", and the address as it may be shown, without a password."""

    kind: str
    address: str
    shown: str

    def __str__(self) -> str:
        return self.shown


def place_of(text: str | None) -> Place:
    """The place that a text names; None: the folder of trials in the user's cache."""
    if text is None:
        text = str(settings.trials_dir())
    if text == "memory":
        return Place("memory", text, "memory, not kept")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Place("journal", text, text)
    shown = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", text)
    if scheme == "grpc":
        return Place("grpc", text, shown)
    if scheme.partition("+")[0] in _DATABASES:
        return Place("database", text, shown)
    raise TuningError(
        f"--storage {shown}: unknown kind {scheme!r}\n"
        "  hint: it may be a journal file, a folder, postgresql://user@host/name, or "
        "grpc://host:port."
    )


def open_storage(place: Place, study: str) -> BaseStorage:
    """Connect; `study` names the file inside a folder. TuningError within seconds if it fails."""
    need_optuna()
    with explained(place):
        return _OPENERS[place.kind](place, study)


def need_optuna() -> None:
    if find_spec("optuna") is None:
        raise TuningError(
            "tuning needs Optuna, which is not installed\n  hint: pip install 'optuna>=4.2'"
        )


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna announces new studies; the caller's own studies keep their announcements."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def explained(place: Place) -> Iterator[None]:
    """A storage's errors as TuningError."""
    try:
        yield
    except TuningError:
        raise
    except OSError as error:
        raise TuningError(_cannot(place, _reason_of(error), error)) from error
    except Exception as error:
        if not _is_of_storage(error):
            raise
        raise TuningError(_cannot(place, _reason_of(error), error)) from error


def _is_of_storage(error: Exception) -> bool:
    kind = type(error)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return bool(modules & {"sqlalchemy", "grpc", "psycopg2", "psycopg", "pg8000"}) or (
        kind.__name__ in {"StorageInternalError", "JSONDecodeError"}
    )


def _reason_of(error: Exception) -> str:
    """The innermost cause in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    details = getattr(error, "details", None)
    text = str(details() if callable(details) else error.__cause__ or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\([\w.]+\)\s*", "", lines[0])[:300] if lines else type(error).__name__


def _cannot(place: Place, reason: str, error: Exception) -> str:
    reached = place.kind in {"database", "grpc"}
    doing = "cannot be reached or used" if reached else "cannot be read or written"
    hints = {
        "database": "is the server running, and does the database exist? "
        "postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        "grpc": "is the server running? `optuna.storages.run_grpc_proxy_server` starts one.",
        "journal": "name another place with --storage, or set FLASHGEN_CACHE_DIR.",
        "memory": "",
    }
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hints["journal"] = "make room on the disk and run the same command again: it continues."
    return (
        f"trials: {place}: {doing} ({reason}); what was measured before is kept\n"
        f"  hint: {hints[place.kind]}"
    )


# **** kinds ****


def _journal(place: Place, study: str) -> BaseStorage:
    from optuna.storages import JournalStorage

    from flashgen.tune.journal import Journal

    path = Path(place.address)
    if path.is_dir() or not (path.suffix or path.exists()):  # a folder, there or to be
        path = path / f"{study}.journal"
    return JournalStorage(Journal(path))


def _database(place: Place, study: str) -> BaseStorage:
    from optuna.storages import RDBStorage, get_storage

    url = _with_driver(place.address)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("postgresql"):
        options["connect_args"] = _timeouts(url)
    storage = RDBStorage(url, engine_kwargs=options)
    return get_storage(storage)  # caches finished trials


def _with_driver(url: str) -> str:
    """PostgreSQL's default driver depends on SQLAlchemy's version: take one that is installed."""
    scheme, _, rest = url.partition("://")
    if scheme != "postgresql":
        return url
    driver = next((name for name in _POSTGRESQL if find_spec(name) is not None), None)
    if driver is None:
        raise TuningError(
            "trials in PostgreSQL need a driver, which is not installed\n"
            f"  hint: {install_hint('storage')}"
        )
    return f"postgresql+{driver}://{rest}"


def _timeouts(url: str) -> dict[str, Any]:
    """A server that does not answer is an error after seconds, not minutes."""
    if "pg8000" in url.partition("://")[0]:
        return {"timeout": CONNECT_S}
    return {
        "connect_timeout": CONNECT_S,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "tcp_user_timeout": 1000 * 3 * CONNECT_S,
    }


def _grpc(place: Place, study: str) -> BaseStorage:
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        raise TuningError(
            "trials behind a gRPC server need grpcio and protobuf, which are not installed\n"
            f"  hint: {install_hint('storage')}"
        )
    import warnings

    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import GrpcStorageProxy

    parts = urlsplit(place.address)
    if not parts.hostname or parts.port is None:
        raise TuningError(f"--storage {place}: expected grpc://HOST:PORT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        storage = GrpcStorageProxy(host=parts.hostname, port=parts.port)
    storage.wait_server_ready(timeout=CONNECT_S)
    return storage


def _memory(place: Place, study: str) -> BaseStorage:
    from optuna.storages import InMemoryStorage

    return InMemoryStorage()


_OPENERS = {"journal": _journal, "database": _database, "grpc": _grpc, "memory": _memory}
