"""What a failed create proves, and what to do next."""

from __future__ import annotations

import enum

from ..errors import (
    AuthenticationError,
    BackendError,
    BackendUnavailableError,
    RateLimitedError,
    TemplateNotFoundError,
    TemplateOutdatedError,
)


class Verdict(enum.Enum):
    """What a failed create tells."""

    REFUSED = "refused"
    """The endpoint said no to the request itself: trying again changes nothing."""
    SLOW_DOWN = "slow down"
    """Try again later, the same request."""
    NOT_SENT = "not sent"
    """The endpoint was never reached."""
    UNKNOWN = "unknown"
    """It may have taken effect."""


def create_verdict(error: BackendError) -> Verdict:
    """Judge a failed create by type and status. What is not recognised is UNKNOWN, never 'nothing happened'."""
    if isinstance(error, RateLimitedError):
        return Verdict.SLOW_DOWN
    if isinstance(error, AuthenticationError | TemplateNotFoundError | TemplateOutdatedError):
        return Verdict.REFUSED
    if isinstance(error, BackendUnavailableError):
        return Verdict.NOT_SENT
    if error.status is not None and 400 <= error.status < 500 and error.status not in (408, 409, 425):
        return Verdict.REFUSED
    return Verdict.UNKNOWN


def backoff(attempt: int, *, base: float = 0.05, cap: float = 2.0) -> float:
    """Seconds before try number `attempt` (from 0): exponential, bounded."""
    return float(min(cap, base * 2 ** min(attempt, 16)))
