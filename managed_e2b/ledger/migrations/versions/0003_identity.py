"""What a sandbox really was: the id that its template's name stood for, and the version of its agent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("template_id", sa.Text()))
    op.add_column("sandboxes", sa.Column("envd_version", sa.Text()))
