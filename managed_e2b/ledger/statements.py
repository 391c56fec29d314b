"""The ledger's statements, as data: built once, each change a compare-and-swap that returns the row.

Parameters begin with `p_`. `p_now` is the ledger's clock in microseconds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    bindparam,
    case,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from ..models import State
from ..rules import states
from ..rules.limits import Pace
from .tables import events, owners, rates, sandboxes

c = sandboxes.c
_ticket = c.ticket == bindparam("p_ticket")
_now: ColumnElement[Any] = bindparam("p_now")

BEAT = (
    update(owners)
    .where(owners.c.id == bindparam("p_owner"), owners.c.closed_at.is_(None))
    .values(heartbeat=_now)
    .returning(owners.c.id)
)
CLOSE_OWNER = (
    update(owners).where(owners.c.id == bindparam("p_owner"), owners.c.closed_at.is_(None)).values(closed_at=_now)
)
OWNERS_WITH_OPEN_ROWS = select(owners).where(
    or_(
        owners.c.id.in_(select(c.owner).where(c.account == bindparam("p_account"), c.state.not_in(states.TERMINAL))),
        owners.c.id.in_(
            select(c.claimed_by).where(
                c.account == bindparam("p_account"), c.state == State.CLEANING, c.claimed_by.is_not(None)
            )
        ),
    )
)

OWNERS = select(owners).where(owners.c.id.in_(bindparam("p_owners", expanding=True)))

TELL = insert(events)


# -- the line of an account, as `rules.limits` decides on it

PACE = tuple(Pace.__dataclass_fields__)
"""The columns of `rates` that make a Pace."""

_refused = (c.state == State.CREATING) & c.refused_at.is_not(None)
_in_line = or_(c.state == State.QUEUED, _refused)
_joined: ColumnElement[Any] = bindparam("p_queued_at")
_older = or_(c.queued_at < _joined, (c.queued_at == _joined) & (c.ticket < bindparam("p_ticket")))


def _held(column: str, value: ColumnElement[Any]) -> ScalarSelect[int]:
    """The slots of an owner or an account."""
    held = sandboxes.alias("held")
    rows = select(func.count()).select_from(held).where(held.c[column] == value, held.c.state.in_(states.SLOT_STATES))
    return rows.scalar_subquery()


ASKER = (
    select(
        c.queued_at,
        (c.state == State.CREATING).label("refused"),
        _held("owner", c.owner).label("slots"),
        *(rates.c[name] for name in PACE),
    )
    .outerjoin(rates, (rates.c.account == c.account) & (rates.c.name == "create"))
    .where(_ticket, _in_line)
)


def _ahead(*rows: ColumnElement[bool]) -> Any:
    """Older rows in line, counted by owner. One state at a time, so that the index has them in the order it takes."""
    queued, refused = (
        select(c.owner, literal(kind).label("kind"), func.count().label("rows")).where(*rows, which, _older)
        for kind, which in (("queued", c.state == State.QUEUED), ("refused", _refused))
    )
    return union_all(queued.group_by(c.owner), refused.group_by(c.owner))


AHEAD = _ahead(c.account == bindparam("p_account"))
AHEAD_OF_OWNER = _ahead(c.owner == bindparam("p_owner"), c.account == bindparam("p_account"))
USED = select(_held("account", bindparam("p_account")))
PARTS = select(owners, _held("owner", owners.c.id).label("slots")).where(
    owners.c.id.in_(bindparam("p_owners", expanding=True))
)
PACE_OF_ACCOUNT = select(rates).where(rates.c.account == bindparam("p_account"), rates.c.name == "create")
LATE = (
    update(rates)
    .where(rates.c.account == bindparam("p_account"), rates.c.name == "create")
    .values(tat=rates.c.tat + bindparam("p_by"))
)
# Who asks shows life, too: one that was suspended must not take a slot while it still looks dead.
ASKED = (
    update(owners)
    .where(
        owners.c.id == bindparam("p_owner"),
        or_(
            owners.c.asked_at.is_(None),
            owners.c.asked_at < bindparam("p_before"),
            owners.c.asked_at > _now,  # the clock was set back
        ),
    )
    .values(asked_at=_now, heartbeat=_now)
)


def _change(sources: Collection[State], *conditions: ColumnElement[bool], **values: Any) -> ReturningUpdate[Any]:
    return update(sandboxes).where(_ticket, c.state.in_(sources), *conditions).values(**values).returning(sandboxes)


_claimed_by_me = or_(c.claimed_by.is_(None), c.claimed_by == bindparam("p_actor"))

START = _change([State.QUEUED], state=State.CREATING, creating_at=_now)
REFUSED = _change([State.CREATING], refused_at=_now)
AGAIN = _change([State.CREATING], c.refused_at.is_not(None), refused_at=None)
RUN = _change(
    [State.CREATING],
    state=State.RUNNING,
    sandbox_id=bindparam("p_sandbox_id"),
    remote_expiry=bindparam("p_remote_expiry"),
    hard_deadline=bindparam("p_sent_at") + c.timeout * 1_000_000,
    running_at=_now,
)
PAUSE = _change([State.RUNNING], state=State.PAUSED)
RESUME = _change([State.PAUSED], state=State.RUNNING, remote_expiry=_now)
GIVE_UP = _change([State.QUEUED], state=State.CLEANED, reason=bindparam("p_detail"), ended_at=_now)
CLAIM = _change(
    states.CLEANABLE,
    or_(c.state != State.CLEANING, c.claimed_by.is_(None), c.claimed_by.in_(bindparam("p_claimers", expanding=True))),
    state=State.CLEANING,
    claimed_by=bindparam("p_actor"),
    claimed_at=_now,
    reason=func.coalesce(c.reason, bindparam("p_detail")),  # the first reason stays
    cleaning_at=func.coalesce(c.cleaning_at, _now),
)

# A reaper's writes hold only while the owner whom it judged has not beaten since, and still has the row.
_judged_still = (
    select(owners.c.id)
    .where(owners.c.id == bindparam("p_judged"), owners.c.heartbeat == bindparam("p_heartbeat"))
    .exists()
)
TAKE_OVER = _change(
    states.CLEANABLE,
    case((c.state == State.CLEANING, func.coalesce(c.claimed_by, c.owner)), else_=c.owner) == bindparam("p_judged"),
    _judged_still,
    state=State.CLEANING,
    claimed_by=bindparam("p_actor"),
    claimed_at=_now,
    reason=func.coalesce(c.reason, bindparam("p_detail")),
    cleaning_at=func.coalesce(c.cleaning_at, _now),
)
DROP = _change(
    [State.QUEUED],
    c.owner == bindparam("p_judged"),
    _judged_still,
    state=State.CLEANED,
    reason=bindparam("p_detail"),
    ended_at=_now,
)
CLEANED = _change(states.sources(State.CLEANED) - {State.QUEUED}, _claimed_by_me, state=State.CLEANED, ended_at=_now)
CREATE_FAILED = _change(
    states.sources(State.CREATE_FAILED),
    _claimed_by_me,
    state=State.CREATE_FAILED,
    last_error=bindparam("p_detail"),
    ended_at=_now,
)

FOUND = update(sandboxes).where(_ticket, c.sandbox_id.is_(None)).values(sandbox_id=bindparam("p_sandbox_id"))
EXTENDED = update(sandboxes).where(_ticket, c.state == State.RUNNING).values(remote_expiry=bindparam("p_remote_expiry"))
IDENTIFIED = (
    update(sandboxes)
    .where(_ticket)
    .values(template_id=bindparam("p_template_id"), envd_version=bindparam("p_envd_version"))
)
NOTE = update(sandboxes).where(_ticket).values(last_error=bindparam("p_detail"))
RECORD = select(sandboxes).where(_ticket)
HISTORY = select(events).where(events.c.ticket == bindparam("p_ticket")).order_by(events.c.id)
KNOWN = select(sandboxes).where(
    or_(c.ticket.in_(bindparam("p_tickets", expanding=True)), c.sandbox_id.in_(bindparam("p_ids", expanding=True)))
)
