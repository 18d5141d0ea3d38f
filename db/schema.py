"""Open, create, upgrade, check and back up a database.

A database that a newer treeopt wrote, or that belongs to another program, is refused before anything in it changes.
"""

import os
import shutil
import sqlite3
import subprocess
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from db.engine import connect, database_errors, name_of
from db.tables import Base
from treeopt.errors import DatabaseError

__all__ = ["Schema", "State", "back_up", "head_revision", "open_database", "schema_of", "upgrade", "vacuum"]

MIGRATIONS = Path(__file__).with_name("migrations")

VERSION_TABLE = "treeopt_schema"
"""Not Alembic's default name: another program's revisions must not be taken for ours."""

CREATION_LOCK = 0x74726565
"""Key of PostgreSQL's advisory lock around schema changes."""


class State(Enum):
    """What a database holds."""

    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Schema:
    """State and revision of a database's schema; the revision is None when it has none of ours."""

    state: State
    revision: str | None


def _alembic(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head_revision() -> str:
    """Return the newest revision this treeopt knows."""
    return str(ScriptDirectory.from_config(_alembic()).get_current_head())


def _schema(connection: Connection) -> Schema:
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        return Schema(State.FOREIGN if tables else State.EMPTY, None)
    revision = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
    if revision is None:
        return Schema(State.EMPTY if tables == {VERSION_TABLE} else State.FOREIGN, None)
    if revision == head_revision():
        return Schema(State.CURRENT, revision)
    known = {script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions()}
    return Schema(State.OLDER if revision in known else State.NEWER, revision)


def _file_of(engine: Engine) -> Path | None:
    return Path(str(engine.url.database)) if engine.dialect.name == "sqlite" else None


def schema_of(engine: Engine) -> Schema:
    """Look at a database's schema without changing anything."""
    path = _file_of(engine)
    if path is not None and not path.exists():
        return Schema(State.EMPTY, None)
    with database_errors(engine), engine.connect() as connection:
        return _schema(connection)


def _refuse(engine: Engine, schema: Schema) -> None:
    name = name_of(engine)
    if schema.state is State.NEWER:
        raise DatabaseError(
            f"{name}: was written by a newer treeopt (schema {schema.revision}, this one knows {head_revision()}); "
            "it was left untouched: update treeopt, or give another database with --db"
        )
    if schema.state is State.FOREIGN:
        raise DatabaseError(
            f"{name}: holds tables of another program; it was left untouched, give another database with --db"
        )


def open_database(url: str, *, create: bool = False) -> Engine | None:
    """Open a database for use.

    Parameters
    ----------
    url : str
        As `db.location.database_url` returns it.
    create : bool
        Make the file and the tables where there are none.

    Returns
    -------
    Engine or None
        None when there is no database yet and it was not to be created.

    Raises
    ------
    DatabaseError
        When it cannot be opened, is older or newer than this treeopt, or belongs to another program.
    """
    engine = connect(url)
    schema = schema_of(engine)
    _refuse(engine, schema)
    if schema.state is State.OLDER:
        raise DatabaseError(
            f"{name_of(engine)}: has the older schema {schema.revision}; run treeopt db upgrade (it makes a backup)"
        )
    if schema.state is State.EMPTY:
        if not create:
            return None
        upgrade(engine)
    return engine


def upgrade(engine: Engine) -> str:
    """Bring an empty or older database to the newest schema, all in one transaction; return its revision.

    Any number of processes may do this at once: the first one does it, the others find it done.
    """
    path = _file_of(engine)
    if path is not None:
        _make_folder(path.parent)
        schema = schema_of(engine)
        _refuse(engine, schema)
        if schema.state is State.OLDER:
            back_up(engine, path.with_name(f"{path.name}.{schema.revision}.bak"))
        _outside_transactions(engine, "PRAGMA journal_mode = WAL")
    with database_errors(engine), engine.execution_options(treeopt_write=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": CREATION_LOCK})
        schema = _schema(connection)  # again: another process may have been faster
        _refuse(engine, schema)
        if schema.state is not State.CURRENT:
            command.upgrade(_alembic(connection), "head")
    return head_revision()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(f"{folder}: cannot be made ({error.strerror}); give another file with --db") from error


def _outside_transactions(engine: Engine, *statements: str) -> None:
    """Run what SQLite allows only outside transactions: changing the journal (which stays changed), and VACUUM."""
    with database_errors(engine):
        raw = engine.raw_connection()
        try:
            for statement in statements:
                raw.cursor().execute(statement).fetchall()
        finally:
            raw.close()


def back_up(engine: Engine, target: Path) -> Path:
    """Copy a database in use to a new file: SQLite's online backup, or pg_dump for PostgreSQL.

    Raises
    ------
    DatabaseError
        When the target exists or cannot be written, or pg_dump is missing or fails.
    """
    if target.exists():
        raise DatabaseError(f"{target}: exists already; name a new file, backups are never overwritten")
    _make_folder(target.parent)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        if engine.dialect.name == "sqlite":
            _copy_sqlite(engine, partial)
        else:
            _dump_postgresql(engine, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _copy_sqlite(engine: Engine, target: Path) -> None:
    if schema_of(engine).state is State.EMPTY:
        raise DatabaseError(f"{name_of(engine)}: there is nothing to back up yet")
    try:
        copy = sqlite3.connect(target)
        raw = engine.raw_connection()
        try:
            raw.driver_connection.backup(copy)  # type: ignore[union-attr]
        finally:
            raw.close()
            copy.close()
    except sqlite3.Error as error:
        raise DatabaseError(
            f"{target}: the backup failed ({error}); nothing was kept, check the disk's room"
        ) from error


def _dump_postgresql(engine: Engine, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise DatabaseError("pg_dump: not found; install the PostgreSQL client, or back up on the server")
    # pg_dump reads libpq URLs, so SQLAlchemy's driver part goes; the password goes by the environment, where other
    # users cannot list it.
    plain = engine.url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    secret = {"PGPASSWORD": str(engine.url.password)} if engine.url.password else {}
    done = subprocess.run(
        [program, "--format=custom", f"--file={target}", plain],
        env={**os.environ, **secret},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DatabaseError(f"{name_of(engine)}: pg_dump failed ({lines[0]})")


def vacuum(engine: Engine) -> None:
    """Give room of deleted rows back."""
    if engine.dialect.name == "sqlite":
        _outside_transactions(engine, "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")
        return
    with database_errors(engine), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in Base.metadata.sorted_tables:
            connection.exec_driver_sql(f"VACUUM ANALYZE {table.name}")
