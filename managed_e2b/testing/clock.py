"""`SteppedClock`: time that stands still until a test moves it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..local.clock import Instant

SECOND = 1_000_000
"""Microseconds."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SteppedClock:
    """A clock of microseconds UTC that stands until it is told to step; safe to use from any thread.

    It is the ledger's kind of clock (`Ledger(engine, clock)`: call it, get microseconds) and the local server's
    (`LocalServer(clock=clock)`: `read()`). Steps may be negative: then the wall clock goes back, as a host's does when
    it is set, and the monotonic clock stays where it is.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._lock = threading.Lock()
        self._now = round((start - EPOCH) / timedelta(microseconds=1))
        self._monotonic = 1_000_000_000

    @property
    def now(self) -> int:
        """Microseconds UTC."""
        with self._lock:
            return self._now

    def __call__(self) -> int:
        return self.now

    def step(self, seconds: float) -> int:
        """Move it by so many seconds, a negative number back. Returns the new time in microseconds."""
        with self._lock:
            microseconds = round(seconds * SECOND)
            self._now += microseconds
            self._monotonic += max(0, microseconds)
            return self._now

    def read(self) -> Instant:
        """Both clocks of the local server at one moment."""
        from ..local.clock import Instant

        with self._lock:
            return Instant(self._monotonic / SECOND, EPOCH + timedelta(microseconds=self._now))
