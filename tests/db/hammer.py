"""One writer process of the hammer test: ``python -m tests.db.hammer URL NAME``."""

import sys
from datetime import UTC, datetime

from db.profiles import open_profile, record_point
from db.schema import open_database
from tests.db.examples import conditions, point

WRITES = 50


def main(url: str, name: str) -> None:
    engine = open_database(url, create=True)  # every process finds the database missing, or half made
    assert engine is not None
    now = datetime.now(UTC)
    # Same device and model for all: rows that eight processes want to insert at the same moment.
    profile = open_profile(engine, conditions(context_len=1 + int(name)), [1], now)
    for number in range(WRITES):
        record_point(engine, profile.id, point(1 + number), now)


if __name__ == "__main__":
    main(*sys.argv[1:])
