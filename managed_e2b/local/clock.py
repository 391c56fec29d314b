"""Time as the server sees it: one reading holds both clocks, and tests step a clock of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol


@dataclass(frozen=True)
class Instant:
    """One moment on both clocks: `monotonic` seconds decide, the UTC `wall` time is what answers show."""

    monotonic: float
    wall: datetime


class Clock(Protocol):
    def read(self) -> Instant: ...


class SystemClock:
    """The host's clocks. Deadlines survive a change of the wall clock because they never look at it."""

    def read(self) -> Instant:
        return Instant(time.monotonic(), datetime.now(UTC))


def rfc3339(moment: datetime) -> str:
    """A UTC time as the API writes it: microseconds, and `Z` for the zone."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
