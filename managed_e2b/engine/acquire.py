"""The path of one sandbox, from the request to the moment the user's code may have it.

validate → queue → intent → create with our ticket → running → (the user's code) → release. Each step is durable
before the next one costs money.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from ..errors import (
    AcquireTimeoutError,
    BackendError,
    LedgerError,
    PrewarmError,
    RateLimitedError,
    SandboxCreateError,
    ValidationError,
)
from ..models import AcquireRequest
from ..rules import failures, leases, limits
from . import host
from .adoption import adopt
from .base import OWNER, TICKET, Acquired, Engine, Made, Scope
from .listing import lookup
from .waiting import Waiting

logger = logging.getLogger("managed_e2b")

RELEASED, CANCELLED, INTERRUPTED = "released", "cancelled", "interrupted"
"""Reasons of a release: the block was left, its task was cancelled, Ctrl-C."""


@asynccontextmanager
async def acquire(engine: Engine, request: AcquireRequest, sdk_version: str) -> AsyncIterator[Acquired]:
    """A running sandbox for the body of a `with`; whatever happens in there, it is released afterwards."""
    kind, template = request.source
    scope = engine.open_scope()
    attempt = _Attempt(engine, scope, request)
    reason: str | None = RELEASED
    acquired: Acquired | None = None
    try:
        queued_at = await engine.driver.ledger(
            engine.book.enqueue,
            scope.ticket,
            owner=engine.owner,
            account=engine.account,
            source=(kind, template),
            timeout=request.timeout,
            lease=engine.lease,
            metadata=request.metadata,
            sdk_version=sdk_version,
        )
        attempt.waiting.join(queued_at)
        acquired = await attempt.create(template)
        yield acquired
    except GeneratorExit:
        # The context was dropped, not left: this may be the garbage collector. The scope's end tells the keeper.
        reason = None
        raise
    except BaseException as error:
        reason = why(error)
        if acquired is not None and request.keep_on_error and isinstance(error, Exception):
            await _keep(engine, acquired, error)
            reason = None
        raise
    finally:
        if acquired is not None:
            acquired.released = reason is not None
        engine.began.pop(scope.ticket, None)
        engine.unidentified.pop(scope.ticket, None)
        if reason is not None and engine.is_ours():
            # Who was cancelled wants to be free at once, and not when what was in the making has been found and killed.
            end = engine.driver.hasten if reason in (CANCELLED, INTERRUPTED) else engine.driver.finish
            try:
                ended = await end(
                    engine.clean,
                    scope.ticket,
                    reason,
                    sent=attempt.sent,
                    made=attempt.made,
                    identify=reason == RELEASED,
                )
            except LedgerError:
                scope.dropped()  # the keeper goes on at once, however long this error keeps the scope
                raise
            if ended is None:
                scope.dropped()  # the keeper sees to it that what goes on in the background comes to its end
            elif ended:
                scope.dropped.detach()  # the keeper need not ask the ledger once more


async def _keep(engine: Engine, acquired: Acquired, error: Exception) -> None:
    """Leave the sandbox of a block that raised to be looked at: it ends with its timeout, or with the lifecycle."""
    await engine.driver.ledger(engine.book.note, acquired.ticket, f"kept: {why(error)}")
    record = await engine.driver.ledger(engine.book.record, acquired.ticket)
    acquired.keep()
    if record is not None and record.hard_deadline is not None:
        until = datetime.fromtimestamp(record.hard_deadline / leases.SECOND, UTC)
        told = f"sandbox {acquired.sandbox_id} is kept until {until:%Y-%m-%d %H:%M:%S} UTC, or until its lifecycle ends"
        error.add_note(told)
        logger.warning("%s: its block %s", told, why(error))


def check_source(request: AcquireRequest) -> None:
    """Refuse, at the call, what cannot be created here."""
    kind, _ = request.source
    if kind != "template":
        raise PrewarmError(
            f"{kind}= needs a template build, which this version does not do: build the template once with "
            "`e2b template build` and pass template="
        )


def why(error: BaseException) -> str:
    """The reason of a release, as the ledger keeps it. Names types only: a message may hold a secret."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if isinstance(error, AcquireTimeoutError):
        return "gave up waiting"
    return f"raised {type(error).__name__}"


