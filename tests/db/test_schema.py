"""Opening, creating, upgrading and backing up; other people's databases stay as they were."""

import hashlib
import shutil
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, text

import db.schema
from db.check import problems
from db.engine import connect
from db.location import database_exists, database_url, network_file_system, sqlite_path
from db.profiles import finish_profile, list_profiles, open_profile, record_point
from db.schema import VERSION_TABLE, State, back_up, head_revision, open_database, schema_of, upgrade, vacuum
from db.tables import Base
from tests.db.examples import conditions, point
from treeopt.errors import DatabaseError


def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_migrations_make_exactly_the_tables_of_the_models(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []
        assert schema_of(engine).revision == head_revision()


def test_a_reader_creates_nothing(url: str) -> None:
    assert open_database(url) is None
    path = sqlite_path(url)
    if path is not None:
        assert not path.exists()


def test_a_folder_is_made_for_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b c %41?" / "x.db"
    assert open_database(database_url(str(path)), create=True) is not None
    assert path.exists()


def test_upgrading_twice_changes_nothing(engine: Engine, now: datetime) -> None:
    open_profile(engine, conditions(), [1], now)
    assert upgrade(engine) == head_revision()
    assert len(list_profiles(engine)) == 1


def test_sqlite_uses_the_write_ahead_log_and_checks_references(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'x.db'}", create=True)
    assert engine is not None
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000


def test_a_newer_schema_is_refused_untouched(engine: Engine, url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = 'v9.9.9'"))  # noqa: S608
    engine.dispose()
    path = sqlite_path(url)
    before = content(path) if path is not None else None
    for attempt in (lambda: open_database(url, create=True), lambda: open_database(url), lambda: upgrade(connect(url))):
        with pytest.raises(DatabaseError, match=r"newer treeopt \(schema v9.9.9") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert schema_of(connect(url)).state is State.NEWER
    if path is not None:
        assert content(path) == before


def test_another_programs_database_is_refused_untouched(url: str) -> None:
    other = create_engine(url)
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('v0.1.0')"))
    other.dispose()
    path = sqlite_path(url)
    before = content(path) if path is not None else None
    for attempt in (lambda: open_database(url, create=True), lambda: open_database(url), lambda: upgrade(connect(url))):
        with pytest.raises(DatabaseError, match="tables of another program; it was left untouched"):
            attempt()
    if path is not None:
        assert content(path) == before
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.fixture
def future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this treeopt knows one revision more."""
    folder = tmp_path / "migrations"
    shutil.copytree(db.schema.MIGRATIONS, folder)
    (folder / "versions" / "v0_2_0.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        "revision = 'v0.2.0'\ndown_revision = 'v0.1.0'\n"
        "def upgrade():\n"
        "    with op.batch_alter_table('models') as batch:\n"
        "        batch.add_column(sa.Column('licence', sa.String()))\n"
    )
    monkeypatch.setattr(db.schema, "MIGRATIONS", folder)


def test_an_older_schema_is_named_then_upgraded_with_a_backup(
    engine: Engine, url: str, now: datetime, request: pytest.FixtureRequest
) -> None:
    open_profile(engine, conditions(), [1], now)
    request.getfixturevalue("future")
    with pytest.raises(DatabaseError, match=r"older schema v0.1.0; run treeopt db upgrade"):
        open_database(url)
    assert upgrade(connect(url)) == "v0.2.0"
    assert schema_of(engine).state is State.CURRENT
    assert len(list_profiles(engine)) == 1
    path = sqlite_path(url)
    if path is not None:
        backup = path.with_name(path.name + ".v0.1.0.bak")
        assert schema_of(connect(f"sqlite:///{backup}")).revision == "v0.1.0"


def test_a_failed_upgrade_leaves_the_old_schema(
    engine: Engine, url: str, now: datetime, request: pytest.FixtureRequest
) -> None:
    open_profile(engine, conditions(), [1], now)
    request.getfixturevalue("future")
    script = db.schema.MIGRATIONS / "versions" / "v0_2_0.py"
    script.write_text(script.read_text() + "    op.drop_table('nowhere')\n")
    with pytest.raises(DatabaseError, match="nowhere"):
        upgrade(connect(url))
    assert schema_of(engine).revision == "v0.1.0"
    with engine.connect() as connection, pytest.raises(Exception, match="licence"):
        connection.execute(text("SELECT licence FROM models"))
    assert len(list_profiles(engine)) == 1


def test_a_backup_is_a_whole_database(engine: Engine, now: datetime, tmp_path: Path) -> None:
    started = open_profile(engine, conditions(), [1], now)
    record_point(engine, started.id, point(1), now)
    finish_profile(engine, started.id, [], now)
    if engine.dialect.name == "postgresql" and shutil.which("pg_dump") is None:
        pytest.skip("no pg_dump here: apt-get install postgresql-client")
    target = back_up(engine, tmp_path / "folder" / "copy.db")
    assert [entry.name for entry in target.parent.iterdir()] == ["copy.db"]
    if engine.dialect.name == "sqlite":
        copy = open_database(f"sqlite:///{target}")
        assert copy is not None
        assert list_profiles(copy) == list_profiles(engine)
    else:
        assert target.read_bytes()[:5] == b"PGDMP"
    before = content(target)
    with pytest.raises(DatabaseError, match="exists already"):
        back_up(engine, target)
    assert content(target) == before


def test_vacuum_keeps_everything(engine: Engine, now: datetime) -> None:
    started = open_profile(engine, conditions(), [1], now)
    record_point(engine, started.id, point(1), now)
    before = list_profiles(engine)
    vacuum(engine)
    assert list_profiles(engine) == before
    assert problems(engine, now) == ()


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "zero.db"
    path.touch()
    url = database_url(str(path))
    assert not database_exists(url)
    assert open_database(url) is None
    assert path.stat().st_size == 0
    assert open_database(url, create=True) is not None


@pytest.mark.parametrize("words", [b"latency,n\n1,2\n", b"x", b"SQLite format 2\x00" + bytes(100)])
def test_a_text_file_is_no_database(tmp_path: Path, words: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(words)
    for create in (False, True):
        with pytest.raises(DatabaseError, match="is not a SQLite database; it was left untouched"):
            open_database(database_url(str(path)), create=create)
    assert path.read_bytes() == words


def test_a_cut_off_file_is_reported_in_one_line(tmp_path: Path, now: datetime) -> None:
    path = tmp_path / "x.db"
    url = database_url(str(path))
    engine = open_database(url, create=True)
    assert engine is not None
    open_profile(engine, conditions(), [1], now)
    vacuum(engine)
    engine.dispose()
    path.write_bytes(path.read_bytes()[: 4096 * 3])

    def use() -> None:
        damaged = open_database(url)
        assert damaged is not None
        problems(damaged, now)
        list_profiles(damaged)

    with pytest.raises(DatabaseError, match=r"x\.db: .*(malformed|backup)") as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("mysql://host/x", "'mysql' is not supported"),
        ("postgresql+nosuch://host/x", "not a database URL"),
    ],
)
def test_urls_that_cannot_work_are_refused(flag: str, said: str) -> None:
    with pytest.raises(DatabaseError, match=said):
        open_database(database_url(flag))


def test_a_missing_server_is_one_line_without_the_password() -> None:
    with pytest.raises(DatabaseError, match="check that the server runs") as caught:
        open_database("postgresql://me:geheim@127.0.0.1:1/x")
    assert "geheim" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_the_database_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert database_url(None, {}).endswith("/treeopt/treeopt.db")
    assert database_url(None, {"TREEOPT_DB": "postgresql://h/x"}) == "postgresql://h/x"
    assert database_url("/a/b.db", {"TREEOPT_DB": "postgresql://h/x"}) == "sqlite:////a/b.db"
    assert database_url("postgres://h/x", {}) == "postgresql://h/x"


def test_network_file_systems_are_told_by_the_deepest_mount() -> None:
    mounts = "disk / ext4 rw 0 0\nsrv:/h /home nfs rw 0 0\ndisk2 /home/me/local ext4 rw 0 0\n"
    assert network_file_system(Path("/home/you/x.db"), mounts) == "nfs"
    assert network_file_system(Path("/home/me/local/x.db"), mounts) is None
    assert network_file_system(Path("/homestead/x.db"), mounts) is None


def test_a_reader_sees_the_state_before_an_open_write(tmp_path: Path, now: datetime) -> None:
    url = database_url(str(tmp_path / "x.db"))
    engine = open_database(url, create=True)
    assert engine is not None
    writer = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO models (name, fingerprint, created_at) VALUES ('m', '', '2026-01-01')")
    assert list_profiles(engine) == ()
    writer.execute("ROLLBACK")
    writer.close()
