"""Latency profiles: rows <-> `treeopt.types.LatencyProfile`.

A profile is started with the grid of input lengths it is to have, grows by points that are committed as soon as they
are measured, and is complete once every length of its grid is settled, and only by `finish_profile`. Whatever ends a
measurement, what is stored is either complete or says that it is not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, delete, select
from sqlalchemy.orm import Session, selectinload

from db.engine import insert_once, name_of, reading, writing
from db.jobs import require_lease
from db.tables import DeviceRow, ModelRow, PointRow, ProfileRow
from db.values import Conditions, Lease, StoredPoint, StoredProfile
from treeopt.artifact import document_digest, to_document
from treeopt.errors import DatabaseError
from treeopt.types import LatencyPoint, LatencyProfile

__all__ = [
    "add_profile",
    "find_profile",
    "finish_profile",
    "forget_profile",
    "get_profile",
    "list_profiles",
    "model_row",
    "open_profile",
    "record_point",
    "set_flags",
]


HARMLESS_FLAGS = frozenset({"noisy"})
"""Flags that measuring again would not clear: the machine is like that."""


def _device(session: Session, identity: Mapping[str, Any], now: datetime) -> DeviceRow:
    plain = dict(identity)
    class_digest = str(plain.get("class_digest") or document_digest(plain))
    instance_digest = str(plain.get("instance_digest") or class_digest)
    insert_once(
        session,
        DeviceRow,
        instance_digest=instance_digest,
        class_digest=class_digest,
        name=str(plain["name"]),
        identity=plain,
        created_at=now,
    )
    # Locked until the transaction ends: of two writers that start the same profile, the second one finds it.
    same = select(DeviceRow).where(DeviceRow.instance_digest == instance_digest)
    return session.scalars(same.with_for_update()).one()


def model_row(session: Session, name: str, fingerprint: str, now: datetime) -> ModelRow:
    """Return the row of a model's version, made when it is new; inside a write transaction."""
    insert_once(session, ModelRow, name=name, fingerprint=fingerprint, created_at=now)
    return session.scalars(select(ModelRow).where(ModelRow.name == name, ModelRow.fingerprint == fingerprint)).one()


def _point(row: PointRow) -> StoredPoint:
    samples_s = None if row.samples_s is None else tuple(row.samples_s)
    point = LatencyPoint(row.num_tokens, row.median_s, row.iqr_s, row.num_samples, samples_s)
    return StoredPoint(point, tuple(row.flags), row.settled)


def _stored(row: ProfileRow) -> StoredProfile:
    return StoredProfile(
        id=row.id,
        digest=row.digest,
        conditions=Conditions(
            device=row.device.identity,
            model=row.model.name,
            fingerprint=row.model.fingerprint,
            dtype=row.dtype,
            batch_size=row.batch_size,
            context_len=row.context_len,
            attention=row.attention,
            graph_mode=row.graph_mode,
            cache=row.cache,
            kernels=row.kernels,
            versions=row.versions,
        ),
        grid=tuple(row.grid),
        complete=row.complete,
        flags=tuple(row.flags),
        origin=row.origin,
        created_at=row.created_at,
        updated_at=row.updated_at,
        steps={point.num_tokens: _point(point) for point in row.points if point.part == "step"},
        forwards={point.num_tokens: _point(point) for point in row.points if point.part == "forward"},
    )


def _query() -> Any:
    return select(ProfileRow).options(
        selectinload(ProfileRow.device), selectinload(ProfileRow.model), selectinload(ProfileRow.points)
    )


def _touch(session: Session, row: ProfileRow, now: datetime) -> StoredProfile:
    """Give the row the digest of its present content."""
    row.updated_at = now
    session.flush()
    stored = _stored(row)
    first = stored.steps.get(1)
    row.digest = document_digest(to_document(stored.to_profile())) if first is not None and first.settled else None
    return replace(stored, digest=row.digest)


def _held(session: Session, lease: Lease | None) -> None:
    if lease is not None:
        require_lease(session, lease.job_id, lease.owner)


