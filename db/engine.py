"""Connections and transactions: one scope for reading, one for writing, one error for everything that can go wrong.

SQLite: writers use BEGIN IMMEDIATE, because a transaction that reads first and then wants to write fails at once,
whatever the timeout, when another writer came between. The journal is a write-ahead log, so readers never wait.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.pool import ConnectionPoolEntry

from db.location import network_file_system, sqlite_path
from treeopt.errors import DatabaseError

__all__ = ["connect", "database_errors", "insert_once", "name_of", "reading", "writing"]

BUSY_TIMEOUT_MS = 30_000
"""How long a writer waits for another one."""

SQLITE_HEADER = b"SQLite format 3\x00"


def connect(url: str) -> Engine:
    """Return an engine; nothing is created or changed yet.

    Raises
    ------
    DatabaseError
        When the URL is malformed, its driver is missing, or its file is not a SQLite database.
    """
    path = sqlite_path(url)
    if path is not None:
        _check_file(path)
    try:
        parsed = make_url(url) if path is None else make_url("sqlite://").set(database=str(path))
        if path is not None:
            engine = create_engine(parsed, pool_size=2, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
        else:
            engine = create_engine(parsed, pool_pre_ping=True, pool_size=2, connect_args={"connect_timeout": 10})
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise DatabaseError(f"--db: is not a database URL ({error}); use sqlite:///FILE or postgresql://..") from error
    except ImportError as error:
        raise DatabaseError(f"--db: no driver ({error}); pip install 'treeopt[postgresql]'") from error
    if path is not None:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_file(path: Path) -> None:
    """Refuse a file that SQLite did not write, and a place where its locks cannot be trusted."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mounts = ""
    kind = network_file_system(path.absolute(), mounts)
    if kind is not None:
        raise DatabaseError(
            f"{path}: lies on a network file system ({kind}), where SQLite can lose data; use PostgreSQL"
        )
    try:
        with path.open("rb") as stream:
            header = stream.read(len(SQLITE_HEADER))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatabaseError(f"{path}: cannot be read ({error.strerror}); give another file with --db") from error
    if header and header != SQLITE_HEADER:  # an empty file is an empty database, also to SQLite
        raise DatabaseError(f"{path}: is not a SQLite database; it was left untouched, give another file with --db")


def _prepare_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver opens no transactions of its own
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = NORMAL")  # with a write-ahead log: safe against crashes of the process
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    write = connection.get_execution_options().get("treeopt_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def name_of(engine: Engine) -> str:
    """Return the database's name for messages: the file, or the URL without its password."""
    if engine.dialect.name == "sqlite":
        return str(engine.url.database)
    return engine.url.render_as_string(hide_password=True)


@contextmanager
def database_errors(engine: Engine) -> Iterator[None]:
    """Turn every error of the database into one line.

    Raises
    ------
    DatabaseError
        In place of any error of SQLAlchemy or its driver.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:  # the latter from connections used without SQLAlchemy
        raise DatabaseError(f"{name_of(engine)}: {_explain(error)}") from error


REMEDIES = (
    ("disk is full", "make room on the disk and run the command again"),
    ("disk i/o error", "look at the disk's room, quota and health"),
    ("readonly database", "give a file that can be written with --db, or mend its rights"),
    ("unable to open", "check that its folder exists and can be written, or give another file with --db"),
    ("locked", "another program holds it; try again"),
    ("not a database", "give another file with --db, or put a backup back"),
    ("malformed", "the file is damaged: put a backup back (treeopt db check says more)"),
    ("authentication failed", "check user and password of the URL"),
    ("does not exist", "check the URL; create the database with createdb"),
    ("connection", "check that the server runs and can be reached, then run the command again"),
    ("terminat", "the server ended the connection; run the command again"),
)


def _explain(error: SQLAlchemyError | sqlite3.Error) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    first = lines[0].strip()
    lower = first.lower()
    remedy = next((text for sign, text in REMEDIES if sign in lower), "what was stored before is unchanged")
    return f"{first}; {remedy}"


def insert_once(session: Session, table: type[DeclarativeBase], **values: object) -> None:
    """Insert a row unless one with the same unique key is there, also when another writer is inserting it now."""
    insert = sqlite_insert if session.get_bind().dialect.name == "sqlite" else postgresql_insert
    session.execute(insert(table).values(**values).on_conflict_do_nothing())


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """Open a short read transaction."""
    with database_errors(engine), Session(engine, expire_on_commit=False) as session:
        yield session


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """Open a short write transaction: committed at the end, rolled back when anything fails.

    Never keep it open while something is measured.
    """
    with (
        database_errors(engine),
        Session(engine.execution_options(treeopt_write=True), expire_on_commit=False) as session,
        session.begin(),
    ):
        yield session
