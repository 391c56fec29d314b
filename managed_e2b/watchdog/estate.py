"""What the watchdog does at a death: it closes the owner in the ledger, and ends what that owner left. Nothing else."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import make_url

from ..drivers import BlockingDriver, Sdk, Wakeup
from ..drivers import run as _run
from ..engine import host
from ..engine.base import OWNER, Engine
from ..engine.release import release
from ..errors import BackendError, LedgerError
from ..ledger import Ledger, open_engine
from ..models import SandboxRecord, State
from ..rules import failures, states
from ..rules.endings import OWNER_DEAD
from ..rules.leases import SECOND
from ..rules.limits import Caps
from ..settings import E2BConfig

logger = logging.getLogger("managed_e2b")

MAX_SECONDS = 600.0
"""The longest that an endpoint or a ledger which fails is tried. Then the lease and the next reaper do it."""

LOCAL_SECONDS = 60.0
"""The same for an endpoint on this machine."""

UNFOUND_SECONDS = 30.0
"""How long a create without an answer is looked for: it may have been in the making when its owner died."""

_RELEASE_PATIENCE = 5.0
_AT_ONCE = 16


@dataclass(frozen=True)
class Estate:
    """What one owner left, and how to get at it. Key and password are left out of `repr`."""

    owner: str
    ledger: str = field(repr=False)
    account: str
    lease: int
    endpoint: E2BConfig

    @classmethod
    def of(cls, registration: dict[str, Any]) -> Estate:
        return cls(**{**registration, "endpoint": E2BConfig(**registration["endpoint"])})

    @property
    def patience(self) -> float:
        """Seconds: a lease and a bit, after which the backend itself has ended what is left.

        Less on this machine: a server here that does not answer has most likely ended, and its sandboxes with it.
        """
        return LOCAL_SECONDS if self.endpoint.is_loopback else min(self.lease + 60.0, MAX_SECONDS)


def settle_all(registrations: list[dict[str, Any]]) -> None:
    """Each on its own thread: one endpoint that hangs must not cost the others their time."""
    threads = [threading.Thread(target=settle, args=(Estate.of(item),)) for item in registrations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def settle(estate: Estate) -> bool:
    """End what a dead owner left, with bounded retries; whether nothing of it is left."""
    started = time.monotonic()
    settler = _Settler(estate)
    try:
        for attempt in itertools.count():
            patience = estate.patience
            try:
                left = settler.once()
                if not left:
                    return True
                if all(record.sandbox_id is None and record.last_error is None for record in left):
                    patience = min(patience, UNFOUND_SECONDS)
            except FileNotFoundError:
                patience = 0.0
            except LedgerError as error:
                logger.warning("the ledger does not answer (%s); it is tried again", type(error).__name__)
            pause = failures.backoff(attempt, base=0.2, cap=10.0)
            if time.monotonic() + pause - started > patience:
                break
            time.sleep(pause)
        if not settler.has_ledger:
            settler.end_tagged()
        return False
    finally:
        settler.close()


class _Settler:
    """An owner of its own in the ledger, so that other reapers respect its claims, and take them over if it dies."""

    def __init__(self, estate: Estate) -> None:
        self._estate = estate
        self._engine: Engine | None = None
        self._sdk = Sdk(estate.endpoint, is_async=False)

    @property
    def has_ledger(self) -> bool:
        """Whether it could be opened."""
        return self._engine is not None

    def once(self) -> list[SandboxRecord]:
        """Try to end each row once; those that are left to us. Raises FileNotFoundError when there is no ledger."""
        if self._engine is None:
            self._engine = self._open()
        engine, owner = self._engine, self._estate.owner
        engine.book.close_owner(owner)
        open_states = set(State) - states.TERMINAL - {State.PAUSED}  # paused on purpose, as in `reap`
        rows = {record.ticket: record for record in engine.book.records(states_=open_states, owner=owner)}
        for claimed in engine.book.records(states_=[State.CLEANING], claimed_by=owner):
            rows[claimed.ticket] = claimed  # it died while it reaped for others
        if not rows:
            return []
        with ThreadPoolExecutor(min(_AT_ONCE, len(rows))) as pool:
            ended = dict(zip(rows, pool.map(self._end, rows), strict=True))
        current = [engine.book.record(ticket) for ticket, done in ended.items() if not done]
        # What somebody else has claimed meanwhile is in good hands.
        return [record for record in current if record is not None and record.claimed_by in (None, owner, engine.owner)]

    def close(self) -> None:
        """Leave what is left to the next reaper."""
        if self._engine is None:
            return
        try:
            self._engine.book.close_owner(self._engine.owner)
        except LedgerError:
            logger.warning("the ledger did not take the watchdog's goodbye; it will be seen to be dead")
        self._engine.book.close()

    def _open(self) -> Engine:
        url = make_url(self._estate.ledger)
        if url.get_backend_name() == "sqlite" and not os.path.exists(url.database or ""):
            raise FileNotFoundError(url.database)  # opening it would make it anew
        book = Ledger(open_engine(self._estate.ledger))
        actor, pid = uuid.uuid4().hex, os.getpid()
        # No heartbeat: it is done, one way or the other, before it could be taken for dead.
        stale_after = int((MAX_SECONDS + 60) * SECOND)
        book.open_owner(actor, host.here(), pid, host.process_started(pid) or 0, "me2b watchdog", stale_after)
        return Engine(
            BlockingDriver(self._sdk, Wakeup()),
            book=book,
            account=self._estate.account,
            owner=actor,
            caps=Caps(1),
            lease=self._estate.lease,
            clean=self._end,
        )

    def end_tagged(self) -> None:
        """Without a ledger: kill what carries the dead owner's id, which nobody else's sandbox does."""
        try:
            _run(self._end_tagged())
        except BackendError as error:
            logger.warning("without a ledger, and the endpoint fails: its lease ends what is left (%s)", error)

    async def _end_tagged(self) -> None:
        async for page in self._sdk.pages({OWNER: self._estate.owner}):
            for item in page:
                if item.metadata.get(OWNER) == self._estate.owner and item.state != "paused":
                    await self._sdk.kill(item.sandbox_id)

    def _end(self, ticket: str, reason: str = OWNER_DEAD) -> bool:
        """One try. Whatever it fails with, the others are tried, and this one again."""
        assert self._engine is not None
        try:
            return _run(release(self._engine, ticket, reason, dead={self._estate.owner}, patience=_RELEASE_PATIENCE))
        except Exception:
            logger.exception("the release of %s failed", ticket)
            return False
