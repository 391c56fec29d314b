"""Alembic's environment: runs on the connection that `ledger.opening` hands over."""

from __future__ import annotations

from alembic import context

from managed_e2b.ledger.tables import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("the ledger migrates itself when it is opened; see managed_e2b.ledger.opening")
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
context.run_migrations()
