"""The line of an account inside a transaction: what `rules.limits` decides from, and what it changes.

Whoever changes something here holds the account's lock: SQLite's write lock, or `serialize` on PostgreSQL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.dialects import postgresql, sqlite

from ..models import Owner
from ..rules import limits
from . import rows
from . import statements as sql
from .tables import rates

IsGone = Callable[[Owner], bool]
"""Whether an owner's process is seen to have ended."""


def nobody_is_gone(_owner: Owner) -> bool:
    """Who cannot see processes goes by the ledger alone."""
    return False


def serialize(connection: Connection, account: str) -> None:
    """One turn at a time per account: SQLite's write lock does it, PostgreSQL needs a lock of its own."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": f"me2b turn {account}"})


def decide(
    connection: Connection, now: int, ticket: str, owner: str, account: str, caps: limits.Caps, is_gone: IsGone
) -> tuple[limits.Go | limits.Wait, bool] | None:
    """Whether it is the row's turn, and whether it was refused before; None when it is not in line any more."""
    asker = connection.execute(sql.ASKER, {"p_ticket": ticket}).first()
    if asker is None:
        return None
    refused = bool(asker.refused)
    pace = limits.Pace() if asker.tat is None else _pace(asker)
    alone = limits.is_alone(caps, pace)
    place = {"p_ticket": ticket, "p_account": account, "p_owner": owner, "p_queued_at": asker.queued_at}
    ahead: dict[str, dict[str, int]] = defaultdict(dict)
    for row in connection.execute(sql.AHEAD_OF_OWNER if alone else sql.AHEAD, place):
        ahead[row.owner][row.kind] = row.rows
    mine = limits.Part(owner, asker.slots, *_counts(ahead.pop(owner, {})))
    others = [
        limits.Part(row.id, row.slots, *_counts(ahead[row.id]), row.max_concurrent, _asked_at(row, is_gone))
        for row in (connection.execute(sql.PARTS, {"p_owners": list(ahead)}) if ahead else ())
    ]
    used = mine.slots if caps.account_limit is None else int(connection.execute(sql.USED, place).scalar_one())
    return limits.turn(caps, limits.Load(now, mine, others, used, pace, refused)), refused


def _counts(ahead: dict[str, int]) -> tuple[int, int]:
    return ahead.get("queued", 0), ahead.get("refused", 0)


def _asked_at(row: Row[Any], is_gone: IsGone) -> int | None:
    """When an owner last asked; None when it will not ask again."""
    return None if row.closed_at is not None or is_gone(rows.owner(row)) else row.asked_at


def read_pace(connection: Connection, account: str) -> limits.Pace:
    row = connection.execute(sql.PACE_OF_ACCOUNT, {"p_account": account}).first()
    return limits.Pace() if row is None else _pace(row)


def _pace(row: Row[Any]) -> limits.Pace:
    return limits.Pace(*(row._mapping[name] for name in sql.PACE))


def write_pace(connection: Connection, account: str, pace: limits.Pace) -> None:
    build: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = build(rates).values(account=account, name="create", **asdict(pace))
    connection.execute(
        statement.on_conflict_do_update(index_elements=["account", "name"], set_=dict(statement.excluded.items()))
    )
