"""Whose sandboxes may be ended by somebody else, decided from what the ledger and the backend's list say.

Two questions: which rows of the ledger are due (`due`), and what a listed sandbox is to this ledger (`judge`).
What is not understood is left alone; a list proves nothing here but that it is worth asking for an id.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import ValidationError
from ..models import RemoteSandbox, SandboxRecord, State
from . import states
from .leases import SECOND

TICKET = "me2b_ticket"
OWNER = "me2b_owner"
"""Metadata keys on every sandbox of ours: which row of a ledger it belongs to, and whose it is."""

OWNER_DEAD = "its owner is dead"
"""How the reason of a row begins that a reaper ended."""


@dataclass(frozen=True)
class Want:
    """Which sandboxes a pass is about; all by default. Each condition that is given must hold."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """These pairs are among the sandbox's."""
    template: str | None = None
    older_than: float = 0
    """Seconds since its create."""

    def row(self, record: SandboxRecord, now: int) -> bool:
        """Whether a row of the ledger is meant."""
        return (
            self.metadata.items() <= record.metadata.items()
            and self.template in (None, record.source)
            and self._is_old(age(record, now))
        )

    def listed(self, sandbox: RemoteSandbox, now: int) -> bool:
        """Whether a listed sandbox is meant; `now` is the backend's clock, see `backend_now`."""
        return (
            self.metadata.items() <= sandbox.metadata.items()
            and self.template in (None, sandbox.template, sandbox.alias)
            and self._is_old((now - sandbox.started_at) / SECOND)
        )

    def _is_old(self, seconds: float) -> bool:
        return self.older_than <= 0 or seconds >= self.older_than


EVERY = Want()


def wanted(
    metadata: Mapping[str, str] | None,
    template: str | None,
    older_than: float | None,
    *,
    purge_foreign: bool,
    include_other_ledgers: bool,
    lease: int,
) -> Want:
    """The filters of a reap. Raises ValidationError for what can hold for no sandbox, or for too many."""
    if metadata is not None and not (
        isinstance(metadata, Mapping) and all(isinstance(part, str) for pair in metadata.items() for part in pair)
    ):
        raise ValidationError(f"reap(metadata={metadata!r}): a mapping of str to str")
    if template is not None and (not isinstance(template, str) or not template):
        raise ValidationError(f"reap(template={template!r}): the name or id of a template")
    if older_than is not None and (
        isinstance(older_than, bool) or not isinstance(older_than, int | float) or not 0 <= older_than < math.inf
    ):
        raise ValidationError(f"reap(older_than={older_than!r}): seconds, from 0")
    if include_other_ledgers and not purge_foreign:
        raise ValidationError("reap(include_other_ledgers=True) is about foreign sandboxes: add purge_foreign=True")
    if include_other_ledgers and (older_than is None or older_than < lease):
        raise ValidationError(
            f"reap(include_other_ledgers=True) needs older_than of {lease} seconds (a lease) or more: nobody here can "
            "tell whether those owners live, and what they have just made is the likeliest to be in use"
        )
    return Want(dict(metadata or {}), template, older_than or 0)


def age(record: SandboxRecord, now: int) -> float:
    """Seconds since a row's create was sent, or since it joined the line."""
    return (now - (record.creating_at or record.queued_at)) / SECOND


def backend_now(listed: Iterable[RemoteSandbox], now: int) -> int:
    """The backend's clock as its list bounds it, where ours is wrong: nothing in it started in the future, and
    nothing that runs is past its end. Never later than `now` unless the list proves it.
    """
    sandboxes = list(listed)
    latest = max([now, *(sandbox.started_at for sandbox in sandboxes)])
    return min([latest, *(sandbox.end_at for sandbox in sandboxes if sandbox.state == "running")])


# -- rows of the ledger -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Due:
    """A row that may be taken over from `holder`, its owner or its cleaner; not to be ended when `kept` says why."""

    record: SandboxRecord
    holder: str
    why: str
    kept: str | None = None


