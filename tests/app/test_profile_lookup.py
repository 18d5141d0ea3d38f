"""Which profile a search takes, and what it says when it takes none."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from db.profiles import finish_profile, list_profiles, open_profile, record_point
from db.schema import open_database
from profiler.device import identify
from profiler.environment import environment
from tests.db.examples import conditions, point
from treeopt.app.latency_lookup import find_profile, stored_profile
from treeopt.errors import DatabaseError, TreeOptError

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'x.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    opened = open_database(url, create=True)
    assert opened is not None
    yield opened
    opened.dispose()


def store(
    engine: Engine, hours: float = 0, *, flags: tuple[str, ...] = (), finish: bool = True, **changes: object
) -> str:
    here = {"device": identify().to_document(), "versions": environment("cpu")}
    at = NOW + timedelta(hours=hours)
    started = open_profile(engine, conditions(**{**here, **changes}), [1, 4], at)
    median_s = 0.25 + hours / 64
    for n in (1, 4):
        record_point(engine, started.id, point(n, median_s), at)
    if not finish:
        return ""
    return str(finish_profile(engine, started.id, flags, at).digest)


def chosen(url: str, context_len: int | None = None, batch_size: int = 1) -> tuple[str | None, str]:
    profile, line = find_profile("toy", context_len, batch_size, url)
    assert "\n" not in line
    return (None if profile is None else f"{profile.batch_size}/{profile.context_len}/{profile.median_s(1)}"), line


def test_without_a_database_nothing_is_made_and_the_command_is_named(url: str, tmp_path: Path) -> None:
    assert chosen(url) == (
        None,
        "no latency profile yet: the objective is tokens per step; run: treeopt profile run --model toy",
    )
    assert list(tmp_path.iterdir()) == []


def test_nearest_batch_then_nearest_context_then_newest(engine: Engine, url: str) -> None:
    for batch_size in (1, 8):
        for context_len in (64, 512, 2048):
            store(engine, batch_size=batch_size, context_len=context_len)
    assert chosen(url)[0] == "1/512/0.25", "512 when nothing says which"
    assert chosen(url, 100)[0] == "1/64/0.25"
    assert chosen(url, 200)[0] == "1/512/0.25", "by ratio: 200 is 3.1 times 64, and 512 is 2.6 times 200"
    assert chosen(url, 100_000)[0] == "1/2048/0.25"
    assert chosen(url, 64, batch_size=6)[0] == "8/64/0.25"
    assert chosen(url, 0)[0] == "1/512/0.25"
    store(engine, hours=32, context_len=64)
    picked, line = chosen(url, 64)
    assert picked == "1/64/0.75", "the newest of equals"
    assert "batch 1, context 64, sdpa, eager, static cache, 2 sizes up to 4" in line


def test_only_complete_unflagged_profiles_of_this_device_and_model(engine: Engine, url: str) -> None:
    store(engine, finish=False)
    assert "not complete yet" in chosen(url)[1]
    digest = store(engine, flags=("noisy", "throttled"), context_len=512)
    picked, line = chosen(url)
    assert picked is None
    assert f"{digest[:12]} is flagged noisy, throttled (use it with --latency {digest[:12]}); run: treeopt" in line
    store(engine, model="other")
    assert chosen(url)[0] is None
    store(engine, hours=-8, context_len=2048)
    assert chosen(url, 512)[0] == "1/2048/0.125", "old and far, but sound"


def test_an_equal_device_is_offered_not_taken(engine: Engine, url: str) -> None:
    twin = {**identify().to_document(), "instance_digest": "f" * 64}
    digest = store(engine, device=twin)
    picked, line = chosen(url)
    assert picked is None
    assert f"{digest[:12]} is of another {identify().name}, equal to this one" in line
    assert stored_profile(digest[:8], url).context_len == 64
    stranger = {**twin, "class_digest": "e" * 64, "instance_digest": "a" * 64}
    store(engine, hours=1, device=stranger, model="only elsewhere")
    assert "none of only elsewhere on this device" in find_profile("only elsewhere", None, 1, url)[1]


def test_another_number_of_threads_is_another_curve(engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    digest = store(engine)
    assert chosen(url)[0] is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    picked, line = chosen(url)
    assert picked is None
    assert f"{digest[:12]} is for 7 threads, this process uses 3 (OMP_NUM_THREADS)" in line


def test_a_change_of_library_is_said(engine: Engine, url: str) -> None:
    store(engine, versions={**environment("cpu"), "torch": "1.0.0"})
    picked, line = chosen(url)
    assert picked is not None
    assert "torch was 1.0.0, is" in line


def test_a_stored_profile_by_its_digest(engine: Engine, url: str, tmp_path: Path) -> None:
    digest = store(engine)
    assert stored_profile(digest, url).median_s(4) == 0.25
    with pytest.raises(DatabaseError, match="is not in this database"):
        stored_profile("0000", url)
    store(engine, context_len=512, finish=False)
    partial = next(p for p in list_profiles(engine) if not p.complete)
    with pytest.raises(DatabaseError, match="is not complete"):
        stored_profile(str(partial.digest), url)
    with pytest.raises(DatabaseError, match="no such file, and no profile is stored"):
        stored_profile("0000", f"sqlite:///{tmp_path / 'none.db'}")


def test_a_database_that_cannot_be_read_is_an_error_not_a_silent_none(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database")
    with pytest.raises(TreeOptError, match="is not a SQLite database"):
        find_profile("toy", None, 1, f"sqlite:///{path}")


SCRIPT = """
import sys
from treeopt.app.latency_lookup import find_profile
find_profile("toy", None, 1, sys.argv[1])
loaded = [name for name in ("torch", "sqlalchemy", "transformers", "psutil", "matplotlib") if name in sys.modules]
print(",".join(loaded))
"""


def test_looking_loads_no_torch_and_without_a_database_no_sql(engine: Engine, url: str, tmp_path: Path) -> None:
    store(engine)
    for place, loaded in ((f"sqlite:///{tmp_path / 'none.db'}", ""), (url, "sqlalchemy")):
        done = subprocess.run([sys.executable, "-c", SCRIPT, place], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == loaded
