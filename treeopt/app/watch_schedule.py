"""Use case: queue latency profiles, and tell when one is stale."""

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import jobs
from db.jobs import Job
from profiler.device import identify
from profiler.idle import Hours, IdlePolicy
from treeopt.app.profile_request import ProfileRequest
from treeopt.artifact import document_digest

__all__ = ["cancel", "fingerprint", "idle_policy", "job_summary", "model_stamp", "queue", "schedule"]


def schedule(
    engine: Engine,
    request: ProfileRequest,
    *,
    hours: str | None = None,
    priority: int = 0,
    max_age_s: float | None = None,
    max_attempts: int = 3,
    now: datetime | None = None,
) -> Job:
    """Queue a request for this machine's device.

    Parameters
    ----------
    engine : Engine
        The database.
    request : ProfileRequest
        What to measure.
    hours : str, optional
        Allowed hours, ``HH:MM-HH:MM``, local time.
    priority : int
        Larger first.
    max_age_s : float, optional
        Measure again when the curve is older, or driver, torch or the model changed.
    max_attempts : int
        Failures allowed in a row.
    now : datetime, optional
        Aware time.
    """
    if hours is not None:
        Hours.parse(hours)
    return jobs.enqueue(
        engine,
        request.to_spec(),
        identify(request.device).lock_key,
        now or datetime.now(UTC),
        priority=priority,
        hours=hours,
        max_age_s=max_age_s,
        max_attempts=max_attempts,
    )


def model_stamp(model: str, config: str | None = None) -> str:
    """Return what changes when a model's files change, without loading it; empty when they cannot be found.

    For a folder or file: names, sizes and times. For a hub id in the local cache: the commit that ``main`` stands for.
    """
    path = Path(config or model)
    if path.exists():
        files = sorted(path.glob("*")) if path.is_dir() else [path]
        facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    reference = home / "hub" / f"models--{model.replace('/', '--')}" / "refs" / "main"
    return reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""


def fingerprint(request: ProfileRequest, versions: Mapping[str, str]) -> str:
    """Return the digest of everything whose change makes a curve stale: driver, torch, transformers, the model."""
    watched = {name: versions.get(name, "") for name in ("driver", "torch", "transformers")}
    return document_digest({**watched, "model": model_stamp(request.model, request.config)})


def queue(engine: Engine | None) -> tuple[Job, ...]:
    """Return every job; none when there is no database."""
    return () if engine is None else jobs.list_jobs(engine)


def cancel(engine: Engine, job_id: int) -> None:
    """Take a job out of the queue; a worker that runs it stops at its next visit."""
    jobs.cancel(engine, job_id, datetime.now(UTC))


def job_summary(job: Job) -> dict[str, Any]:
    """Return what a list says of a job; JSON."""
    return {
        "id": job.id,
        "state": job.state,
        "priority": job.priority,
        "model": job.spec.get("model"),
        "spec": dict(job.spec),
        "window": job.hours,
        "max_age_s": job.max_age_s,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "not_before": job.not_before.isoformat(timespec="seconds"),
        "owner": job.owner,
        "finished_at": None if job.finished_at is None else job.finished_at.isoformat(timespec="seconds"),
        "last_error": job.last_error,
    }


def idle_policy(
    *, max_foreign_cpu: float, need_mains: bool, allow_unknown: bool, window: str | None, dwell_s: float
) -> IdlePolicy:
    """Return the idle policy of the command line's flags.

    Raises
    ------
    ProfileError
        When the window is malformed.
    """
    return IdlePolicy(
        max_foreign_cpu=max_foreign_cpu,
        need_mains=need_mains,
        allow_unknown=allow_unknown,
        hours=None if window is None else Hours.parse(window),
        dwell_s=dwell_s,
    )
