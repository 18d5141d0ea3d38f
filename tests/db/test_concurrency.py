"""Many processes, one database: nothing is lost, nothing is doubled, nobody is refused."""

import subprocess
import sys
import time
from datetime import datetime

from sqlalchemy import text

from db.check import problems
from db.location import database_exists
from db.profiles import list_profiles
from db.schema import State, open_database, schema_of
from tests.db.hammer import WRITES

PROCESSES = 8


def test_eight_processes_hammer_one_fresh_database(url: str, now: datetime) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-m", "tests.db.hammer", url, str(i)], stderr=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    reads = 0
    reader = None
    while any(writer.poll() is None for writer in writers):
        if reader is None and database_exists(url):
            reader = open_database(url)
        if reader is not None:
            for profile in list_profiles(reader):
                assert len(profile.steps) == max(profile.steps, default=0), (
                    "points appear in the order they were stored"
                )
            reads += 1
        time.sleep(0.2)
    errors = [writer.communicate()[1] for writer in writers]
    assert errors == [""] * PROCESSES
    engine = open_database(url)
    assert engine is not None
    assert reads > 0
    with engine.connect() as connection:
        counts = {
            table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar()  # noqa: S608
            for table in ("points", "profiles", "devices", "models")
        }
    assert counts == {"points": PROCESSES * WRITES, "profiles": PROCESSES, "devices": 1, "models": 1}
    assert schema_of(engine).state is State.CURRENT
    assert problems(engine, now) == ()
