"""From the end of use to the proof of death: claim, DELETE by id, a per-id 404, `cleaned`.

Never `connect`: it resumes and extends. A 204, a 502, an absence from a list prove nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from ..errors import BackendError, LedgerError, RateLimitedError
from ..models import SandboxRecord, State
from ..rules import failures, leases, states
from . import identity
from .base import Engine
from .complaints import ENDPOINT
from .listing import lookup
from .patience import patiently

logger = logging.getLogger("managed_e2b")

PATIENCE = 10.0
"""Seconds for which one release keeps trying to kill before it leaves the row to the keeper."""

FIND_PATIENCE = 3.0
"""Seconds for which one release looks for what a create without an answer may have made. Then the keeper goes on."""


async def release(
    engine: Engine,
    ticket: str,
    reason: str,
    *,
    sent: bool = True,
    made: str | None = None,
    identify: bool = False,
    dead: Collection[str] = (),
    patience: float | None = None,
) -> bool:
    """End a row, and with it its sandbox. Whether it is terminal now; if not, the keeper or a reaper goes on.

    `sent=False`: no create of this row ever reached the backend. `made`: the id that a create answered with when the
    row had been ended already, so that it could not be written there; it is ended whosever the row is. `identify`:
    ask first what it is, if the row does not tell. `dead`: owners whose claims may be taken over. Raises LedgerError;
    what is known here to be its sandbox is killed all the same.
    """
    d, book = engine.driver, engine.book
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    try:
        record = await d.ledger(book.claim, ticket, engine.owner, reason, dead=dead)
    except LedgerError:
        await _end_unclaimed(engine, ticket, deadline)
        raise
    if record is None:
        current = await d.ledger(book.record, ticket)
        if current is not None and current.state is State.QUEUED:
            current = await d.ledger(book.give_up, ticket, engine.owner, reason)
            d.notify()
        is_over = current is None or current.state in states.TERMINAL
        if made is not None:
            await _end_late(engine, ticket, made, deadline, is_over=is_over)
        if is_over:
            _forget(engine, ticket)
        return is_over
    refused = record.refused_at is not None
    try:
        if identify:
            await identity.identify(engine, record)
        known = record.sandbox_id or made
        if known is None and ticket in engine.made:
            known = engine.made[ticket].sandbox_id  # its id could not be written
        ids = [known] if known else []
        if not ids and sent:
            # After a 429 one look is enough: the endpoint itself has said that it made nothing.
            patience = 0.0 if refused else FIND_PATIENCE
            ids = await _find(engine, record, min(deadline, time.monotonic() + patience))
        for sandbox_id in ids:
            if not await _prove_dead(engine, sandbox_id, deadline):
                await d.ledger(book.note, ticket, f"{sandbox_id} still answers after DELETE")
                return False
    except BackendError as error:
        told = f"release of {record.sandbox_id or ticket} is not proved yet: {error}"
        engine.complaints.failed(ENDPOINT, ticket, told)
        await d.ledger(book.note, ticket, f"{type(error).__name__}: {error}")
        return False
    if ids:
        ended = await d.ledger(book.cleaned, ticket, engine.owner)
    elif not sent or refused or leases.must_have_expired(record, await d.ledger(book.now)):
        ended = await d.ledger(book.create_failed, ticket, engine.owner, record.last_error or "nothing was created")
    else:
        return False
    d.notify()
    if ended is None:  # somebody was faster; theirs is a proof as good as ours
        current = await d.ledger(book.record, ticket)
        if current is None or current.state not in states.TERMINAL:
            return False
    _forget(engine, ticket)
    return True


def _forget(engine: Engine, ticket: str) -> None:
    engine.made.pop(ticket, None)
    engine.complaints.worked(ticket)


async def _find(engine: Engine, record: SandboxRecord, deadline: float) -> list[str]:
    """What a create without an answer has made. It may be in the making: look until the deadline."""
    attempt = 0
    while True:
        found = await lookup(engine, record.ticket, patience=deadline - time.monotonic())
        if len(found) == 1:  # more than one: none of them alone tells that all are dead
            await engine.driver.ledger(engine.book.found, record.ticket, found[0])
        if found or time.monotonic() >= deadline:
            return found
        await engine.driver.wait(failures.backoff(attempt), record.ticket)
        attempt += 1


async def _end_unclaimed(engine: Engine, ticket: str, deadline: float) -> None:
    """End what was made here for a row that cannot be claimed: the ledger fails, and nobody uses it any more."""
    found = engine.made.get(ticket)
    if found is None or found.is_dead:
        return
    try:
        found.is_dead = await _prove_dead(engine, found.sandbox_id, deadline)
    except BackendError as error:
        told = f"release of {found.sandbox_id}, without the ledger, is not proved yet: {error}"
        engine.complaints.failed(ENDPOINT, ticket, told)


async def _end_late(engine: Engine, ticket: str, sandbox_id: str, deadline: float, *, is_over: bool) -> None:
    """End what a create made after somebody else had taken over, or ended, its row."""
    try:
        if not is_over:  # whoever has the row can go on with the id
            await engine.driver.ledger(engine.book.found, ticket, sandbox_id)
        if await _prove_dead(engine, sandbox_id, deadline):
            return
        told = "it still answers after DELETE"
    except BackendError as error:
        told = str(error)
    logger.warning("%s, made too late for its row, is not proved dead: %s; its lease ends it", sandbox_id, told)


async def _prove_dead(engine: Engine, sandbox_id: str, deadline: float) -> bool:
    """DELETE until a per-id answer says 404, or the deadline has passed. Raises the last BackendError then."""
    attempt = 0
    sdk = engine.driver.sdk
    while True:
        failure: BackendError | None = None
        try:
            if not await patiently(engine, sdk.kill, sandbox_id, patience=deadline - time.monotonic()):
                return True
            if await patiently(engine, sdk.info, sandbox_id, patience=deadline - time.monotonic()) is None:
                return True
        except RateLimitedError:
            raise  # what it asked for does not fit into our time
        except BackendError as error:
            failure = error
        if time.monotonic() >= deadline:
            if failure is not None:
                raise failure
            return False
        await engine.driver.wait(failures.backoff(attempt), sandbox_id)
        attempt += 1
