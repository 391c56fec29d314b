"""Warnings of what fails again and again: at once, then after 1, 2, 4 … 60 seconds, and once more when it works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("managed_e2b")

ENDPOINT = "the endpoint"
LEDGER = "the ledger"
KEEPER = "the keeper"
"""What things fail because of."""

LONGEST = 60.0
"""Seconds between two warnings of one trouble, at most."""


@dataclass
class _Trouble:
    since: float
    items: set[str] = field(default_factory=set)
    failures: int = 0
    told: int = 0
    told_at: float = 0.0
    ended_at: float = 0.0
    is_answered: bool = True
    """No warning is out to which the word that it works again is still owed."""


class Complaints:
    """One a lifecycle, for all that its threads try again. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._troubles: dict[str, _Trouble] = {}

    def failed(self, what: str, item: str, told: str, error: BaseException | None = None) -> None:
        """`item`, which will be tried again, failed because of `what` ("the ledger").

        All items that fail because of the same are one trouble: an endpoint that is down fails a thousand. `error`: its
        traceback is wanted, too.
        """
        with self._lock:
            now = self._clock()
            trouble = self._troubles.get(what)
            # One that comes and goes stays one trouble: else each coming and going would be told.
            if trouble is None or (not trouble.items and now - trouble.ended_at >= LONGEST):
                trouble = self._troubles[what] = _Trouble(now)
            elif not trouble.items and trouble.is_answered:
                trouble.since, trouble.failures = now, 0
            trouble.items.add(item)
            trouble.failures += 1
            if trouble.told and now - trouble.told_at < min(LONGEST, 2.0 ** min(trouble.told - 1, 10)):
                return
            trouble.told += 1
            trouble.told_at = now
            trouble.is_answered = False
            others = len(trouble.items) - 1
            count = f"{trouble.failures} failures in {now - trouble.since:.0f} s"
        more = f" (and {others} more)" if others else ""
        so_far = "" if count.startswith("1 ") else f"; {count}"
        logger.warning("%s: %s%s%s; it is tried again", what, told, more, so_far, exc_info=error)

    def worked(self, item: str) -> None:
        """`item` is done, or is no business of ours any more. Cheap while nothing fails."""
        if not self._troubles:
            return
        over: list[tuple[str, int, float]] = []
        with self._lock:
            now = self._clock()
            for what, trouble in self._troubles.items():
                if item not in trouble.items:
                    continue
                trouble.items.discard(item)
                if trouble.items:
                    continue
                trouble.ended_at = now
                if not trouble.is_answered:
                    trouble.is_answered = True
                    over.append((what, trouble.failures, now - trouble.since))
        for what, failures, seconds in over:
            logger.warning("%s works again, after %d failures in %.0f s", what, failures, seconds)