def due(records: Iterable[SandboxRecord], dead: Collection[str], me: str, want: Want, now: int) -> list[Due]:
    """Rows whose holder is dead, or that a pass of mine took from one. Those that were tried before come last."""
    found = [item for record in records if want.row(record, now) and (item := _due(record, dead, me)) is not None]
    return sorted(found, key=lambda item: (item.record.claimed_at or 0, item.record.queued_at))


def _due(record: SandboxRecord, dead: Collection[str], me: str) -> Due | None:
    if record.state in states.TERMINAL:
        return None
    cleaner = record.claimed_by if record.state is State.CLEANING else None
    holder = cleaner or record.owner
    mine = cleaner == me and record.owner != me and record.owner in dead
    if holder not in dead and not mine:
        return None
    if cleaner is None or mine:
        why = f"owner {record.owner} is dead; the row was {record.state}"
    else:
        why = f"{cleaner}, who was cleaning it, is dead"
    kept = "it was paused on purpose: resume it, or kill it by id" if record.state is State.PAUSED else None
    return Due(record, holder, why, kept)


# -- sandboxes of the backend's list ------------------------------------------------------------------------


class Kind(enum.Enum):
    """What a listed sandbox is to this ledger."""

    TRACKED = "tracked"
    """An open row holds it: that row decides, never the list."""
    HELD = "held"
    """Its owner lives, whatever the ledger knows of the sandbox."""
    LEFT = "left"
    """Ours, and nobody can be using it: its row has ended, or another sandbox answers that ticket."""
    OTHER_LEDGER = "other ledger"
    """It carries the marks of an owner that this ledger has never heard of: that one may well be alive."""
    FOREIGN = "foreign"
    """Nothing of this package made it."""


@dataclass(frozen=True)
class Judgement:
    """What a listed sandbox is, and what says so."""

    kind: Kind
    why: str
    ticket: str | None = None
    owner: str | None = None


def judge(
    sandbox: RemoteSandbox,
    by_id: SandboxRecord | None,
    by_ticket: SandboxRecord | None,
    owners: Mapping[str, bool],
    me: str,
) -> Judgement:
    """Judge a listed sandbox.

    `by_id`, `by_ticket`: the ledger's rows for its id and for the ticket it carries, read *after* the list: a
    row is durable before its create is sent. `owners`: whether each owner this ledger knows is alive.
    """
    ticket, owner = sandbox.metadata.get(TICKET), sandbox.metadata.get(OWNER)
    if by_id is not None:
        made = Judgement(Kind.TRACKED, f"its row is {by_id.state}", by_id.ticket, by_id.owner)
        return made if by_id.state not in states.TERMINAL else _ended(by_id)
    if by_ticket is not None:
        if by_ticket.state in states.TERMINAL:
            return _ended(by_ticket)
        if by_ticket.sandbox_id is None:
            return Judgement(Kind.TRACKED, "its create is being answered or looked for", ticket, by_ticket.owner)
        if by_ticket.owner != me and owners.get(by_ticket.owner, True):
            return Judgement(Kind.HELD, "its owner lives", ticket, by_ticket.owner)
        why = f"a second sandbox of one create: {by_ticket.sandbox_id} is the one in use"
        return Judgement(Kind.LEFT, why, ticket, by_ticket.owner)
    if owner is not None and owner in owners:
        if owners[owner]:
            return Judgement(Kind.HELD, "its owner lives", ticket, owner)
        return Judgement(Kind.LEFT, f"owner {owner} is dead, and the ledger has no row of it", ticket, owner)
    if ticket is not None or owner is not None:
        return Judgement(Kind.OTHER_LEDGER, "it belongs to an owner that this ledger does not know", ticket, owner)
    return Judgement(Kind.FOREIGN, "nothing of managed-e2b made it")


def _ended(record: SandboxRecord) -> Judgement:
    return Judgement(Kind.LEFT, f"its row has ended ({record.reason or record.state})", record.ticket, record.owner)


def purgeable(kind: Kind, *, include_other_ledgers: bool) -> bool:
    """Whether `purge_foreign` ends it."""
    return kind in (Kind.LEFT, Kind.FOREIGN) or (kind is Kind.OTHER_LEDGER and include_other_ledgers)