class _Attempt:
    """One request on its way.

    `sent`: whether a create may have reached the backend. `made`: what it made when its row was ours no more.
    """

    def __init__(self, engine: Engine, scope: Scope, request: AcquireRequest) -> None:
        self.engine = engine
        self.scope = scope
        self.request = request
        self.waiting = Waiting(engine, scope.ticket, request.acquire_timeout)
        self.sent = False
        self.made: str | None = None

    async def create(self, template: str) -> Acquired:
        """When it is its turn: one sandbox, tagged with our ticket, durable as `running` before anybody sees it."""
        engine, request, ticket = self.engine, self.request, self.scope.ticket
        seconds = leases.first_timeout(request.timeout, engine.lease)
        while True:
            turn = await self.waiting.turn()
            sent_at = await engine.driver.ledger(engine.book.now)
            if late := limits.lateness(turn, engine.caps, sent_at):
                await engine.driver.ledger(engine.book.late, engine.account, late)
            engine.began[ticket] = (sent_at, host.steady())
            self.sent = True
            sandbox: Any = None
            failed: BackendError | None = None
            try:
                sandbox = await engine.driver.sdk.create(
                    template=template,
                    timeout=seconds,
                    metadata={**request.metadata, TICKET: ticket, OWNER: engine.owner},
                    envs=request.envs,
                    allow_internet_access=request.allow_internet_access,
                    idempotency_key=ticket,
                )
            except BackendError as error:
                failed = error
            # What follows is not done while the error is handled, or every error inside of it would remember it.
            try:
                if isinstance(failed, RateLimitedError):
                    await self.waiting.refused(failed.with_traceback(None), sent_at)  # which it keeps
                    continue
                if failed is not None:
                    sandbox = await self._rescue(failed, failures.create_verdict(failed), seconds)
            finally:
                failed = None  # see `_rescue`
            engine.made[ticket] = Made(sandbox.sandbox_id)
            record = await engine.driver.ledger(
                engine.book.running, ticket, engine.owner, sandbox.sandbox_id, sent_at=sent_at, remote=seconds
            )
            if record is None:
                self.made = sandbox.sandbox_id
                raise await self.waiting.gone()
            if turn.pace.gap:
                await engine.driver.ledger(engine.book.recovered, engine.account, engine.caps, sent_at=sent_at)
            engine.unidentified[ticket] = sandbox.sandbox_id, 0
            sandbox._me2b_scope = self.scope  # who holds the native object uses the sandbox
            return Acquired(self.scope, sandbox.sandbox_id, sandbox)

    async def _rescue(self, error: BackendError, verdict: failures.Verdict, seconds: int) -> Any:
        """A create that failed: adopt what it made after all, or raise what it was, with nothing left unknown."""
        engine, ticket = self.engine, self.scope.ticket
        try:
            if verdict is failures.Verdict.NOT_SENT:
                self.sent = False
                raise error
            found: list[str] = []
            if error.status != 401:  # a refused key cannot list either
                try:
                    found = await lookup(engine, ticket)
                except BackendError:
                    if verdict is failures.Verdict.REFUSED:
                        raise error from None  # what failed first; the release looks again
            if found and verdict is failures.Verdict.UNKNOWN:
                adopted = await adopt(engine, found, seconds)
                if adopted is not None:
                    return adopted
            if verdict is failures.Verdict.REFUSED:
                self.sent = bool(found)  # the release kills what was found, contrary to the answer
                raise error
            raise SandboxCreateError(
                f"{error}; whether a sandbox was made is not known yet: ticket {ticket} stays in the ledger until it "
                f"is found and killed, or its timeout of {seconds} s has passed",
                ticket=ticket,
                status=error.status,
            ) from error
        finally:
            # A frame that holds the error passing through it is a cycle with all the caller's frames: a sandbox that
            # is forgotten there would be in use until the collector comes.
            del error


def validated(**values: Any) -> AcquireRequest:
    """An AcquireRequest, or a ValidationError that names what is wrong, before anything is sent."""
    from pydantic import ValidationError as PydanticError

    try:
        request = AcquireRequest(**values)
    except PydanticError as error:
        told = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'acquire'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        )
        raise ValidationError(f"acquire(): {told}") from None
    check_source(request)
    return request
