"""How often the spawner may die before the runtime gives up."""

from __future__ import annotations

from collections import deque

MOST = 3
"""Deaths within `WINDOW` after which a new one is still started."""
WINDOW = 60.0
"""Seconds."""


class Deaths:
    """Those of the last `WINDOW` seconds, by a monotonic clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self, now: float) -> bool:
        """Count one. False when there were too many: whatever kills it would kill the next one too."""
        self._times.append(now)
        while self._times[0] <= now - WINDOW:
            self._times.popleft()
        return len(self._times) <= MOST
