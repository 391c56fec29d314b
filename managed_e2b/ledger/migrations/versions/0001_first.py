"""The first ledger: owners, sandboxes, rates, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Frozen here on purpose: a migration tells what was, `rules.states` what is.
STATES = "'queued', 'creating', 'running', 'paused', 'cleaning', 'cleaned', 'create_failed'"


def upgrade() -> None:
    op.create_table(
        "owners",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("machine_id", sa.String(64), nullable=False),
        sa.Column("boot_id", sa.String(64), nullable=False),
        sa.Column("pid_namespace", sa.String(32), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.BigInteger(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False),
        sa.Column("stale_after", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("closed_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_owners"),
    )
    op.create_table(
        "sandboxes",
        sa.Column("ticket", sa.String(32), nullable=False),
        sa.Column("sandbox_id", sa.Text()),
        sa.Column("account", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("source_kind", sa.String(16), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("timeout", sa.Integer(), nullable=False),
        sa.Column("lease", sa.Integer(), nullable=False),
        sa.Column("hard_deadline", sa.BigInteger()),
        sa.Column("remote_expiry", sa.BigInteger()),
        sa.Column("claimed_by", sa.String(32)),
        sa.Column("claimed_at", sa.BigInteger()),
        sa.Column("parent", sa.String(32)),
        sa.Column("reason", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.Text()),
        sa.Column("queued_at", sa.BigInteger(), nullable=False),
        sa.Column("creating_at", sa.BigInteger()),
        sa.Column("running_at", sa.BigInteger()),
        sa.Column("cleaning_at", sa.BigInteger()),
        sa.Column("ended_at", sa.BigInteger()),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_sandboxes_state")),
        sa.ForeignKeyConstraint(["owner"], ["owners.id"], name="fk_sandboxes_owner_owners"),
        sa.PrimaryKeyConstraint("ticket", name="pk_sandboxes"),
        sa.UniqueConstraint("sandbox_id", name="uq_sandboxes_sandbox_id"),
    )
    op.create_index("ix_sandboxes_owner_state", "sandboxes", ["owner", "state"])
    op.create_index("ix_sandboxes_account_state", "sandboxes", ["account", "state"])
    op.create_index("ix_sandboxes_state", "sandboxes", ["state"])
    op.create_table(
        "rates",
        sa.Column("account", sa.String(16), nullable=False),
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("tat", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account", "name", name="pk_rates"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("ticket", sa.String(32), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(32), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_ticket", "events", ["ticket"])
