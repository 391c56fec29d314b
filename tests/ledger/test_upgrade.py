"""A ledger that an older version wrote is upgraded when it is opened, and everything in it stays."""

from __future__ import annotations

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Connection

from managed_e2b import State
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.rules.limits import Caps, Go

from .test_opening import MIGRATIONS

OWNER, ACCOUNT = "a" * 32, "account"
FIRST = [
    "INSERT INTO owners (id, machine_id, boot_id, pid_namespace, pid, pid_started, label, heartbeat, stale_after, "
    f"opened_at) VALUES ('{OWNER}', 'm', 'b', 'p', 1, 1, 'old', 5, 6, 7)",
    "INSERT INTO sandboxes (ticket, sandbox_id, account, owner, state, source_kind, source, timeout, lease, metadata, "
    f"queued_at, creating_at, running_at) VALUES ('running', 'i1', '{ACCOUNT}', '{OWNER}', 'running', 'template', "
    "'base', 60, 30, '{\"run\": \"7\"}', 1, 2, 3)",
    "INSERT INTO sandboxes (ticket, account, owner, state, source_kind, source, timeout, lease, metadata, queued_at) "
    f"VALUES ('queued', '{ACCOUNT}', '{OWNER}', 'queued', 'template', 'base', 60, 30, '{{}}', 4)",
    f"INSERT INTO rates (account, name, tat) VALUES ('{ACCOUNT}', 'create', 12)",
]
"""Rows as the first version wrote them."""


def migrate(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


@pytest.fixture
def old(url: str) -> str:
    """A ledger of the first version, with a sandbox that runs and a request in line."""
    where = url if "://" in url else f"sqlite:///{url}"
    engine = create_engine(where.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        migrate(connection, "0001")
        for statement in FIRST:
            connection.execute(text(statement))
    engine.dispose()
    return url


def test_what_the_first_version_wrote_is_there_and_goes_on(old: str) -> None:
    book = Ledger(open_engine(old), clock=lambda: 100)
    running, queued = book.records(account=ACCOUNT)
    assert (running.ticket, running.sandbox_id, running.state) == ("running", "i1", State.RUNNING)
    assert (running.metadata, running.running_at, running.refused_at) == ({"run": "7"}, 3, None)
    assert (queued.ticket, queued.state) == ("queued", State.QUEUED)
    (owner,) = book.known_owners([OWNER])
    assert (owner.label, owner.heartbeat) == ("old", 5)
    assert isinstance(book.turn("queued", OWNER, ACCOUNT, Caps(2, account_limit=2, create_rate=1.0)), Go)
    book.close()
