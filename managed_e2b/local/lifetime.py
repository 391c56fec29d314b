"""How long a sandbox lives: the rules of timeouts, as values. Pure: every rule is given `now`.

All lengths are seconds. The longest life is counted from the start (a resume is a new start), as upstream does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from managed_e2b.local.clock import Instant
from managed_e2b.local.errors import ApiError, bad_request

DEFAULT_TIMEOUT = 300
DEFAULT_TIMEOUT_V1 = 15
MINIMUM_REFRESH = 15
MAX_LENGTH_HOURS = 24
MAX_LENGTH = MAX_LENGTH_HOURS * 3600


def timeout_for_create(asked: int | None, default: int) -> int:
    """The time to live of a new sandbox. Raises ApiError(400) for what can't be one."""
    if asked is None:
        return default
    if asked <= 0:
        raise bad_request("Timeout must be greater than 0")
    if asked > MAX_LENGTH:
        raise bad_request(f"Timeout cannot be greater than {MAX_LENGTH_HOURS} hours")
    return asked


def timeout_for_connect(asked: int | None) -> int:
    """How long a connected sandbox lives at least. Raises ApiError(400) for what can't be a time to live."""
    if asked is None:
        return DEFAULT_TIMEOUT
    if asked < 0:
        raise bad_request("Timeout must not be negative")
    if asked > MAX_LENGTH:
        raise bad_request(f"Timeout cannot be greater than {MAX_LENGTH_HOURS} hours")
    return asked


@dataclass(frozen=True)
class Lifetime:
    """When a running sandbox started and when it ends."""

    start: Instant
    end: Instant

    @classmethod
    def begin(cls, now: Instant, seconds: float) -> Lifetime:
        return cls(now, _after(now, seconds))

    def reset(self, now: Instant, seconds: float) -> Lifetime:
        """set_timeout: the end becomes `now + seconds`, sooner or later than before; negative means now.

        Silently cut at the longest life; ApiError(400) once that has passed.
        """
        left = self.start.monotonic + MAX_LENGTH - now.monotonic
        if left <= 0:
            raise ApiError(400, "Max instance length exceeded")
        return replace(self, end=_after(now, min(max(seconds, 0.0), left)))

    def extend(self, now: Instant, seconds: float) -> Lifetime:
        """connect and refresh: the end becomes `now + seconds` if that is later than it was, else stays the same."""
        left = self.start.monotonic + MAX_LENGTH - now.monotonic
        end = _after(now, min(seconds, left))
        return replace(self, end=end) if end.monotonic > self.end.monotonic else self

    def stopped(self, now: Instant) -> Lifetime:
        """A pause: it ended now, as far as answers show."""
        return replace(self, end=now)

    def over(self, now: Instant) -> bool:
        return now.monotonic >= self.end.monotonic


def _after(now: Instant, seconds: float) -> Instant:
    return Instant(now.monotonic + seconds, now.wall + timedelta(seconds=seconds))
