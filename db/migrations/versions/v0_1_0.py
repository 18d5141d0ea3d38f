"""The first schema: devices, models, profiles and points, documents, jobs.

Written out in full, not derived from `db.tables`: a revision must go on meaning what it meant when the tables change.
"""

import sqlalchemy as sa
from alembic import op

revision = "v0.1.0"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "devices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("instance_digest", sa.String(length=64), nullable=False),
        sa.Column("class_digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("identity", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("instance_digest", name=op.f("uq_devices_instance_digest")),
    )
    with op.batch_alter_table("devices", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_devices_class_digest"), ["class_digest"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_digest", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_digest", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("hours", sa.String(length=11), nullable=True),
        sa.Column("max_age_s", sa.Double(), nullable=True),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("not_before", sa.DateTime(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_until", sa.DateTime(), nullable=True),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("finished_at", sa.DateTime(), nullable=True),
        sa.CheckConstraint("(state = 'running') = (owner IS NOT NULL)", name=op.f("ck_jobs_owner")),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name=op.f("ck_jobs_state")),
        sa.CheckConstraint("(owner IS NULL) = (lease_until IS NULL)", name=op.f("ck_jobs_lease")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_device_state", ["device_digest", "state"], unique=False)
        batch_op.create_index(
            "uq_jobs_open",
            ["device_digest", "spec_digest"],
            unique=True,
            sqlite_where=sa.text("state IN ('queued', 'running')"),
            postgresql_where=sa.text("state IN ('queued', 'running')"),
        )

    op.create_table(
        "models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("name", "fingerprint", name=op.f("uq_models_name_fingerprint")),
    )
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_models_name"), ["name"], unique=False)

    op.create_table(
        "tree_designs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("acceptance_digest", sa.String(length=64), nullable=True),
        sa.Column("latency_digest", sa.String(length=64), nullable=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tree_designs")),
        sa.UniqueConstraint("digest", name=op.f("uq_tree_designs_digest")),
    )
    with op.batch_alter_table("tree_designs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tree_designs_acceptance_digest"), ["acceptance_digest"], unique=False)
        batch_op.create_index(batch_op.f("ix_tree_designs_latency_digest"), ["latency_digest"], unique=False)

    op.create_table(
        "acceptance_tables",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_acceptance_tables_model_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_acceptance_tables")),
        sa.UniqueConstraint("digest", name=op.f("uq_acceptance_tables_digest")),
    )
    with op.batch_alter_table("acceptance_tables", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_acceptance_tables_model_id"), ["model_id"], unique=False)

    op.create_table(
        "decode_runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=True),
        sa.Column("tree_digest", sa.String(length=64), nullable=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_decode_runs_device_id_devices")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_decode_runs_model_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decode_runs")),
    )
    with op.batch_alter_table("decode_runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_decode_runs_model_id"), ["model_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_decode_runs_tree_digest"), ["tree_digest"], unique=False)

    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("context_len", sa.Integer(), nullable=False),
        sa.Column("attention", sa.String(), nullable=False),
        sa.Column("graph_mode", sa.String(), nullable=False),
        sa.Column("cache", sa.String(), nullable=True),
        sa.Column("kernels", sa.String(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("grid", sa.JSON(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.CheckConstraint("batch_size >= 1", name=op.f("ck_profiles_batch_size")),
        sa.CheckConstraint("context_len >= 0", name=op.f("ck_profiles_context_len")),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_profiles_device_id_devices")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_profiles_model_id_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profiles")),
    )
    with op.batch_alter_table("profiles", schema=None) as batch_op:
        batch_op.create_index("ix_profiles_device_model", ["device_id", "model_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_profiles_digest"), ["digest"], unique=False)

    op.create_table(
        "points",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("part", sa.String(length=8), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("median_s", sa.Double(), nullable=False),
        sa.Column("iqr_s", sa.Double(), nullable=True),
        sa.Column("num_samples", sa.Integer(), nullable=True),
        sa.Column("samples_s", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.CheckConstraint("part IN ('step', 'forward')", name=op.f("ck_points_part")),
        sa.CheckConstraint("iqr_s >= 0 AND iqr_s < 1000000000", name=op.f("ck_points_iqr_s")),
        sa.CheckConstraint("median_s > 0 AND median_s < 1000000000", name=op.f("ck_points_median_s")),
        sa.CheckConstraint("num_samples >= 1", name=op.f("ck_points_num_samples")),
        sa.CheckConstraint("num_tokens >= 1", name=op.f("ck_points_num_tokens")),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name=op.f("fk_points_profile_id_profiles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_points")),
        sa.UniqueConstraint("profile_id", "part", "num_tokens", name=op.f("uq_points_profile_id_part_num_tokens")),
    )
