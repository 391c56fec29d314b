"""Who may create now: caps, the create rate, and the pace after a 429, decided from numbers that one transaction read.

The line is one per account. A row may go when there is a slot, and time in the rate, for it *and* for every older row
that could go as well: so the oldest go first, several at once where there is room, and nobody waits behind a row that
its own lifecycle's `max_concurrent` holds back, or whose owner has stopped asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import retry_after
from .leases import SECOND

MARGIN = 0.03
"""The rate is aimed this much below the configured one, which makes room for creates that are a little late."""

LATE = SECOND // 100
"""A create that is sent so long after its turn moves the ones after it: they were reckoned from its turn."""

PRESENT = 10 * SECOND
"""An owner that has not asked for so long does not hold up the line: it is dead, suspended, or its loop is blocked."""

ASK = 2.5
"""The most seconds between two questions of an owner that is in line; several of them fit into PRESENT."""

_NEAR, _FAR, _PATIENT = 0.1, 2.0, 4
"""Seconds between two questions of who waits for another's slot: of the first in line, and of those far behind. Both
ask up to so many times more rarely the longer they wait."""

_NUDGE = 0.02
"""The fewest seconds between two looks of one who is behind others."""

FIRST_GAP = SECOND // 5
LONGEST_GAP = 20 * SECOND
SHORTEST_GAP = SECOND // 10
"""Microseconds between two creates of an account after a 429: to begin with, at most, and when it ends again."""

RECOVERY = 0.5
"""Creates per second that every create which is not refused adds to the pace."""

LEAST_HOLD = SECOND // 2
LONGEST_HOLD = int(retry_after.LONGEST * SECOND)
"""Microseconds for which nobody creates after a 429: the least when it names no time, the most when it does."""


@dataclass(frozen=True)
class Caps:
    """Limits as configured. None is no limit.

    `max_concurrent` counts this lifecycle's sandboxes, `account_limit` those of all lifecycles that share
    ledger and account; `create_rate` is creates per second over all of them.
    """

    max_concurrent: int
    account_limit: int | None = None
    create_rate: float | None = None

    @property
    def step(self) -> int:
        """Microseconds between two creates; 0 without a rate."""
        return int(SECOND / self.create_rate * (1 + MARGIN)) if self.create_rate else 0

    @property
    def tolerance(self) -> int:
        """How late a turn may be asked for without moving the ones after it.

        It is what MARGIN spares within a second (or within 1/rate, if that is longer) beyond LATE: in every window of
        that length no more creates are sent than the configured rate allows.
        """
        return int(MARGIN * SECOND * max(1.0, 1 / self.create_rate)) - LATE if self.create_rate else 0


@dataclass(frozen=True)
class Part:
    """One owner's part of the line. Slots are rows in `rules.states.SLOT_STATES`; what is "ahead" is older."""

    owner: str
    slots: int
    queued_ahead: int
    refused_ahead: int
    """Rows that hold a slot already and wait for their next try, after a 429."""
    max_concurrent: int | None = None
    """None: unknown, because a version that did not tell wrote the row."""
    asked_at: int | None = None
    """When it last asked for its turn."""

    def could_go(self, now: int) -> int:
        """How many of its older rows could take a slot, were there enough."""
        if not self.is_present(now):
            return 0
        room = self.queued_ahead if self.max_concurrent is None else max(0, self.max_concurrent - self.slots)
        return min(self.queued_ahead, room)

    def is_present(self, now: int) -> bool:
        # "From the future": the clock was set back, and nobody knows when that was.
        return self.asked_at is not None and abs(now - self.asked_at) <= PRESENT


@dataclass(frozen=True)
class Pace:
    """How fast an account may create; one row of the ledger, shared by all processes. Times in microseconds.

    `tat` is GCRA's theoretical arrival time: the first moment at which the next create conforms. `gap` is the time
    between two creates that 429s have led to (0: none). Until `held_until` nobody creates. Answers to creates that
    were sent before `slowed_at` say nothing new.
    """

    tat: int = 0
    gap: int = 0
    held_until: int = 0
    slowed_at: int = 0

    def at(self, now: int, step: int) -> Pace:
        """The same, without times that a clock which has been set back since cannot have meant."""
        return Pace(
            tat=self.tat if self.tat - now <= max(step, LONGEST_GAP) else now,
            gap=self.gap,
            held_until=self.held_until if self.held_until - now <= LONGEST_HOLD else now,
            slowed_at=min(self.slowed_at, now),
        )


@dataclass(frozen=True)
class Load:
    """What the ledger says at `now`: the asker's part, those of the owners with older rows, the account's pace."""

    now: int
    mine: Part
    others: Sequence[Part] = ()
    used: int = 0
    """Slots of the whole account. Read only where there is an `account_limit`."""
    pace: Pace = Pace()
    refused: bool = False
    """The asking row holds a slot already: its create was answered by a 429, and it is to be tried again."""


