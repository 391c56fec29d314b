"""The reaper: ends what dead owners left. Any process may run it; a live owner's rows are never touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..models import Owner, ReapAction, Reaped, ReapReport, SandboxRecord, State
from ..rules import cleanup, failures, liveness, states
from ..rules.cleanup import OWNER_DEAD
from . import host
from .base import Engine

MAX_ITEMS = 1000
MAX_SECONDS = 120.0
"""Bounds of one reap; the next one goes on."""


@dataclass(frozen=True)
class Bounds:
    """How far one reap goes: items a pass, seconds in all (about: one request may outlast it), and `stopped`."""

    items: int = MAX_ITEMS
    seconds: float = MAX_SECONDS
    stopped: Callable[[], bool] = lambda: False
    started: float = field(default_factory=time.monotonic)

    def cut(self, done: int) -> str | None:
        """Why to end here, with `done` items done; None to go on."""
        if self.stopped():
            return "it was asked to stop"
        if time.monotonic() - self.started >= self.seconds:
            return f"{self.seconds:g} seconds were over"
        return f"{self.items} sandboxes were done" if done >= self.items else None


async def reap(
    engine: Engine,
    *,
    want: cleanup.Want = cleanup.EVERY,
    dry_run: bool = False,
    max_iter: int = 1,
    bounds: Bounds | None = None,
) -> ReapReport:
    """Pass over the rows of this account whose owner, or whose cleaner, is dead, until none is pending.

    At most `max_iter` passes; each tries each sandbox once.
    """
    limits = bounds or Bounds()
    items: dict[str, Reaped] = {}
    cut: str | None = None
    for attempt in range(max_iter):
        if attempt:
            await engine.driver.wait(failures.backoff(attempt, base=0.1))
        done, cut = await _pass(engine, want, dry_run, limits)
        items |= done
        if cut is not None or not any(item.action == "pending" for item in items.values()):
            break
    return ReapReport(tuple(items.values()), cut)


async def _pass(
    engine: Engine, want: cleanup.Want, dry_run: bool, bounds: Bounds
) -> tuple[dict[str, Reaped], str | None]:
    d, book = engine.driver, engine.book
    known = await d.ledger(book.owners_with_open_rows, engine.account)
    now = await d.ledger(book.now)
    dead = {owner.id: owner for owner in known if not alive(owner, now)}
    done: dict[str, Reaped] = {}
    if not dead:
        return done, None
    open_states = set(State) - states.TERMINAL
    records = await d.ledger(book.records, states_=open_states, account=engine.account)
    for item in cleanup.due(records, dead, engine.owner, want, now):
        if (cut := bounds.cut(len(done))) is not None:
            return done, cut
        if item.kept is not None:
            told = _told(item, now, "kept", item.kept)
        elif dry_run:
            told = _told(item, now, "due")
        else:
            told = await _end(engine, item, dead.get(item.holder), now)
        done[item.record.ticket] = told
    return done, None


async def _end(engine: Engine, item: cleanup.Due, holder: Owner | None, now: int) -> Reaped:
    """Take a row over from its dead holder, unless it is ours already, and try once to end it."""
    d, book, ticket = engine.driver, engine.book, item.record.ticket
    if holder is not None:
        taken = await d.ledger(book.take_over, ticket, engine.owner, OWNER_DEAD, holder)
        if taken is None:
            return _told(item, now, "taken", _taken_by(await d.ledger(book.record, ticket)))
        if taken.state in states.TERMINAL:
            d.notify()
            return _told(item, now, "never_existed", "nothing was ever sent")
    # Not on the caller's thread: a cancellation must not cut it in half, nor the keeper's sweep double it.
    ended = await d.finish(engine.clean, ticket, OWNER_DEAD, patience=0.0)
    record = await d.ledger(book.record, ticket) or item.record
    if not ended:
        return _told(item, now, "pending", record.last_error or "its end is not proved yet", record)
    if record.state is State.CREATE_FAILED:
        return _told(item, now, "never_existed", record.last_error, record)
    return _told(item, now, "cleaned", None, record)


def _told(
    item: cleanup.Due, now: int, action: ReapAction, detail: str | None = None, record: SandboxRecord | None = None
) -> Reaped:
    record = record or item.record
    why = f"{item.why}; {detail}" if detail else item.why
    return Reaped(record.ticket, record.sandbox_id, record.owner, action, why, cleanup.age(record, now))


def _taken_by(record: SandboxRecord | None) -> str:
    if record is None or record.state in states.TERMINAL:
        return "somebody else has ended it"
    if record.state is State.CLEANING:
        return f"{record.claimed_by} is cleaning it"
    return "its owner has shown life since"


def alive(owner: Owner, now: int) -> bool:
    """Whether an owner lives, as seen from this host at `now` on the ledger's clock."""
    here = host.here()
    started = host.process_started(owner.pid) if liveness.sees_its_process(owner, here) else None
    return liveness.is_alive(owner, here, started, now)
