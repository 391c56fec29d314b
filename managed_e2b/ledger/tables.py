"""The ledger's tables. Times are integer microseconds UTC; states and their CHECK come from `rules.states`."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

from ..models import State

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_STATES = ", ".join(f"'{state}'" for state in State)

owners = Table(
    "owners",
    metadata,
    Column("id", String(32), primary_key=True),
    # Host identity: two processes can see each other only when all three are the same.
    Column("machine_id", String(64), nullable=False),
    Column("boot_id", String(64), nullable=False),
    Column("pid_namespace", String(32), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", BigInteger, nullable=False),
    Column("label", Text, nullable=False),
    Column("heartbeat", BigInteger, nullable=False),
    Column("stale_after", BigInteger, nullable=False),
    Column("opened_at", BigInteger, nullable=False),
    Column("closed_at", BigInteger),
    # How many sandboxes it may have, and when it last asked for its turn: the others in line reckon with that.
    Column("max_concurrent", Integer),
    Column("asked_at", BigInteger),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("ticket", String(32), primary_key=True),
    Column("sandbox_id", Text, unique=True),
    Column("account", String(16), nullable=False),
    Column("owner", String(32), ForeignKey("owners.id"), nullable=False),
    Column("state", String(16), CheckConstraint(f"state IN ({_STATES})", name="state"), nullable=False),
    Column("source_kind", String(16), nullable=False),
    Column("source", Text, nullable=False),
    Column("timeout", Integer, nullable=False),
    Column("lease", Integer, nullable=False),
    Column("hard_deadline", BigInteger),
    Column("remote_expiry", BigInteger),
    Column("claimed_by", String(32)),
    Column("claimed_at", BigInteger),
    Column("parent", String(32)),
    Column("reason", Text),
    Column("last_error", Text),
    Column("metadata", JSON, nullable=False),
    Column("sdk_version", Text),
    # What the backend says that it made: the id that the template's name stood for, and its agent's version.
    Column("template_id", Text),
    Column("envd_version", Text),
    # The place in line: the time it joined, and the order within one microsecond.
    Column("queued_at", BigInteger, nullable=False),
    # Its last create was answered by a 429: it waits in line for the next try, and keeps its slot.
    Column("refused_at", BigInteger),
    Column("creating_at", BigInteger),
    Column("running_at", BigInteger),
    Column("cleaning_at", BigInteger),
    Column("ended_at", BigInteger),
    Index(None, "owner", "state"),
    # What a turn is decided from, without a look at the rows.
    Index("ix_sandboxes_line", "account", "state", "owner", "queued_at", "ticket", "refused_at"),
    Index(None, "state"),
)

rates = Table(
    "rates",
    metadata,
    Column("account", String(16), primary_key=True),
    Column("name", String(32), primary_key=True),
    # See `rules.limits.Pace`.
    Column("tat", BigInteger, nullable=False),
    Column("gap", BigInteger, nullable=False, server_default="0"),
    Column("held_until", BigInteger, nullable=False, server_default="0"),
    Column("slowed_at", BigInteger, nullable=False, server_default="0"),
)

events = Table(
    "events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("ticket", String(32), nullable=False, index=True),
    Column("at", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("actor", String(32), nullable=False),
    Column("detail", Text),
)
