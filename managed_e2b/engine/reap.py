"""The reaper: ends what dead owners left. Any process may run it; a live owner's rows are never touched."""

from __future__ import annotations

import time
from typing import Literal

from ..models import Owner, Reaped, ReapReport, SandboxRecord, State
from ..rules import liveness, states
from . import host
from .base import Engine
from .release import release

MAX_ITEMS = 1000
MAX_SECONDS = 120.0
"""Bounds of one reap; the next one goes on."""

_PATIENCE = 5.0


async def reap(
    engine: Engine, *, max_iter: int = 1, max_items: int = MAX_ITEMS, max_seconds: float = MAX_SECONDS
) -> ReapReport:
    """Pass over the rows of this account whose owner, or whose cleaner, is dead, until none is pending.

    At most `max_iter` passes, `max_items` rows a pass, and about `max_seconds` in all.
    """
    deadline = time.monotonic() + max_seconds
    items: dict[str, Reaped] = {}
    for _ in range(max_iter):
        for item in await _pass(engine, max_items, deadline):
            items[item.ticket] = item
        if time.monotonic() >= deadline or not any(item.action == "pending" for item in items.values()):
            break
    return ReapReport(tuple(items.values()))


async def _pass(engine: Engine, max_items: int, deadline: float) -> list[Reaped]:
    d, book = engine.driver, engine.book
    owners = await d.ledger(book.owners_with_open_rows, engine.account)
    now = await d.ledger(book.now)
    dead = {owner.id for owner in owners if not _alive(owner, now)}
    items: list[Reaped] = []
    if not dead:
        return items
    open_states = set(State) - states.TERMINAL
    for record in await d.ledger(book.records, states_=open_states, account=engine.account):
        if len(items) >= max_items or time.monotonic() >= deadline:
            break
        cleaner = record.claimed_by if record.state is State.CLEANING else None
        ours = cleaner == engine.owner and record.owner in dead  # claimed by an earlier pass, and not proved yet
        if not ours and (cleaner or record.owner) not in dead:
            continue  # a live owner's row, or a live reaper is at it
        ended = await release(engine, record.ticket, "its owner is dead", dead=dead, patience=_PATIENCE)
        items.append(await _told(engine, record, ended))
    return items


async def _told(engine: Engine, record: SandboxRecord, ended: bool) -> Reaped:
    action: Literal["cleaned", "pending", "taken"] = "cleaned" if ended else "pending"
    why = f"owner {record.owner} is dead; the row was {record.state}"
    current = await engine.driver.ledger(engine.book.record, record.ticket)
    if current is not None and not ended:
        if current.claimed_by != engine.owner:
            action, why = "taken", f"{current.claimed_by} is cleaning it"
        elif current.last_error:
            why = f"{why}; {current.last_error}"
    sandbox_id = current.sandbox_id if current is not None else record.sandbox_id
    return Reaped(record.ticket, sandbox_id, record.owner, action, why)


def _alive(owner: Owner, now: int) -> bool:
    here = host.here()
    started = host.process_started(owner.pid) if liveness.sees_its_process(owner, here) else None
    return liveness.is_alive(owner, here, started, now)
