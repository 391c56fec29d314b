"""How a sandbox ended: decided from its row in the ledger and from what the backend says of its id.

The row comes first: who ended a sandbox on purpose wrote there why before the backend was asked to. Only when the row
is still open does the backend's answer decide, and an answer that did not come decides nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import (
    SandboxExpiredError,
    SandboxGoneError,
    SandboxKilledError,
    SandboxLapsedError,
    SandboxLostError,
    SandboxPausedError,
    SandboxReapedError,
    SandboxReleasedError,
)
from ..models import RemoteSandbox, SandboxRecord, State
from . import states
from .leases import SECOND

OWNER_DEAD = "its owner is dead"
"""How the reason of a row begins that a reaper ended."""

_BY_NAME: dict[str, type[SandboxGoneError]] = {
    kind.ending: kind for kind in (SandboxExpiredError, SandboxKilledError, SandboxLapsedError, SandboxLostError)
}
"""Endings whose name is the first word of the row's reason: `lost: …`."""

_BY_OWNER = ("released", "shutdown", "cancelled", "interrupted", "raised ", "abandoned", "gave up waiting")
"""How reasons begin that only an owner gives. The first reason stays, also when another has to finish the cleanup."""


class Answer(enum.Enum):
    """What the backend says, asked for one id."""

    RUNNING = "running"
    PAUSED = "paused"
    NOT_FOUND = "not found"
    UNKNOWN = "unknown"
    """It could not be asked, or said something else: that proves nothing."""


@dataclass(frozen=True)
class Ending:
    """How it ended, and the reason in words, as the ledger keeps it."""

    kind: type[SandboxGoneError]
    reason: str


def answer_of(found: RemoteSandbox | None) -> Answer:
    """The meaning of a per-id answer; None is a 404. A state that is not known here proves nothing."""
    if found is None:
        return Answer.NOT_FOUND
    return {"running": Answer.RUNNING, "paused": Answer.PAUSED}.get(found.state, Answer.UNKNOWN)


def recorded(record: SandboxRecord) -> Ending | None:
    """The ending that the ledger itself tells of; None while the row is open."""
    if record.state is not State.CLEANING and record.state not in states.TERMINAL:
        return None
    reason = record.reason or "released"
    if (named := _BY_NAME.get(reason.partition(":")[0])) is not None:
        return Ending(named, reason)
    if record.claimed_by in (None, record.owner) or reason.startswith(_BY_OWNER):
        return Ending(SandboxReleasedError, reason)
    return Ending(SandboxReapedError if reason.startswith(OWNER_DEAD) else SandboxKilledError, reason)


def judge(record: SandboxRecord, answer: Answer, now: int, *, released: bool = False) -> Ending | None:
    """How a sandbox ended, or None when it is not known to have ended.

    `now` is the ledger's clock after the answer came. `released`: its holder has let go of it, and the row does not
    tell yet.
    """
    if (known := recorded(record)) is not None:
        return known
    if released:
        return Ending(SandboxReleasedError, record.reason or "released")
    if answer is Answer.PAUSED:
        return Ending(SandboxPausedError, "paused: at the backend, by somebody else or at the end of its lease")
    if answer is Answer.NOT_FOUND:
        return _vanished(record, now)
    return None


def _vanished(record: SandboxRecord, now: int) -> Ending:
    """The backend does not know the id of an open row: by whose clock has it ended?

    The row's times count from before the requests went out, so a sandbox that ran out of time at the backend has
    always run out of it here.
    """
    if record.hard_deadline is not None and now >= record.hard_deadline:
        return Ending(SandboxExpiredError, f"expired: its timeout of {record.timeout} s has passed")
    if record.remote_expiry is not None and now >= record.remote_expiry:
        late = (now - record.remote_expiry) / SECOND
        return Ending(
            SandboxLapsedError, f"lapsed: its lease of {record.lease} s was not renewed (noticed {late:.1f} s later)"
        )
    lived = (
        "" if record.running_at is None else f" after {(now - record.running_at) / SECOND:.1f} of {record.timeout} s"
    )
    return Ending(
        SandboxLostError,
        f"lost: the backend does not know it any more{lived}; lost by the provider, or killed outside of this ledger",
    )
