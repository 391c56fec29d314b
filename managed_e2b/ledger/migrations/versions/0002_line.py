"""One line for a whole account: who asks, who was refused, and how fast the endpoint lets us create."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("owners", sa.Column("max_concurrent", sa.Integer()))
    op.add_column("owners", sa.Column("asked_at", sa.BigInteger()))
    op.add_column("sandboxes", sa.Column("refused_at", sa.BigInteger()))
    for name in ("gap", "held_until", "slowed_at"):
        op.add_column("rates", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(
        "ix_sandboxes_line", "sandboxes", ["account", "state", "owner", "queued_at", "ticket", "refused_at"]
    )
    op.drop_index("ix_sandboxes_account_state", "sandboxes")  # the new one begins with the same columns
