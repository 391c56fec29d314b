"""Who may create now: caps and the create rate, decided from numbers that one transaction read."""

from __future__ import annotations

from dataclasses import dataclass

from .leases import SECOND


@dataclass(frozen=True)
class Caps:
    """Limits as configured. None is no limit.

    `max_concurrent` counts this lifecycle's sandboxes, `account_limit` those of all lifecycles that share
    ledger and account; `create_rate` is creates per second over all of them.
    """

    max_concurrent: int
    account_limit: int | None = None
    create_rate: float | None = None


@dataclass(frozen=True)
class Load:
    """What the ledger says at `now`. Slots are rows in `rules.states.SLOT_STATES`."""

    now: int
    own_slots: int
    account_slots: int
    ahead: int
    """Queued rows that are older and may go before this one."""
    tat: int
    """GCRA's theoretical arrival time: the first moment at which the next create conforms."""


@dataclass(frozen=True)
class Go:
    """Create now. `tat` is the rate's new theoretical arrival time."""

    tat: int


@dataclass(frozen=True)
class Wait:
    """Not yet. `seconds` until the rate allows it, None when a slot must come free first."""

    seconds: float | None
    why: str


def turn(caps: Caps, load: Load) -> Go | Wait:
    """Whether the asking row may become `creating`. GCRA with a burst of one: creates are evenly spaced."""
    if load.ahead:
        return Wait(None, "others are in line before it")
    if load.own_slots >= caps.max_concurrent:
        return Wait(None, f"max_concurrent={caps.max_concurrent} of this lifecycle is in use")
    if caps.account_limit is not None and load.account_slots >= caps.account_limit:
        return Wait(None, f"account_limit={caps.account_limit} of this account is in use")
    if load.tat > load.now:
        return Wait((load.tat - load.now) / SECOND, "the create rate")
    step = int(SECOND / caps.create_rate) if caps.create_rate else 0
    return Go(load.now + step)
