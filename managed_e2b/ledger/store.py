"""The ledger's operations. Each change is a compare-and-swap that returns the row; None means 'not so any more'.

An event is appended in the same transaction as the change it tells of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, insert, select, text

from ..models import Host, Owner, SandboxRecord, State
from ..rules import limits
from ..rules.leases import SECOND
from . import line, rows
from . import statements as sql
from .failing import Place
from .forking import unforked
from .opening import READ_ONLY
from .tables import owners, sandboxes

Clock = Callable[[], int]
"""Microseconds UTC."""

_MARK = SECOND
"""How old the mark of an owner that asks may be before it is written anew."""

_VARIABLES = 500
"""The most values in one statement's list; older SQLite takes 999."""


def host_clock() -> int:
    """This host's clock, in microseconds UTC."""
    return time.time_ns() // 1000


class Ledger:
    """The ledger's operations, safe to call from any thread and from any number of processes at once.

    Each raises LedgerError when the database fails: nothing is changed then, or all of what was to be changed.
    """

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._place = Place(engine)
        self._postgres = engine.dialect.name == "postgresql"
        self._clock = clock or (None if self._postgres else host_clock)

    def close(self) -> None:
        """Close the connections. The ledger may be used again; it then opens new ones."""
        self._engine.dispose()

    def now(self) -> int:
        """The ledger's clock: the database server's on PostgreSQL, this host's on SQLite."""
        if self._clock is not None:
            return self._clock()
        with self._place.used(), self._engine.connect() as connection:
            return self._now(connection)

    # -- owners ---------------------------------------------------------------------------------------------

    def open_owner(
        self,
        owner_id: str,
        host: Host,
        pid: int,
        pid_started: int,
        label: str,
        stale_after: int,
        max_concurrent: int | None = None,
    ) -> None:
        """Make an owner known. `stale_after` in microseconds; `max_concurrent` tells others what it leaves to them."""
        with self._write() as (connection, now):
            values = {
                "id": owner_id,
                "machine_id": host.machine_id,
                "boot_id": host.boot_id,
                "pid_namespace": host.pid_namespace,
                "pid": pid,
                "pid_started": pid_started,
                "label": label,
                "heartbeat": now,
                "stale_after": stale_after,
                "opened_at": now,
                "max_concurrent": max_concurrent,
            }
            connection.execute(insert(owners), values)

    def beat(self, owner_id: str) -> bool:
        """Renew an owner's heartbeat. False when it is closed (by itself, or declared dead)."""
        with self._write() as (connection, now):
            return connection.execute(sql.BEAT, {"p_owner": owner_id, "p_now": now}).first() is not None

    def close_owner(self, owner_id: str) -> None:
        """Say goodbye: the owner is dead from now on, whatever its process does."""
        with self._write() as (connection, now):
            connection.execute(sql.CLOSE_OWNER, {"p_owner": owner_id, "p_now": now})

    def owners_with_open_rows(self, account: str) -> list[Owner]:
        """Owners and cleaners of this account's rows that are not terminal."""
        with self._read() as connection:
            return [rows.owner(row) for row in connection.execute(sql.OWNERS_WITH_OPEN_ROWS, {"p_account": account})]

    def known_owners(self, ids: Collection[str]) -> list[Owner]:
        """Those of these owners that the ledger knows."""
        with self._read() as connection:
            return [
                rows.owner(row) for some in _batches(ids) for row in connection.execute(sql.OWNERS, {"p_owners": some})
            ]

    # -- the path of one sandbox ----------------------------------------------------------------------------

    def enqueue(
        self,
        ticket: str,
        *,
        owner: str,
        account: str,
        source: tuple[str, str],
        timeout: int,
        lease: int,
        metadata: dict[str, str],
        sdk_version: str,
    ) -> int:
        """A place in line, durable before anything is asked of the backend: the time at which it was joined."""
        with self._write() as (connection, now):
            values = {
                "ticket": ticket,
                "account": account,
                "owner": owner,
                "state": State.QUEUED,
                "source_kind": source[0],
                "source": source[1],
                "timeout": timeout,
                "lease": lease,
                "metadata": metadata,
                "sdk_version": sdk_version,
                "queued_at": now,
            }
            connection.execute(insert(sandboxes), values)
            _tell(connection, ticket, now, State.QUEUED, owner)
            connection.execute(sql.ASKED, {"p_owner": owner, "p_now": now, "p_before": now - _MARK})
            return now

    def turn(
        self, ticket: str, owner: str, account: str, caps: limits.Caps, is_gone: line.IsGone = line.nobody_is_gone
    ) -> limits.Go | limits.Wait | None:
        """Let a row in line create when it is its turn; None when it is not in line any more.

        A queued row becomes `creating`; one that was refused is that already. An owner that has to wait is known to
        be asking from now on: see `rules.limits.PRESENT`. `is_gone` says whose process is seen to have ended: such an
        owner holds up nobody. It is asked inside the transaction, so it must be quick.
        """
        with self._write() as (connection, now):
            line.serialize(connection, account)
            decided = line.decide(connection, now, ticket, owner, account, caps, is_gone)
            if decided is None:
                return None
            decision, refused = decided
            if isinstance(decision, limits.Wait):
                connection.execute(sql.ASKED, {"p_owner": owner, "p_now": now, "p_before": now})
                return decision
            if max(caps.step, decision.pace.gap):
                line.write_pace(connection, account, decision.pace)
            connection.execute(sql.AGAIN if refused else sql.START, {"p_ticket": ticket, "p_now": now})
            connection.execute(sql.ASKED, {"p_owner": owner, "p_now": now, "p_before": now - _MARK})
            if not refused:
                _tell(connection, ticket, now, State.CREATING, owner)
            return decision

    def look(
        self, ticket: str, owner: str, account: str, caps: limits.Caps, is_gone: line.IsGone = line.nobody_is_gone
    ) -> limits.Go | limits.Wait | None:
        """What `turn` would say, without a change, and without waiting for writers."""
        with self._read() as connection:
            decided = line.decide(connection, self._now(connection), ticket, owner, account, caps, is_gone)
            return None if decided is None else decided[0]

    def late(self, account: str, by: int) -> None:
        """A create is sent `by` microseconds after its turn: the next ones wait as much longer."""
        with self._write() as (connection, _now):
            line.serialize(connection, account)
            connection.execute(sql.LATE, {"p_account": account, "p_by": by})

    def refused(
        self, ticket: str, account: str, caps: limits.Caps, *, sent_at: int, wait: float | None, jitter: float
    ) -> SandboxRecord | None:
        """The endpoint answered 429: the row waits in line for its next try, and all of the account slow down.

        `wait`: the seconds that the endpoint named. None when the row is not `creating` any more.
        """
        with self._write() as (connection, now):
            line.serialize(connection, account)
            pace = line.read_pace(connection, account)
            line.write_pace(connection, account, limits.slowed(pace, caps, now, sent_at, wait, jitter))
            row = connection.execute(sql.REFUSED, {"p_ticket": ticket, "p_now": now}).first()
            return None if row is None else rows.record(row)

    def recovered(self, account: str, caps: limits.Caps, *, sent_at: int) -> None:
        """The endpoint took a create: the account may go a little faster again."""
        with self._write() as (connection, now):
            line.serialize(connection, account)
            pace = line.read_pace(connection, account)
            line.write_pace(connection, account, limits.recovered(pace, caps, now, sent_at))

    def running(self, ticket: str, owner: str, sandbox_id: str, *, sent_at: int, remote: int) -> SandboxRecord | None:
        """The answer came: `remote` seconds of life counted from `sent_at`. None when the row was claimed meanwhile."""
        expiry = sent_at + remote * SECOND
        return self._swap(
            sql.RUN, State.RUNNING, ticket, owner, p_sandbox_id=sandbox_id, p_remote_expiry=expiry, p_sent_at=sent_at
        )

    def found(self, ticket: str, sandbox_id: str) -> None:
        """Note the id of a sandbox that was found by its ticket."""
        with self._write() as (connection, _now):
            connection.execute(sql.FOUND, {"p_ticket": ticket, "p_sandbox_id": sandbox_id})

    def extended(self, ticket: str, remote_expiry: int) -> None:
        """Note that the backend's timeout was renewed up to `remote_expiry`."""
        with self._write() as (connection, _now):
            connection.execute(sql.EXTENDED, {"p_ticket": ticket, "p_remote_expiry": remote_expiry})

    def identified(self, ticket: str, template_id: str, envd_version: str | None) -> None:
        """Note what the backend says that it made."""
        with self._write() as (connection, _now):
            values = {"p_ticket": ticket, "p_template_id": template_id, "p_envd_version": envd_version}
            connection.execute(sql.IDENTIFIED, values)

    def paused(self, ticket: str, actor: str, reason: str) -> SandboxRecord | None:
        """It is paused at the backend."""
        return self._swap(sql.PAUSE, State.PAUSED, ticket, actor, reason)

    def resumed(self, ticket: str, actor: str) -> SandboxRecord | None:
        """It runs again; for how long the backend lets it is not known, so a renewal is due."""
        return self._swap(sql.RESUME, State.RUNNING, ticket, actor)

    def give_up(self, ticket: str, actor: str, reason: str) -> SandboxRecord | None:
        """Leave the line: nothing was ever sent for this row."""
        return self._swap(sql.GIVE_UP, State.CLEANED, ticket, actor, reason)

    def claim(self, ticket: str, claimer: str, reason: str, *, dead: Collection[str] = ()) -> SandboxRecord | None:
        """Claim a row for cleaning. None when it is terminal, queued, or claimed by another not `dead`."""
        return self._swap(sql.CLAIM, State.CLEANING, ticket, claimer, reason, p_claimers=[claimer, *dead])

    def take_over(self, ticket: str, claimer: str, reason: str, judged: Owner) -> SandboxRecord | None:
        """Claim the row of an owner, or of a cleaner, that was judged dead; a queued one just ends.

        None when it is not theirs any more, or when they have beaten since they were read.
        """
        seen = {"p_judged": judged.id, "p_heartbeat": judged.heartbeat}
        return self._swap(sql.TAKE_OVER, State.CLEANING, ticket, claimer, reason, **seen) or self._swap(
            sql.DROP, State.CLEANED, ticket, claimer, reason, **seen
        )

    def cleaned(self, ticket: str, claimer: str) -> SandboxRecord | None:
        """Proved dead."""
        return self._swap(sql.CLEANED, State.CLEANED, ticket, claimer)

    def create_failed(self, ticket: str, actor: str, error: str) -> SandboxRecord | None:
        """Proved that nothing exists."""
        return self._swap(sql.CREATE_FAILED, State.CREATE_FAILED, ticket, actor, error)

    def note(self, ticket: str, error: str) -> None:
        """Keep the last thing that went wrong with a row."""
        with self._write() as (connection, _now):
            connection.execute(sql.NOTE, {"p_ticket": ticket, "p_detail": error})

    # -- reading --------------------------------------------------------------------------------------------

    def record(self, ticket: str) -> SandboxRecord | None:
        with self._read() as connection:
            row = connection.execute(sql.RECORD, {"p_ticket": ticket}).first()
            return None if row is None else rows.record(row)

    def records(
        self,
        *,
        states_: Collection[State] | None = None,
        owner: str | None = None,
        account: str | None = None,
        claimed_by: str | None = None,
    ) -> list[SandboxRecord]:
        """Rows in the order in which they joined the line."""
        query = select(sandboxes).order_by(sandboxes.c.queued_at, sandboxes.c.ticket)
        if states_ is not None:
            query = query.where(sandboxes.c.state.in_(states_))
        if owner is not None:
            query = query.where(sandboxes.c.owner == owner)
        if account is not None:
            query = query.where(sandboxes.c.account == account)
        if claimed_by is not None:
            query = query.where(sandboxes.c.claimed_by == claimed_by)
        with self._read() as connection:
            return [rows.record(row) for row in connection.execute(query)]

    def known(self, tickets: Collection[str], sandbox_ids: Collection[str]) -> list[SandboxRecord]:
        """Rows, of any account, that have one of these tickets or one of these ids."""
        found: dict[str, SandboxRecord] = {}
        with self._read() as connection:
            for name, values in (("p_tickets", tickets), ("p_ids", sandbox_ids)):
                for some in _batches(values):
                    matches = connection.execute(sql.KNOWN, {"p_tickets": (), "p_ids": (), name: some})
                    found |= {row.ticket: rows.record(row) for row in matches}
        return list(found.values())

    def history(self, ticket: str) -> list[tuple[int, State, str, str | None]]:
        """What happened to a row: (time, state, actor, detail), oldest first."""
        with self._read() as connection:
            rows = connection.execute(sql.HISTORY, {"p_ticket": ticket})
            return [(row.at, State(row.state), row.actor, row.detail) for row in rows]

    # -- inside ---------------------------------------------------------------------------------------------

    @contextmanager
    def _write(self) -> Iterator[tuple[Connection, int]]:
        with self._place.used(), unforked(), self._engine.begin() as connection:
            yield connection, self._now(connection)

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._place.used(), unforked(), self._engine.connect() as connection:
            connection.execution_options(**{READ_ONLY: True})
            yield connection

    def _now(self, connection: Connection) -> int:
        if self._clock is not None:
            return self._clock()
        statement = text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        return int(connection.execute(statement).scalar_one())

    def _swap(
        self,
        statement: Any,
        state: State,
        ticket: str,
        actor: str,
        detail: str | None = None,
        **parameters: Any,
    ) -> SandboxRecord | None:
        """Make the row `state` if it is still where `statement` wants it, and tell."""
        with self._write() as (connection, now):
            fixed = {"p_ticket": ticket, "p_actor": actor, "p_detail": detail, "p_now": now}
            row = connection.execute(statement, {**fixed, **parameters}).first()
            if row is None:
                return None
            _tell(connection, ticket, now, state, actor, detail)
            return rows.record(row)


def _tell(connection: Connection, ticket: str, at: int, state: State, actor: str, detail: str | None = None) -> None:
    values = {"ticket": ticket, "at": at, "state": state, "actor": actor, "detail": detail}
    connection.execute(sql.TELL, values)


def _batches(values: Collection[str]) -> Iterator[list[str]]:
    every = list(values)
    return (every[start : start + _VARIABLES] for start in range(0, len(every), _VARIABLES))
