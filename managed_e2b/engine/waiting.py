"""A request's time in line: until it is its turn, until the endpoint takes its create, or until its patience ends."""

from __future__ import annotations

import random
import time

from ..errors import AcquireTimeoutError, RateLimitedError, SandboxGoneError
from ..models import Holder
from ..rules import leases, limits, states
from . import endings, host
from .base import TICKET, Engine
from .listing import read

IDLE = 30.0
"""Seconds after which one that is not the first of its lifecycle asks all the same. When it is, it is woken."""

SHOWN = 20
"""The most holders of slots that an error's text names; its `holders` has all."""

COUNT_PAGES = 10
"""The most pages of the endpoint's list that are read to tell who fills the account."""


class Waiting:
    """One request in line. It asks the ledger only while it is the first of its lifecycle, and sleeps otherwise."""

    def __init__(self, engine: Engine, ticket: str, patience: float | None) -> None:
        self._engine = engine
        self._ticket = ticket
        self._patience = patience
        self._deadline = None if patience is None else time.monotonic() + patience
        self._queued_at = 0
        self._asked = 0.0
        self._refusal: RateLimitedError | None = None

    def join(self, queued_at: int) -> None:
        """It has its place in the ledger's line since then."""
        self._queued_at = queued_at

    async def turn(self) -> limits.Go:
        """Wait until the row may create: the oldest first, within the caps, the rate, and the endpoint's patience."""
        driver, line, place = self._engine.driver, self._engine.line, (self._queued_at, self._ticket)
        timed = True  # the first question, and one at an appointed time, is worth a transaction
        idle, asked = False, 0
        try:
            line.join(place)
            while True:
                told = driver.told
                if not idle and not line.is_first(place):
                    idle = not await self._sleep(IDLE, "others of this lifecycle are before it", self._ticket, told)
                    continue
                decision = await self._ask(timed)
                if isinstance(decision, limits.Go):
                    return decision
                if decision is None:
                    raise await self.gone()
                timed, idle, asked = decision.is_appointment, False, asked + 1
                await self._sleep(limits.pause(decision, asked, random.random()), decision.why, None, told)
        finally:
            first = line.leave(place)
            if first is not None:
                driver.notify(first)

    async def refused(self, error: RateLimitedError, sent_at: int) -> None:
        """The endpoint answered 429 to our create: back into the line, and slower, with all who share the account."""
        self._refusal = error
        engine = self._engine
        record = await engine.driver.ledger(
            engine.book.refused,
            self._ticket,
            engine.account,
            engine.caps,
            sent_at=sent_at,
            wait=error.retry_after,
            jitter=random.random(),
        )
        if record is None:
            raise await self.gone()

    async def gone(self) -> SandboxGoneError:
        """Somebody else has ended our row: a reaper that took this process for dead, or a shutdown."""
        return await endings.of_row(self._engine, self._ticket)

    async def _ask(self, timed: bool) -> limits.Go | limits.Wait | None:
        engine, now = self._engine, time.monotonic()
        place = (self._ticket, engine.owner, engine.account, engine.caps, host.is_gone)
        if not timed and now - self._asked < limits.ASK:
            # Between two of our own marks in the ledger a look is enough: it waits for no writer, and none for it.
            seen = await engine.driver.ledger(engine.book.look, *place)
            if isinstance(seen, limits.Wait):
                return seen
        self._asked = now
        return await engine.driver.ledger(engine.book.turn, *place)

    async def _sleep(self, seconds: float, why: str, key: str | None, since: int) -> bool:
        """Whether it was woken before the time had passed."""
        began = time.monotonic()
        if self._deadline is not None:
            if began >= self._deadline:
                raise await self._timed_out(why) from self._refusal
            seconds = min(seconds, self._deadline - began)
        await self._engine.driver.wait(seconds, key, since)
        return time.monotonic() - began < seconds

    async def _timed_out(self, why: str) -> AcquireTimeoutError:
        engine = self._engine
        records = await engine.driver.ledger(engine.book.records, states_=states.SLOT_STATES, account=engine.account)
        now = await engine.driver.ledger(engine.book.now)
        owners = await engine.driver.ledger(engine.book.known_owners, {record.owner for record in records})
        labels = {owner.id: owner.label for owner in owners}
        holders = [
            Holder(
                sandbox_id=record.sandbox_id,
                ticket=record.ticket,
                state=record.state,
                age=(now - (record.creating_at or record.queued_at)) / leases.SECOND,
                owner=record.owner,
                label=labels.get(record.owner, ""),
            )
            for record in records
            if record.ticket != self._ticket
        ]
        told = [f"no slot within acquire_timeout={self._patience} s: {why}."]
        if self._refusal is not None:
            told.append(f"The endpoint's last word was: {self._refusal}. {await self._counted()}")
        told.append("Slots of this account are held by:")
        told += [f"  {holder}" for holder in holders[:SHOWN]] or ["  none"]
        if len(holders) > SHOWN:
            told.append(f"  and {len(holders) - SHOWN} more")
        told.append("Raise the limit or the timeout, or run `me2b reap` if owners are dead.")
        return AcquireTimeoutError("\n".join(told), holders=holders)

    async def _counted(self) -> str:
        """What fills an account that the ledger sees room in: sandboxes that it does not know of."""
        engine = self._engine
        listing = await read(engine, pages=COUNT_PAGES, patience=0.0)
        if listing.error is not None:
            return f"(What runs there could not be listed: {type(listing.error).__name__}.)"
        tickets = [item.metadata.get(TICKET, "") for item in listing.found.values()]
        known = await engine.driver.ledger(engine.book.known, [ticket for ticket in tickets if ticket], [])
        ours = {record.ticket for record in known}
        unknown = sum(ticket not in ours for ticket in tickets)
        told = f"It lists {len(tickets)} sandboxes of this key; {unknown} of them are unknown to this ledger"
        return f"{told}: `me2b reap --foreign` can end those." if unknown else f"{told}."
