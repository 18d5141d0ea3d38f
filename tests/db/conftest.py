"""One fixture, two databases: every test that takes `url` runs on SQLite and on PostgreSQL."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from db.schema import open_database
from tests.db.postgres import find_programs, running_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server programs here: apt-get install postgresql")
    with running_server(programs) as prefix:
        yield prefix


@pytest.fixture
def new_postgres(postgres: str) -> Callable[[], str]:
    def make() -> str:
        """Empty the server's one database: far quicker than making a new one for every test."""
        engine = create_engine(postgres + "postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> :me"
            me = connection.execute(text("SELECT pg_backend_pid()")).scalar()
            connection.execute(text(others), {"me": me})
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
        return postgres + "postgres"

    return make


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fresh.db'}"
    return request.getfixturevalue("new_postgres")()


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """A database with the current schema."""
    opened = open_database(url, create=True)
    assert opened is not None
    yield opened
    opened.dispose()


@pytest.fixture
def now() -> datetime:
    return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