@dataclass(frozen=True)
class Go:
    """Create now, at `at`. `pace` is the account's new one."""

    pace: Pace
    at: int


@dataclass(frozen=True)
class Wait:
    """Not yet. `seconds` until the rate allows it, None when a slot must come free first."""

    seconds: float | None
    why: str
    ahead: int = 0
    """How many go before it."""
    own: bool = False
    """It is this lifecycle itself that holds the slots."""

    @property
    def is_appointment(self) -> bool:
        """Whether it may go when its seconds have passed, whatever others do."""
        return self.seconds is not None and not self.ahead


def is_alone(caps: Caps, pace: Pace) -> bool:
    """Whether nothing that other owners do matters to the asker."""
    return caps.account_limit is None and not caps.create_rate and not pace.gap


def turn(caps: Caps, load: Load) -> Go | Wait:
    """Whether the asking row may create now."""
    now, mine = load.now, load.mine
    pace = load.pace.at(now, caps.step)
    ahead = sum(part.could_go(now) for part in load.others)
    if not load.refused:
        if mine.slots + mine.queued_ahead >= caps.max_concurrent:
            why = f"max_concurrent={caps.max_concurrent} of this lifecycle is in use"
            if mine.slots < caps.max_concurrent:
                why = "others of this lifecycle are in line before it"
            return Wait(None, why, ahead + mine.queued_ahead, own=True)
        ahead += mine.queued_ahead
    if caps.account_limit is not None:
        if not load.refused and load.used + ahead >= caps.account_limit:
            why = f"account_limit={caps.account_limit} of this account is in use"
            if load.used < caps.account_limit:
                why = "others are in line before it"
            return Wait(None, why, ahead)
        ahead = min(ahead, max(0, caps.account_limit - load.used))
    ahead += mine.refused_ahead + sum(part.refused_ahead for part in load.others if part.is_present(now))
    step = max(caps.step, pace.gap)
    ready = max(pace.tat if step else 0, pace.held_until) + ahead * step
    if now < ready:
        held = pace.gap > caps.step or now < pace.held_until
        return Wait((ready - now) / SECOND, "the endpoint answered 429" if held else "the create rate", ahead)
    return Go(replace(pace, tat=max(pace.tat, now - caps.tolerance) + step), now)


def lateness(go: Go, caps: Caps, sent_at: int) -> int:
    """Microseconds by which the ones after a create must wait longer, because it is sent at `sent_at` only."""
    late = sent_at - go.at
    return late if late > LATE and max(caps.step, go.pace.gap) else 0


def pause(wait: Wait, asked: int, jitter: float) -> float:
    """Seconds until the next question, after `asked` of them. A time in the rate is kept exactly by the first in line.

    Who is behind others looks again half-way there: some may leave, or die, and the time that was kept for them is
    lost if nobody takes it. `jitter` in [0, 1) spreads those who ask.
    """
    spread = 0.8 + 0.2 * jitter
    if wait.seconds is not None:
        if wait.ahead:
            return min(max(_NUDGE, wait.seconds / 2), ASK) * spread
        return max(0.001, wait.seconds if wait.seconds < ASK else ASK * spread)
    if wait.own:  # a release wakes it before
        return ASK * spread
    return min(_FAR, _NEAR * (1 + wait.ahead) * min(_PATIENT, 1.05 ** min(asked, 100))) * spread


def slowed(pace: Pace, caps: Caps, now: int, sent_at: int, wait: float | None, jitter: float) -> Pace:
    """The pace after a 429 for a create that was sent at `sent_at`.

    The rate is halved, once for all creates that were under way together. `wait`, the seconds of a Retry-After, holds
    everybody for so long; without one they are held for a gap (so repeated 429s back off exponentially) and up to a
    quarter of it more: `jitter` in [0, 1).
    """
    pace = pace.at(now, caps.step)
    fresh = sent_at >= pace.slowed_at
    gap, held_until = pace.gap, pace.held_until
    if fresh:
        gap = min(max(FIRST_GAP, 2 * max(gap, caps.step)), max(LONGEST_GAP, caps.step))
    if wait is not None:
        held_until = max(held_until, now + min(int(wait * SECOND), LONGEST_HOLD))
    elif fresh:
        held_until = max(held_until, now + int(max(gap, LEAST_HOLD) * (1 + jitter / 4)))
    return replace(pace, gap=gap, held_until=held_until, slowed_at=now if fresh else pace.slowed_at)


def recovered(pace: Pace, caps: Caps, now: int, sent_at: int) -> Pace:
    """The pace after a create that was not refused: a little faster, until 429s limit it no more."""
    pace = pace.at(now, caps.step)
    if not pace.gap or sent_at < pace.slowed_at:
        return pace
    gap = int(SECOND / (SECOND / pace.gap + RECOVERY))
    return replace(pace, gap=0 if gap <= max(caps.step, SHORTEST_GAP) else gap)
