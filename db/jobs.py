"""The queue of profiles to measure when a machine is idle, safe for any number of workers.

A worker claims a job for a while (a lease) and renews the lease as long as it lives. When it is killed, the lease runs
out and the job is taken up again. Every change of state is a compare-and-swap: an UPDATE that names the state it found,
so that of two workers only one succeeds, on SQLite and PostgreSQL alike, without a lock held in between.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, or_, select, update
from sqlalchemy.orm import Session

from db.engine import insert_once, reading, writing
from db.tables import JobRow
from treeopt.artifact import document_digest
from treeopt.errors import DatabaseError

__all__ = [
    "Job",
    "cancel",
    "claim",
    "enqueue",
    "fail",
    "finish",
    "list_jobs",
    "release",
    "renew",
    "require_lease",
]

FIRST_RETRY_S = 60.0
"""Wait after a job's first failure; it doubles with every further one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One entry of the queue.

    Parameters
    ----------
    id : int
        Its number.
    device_digest : str
        The device it is for.
    spec : mapping
        What to measure.
    state : {"queued", "running", "done", "failed", "cancelled"}
        Where it is.
    priority : int
        Larger first.
    hours : str or None
        Allowed hours, ``HH:MM-HH:MM``.
    max_age_s : float or None
        Due again so long after it was done; None for once.
    max_attempts, attempts : int
        Tries allowed, and used since it was last done.
    fingerprint : str or None
        Environment of the last finished run.
    not_before : datetime
        When it is due, UTC.
    owner : str or None
        Worker that runs it.
    lease_until : datetime or None
        Until when it is that worker's, UTC.
    last_error : str or None
        Why the last try failed.
    created_at, finished_at : datetime
        UTC; None while it was never done.
    """

    id: int
    device_digest: str
    spec: Mapping[str, Any]
    state: str
    priority: int
    hours: str | None
    max_age_s: float | None
    max_attempts: int
    attempts: int
    fingerprint: str | None
    not_before: datetime
    owner: str | None
    lease_until: datetime | None
    last_error: str | None
    created_at: datetime
    finished_at: datetime | None


def _job(row: JobRow) -> Job:
    return Job(**{name: getattr(row, name) for name in Job.__dataclass_fields__})


def enqueue(
    engine: Engine,
    spec: Mapping[str, Any],
    device_digest: str,
    now: datetime,
    *,
    priority: int = 0,
    hours: str | None = None,
    max_age_s: float | None = None,
    max_attempts: int = 3,
) -> Job:
    """Queue a measurement; one that is queued already gets the new priority, hours and age instead of a double."""
    spec_digest = document_digest(dict(spec))
    with writing(engine) as session:
        insert_once(
            session,
            JobRow,
            device_digest=device_digest,
            spec=dict(spec),
            spec_digest=spec_digest,
            state="queued",
            priority=priority,
            max_attempts=max_attempts,
            attempts=0,
            not_before=now,
            created_at=now,
        )
        same = (JobRow.device_digest == device_digest, JobRow.spec_digest == spec_digest)
        row = session.scalars(select(JobRow).where(*same, JobRow.state.in_(("queued", "running")))).one()
        if row.state == "queued":
            row.not_before = min(row.not_before, now)
        row.priority, row.hours, row.max_age_s, row.max_attempts = priority, hours, max_age_s, max_attempts
        session.flush()
        session.refresh(row)
        return _job(row)


def claim(
    engine: Engine,
    device_digest: str,
    owner: str,
    lease_s: float,
    now: datetime,
    *,
    ready: Callable[[Job], bool] | None = None,
) -> Job | None:
    """Take the first job that is due: by priority, then by when it was due.

    A job whose worker let the lease run out is taken up again, or failed when its tries are used up.

    Parameters
    ----------
    engine : Engine
        The database.
    device_digest : str
        Only jobs of this device.
    owner : str
        Unique name of the claim.
    lease_s : float
        How long the job stays this worker's without `renew`.
    now : datetime
        Aware time.
    ready : callable, optional
        Decides whether a queued job is due; default ``not_before <= now``.

    Returns
    -------
    Job or None
        The job as claimed, or None when none is due.
    """
    ready = ready or (lambda job: job.not_before <= now)
    with writing(engine) as session:
        expired = (JobRow.state == "running") & (JobRow.lease_until <= now)
        query = (
            select(JobRow)
            .where(JobRow.device_digest == device_digest, or_(JobRow.state == "queued", expired))
            .order_by(JobRow.priority.desc(), JobRow.not_before, JobRow.id)
        )
        for job in [_job(row) for row in session.scalars(query)]:
            if job.state == "running" and job.attempts >= job.max_attempts:
                lost = f"its worker vanished; {job.attempts} of {job.max_attempts} tries are used"
                _swap(session, job, state="failed", owner=None, lease_until=None, last_error=lost, finished_at=now)
            elif job.state == "running" or ready(job):
                changes = {
                    "state": "running",
                    "owner": owner,
                    "lease_until": now + timedelta(seconds=lease_s),
                    "attempts": job.attempts + 1,
                }
                if _swap(session, job, **changes):
                    session.expire_all()
                    return _job(session.get_one(JobRow, job.id))
    return None


def _swap(session: Session, job: Job, **changes: Any) -> bool:
    """Change a job if it still is as it was read."""
    same = (JobRow.id == job.id, JobRow.state == job.state, JobRow.attempts == job.attempts)
    owner = JobRow.owner.is_(None) if job.owner is None else JobRow.owner == job.owner
    statement = update(JobRow).where(*same, owner).values(**changes).execution_options(synchronize_session=False)
    return bool(session.execute(statement).rowcount == 1)  # type: ignore[attr-defined]


def require_lease(session: Session, job_id: int, owner: str) -> JobRow:
    """Return the job's row, locked for this transaction, if it is still the owner's.

    Raises
    ------
    DatabaseError
        When another worker has taken it up, or it was cancelled.
    """
    row = session.scalar(select(JobRow).where(JobRow.id == job_id).with_for_update())
    if row is None or row.owner != owner:
        raise DatabaseError(f"job {job_id}: is not this worker's any more (lease lost or job cancelled); it stops here")
    return row


def renew(engine: Engine, job: Job, lease_s: float, now: datetime) -> bool:
    """Keep a job for another lease; False when it was lost or cancelled."""
    with writing(engine) as session:
        statement = (
            update(JobRow)
            .where(JobRow.id == job.id, JobRow.owner == job.owner, JobRow.state == "running")
            .values(lease_until=now + timedelta(seconds=lease_s))
        )
        return bool(session.execute(statement).rowcount == 1)  # type: ignore[attr-defined]


def release(engine: Engine, job: Job, not_before: datetime) -> None:
    """Give a job back unfinished, because the machine got busy or the worker ends; the try is not counted."""
    with writing(engine) as session:
        row = require_lease(session, job.id, str(job.owner))
        row.state, row.owner, row.lease_until = "queued", None, None
        row.attempts = max(0, row.attempts - 1)
        row.not_before = not_before


def finish(engine: Engine, job: Job, fingerprint: str, now: datetime) -> None:
    """Say that a job is done; one with an age is queued for when its result will be too old."""
    with writing(engine) as session:
        row = require_lease(session, job.id, str(job.owner))
        row.owner, row.lease_until, row.last_error = None, None, None
        row.attempts, row.fingerprint, row.finished_at = 0, fingerprint, now
        if row.max_age_s is None:
            row.state = "done"
        else:
            row.state, row.not_before = "queued", now + timedelta(seconds=row.max_age_s)


def fail(engine: Engine, job: Job, error: str, now: datetime) -> Job:
    """Say that a try failed; it is tried again later, at growing intervals, until its tries are used up."""
    with writing(engine) as session:
        row = require_lease(session, job.id, str(job.owner))
        row.owner, row.lease_until, row.last_error = None, None, error
        if row.attempts < row.max_attempts:
            row.state = "queued"
            row.not_before = now + timedelta(seconds=FIRST_RETRY_S * 2 ** (row.attempts - 1))
        else:
            row.state, row.finished_at = "failed", now
        session.flush()
        return _job(row)


def cancel(engine: Engine, job_id: int, now: datetime) -> None:
    """Take a job out of the queue; a worker that runs it stops at its next point.

    Raises
    ------
    DatabaseError
        When there is no such job.
    """
    with writing(engine) as session:
        row = session.scalar(select(JobRow).where(JobRow.id == job_id).with_for_update())
        if row is None:
            raise DatabaseError(f"job {job_id}: is not in this database; see treeopt profile jobs")
        row.state, row.owner, row.lease_until, row.finished_at = "cancelled", None, None, now


def list_jobs(engine: Engine) -> tuple[Job, ...]:
    """Return every job, in the order of their numbers."""
    with reading(engine) as session:
        return tuple(_job(row) for row in session.scalars(select(JobRow).order_by(JobRow.id)))
