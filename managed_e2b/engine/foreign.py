"""What the backend lists for this key and no open row of the ledger holds; and ending it, one id at a time.

A list only says which ids are worth asking for. Nothing is ended before the backend, asked for that id, has
confirmed what it is, and the ledger, read after that, has confirmed whose it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import AuthenticationError, BackendError
from ..models import ReapAction, Reaped, RemoteSandbox
from ..rules import cleanup, failures
from ..rules.cleanup import Judgement, Kind
from ..rules.leases import SECOND
from .base import OWNER, TICKET, Engine
from .listing import read
from .patience import patiently
from .reap import Bounds, alive

PATIENCE = 2.0
"""Seconds for which a per-id 404 is waited for after one DELETE."""


@dataclass(frozen=True)
class Survey:
    """What a list showed, judged, with the backend's clock as it bounds it. `cut`: why it was not read to its end."""

    found: tuple[tuple[RemoteSandbox, Judgement], ...]
    now: int
    cut: str | None


async def survey(engine: Engine, bounds: Bounds) -> Survey:
    """List what runs or is paused for this key, and judge each. Raises AuthenticationError only."""
    listing = await read(engine, cut=lambda _listed: bounds.cut(0))
    if isinstance(listing.error, AuthenticationError):
        raise listing.error
    now = await engine.driver.ledger(engine.book.now)
    judged = await judge(engine, listing.found.values())
    return Survey(tuple(judged), cleanup.backend_now(listing.found.values(), now), listing.cut)


async def judge(engine: Engine, listed: Iterable[RemoteSandbox]) -> list[tuple[RemoteSandbox, Judgement]]:
    """Judge sandboxes by the ledger as it is now, which must be after they were listed."""
    d, book = engine.driver, engine.book
    sandboxes = list(listed)
    tickets = {item.metadata[TICKET] for item in sandboxes if TICKET in item.metadata}
    rows = await d.ledger(book.known, tickets, {item.sandbox_id for item in sandboxes})
    names = {row.owner for row in rows} | {item.metadata[OWNER] for item in sandboxes if OWNER in item.metadata}
    now = await d.ledger(book.now)
    owners = {owner.id: alive(owner, now) for owner in await d.ledger(book.known_owners, names)}
    by_id = {row.sandbox_id: row for row in rows if row.sandbox_id is not None}
    by_ticket = {row.ticket: row for row in rows}
    judged: list[tuple[RemoteSandbox, Judgement]] = []
    for item in sandboxes:
        ticket = item.metadata.get(TICKET)
        row = None if ticket is None else by_ticket.get(ticket)
        judged.append((item, cleanup.judge(item, by_id.get(item.sandbox_id), row, owners, engine.owner)))
    return judged


async def purge(
    engine: Engine, *, want: cleanup.Want, include_other_ledgers: bool, dry_run: bool, bounds: Bounds
) -> tuple[list[Reaped], str | None]:
    """End what nobody whom this ledger knows to be alive may be using. What was done, and why it stopped early."""
    seen = await survey(engine, bounds)
    items: list[Reaped] = []
    for sandbox, judgement in seen.found:
        if judgement.kind in (Kind.TRACKED, Kind.HELD) or not want.listed(sandbox, seen.now):
            continue
        if (cut := bounds.cut(len(items))) is not None:
            return items, cut
        action: ReapAction = "kept"
        why = judgement.why
        if cleanup.purgeable(judgement.kind, include_other_ledgers=include_other_ledgers):
            action = "due"
            if not dry_run:
                action, why = await end(engine, sandbox, judgement, want, seen.now)
        age = (seen.now - sandbox.started_at) / SECOND
        items.append(Reaped(judgement.ticket, sandbox.sandbox_id, judgement.owner, action, why, age, listed=True))
    return items, seen.cut


async def end(
    engine: Engine,
    sandbox: RemoteSandbox,
    judgement: Judgement,
    want: cleanup.Want,
    now: int,
) -> tuple[ReapAction, str]:
    """Ask for the id, judge again, DELETE once, and prove it by a per-id 404. What came of it, and why."""
    sdk, sandbox_id = engine.driver.sdk, sandbox.sandbox_id
    try:
        found = await patiently(engine, sdk.info, sandbox_id)
        if found is None:
            return "gone", "it was listed, and is not there"
        ((_, again),) = await judge(engine, [found])
        if again.kind is not judgement.kind:
            return "kept", again.why
        if not want.listed(found, now):
            return "kept", "the list told otherwise than it does itself"
        if not await patiently(engine, sdk.kill, sandbox_id):
            return "cleaned", judgement.why
        deadline = time.monotonic() + PATIENCE
        attempt = 0
        while await sdk.info(sandbox_id) is not None:
            if time.monotonic() >= deadline:
                return "pending", f"{judgement.why}; it still answers after DELETE"
            await engine.driver.wait(failures.backoff(attempt))
            attempt += 1
    except BackendError as error:
        return "pending", f"{judgement.why}; {type(error).__name__}: {error}"
    return "cleaned", judgement.why
