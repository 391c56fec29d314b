"""Noticing that a sandbox has ended: ask for its id, decide, write it down, and say it to whoever uses it."""

from __future__ import annotations

from ..errors import BackendError, Me2bError, SandboxGoneError, SandboxPausedError, SandboxUnreachableError
from ..models import SandboxRecord, State
from ..rules import endings
from ..rules.endings import Answer, Ending
from .base import Acquired, Engine
from .patience import patiently

_PATIENCE = 5.0
"""Seconds for which the backend is asked what became of a sandbox while it answers 429."""


async def ensure_held(engine: Engine, acquired: Acquired) -> None:
    """Raise the error that says how the sandbox ended when the handle was released, or while it is paused."""
    if acquired.released or acquired.paused:
        record, ending, answer = await _look(engine, acquired)
        if ending is not None:
            raise await _gone(engine, acquired, record, ending)
        acquired.paused = answer is not Answer.RUNNING and acquired.paused


async def why_failed(engine: Engine, acquired: Acquired, error: BackendError) -> Me2bError:
    """What to raise for a call into a sandbox that got no proper answer.

    How the sandbox ended, if it is known to have ended; its row ends with that, too. Else that it cannot be reached.
    """
    record, ending, answer = await _look(engine, acquired)
    if ending is not None:
        return await _gone(engine, acquired, record, ending)
    running = True if answer is Answer.RUNNING else None
    known = "it runs, says the backend" if running else "the backend does not say whether it runs"
    kind = engine.driver.sdk.error(SandboxUnreachableError)
    return kind(
        f"sandbox {acquired.sandbox_id} does not answer, and {known}: {error}", status=error.status, running=running
    )


async def notice(engine: Engine, record: SandboxRecord) -> Ending | None:
    """Ask how the sandbox of an open row is, and write down its end. None: it runs, or nobody knows."""
    ending, answer = await _judge(engine, record, released=False)
    await _write(engine, record, ending, answer)
    return ending


async def of_row(engine: Engine, ticket: str) -> SandboxGoneError:
    """The error for a row that somebody has ended, whatever it was waiting for."""
    record = await engine.driver.ledger(engine.book.record, ticket)
    ending = endings.recorded(record) if record is not None else None
    kind = engine.driver.sdk.error(ending.kind if ending is not None else SandboxGoneError)
    return kind(
        f"the request was ended meanwhile ({ending.reason if ending is not None else 'its row is gone'})",
        sandbox_id=record.sandbox_id if record is not None else None,
        reason=ending.reason if ending is not None else None,
        ticket=ticket,
        ended_at=record.ended_at if record is not None else None,
        noticed_at=await engine.driver.ledger(engine.book.now),
    )


async def _look(engine: Engine, acquired: Acquired) -> tuple[SandboxRecord | None, Ending | None, Answer]:
    record = await engine.driver.ledger(engine.book.record, acquired.ticket)
    if record is None:  # somebody has emptied the ledger under us
        answer = await _ask(engine, acquired.sandbox_id)
        gone = Ending(SandboxGoneError, "its row in the ledger and the sandbox are gone")
        return None, gone if answer is Answer.NOT_FOUND or acquired.released else None, answer
    ending, answer = await _judge(engine, record, released=acquired.released)
    await _write(engine, record, ending, answer)
    return record, ending, answer


async def _judge(engine: Engine, record: SandboxRecord, *, released: bool) -> tuple[Ending | None, Answer]:
    if (known := endings.judge(record, Answer.UNKNOWN, 0, released=released)) is not None:
        return known, Answer.UNKNOWN
    answer = Answer.UNKNOWN if record.sandbox_id is None else await _ask(engine, record.sandbox_id)
    now = await engine.driver.ledger(engine.now_of, record.ticket)
    return endings.judge(record, answer, now), answer


async def _ask(engine: Engine, sandbox_id: str) -> Answer:
    try:
        return endings.answer_of(await patiently(engine, engine.driver.sdk.info, sandbox_id, patience=_PATIENCE))
    except BackendError:
        return Answer.UNKNOWN


async def _write(engine: Engine, record: SandboxRecord, ending: Ending | None, answer: Answer) -> None:
    """Let the row tell the truth. What the row itself told needs no writing; a forked child writes nothing."""
    d, book = engine.driver, engine.book
    if not engine.is_ours():
        return
    if answer is Answer.RUNNING and record.state is State.PAUSED:
        await d.ledger(book.resumed, record.ticket, engine.owner)
    elif ending is None or answer not in (Answer.PAUSED, Answer.NOT_FOUND):
        return
    elif answer is Answer.PAUSED:
        await d.ledger(book.paused, record.ticket, engine.owner, ending.reason)
        d.notify()  # it holds no slot any more
    else:
        await d.finish(engine.clean, record.ticket, ending.reason, patience=0.0)


async def _gone(engine: Engine, acquired: Acquired, record: SandboxRecord | None, ending: Ending) -> SandboxGoneError:
    acquired.paused = ending.kind is SandboxPausedError
    current = await engine.driver.ledger(engine.book.record, acquired.ticket) or record
    kind = engine.driver.sdk.error(ending.kind)
    return kind(
        f"sandbox {acquired.sandbox_id} cannot be used any more ({ending.reason}); ticket {acquired.ticket}",
        sandbox_id=acquired.sandbox_id,
        reason=ending.reason,
        ticket=acquired.ticket,
        started_at=current.running_at if current is not None else None,
        ended_at=current.ended_at if current is not None else None,
        noticed_at=await engine.driver.ledger(engine.book.now),
    )
