"""Where a study's trials are kept: Optuna's storages, one file or one server for all workers."""

import contextlib
import json
import sqlite3
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import InputError, MachineError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_JOURNAL = "journal:"
_TABLES = {"studies", "trials", "version_info", "study_directions", "alembic_version"}
"""Of Optuna's: one of them is among those that any storage has."""
_FORMS = "sqlite:///FILE, journal:FILE and postgresql://USER@HOST/DATABASE"


def open_storage(url: str) -> "BaseStorage":
    """Opens, or makes, a storage that several processes may share.

    Args:
        url: "journal:FILE", or what SQLAlchemy takes: "sqlite:///FILE", "postgresql://..." .

    Raises:
        InputError: If it cannot be reached; a password in the URL is not repeated.
    """
    import optuna

    # Each trial is reported by its worker.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _said_plainly(url):
        if url.startswith(_JOURNAL):
            return _journal(Path(url.removeprefix(_JOURNAL)))
        return _database(url)


def file_in(folder: Path) -> str:
    """The URL of a search's or sweep's own storage: a file in its folder, whatever signs the folder's name has."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(folder / "study.db")).render_as_string()


def file_of(url: str) -> Path | None:
    """The file that a storage is; None: it is a server.

    Raises:
        InputError: If it is no URL of a storage.
    """
    if url.startswith(_JOURNAL):
        return Path(url.removeprefix(_JOURNAL))
    from sqlalchemy.engine import make_url

    with _said_plainly(url):
        parsed = make_url(url)
        return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def close_storage(storage: "BaseStorage") -> None:
    """Ends the connections of this process."""
    storage.remove_session()
    if engine := getattr(storage, "engine", None):
        engine.dispose()


def shown(url: str) -> str:
    """The URL without its password."""
    if url.startswith(_JOURNAL):
        return url
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


def _journal(path: Path) -> "BaseStorage":
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_other_content(path)
    # Absolute: the backend's lock is a link beside the file, which would not resolve a path
    # relative to somewhere else.
    return JournalStorage(JournalFileBackend(str(path.absolute())))


def _refuse_other_content(path: Path) -> None:
    """A journal is lines of JSON, each an operation."""
    first = b""
    if path.exists():
        with open(path, "rb") as file:
            first = file.readline(2**20)
    try:
        if first and "op_code" not in json.loads(first):
            raise ValueError
    except (ValueError, TypeError):
        raise InputError(
            f"--storage {_JOURNAL}{path} is no journal of trials. Name a file that is not there."
        ) from None


def _refuse_other_tables(path: Path) -> None:
    """A database of somebody else gets no tables of ours."""
    if not path.is_file():
        return
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:  # no database, or in use: said when it is opened
        return
    if names and not names & _TABLES:
        raise InputError(f"--storage {path} is another database. Name a new file.")


def _database(url: str) -> "BaseStorage":
    import sqlalchemy
    from optuna.storages import RDBStorage

    parsed = sqlalchemy.engine.make_url(url)
    if parsed.drivername == "postgresql":  # releases of SQLAlchemy differ in the driver that this means
        parsed = parsed.set(drivername="postgresql+psycopg")
    is_file = parsed.get_backend_name() == "sqlite"
    if not is_file and parsed.get_backend_name() != "postgresql":
        raise InputError(f"--storage {shown(url)} is of no known kind. Possible are {_FORMS}.")
    if is_file and parsed.database in (None, "", ":memory:"):
        raise InputError(f"--storage {url} keeps nothing: it names no file. Possible are {_FORMS}.")
    if is_file and parsed.database:
        _refuse_other_tables(Path(parsed.database))
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    attempts = 20
    for attempt in range(attempts):
        try:
            # One process writes at a time: the others wait their turn.
            options = {"connect_args": {"timeout": 100}} if is_file else {}
            storage = RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=options)
        except (
            sqlalchemy.exc.IntegrityError,
            sqlalchemy.exc.ProgrammingError,
            sqlalchemy.exc.OperationalError,
        ) as error:
            # Workers that start together make the same tables, and only the first one succeeds at
            # once.
            lost_a_race = not isinstance(error, sqlalchemy.exc.OperationalError) or "already exists" in str(error)
            if not lost_a_race or attempt == attempts - 1:
                raise
            time.sleep(0.2)
        else:
            if is_file:
                _lock_from_the_first_read(storage.engine)
            return storage
    raise AssertionError


def _lock_from_the_first_read(engine: Any) -> None:
    """Makes every transaction on SQLite take the file's lock when it begins.

    Python's driver begins one at the first write only. Two workers may then both read that a trial
    is waiting, and both take it.
    """
    from sqlalchemy import event

    def leave_transactions_alone(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    event.listen(engine, "connect", leave_transactions_alone)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections made before


@contextlib.contextmanager
def answers(url: str) -> Iterator[None]:
    """Within the block, a storage that stops answering is a fault of the machine.

    Raises:
        MachineError: With what to do.
    """
    import sqlalchemy
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise MachineError(
            f"the storage {shown(url)} stopped answering: {reason}. Finished trials are kept: "
            "give the same command again."
        ) from error


@contextlib.contextmanager
def _said_plainly(url: str) -> Iterator[None]:
    import sqlalchemy

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on what Optuna calls experimental
            yield
    except sqlalchemy.exc.NoSuchModuleError:  # a kind of database that SQLAlchemy does not know
        raise InputError(f"--storage {shown(url)} is of no known kind. Possible are {_FORMS}.") from None
    except sqlalchemy.exc.ArgumentError:
        raise InputError(f"--storage {url!r} is no URL of a storage. Possible are {_FORMS}.") from None
    except ImportError:
        raise InputError(
            f"--storage {shown(url)} needs its database's driver. Install it: pip install 'sfumato[postgresql]'."
        ) from None
    except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise InputError(
            f"--storage {shown(url)} cannot be reached: {reason}. Start it, or give another of {_FORMS}."
        ) from None
