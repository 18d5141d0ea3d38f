"""The tables.

::

    devices 1──n profiles n──1 models        profiles 1──n points (raw samples in each)
    models  1──n acceptance_tables           tree_designs, decode_runs: documents by digest
    jobs: profiles to be measured when the machine is idle

Rules that the database itself keeps: a point's times are finite and above 0, a device, a model, a point and a document
exist once. Times of day are UTC.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, CheckConstraint, DateTime, Dialect, Double, ForeignKey, Index, MetaData, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.schema import UniqueConstraint
from sqlalchemy.types import TypeDecorator

__all__ = [
    "AcceptanceTableRow",
    "Base",
    "DecodeRunRow",
    "DeviceRow",
    "JobRow",
    "ModelRow",
    "PointRow",
    "ProfileRow",
    "TreeDesignRow",
    "UtcDateTime",
]

LONGEST_STEP_S = 1e9
"""Upper limit in checks: NaN and infinity compare as larger in PostgreSQL, and are NULL in SQLite."""


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC times in Python, plain UTC times in every database."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse times without a zone, which would be stored as whatever the machine is set to."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Put the zone back."""
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Root of the tables; constraints have names, which migrations of SQLite tables need."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own protocol
        datetime: UtcDateTime,
        float: Double,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[int]: JSON,
        list[float]: JSON,
        list[str]: JSON,
    }


class DeviceRow(Base):
    """One device; `identity` is the ``device`` object of a latency document."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    instance_digest: Mapped[str] = mapped_column(String(64), unique=True)
    class_digest: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str]
    identity: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ModelRow(Base):
    """One version of a model; `fingerprint` changes with its configuration or weights."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("name", "fingerprint"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    fingerprint: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime]


class ProfileRow(Base):
    """One latency curve: a device, a model, and everything that makes the curve another one."""

    __tablename__ = "profiles"
    __table_args__ = (
        CheckConstraint("batch_size >= 1", name="batch_size"),
        CheckConstraint("context_len >= 0", name="context_len"),
        Index("ix_profiles_device_model", "device_id", "model_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    dtype: Mapped[str]
    batch_size: Mapped[int]
    context_len: Mapped[int]
    attention: Mapped[str]
    graph_mode: Mapped[str]
    cache: Mapped[str | None]
    kernels: Mapped[str | None]
    versions: Mapped[dict[str, str]]
    grid: Mapped[list[int]]
    complete: Mapped[bool] = mapped_column(default=False)
    flags: Mapped[list[str]]
    origin: Mapped[str] = mapped_column(default="measured")
    digest: Mapped[str | None] = mapped_column(String(64), index=True)
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    device: Mapped[DeviceRow] = relationship()
    model: Mapped[ModelRow] = relationship()
    points: Mapped[list["PointRow"]] = relationship(
        back_populates="profile", cascade="all, delete-orphan", passive_deletes=True, order_by="PointRow.num_tokens"
    )


class PointRow(Base):
    """One point of a curve; `part` is step (what decoding executes) or forward (the bare model beside it)."""

    __tablename__ = "points"
    __table_args__ = (
        UniqueConstraint("profile_id", "part", "num_tokens"),
        CheckConstraint("part IN ('step', 'forward')", name="part"),
        CheckConstraint("num_tokens >= 1", name="num_tokens"),
        CheckConstraint(f"median_s > 0 AND median_s < {LONGEST_STEP_S:.0f}", name="median_s"),
        CheckConstraint(f"iqr_s >= 0 AND iqr_s < {LONGEST_STEP_S:.0f}", name="iqr_s"),
        CheckConstraint("num_samples >= 1", name="num_samples"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    profile_id: Mapped[int] = mapped_column(ForeignKey("profiles.id", ondelete="CASCADE"))
    part: Mapped[str] = mapped_column(String(8))
    num_tokens: Mapped[int]
    median_s: Mapped[float]
    iqr_s: Mapped[float | None]
    num_samples: Mapped[int | None]
    samples_s: Mapped[list[float] | None] = mapped_column(JSON(none_as_null=True))
    flags: Mapped[list[str]]
    settled: Mapped[bool]

    profile: Mapped[ProfileRow] = relationship(back_populates="points")


class AcceptanceTableRow(Base):
    """A ``treeopt.acceptance`` document."""

    __tablename__ = "acceptance_tables"

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), index=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class TreeDesignRow(Base):
    """A ``treeopt.tree`` document, with the digests of what it was made from."""

    __tablename__ = "tree_designs"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    acceptance_digest: Mapped[str | None] = mapped_column(String(64), index=True)
    latency_digest: Mapped[str | None] = mapped_column(String(64), index=True)
    document: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class DecodeRunRow(Base):
    """A ``treeopt.run`` document and the device it ran on; equal runs are stored as often as they happened."""

    __tablename__ = "decode_runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), index=True)
    device_id: Mapped[int | None] = mapped_column(ForeignKey("devices.id"))
    tree_digest: Mapped[str | None] = mapped_column(String(64), index=True)
    document: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


OPEN = text("state IN ('queued', 'running')")


class JobRow(Base):
    """A profile to be measured when its device is idle.

    States: queued -> running -> done, or back to queued (yielded, failed with tries left, its worker vanished, or due
    again after `max_age_s`), or failed or cancelled. A running job belongs to `owner` until `lease_until`.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="state"),
        CheckConstraint("(state = 'running') = (owner IS NOT NULL)", name="owner"),
        CheckConstraint("(owner IS NULL) = (lease_until IS NULL)", name="lease"),
        Index("ix_jobs_device_state", "device_digest", "state"),
        # Each measurement waits or runs at most once; done ones may be queued again.
        Index("uq_jobs_open", "device_digest", "spec_digest", unique=True, sqlite_where=OPEN, postgresql_where=OPEN),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device_digest: Mapped[str] = mapped_column(String(64))
    spec: Mapped[dict[str, Any]]
    spec_digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16), default="queued")
    priority: Mapped[int] = mapped_column(default=0)
    hours: Mapped[str | None] = mapped_column(String(11))
    max_age_s: Mapped[float | None]
    max_attempts: Mapped[int] = mapped_column(default=3)
    attempts: Mapped[int] = mapped_column(default=0)
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    not_before: Mapped[datetime]
    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
