"""Use cases of the database itself: upgrade, current, backup, check, vacuum."""

from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from db.check import problems
from db.engine import connect, name_of
from db.location import database_exists, database_url
from db.schema import back_up, head_revision, open_database, schema_of, upgrade, vacuum
from treeopt.errors import DatabaseError

__all__ = ["backup", "check", "current", "run_upgrade", "run_vacuum"]


def run_upgrade(db_url: str | None) -> tuple[str, str]:
    """Bring the database to the newest schema; return its name and revision."""
    engine = connect(database_url(db_url))
    return name_of(engine), upgrade(engine)


def current(db_url: str | None) -> dict[str, str | None]:
    """Return where the database is, its revision, the newest revision, and its state."""
    engine = connect(database_url(db_url))
    schema = schema_of(engine)
    return {
        "database": name_of(engine),
        "revision": schema.revision,
        "newest": head_revision(),
        "state": schema.state.value,
    }


def _existing(db_url: str | None) -> Engine:
    url = database_url(db_url)
    engine = open_database(url) if database_exists(url) else None
    if engine is None:
        raise DatabaseError(f"{name_of(connect(url))}: there is no database yet; make one with treeopt db upgrade")
    return engine


def backup(db_url: str | None, target: Path) -> Path:
    """Copy the database while it is in use."""
    return back_up(_existing(db_url), target)


def check(db_url: str | None) -> tuple[str, ...]:
    """Return what is wrong with the database; empty when it is sound."""
    return problems(_existing(db_url), datetime.now(UTC))


def run_vacuum(db_url: str | None) -> None:
    """Give room of deleted rows back."""
    vacuum(_existing(db_url))