def open_profile(
    engine: Engine,
    conditions: Conditions,
    grid: Sequence[int],
    now: datetime,
    *,
    fresh_after: datetime | None = None,
    done_after: datetime | None = None,
) -> StoredProfile:
    """Start a profile, or take up one of the same conditions that reaches as far: unfinished, or made just now.

    Parameters
    ----------
    engine : Engine
        The database.
    conditions : Conditions
        What is measured; another driver, library or model version is another profile.
    grid : sequence of int
        Input lengths that make it complete.
    now : datetime
        Aware time.
    fresh_after : datetime, optional
        Unfinished profiles not touched since are left alone: the machine may have changed.
    done_after : datetime, optional
        A complete one that was started since is taken up too, to add points to it, unless something disturbed it;
        none without it.
    """
    known = conditions
    with writing(engine) as session:
        device = _device(session, known.device, now)
        model = model_row(session, known.model, known.fingerprint, now)
        same = _query().where(
            ProfileRow.device_id == device.id,
            ProfileRow.model_id == model.id,
            ProfileRow.origin == "measured",
            ProfileRow.dtype == known.dtype,
            ProfileRow.batch_size == known.batch_size,
            ProfileRow.context_len == known.context_len,
            ProfileRow.attention == known.attention,
            ProfileRow.graph_mode == known.graph_mode,
        )
        for row in session.scalars(same.order_by(ProfileRow.updated_at.desc())):
            same_kind = (row.cache, row.kernels, row.versions) == (known.cache, known.kernels, dict(known.versions))
            if row.complete:
                recent = done_after is not None and row.created_at >= done_after
                usable = recent and _covers(row.grid, grid) and set(row.flags) <= HARMLESS_FLAGS
            else:
                reach = max((point.num_tokens for point in row.points if point.part == "step"), default=1)
                usable = (fresh_after is None or row.updated_at >= fresh_after) and reach <= max(grid)
            if same_kind and usable:
                if row.complete:  # opening it measures nothing: its age stays
                    return _touch(session, row, row.updated_at)
                row.grid = sorted({*grid})
                return _touch(session, row, now)
        row = ProfileRow(
            device=device,
            model=model,
            points=[],
            dtype=known.dtype,
            batch_size=known.batch_size,
            context_len=known.context_len,
            attention=known.attention,
            graph_mode=known.graph_mode,
            cache=known.cache,
            kernels=known.kernels,
            versions=dict(known.versions),
            grid=sorted({*grid}),
            complete=False,
            flags=[],
            origin="measured",
            created_at=now,
            updated_at=now,
        )
        session.add(row)
        return _touch(session, row, now)


def _covers(measured: Sequence[int], wanted: Sequence[int]) -> bool:
    """Tell whether a grid holds another and ends where it ends."""
    return set(wanted) <= set(measured) and max(wanted) == max(measured)


def _row(session: Session, engine: Engine, profile_id: int) -> ProfileRow:
    """Return a row, locked until the transaction ends (SQLite's writers have the whole file)."""
    row: ProfileRow | None = session.scalar(_query().where(ProfileRow.id == profile_id).with_for_update())
    if row is None:
        raise DatabaseError(f"{name_of(engine)}: profile {profile_id} is gone; start the measurement again")
    return row


def record_point(
    engine: Engine,
    profile_id: int,
    point: LatencyPoint,
    now: datetime,
    *,
    part: str = "step",
    flags: Collection[str] = (),
    settled: bool = True,
    lease: Lease | None = None,
) -> None:
    """Store a point, or what is known of it so far, in place of what was known before.

    Raises
    ------
    DatabaseError
        When the profile was forgotten, or the lease was lost to another worker.
    """
    with writing(engine) as session:
        _held(session, lease)
        row = _row(session, engine, profile_id)
        if row.complete and part == "step":
            # A complete curve stays complete while it is refined: a new length joins the grid together with its
            # settled point, and is invisible before. Measuring a known length anew makes the curve incomplete.
            if settled:
                row.grid = sorted({*row.grid, point.num_tokens})
            elif point.num_tokens in row.grid:
                row.complete = False
        old = next((p for p in row.points if (p.part, p.num_tokens) == (part, point.num_tokens)), None)
        if old is None:
            old = PointRow(part=part, num_tokens=point.num_tokens)
            row.points.append(old)
        old.median_s = point.median_s
        old.iqr_s = point.iqr_s
        old.num_samples = point.num_samples
        old.samples_s = None if point.samples_s is None else list(point.samples_s)
        old.flags = sorted(flags)
        old.settled = settled
        _touch(session, row, now)


def set_flags(
    engine: Engine, profile_id: int, flags: Collection[str], now: datetime, *, lease: Lease | None = None
) -> None:
    """Say what is odd about a profile so far."""
    with writing(engine) as session:
        _held(session, lease)
        row = _row(session, engine, profile_id)
        row.flags = sorted(flags)
        _touch(session, row, now)


