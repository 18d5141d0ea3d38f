"""Look for damage: the file's own integrity, broken references, and contents that contradict themselves."""

from datetime import datetime

from sqlalchemy import Engine, select
from sqlalchemy.orm import selectinload

from db.engine import reading
from db.tables import JobRow, ProfileRow
from treeopt.errors import InvalidValueError
from treeopt.types import LatencyPoint

__all__ = ["problems"]


def problems(engine: Engine, now: datetime) -> tuple[str, ...]:
    """Return what is wrong with a database, one line each; empty when it is sound.

    Parameters
    ----------
    engine : Engine
        An open database of the current schema.
    now : datetime
        Aware time, to judge leases by.
    """
    found: list[str] = []
    with reading(engine) as session:
        if engine.dialect.name == "sqlite":
            connection = session.connection()
            found += [
                f"file: {row[0]}" for row in connection.exec_driver_sql("PRAGMA integrity_check") if row[0] != "ok"
            ]
            found += [
                f"table {row[0]}: row {row[1]} refers to nothing in {row[2]}"
                for row in connection.exec_driver_sql("PRAGMA foreign_key_check")
            ]
        for row in session.scalars(select(ProfileRow).options(selectinload(ProfileRow.points))):
            found += _profile_problems(row)
        for job in session.scalars(select(JobRow).where(JobRow.state == "running")):
            if job.lease_until is not None and job.lease_until <= now:
                found.append(f"job {job.id}: its worker is gone; the next treeopt profile watch takes it up again")
    return tuple(found)


def _profile_problems(row: ProfileRow) -> list[str]:
    found = []
    for point in row.points:
        try:
            samples_s = None if point.samples_s is None else tuple(point.samples_s)
            LatencyPoint(point.num_tokens, point.median_s, point.iqr_s, point.num_samples, samples_s)
        except InvalidValueError as error:
            found.append(f"profile {row.id}, {point.num_tokens} tokens: {error}")
    settled = {point.num_tokens for point in row.points if point.part == "step" and point.settled}
    missing = sorted({*row.grid} - settled)
    if row.complete and missing:
        found.append(f"profile {row.id}: says it is complete but lacks the points {missing}; forget it")
    return found
