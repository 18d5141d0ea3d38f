"""What can break under a database: one clear line, and what was stored stays as it was."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, text

from db.check import problems
from db.engine import writing
from db.profiles import list_profiles, open_profile, record_point
from db.schema import back_up, open_database
from db.tables import ModelRow
from tests.db.examples import conditions, point
from treeopt.errors import DatabaseError


def started(path: Path, now: datetime) -> tuple[Engine, int]:
    engine = open_database(f"sqlite:///{path}", create=True)
    assert engine is not None
    profile = open_profile(engine, conditions(), [1], now)
    record_point(engine, profile.id, point(1), now)
    return engine, profile.id


def test_a_full_disk_stops_the_write_and_keeps_the_rest(tmp_path: Path, now: datetime) -> None:
    engine, profile_id = started(tmp_path / "x.db", now)

    @event.listens_for(engine, "begin")
    def no_room(connection: object) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # SQLITE_FULL, as on a full disk

    huge = point(2)
    huge = type(huge)(2, 0.25, samples_s=tuple(0.25 + i / 2**20 for i in range(20_000)))
    with pytest.raises(DatabaseError, match="is full; make room on the disk") as caught:
        record_point(engine, profile_id, huge, now)
    assert "\n" not in str(caught.value)
    assert [p.steps.keys() for p in list_profiles(engine)] == [{1}]
    event.remove(engine, "begin", no_room)
    fresh = open_database(f"sqlite:///{tmp_path / 'x.db'}")
    assert fresh is not None
    assert problems(fresh, now) == ()


FULL = """
import sys
from pathlib import Path
from datetime import UTC, datetime
from tests.db.examples import conditions, point
from db.profiles import list_profiles, open_profile, record_point
from db.schema import open_database
from treeopt.errors import DatabaseError
now = datetime.now(UTC)
try:
    engine = open_database("sqlite:///" + sys.argv[1], create=True)
    profile = open_profile(engine, conditions(), [1], now)
    for number in range(100_000):
        record_point(engine, profile.id, point(1 + number), now)
except DatabaseError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_file_system(tmp_path: Path, now: datetime) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this container may not mount a small file system")
    try:
        done = subprocess.run(
            [sys.executable, "-c", FULL, small / "x.db"], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.stderr == ""
        assert done.stdout.count("\n") == 1
        assert "x.db: " in done.stdout
        shutil.copytree(small, tmp_path / "rescued")
    finally:
        subprocess.run(["umount", small], check=True)
    engine = open_database(f"sqlite:///{tmp_path / 'rescued' / 'x.db'}")
    if engine is not None:  # None: there was no room for the tables themselves
        assert problems(engine, now) == ()
        assert all(len(p.steps) == max(p.steps, default=0) for p in list_profiles(engine))


AS_NOBODY = """
import os, sys, tempfile
from db.location import database_url
from db.schema import open_database
from treeopt.errors import DatabaseError
with tempfile.TemporaryDirectory() as folder:
    open_database(database_url(folder + "/x.db"), create=True)  # loads what another user may not be allowed to read
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    open_database(database_url(sys.argv[1]), create=True)
    print("opened")
except DatabaseError as error:
    print(error)
"""


def _as_nobody(path: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, path], capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every user can reach, which pytest's own is not."""
    folder = Path("/tmp") / f"treeopt-test-{os.getpid()}"  # noqa: S108
    folder.mkdir()
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_one_line(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    (line,) = _as_nobody(open_folder / "x.db")
    assert line == f"{open_folder / 'x.db'}: unable to open database file; " + line.partition("; ")[2]
    assert "check that its folder exists and can be written" in line
    assert list(open_folder.iterdir()) == []
    (line,) = _as_nobody(open_folder / "below" / "x.db")
    assert "cannot be made (Permission denied); give another file with --db" in line


def test_a_read_only_file_is_one_line(open_folder: Path, now: datetime) -> None:
    path = open_folder / "x.db"
    path.touch()
    path.chmod(0o444)
    lines = _as_nobody(path)
    assert len(lines) == 1
    assert "x.db: " in lines[0]
    assert "readonly" in lines[0] or "read-only" in lines[0] or "unable to open" in lines[0]
    assert path.stat().st_size == 0


def test_a_backup_that_finds_no_room_leaves_nothing(
    tmp_path: Path, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = started(tmp_path / "x.db", now)
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match="cannot be made"):
        back_up(engine, tmp_path / "file" / "copy.db")
    assert sorted(entry.name for entry in tmp_path.glob("*copy*")) == []


def test_a_lock_held_too_long_is_one_line(tmp_path: Path, now: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.engine.BUSY_TIMEOUT_MS", 100)
    engine, profile_id = started(tmp_path / "x.db", now)
    blocker = open_database(f"sqlite:///{tmp_path / 'x.db'}")
    assert blocker is not None
    with writing(blocker) as session:
        session.add(ModelRow(name="held", fingerprint="", created_at=now))
        session.flush()
        with pytest.raises(DatabaseError, match="locked; another program holds it"):
            record_point(engine, profile_id, point(2), now)
    record_point(engine, profile_id, point(2), now)


def test_an_error_inside_a_transaction_rolls_everything_back(engine: Engine, now: datetime) -> None:
    def work() -> None:
        with writing(engine) as session:
            session.add(ModelRow(name="half", fingerprint="", created_at=now))
            session.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM models")).scalar() == 0


@pytest.mark.postgresql
def test_a_connection_lost_in_the_middle(new_postgres: Callable[[], str], now: datetime) -> None:
    url = new_postgres()
    engine = open_database(url, create=True)
    assert engine is not None
    profile = open_profile(engine, conditions(), [1], now)
    record_point(engine, profile.id, point(1), now)

    def cut() -> None:
        admin = create_engine(url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            me = connection.execute(text("SELECT pg_backend_pid()")).scalar()
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> :me"
            connection.execute(text(others), {"me": me})
        admin.dispose()

    def work() -> None:
        with writing(engine) as session:
            session.add(ModelRow(name="half", fingerprint="", created_at=now))
            session.flush()
            other = threading.Thread(target=cut)
            other.start()
            other.join()
            session.add(ModelRow(name="other half", fingerprint="", created_at=now))

    with pytest.raises(DatabaseError, match=r"terminating connection|closed the connection") as caught:
        work()
    assert "\n" not in str(caught.value)
    record_point(engine, profile.id, point(2), now)  # the next one connects again by itself
    assert [sorted(p.steps) for p in list_profiles(engine)] == [[1, 2]]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM models")).scalar() == 1