def finish_profile(
    engine: Engine, profile_id: int, flags: Collection[str], now: datetime, *, lease: Lease | None = None
) -> StoredProfile:
    """Declare a profile complete.

    Raises
    ------
    DatabaseError
        When a length of its grid is missing or not settled.
    """
    with writing(engine) as session:
        _held(session, lease)
        row = _row(session, engine, profile_id)
        settled = {point.num_tokens for point in row.points if point.part == "step" and point.settled}
        missing = sorted({*row.grid} - settled)
        if missing or not row.grid:
            raise DatabaseError(
                f"{name_of(engine)}: profile {profile_id} cannot be complete, its points {missing} are not measured; "
                "run the measurement again to go on"
            )
        row.complete = True
        row.flags = sorted(flags)
        return _touch(session, row, now)


def add_profile(engine: Engine, profile: LatencyProfile, now: datetime) -> StoredProfile:
    """Store a curve that was measured elsewhere; storing it twice is storing it once.

    Parameters
    ----------
    engine : Engine
        The database.
    profile : LatencyProfile
        A valid curve; whether to trust it was decided before.
    now : datetime
        Aware time.
    """
    wanted = document_digest(to_document(profile))
    with writing(engine) as session:
        device = _device(session, profile.device, now)
        known: ProfileRow | None = session.scalar(_query().where(ProfileRow.digest == wanted))
        if known is not None:
            return _stored(known)
        row = ProfileRow(
            device=device,
            model=model_row(session, profile.model, "", now),
            dtype=profile.dtype,
            batch_size=profile.batch_size,
            context_len=profile.context_len,
            attention=profile.attention,
            graph_mode=profile.graph_mode,
            cache=profile.cache,
            kernels=profile.kernels,
            versions=dict(profile.versions or {}),
            grid=[point.num_tokens for point in profile.points],
            complete=profile.complete,
            flags=sorted(profile.flags or ()),
            origin="imported",
            created_at=now,
            updated_at=now,
        )
        row.points = [
            PointRow(
                part="step",
                num_tokens=point.num_tokens,
                median_s=point.median_s,
                iqr_s=point.iqr_s,
                num_samples=point.num_samples,
                samples_s=None if point.samples_s is None else list(point.samples_s),
                flags=[],
                settled=True,
            )
            for point in profile.points
        ]
        session.add(row)
        return _touch(session, row, now)


def list_profiles(
    engine: Engine, *, model: str | None = None, instance_digest: str | None = None
) -> tuple[StoredProfile, ...]:
    """Return the profiles, newest first.

    Parameters
    ----------
    engine : Engine
        The database.
    model, instance_digest : str, optional
        Only those of this model, of this device.
    """
    query = _query().order_by(ProfileRow.updated_at.desc(), ProfileRow.id.desc())
    if model is not None:
        query = query.join(ModelRow).where(ModelRow.name == model)
    if instance_digest is not None:
        query = query.join(DeviceRow).where(DeviceRow.instance_digest == instance_digest)
    with reading(engine) as session:
        return tuple(_stored(row) for row in session.scalars(query))


def get_profile(engine: Engine, profile_id: int) -> StoredProfile:
    """Return a profile by its row.

    Raises
    ------
    DatabaseError
        When it was forgotten.
    """
    with reading(engine) as session:
        return _stored(_row(session, engine, profile_id))


SHORTEST_PREFIX = 4


def find_profile(engine: Engine, reference: str) -> StoredProfile:
    """Return the profile whose digest starts with ``reference``.

    Raises
    ------
    DatabaseError
        When none does, or more than one.
    """
    prefix = reference.lower()
    if len(prefix) < SHORTEST_PREFIX or set(prefix) - set("0123456789abcdef"):
        raise DatabaseError(
            f"profile {reference!r}: give at least {SHORTEST_PREFIX} digits of its digest, see treeopt profile list"
        )
    with reading(engine) as session:
        rows = list(session.scalars(_query().where(ProfileRow.digest.startswith(prefix)).limit(2)))
        if len(rows) != 1:
            problem = "more than one has this digest; give more digits" if rows else "is not in this database"
            raise DatabaseError(f"profile {reference!r}: {problem}, see treeopt profile list")
        return _stored(rows[0])


def forget_profile(engine: Engine, profile_id: int) -> None:
    """Delete a profile and its points."""
    with writing(engine) as session:
        session.execute(delete(ProfileRow).where(ProfileRow.id == profile_id))
