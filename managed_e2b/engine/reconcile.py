"""Ledger and backend compared, one id at a time: rows by the backend's per-id answer, listed ids by their rows.

It ends what is proved: the row of a sandbox that the backend, asked for its id, does not know any more, and the
sandbox of a row that has ended. No row is ever closed because of a list.
"""

from __future__ import annotations

from ..errors import AuthenticationError, BackendError
from ..models import Compared, ReconcileKind, ReconcileReport, SandboxRecord, State
from ..rules import cleanup, endings, states
from ..rules.cleanup import Judgement, Kind
from . import foreign
from .base import Engine
from .patience import patiently
from .reap import Bounds, alive


async def reconcile(engine: Engine, *, one_backend: bool, bounds: Bounds | None = None) -> ReconcileReport:
    """Compare the rows of this account that hold a slot, and what the backend lists.

    `one_backend`: whether all owners of the account use one backend. Otherwise those of other live owners cannot be
    asked for. Raises AuthenticationError.
    """
    d, book = engine.driver, engine.book
    limits = bounds or Bounds()
    items: list[Compared] = []
    wanted = states.SLOT_STATES | {State.PAUSED}
    records = await d.ledger(book.records, states_=wanted, account=engine.account)
    now = await d.ledger(book.now)
    owners = {
        owner.id: alive(owner, now) for owner in await d.ledger(book.known_owners, {row.owner for row in records})
    }
    for record in records:
        if (cut := limits.cut(len(items))) is not None:
            return ReconcileReport(tuple(items), cut)
        if one_backend or record.owner == engine.owner or not owners[record.owner]:
            item = await _row(engine, record, owner_alive=owners[record.owner])
        else:
            item = _compared(record, "unknown", "it is on the local server of another process")
        if item is not None:
            items.append(item)
    seen = await foreign.survey(engine, limits)
    for sandbox, judgement in seen.found:
        if judgement.kind is not Kind.LEFT:
            continue
        if (cut := limits.cut(len(items))) is not None:
            return ReconcileReport(tuple(items), cut)
        action, why = await foreign.end(engine, sandbox, judgement, cleanup.EVERY, seen.now)
        if action in ("cleaned", "pending"):
            items.append(_untracked(sandbox.sandbox_id, judgement, why, ended=action == "cleaned"))
    return ReconcileReport(tuple(items), seen.cut)


async def _row(engine: Engine, record: SandboxRecord, *, owner_alive: bool) -> Compared | None:
    """Compare one row. None when it has ended meanwhile, as sandboxes do."""
    d = engine.driver
    if record.state is State.CLEANING:
        return _compared(record, "ending", record.last_error or "its end is not proved yet")
    if record.sandbox_id is None:
        return _compared(record, "unknown", "its create is not answered yet")
    try:
        found = await patiently(engine, d.sdk.info, record.sandbox_id)
    except AuthenticationError:
        raise
    except BackendError as error:
        return _compared(record, "unknown", f"{type(error).__name__}: {error}")
    if found is None:
        return await _vanished(engine, record, owner_alive=owner_alive)
    if not owner_alive and record.state is not State.PAUSED:
        return _compared(record, "orphaned", f"owner {record.owner} is dead, and it is {found.state}")
    kind: ReconcileKind = "paused" if found.state == "paused" else "running"
    return _compared(record, kind, f"the row says {record.state}, the backend {found.state}")


async def _vanished(engine: Engine, record: SandboxRecord, *, owner_alive: bool) -> Compared | None:
    """End the row, if it is ours to end: a live owner learns it by itself, and tells its user."""
    d = engine.driver
    current = await d.ledger(engine.book.record, record.ticket)
    if current is None or current.state is not record.state:
        return None
    why = f"the row says {record.state}, the backend knows nothing of the id"
    if owner_alive and record.owner != engine.owner:
        return _compared(record, "vanished", why)
    ending = endings.judge(current, endings.Answer.NOT_FOUND, await d.ledger(engine.book.now))
    reason = why if ending is None else ending.reason
    ended = await d.finish(engine.clean, record.ticket, reason, patience=0.0)
    return _compared(record, "vanished", reason, ended=ended)


def _compared(record: SandboxRecord, kind: ReconcileKind, why: str, *, ended: bool = False) -> Compared:
    return Compared(record.ticket, record.sandbox_id, record.owner, kind, why, ended)


def _untracked(sandbox_id: str, judgement: Judgement, why: str, *, ended: bool) -> Compared:
    return Compared(judgement.ticket, sandbox_id, judgement.owner, "untracked", why, ended)
