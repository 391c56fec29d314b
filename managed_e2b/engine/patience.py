"""Calls that the endpoint may answer with 429: asked again when it says so, and by nobody of this process before.

Creates have their own way, which all processes of the account share: the line in the ledger.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import RateLimitedError
from ..rules import failures

if TYPE_CHECKING:
    from .base import Engine

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds for which a call that somebody waits for is asked again."""

_KEY = "held"
"""Nobody is woken by it: that a slot came free does not shorten what the endpoint asked for."""


class Hold:
    """Until when an endpoint wants to be left alone. One a lifecycle; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._refusals = 0

    def refuse(self, named: float | None) -> None:
        """It answered 429, and named so many seconds, or none: then each refusal in a row doubles the time."""
        with self._lock:
            wait = named
            if wait is None:
                wait = failures.backoff(self._refusals, base=0.25, cap=30.0) * (1 + random.random() / 4)
            self._refusals += 1
            self._until = max(self._until, time.monotonic() + wait)

    def accept(self) -> None:
        """It did what it was asked."""
        with self._lock:
            self._refusals = 0

    def left(self) -> float:
        """Seconds until it may be asked again; 0 for now."""
        return max(0.0, self._until - time.monotonic())


async def patiently(
    engine: Engine, call: Callable[..., Awaitable[T]], *args: Any, patience: float = PATIENCE, hold: Hold | None = None
) -> T:
    """Make a call, again and again while it is answered by 429 and the time to wait fits into `patience` seconds.

    `hold`: whose 429 it is; the control plane's when none is given. Raises the last RateLimitedError, at once when it
    is known that waiting would take longer.
    """
    hold = engine.calls if hold is None else hold
    deadline = time.monotonic() + patience
    while True:
        left = hold.left()
        if left > max(0.0, deadline - time.monotonic()):
            raise RateLimitedError(
                f"{engine.driver.sdk.endpoint} answered 429 a moment ago and is not asked again for {left:.1f} s",
                retry_after=left,
            )
        if left:
            await engine.driver.wait(left, _KEY)
        try:
            result = await call(*args)
        except RateLimitedError as error:
            hold.refuse(error.retry_after)
            if hold.left() > max(0.0, deadline - time.monotonic()):
                raise
        else:
            hold.accept()
            return result
