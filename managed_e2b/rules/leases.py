"""The dead man's switch: how long the backend itself lets a sandbox live, and when to renew that."""

from __future__ import annotations

import math
import zlib

from ..models import SandboxRecord

SECOND = 1_000_000
"""Microseconds."""

CLOCK_MARGIN = 30 * SECOND
"""How far the backend's timer may lag behind ours before "it must have expired" is believed."""


def first_timeout(timeout: int, lease: int) -> int:
    """Seconds to give the backend at creation: the lease, never past the hard limit."""
    return min(timeout, lease)


def renewal(record: SandboxRecord, now: int) -> int | None:
    """Seconds to set as the remote timeout now, or None while no renewal is due.

    Due once half the lease is used up. The remote expiry never passes the hard deadline; when it has
    already reached that, nothing is renewed any more and the backend ends the sandbox.
    """
    if record.hard_deadline is None or record.remote_expiry is None:
        return None
    if record.remote_expiry >= record.hard_deadline or now >= record.hard_deadline:
        return None
    # More than a whole lease left cannot be: the clock was set back, and the time of the last renewal is not known.
    if record.lease * SECOND // 2 < record.remote_expiry - now <= record.lease * SECOND:
        return None
    return max(1, math.ceil(min(record.lease * SECOND, record.hard_deadline - now) / SECOND))


def must_have_expired(record: SandboxRecord, now: int) -> bool:
    """Whether a sandbox whose create was sent, but whose answer never came, cannot be running any more.

    The request carried a timeout of `first_timeout` seconds and nobody renews what nobody knows.
    """
    if record.creating_at is None:
        return True
    sent_until = record.cleaning_at or record.creating_at
    return now > sent_until + first_timeout(record.timeout, record.lease) * SECOND + CLOCK_MARGIN


def beat_interval(lease: int, stale_after: int) -> float:
    """Seconds between two rounds of the keeper: four within the shorter of lease and staleness, at most 30."""
    return max(0.2, min(lease / 4, stale_after / 4, 30.0))


def first_beat(owner: str, interval: float) -> float:
    """Seconds until the first of an owner's rounds, above 0 and at most `interval`: always the same for one owner.

    Those of many that were started together are spread over the interval, and so are all that follow.
    """
    return interval * (1 - zlib.crc32(owner.encode()) / 2**32)
