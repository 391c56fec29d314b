"""One thread per open lifecycle, on both faces: a blocked event loop must not look like a crash.

It runs the engine's own code on the blocking driver: the owner's heartbeat, the leases, what nobody holds any
more, and what is still `cleaning`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy.exc import DBAPIError

from ..errors import BackendError
from ..models import SandboxRecord, State
from ..rules import leases
from .base import Engine
from .reap import reap

logger = logging.getLogger("managed_e2b")

TICK = 1.0
"""Seconds between two looks at what was abandoned; heartbeats and leases have their own, longer interval."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Keeper:
    """See the module. `run` drives a coroutine of the engine over the blocking driver."""

    def __init__(self, engine: Engine, run: Run, *, stale_after: float, reap_at_start: bool) -> None:
        self._engine = engine
        self._run = run
        self._interval = leases.beat_interval(engine.lease, int(stale_after))
        self._reap_at_start = reap_at_start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="me2b-keeper", daemon=True)
        self.owner_lost = False
        """Set when the ledger says that this owner is closed: somebody took it for dead."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ask it to end and wait up to `timeout` seconds."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _main(self) -> None:
        next_beat = time.monotonic() + self._interval
        if self._reap_at_start:
            self._guarded(lambda: self._run(reap(self._engine)))
        while not self._stop.wait(min(TICK, self._interval)):
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._interval
                self._guarded(self._beat)
                self._guarded(self._renew)
            self._guarded(self._sweep)

    def _guarded(self, step: Callable[[], object]) -> None:
        """The keeper outlives an endpoint or a database that fails for a while: it tells, and tries again."""
        try:
            step()
        except (BackendError, DBAPIError, OSError) as error:
            logger.warning("keeper: %s: %s; it will try again", type(error).__name__, error)

    def _beat(self) -> None:
        self.owner_lost = not self._engine.book.beat(self._engine.owner)

    def _renew(self) -> None:
        engine = self._engine
        if self.owner_lost:
            return  # a reaper ended this owner: renewing now could keep alive what is being killed
        for record in engine.book.records(states_=[State.RUNNING], owner=engine.owner):
            # Each on its own: one that fails must not cost the others their lease.
            self._guarded(functools.partial(self._renew_one, record))

    def _renew_one(self, record: SandboxRecord) -> None:
        engine = self._engine
        sent_at = engine.book.now()
        if record.hard_deadline is not None and sent_at >= record.hard_deadline:
            engine.clean(record.ticket, "expired: its timeout has passed")
            return
        seconds = leases.renewal(record, sent_at)
        if seconds is None or record.sandbox_id is None:
            return
        if self._run(engine.driver.sdk.set_timeout(record.sandbox_id, seconds)):
            engine.book.extended(record.ticket, sent_at + seconds * leases.SECOND)
        else:
            engine.clean(record.ticket, "vanished: the backend does not know it any more")

    def _sweep(self) -> None:
        engine = self._engine
        # Ours, and what a reap of ours has claimed of dead owners: nobody else goes on with those while we live.
        claimed = engine.book.records(states_=[State.CLEANING], claimed_by=engine.owner)
        due = {record.ticket: record.reason or "released" for record in claimed}
        for _ in range(len(engine.abandoned)):
            due.setdefault(engine.abandoned.popleft(), "abandoned: nobody holds its handle")
        for ticket, reason in due.items():
            self._guarded(functools.partial(self._end, ticket, reason))

    def _end(self, ticket: str, reason: str) -> None:
        """One try. What is not proved, or could not even be claimed, is due again at the next tick."""
        ended = False
        try:
            ended = self._engine.clean(ticket, reason, patience=0.0)
        finally:
            if not ended:
                self._engine.abandoned.append(ticket)
