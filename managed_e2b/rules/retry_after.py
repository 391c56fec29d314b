"""What an endpoint means by `Retry-After`, whatever it wrote there."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

from .leases import SECOND

LONGEST = 900.0
"""Seconds. A header that names more is believed this far only: a wrong date must not stop every process for days."""


def seconds(value: str | None, now: int, date: str | None = None) -> float | None:
    """How long to wait, in seconds; None when the header names no time.

    RFC 9110 allows whole seconds and an HTTP-date; fractions, which some proxies send, are understood too. A date is
    counted from the answer's own `date` header, which knows nothing of a client's wrong clock; without one from `now`
    (microseconds UTC). One that has passed is 0. A negative number, an empty value, and anything else are no time: the
    caller backs off by itself.
    """
    text = (value or "").strip()
    # Digits of other scripts would pass `\d`, and a number of a thousand digits is no time either.
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,9})?", text):
        return min(float(text), LONGEST)
    until = _moment(text)
    if until is None:
        return None
    sent = _moment((date or "").strip())
    return min(max(0.0, until - (now / SECOND if sent is None else sent)), LONGEST)


def _moment(text: str) -> float | None:
    """An HTTP-date in seconds since the epoch."""
    if not re.search(r"[A-Za-z]", text) or len(text) > 64:
        return None
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:  # asctime, or "-0000": HTTP-dates are always GMT
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        return None
