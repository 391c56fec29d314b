"""Who must end when: a heap of deadlines, the one alarm that watches its top, and the timetable made of both.

A deadline that changed is simply pushed again; an entry that is no longer true is dropped when it comes up.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from managed_e2b.local.clock import Clock


class Deadlines:
    """The pure half: which keys are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._current: dict[str, float] = {}

    def set(self, key: str, deadline: float) -> None:
        self._current[key] = deadline
        heapq.heappush(self._heap, (deadline, key))
        # deadlines moved often leave stale entries behind: rebuild before they outweigh the true ones
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._current):
            self._heap = [(when, name) for name, when in self._current.items()]
            heapq.heapify(self._heap)

    def discard(self, key: str) -> None:
        self._current.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline, None when there is none."""
        while self._heap:
            deadline, key = self._heap[0]
            if self._current.get(key) == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[str]:
        """Take out the keys whose deadline has come, earliest first."""
        due = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due


class Alarm:
    """The active half: calls `ring` once the moment it was last set for has come. One timer, never a poll."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay: float | None) -> None:
        """Ring in `delay` seconds instead of whenever it was set before; None: not at all."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if delay is not None:
            self._handle = asyncio.get_running_loop().call_later(max(0.0, delay), self._ring)


class Timetable:
    """When each sandbox ends. Calls `ring` when one is due; who is, `due` tells."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._deadlines = Deadlines()
        self._alarm = Alarm(ring)

    def set(self, sandbox_id: str, monotonic: float) -> None:
        """It ends then, by the monotonic clock, and not when it was said before."""
        self._deadlines.set(sandbox_id, monotonic)
        self.rearm()

    def discard(self, sandbox_id: str) -> None:
        """It has no end for now."""
        self._deadlines.discard(sandbox_id)

    def due(self) -> list[str]:
        """Take out those whose end has come. `rearm` afterwards."""
        return self._deadlines.pop_due(self._clock.read().monotonic)

    def rearm(self) -> None:
        deadline = self._deadlines.next()
        self._alarm.set(None if deadline is None else deadline - self._clock.read().monotonic)

    def stop(self) -> None:
        """Ring no more."""
        self._alarm.set(None)
