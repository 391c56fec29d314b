"""The path of one sandbox, from the request to the moment the user's code may have it.

validate → queue → intent → create with our ticket → running → (the user's code) → release. Each step is durable
before the next one costs money.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..errors import (
    AcquireTimeoutError,
    BackendError,
    PrewarmError,
    SandboxCreateError,
    SandboxGoneError,
    ValidationError,
)
from ..models import AcquireRequest, SandboxRecord
from ..rules import failures, leases, limits, states
from .base import OWNER, TICKET, Acquired, Engine, Scope
from .release import lookup

POLL = 0.25
"""Seconds between two looks at the line when nothing woke us: another process may have freed a slot."""


@asynccontextmanager
async def acquire(engine: Engine, request: AcquireRequest, sdk_version: str) -> AsyncIterator[Acquired]:
    """A running sandbox for the body of a `with`; whatever happens in there, it is released afterwards."""
    kind, template = request.source
    scope = engine.open_scope()
    attempt = _Attempt(engine, scope, request, time.monotonic())
    reason: str | None = "released"
    acquired: Acquired | None = None
    try:
        await engine.driver.ledger(
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
        await attempt.turn()
        acquired = await attempt.create(template)
        yield acquired
    except GeneratorExit:
        # The context was dropped, not left: this may be the garbage collector. The scope's end tells the keeper.
        reason = None
        raise
    except BaseException as error:
        reason = why(error)
        raise
    finally:
        if acquired is not None:
            acquired.released = reason is not None
        if reason is not None and engine.is_ours():
            await engine.driver.finish(engine.clean, scope.ticket, reason, sent=attempt.sent)


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
        return "interrupted"
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, AcquireTimeoutError):
        return "gave up waiting"
    return f"raised {type(error).__name__}"


class _Attempt:
    """One request on its way. `sent` tells whether a create may have reached the backend."""

    def __init__(self, engine: Engine, scope: Scope, request: AcquireRequest, started: float) -> None:
        self.engine = engine
        self.scope = scope
        self.request = request
        self.sent = False
        self._deadline = None if request.acquire_timeout is None else started + request.acquire_timeout

    async def turn(self) -> None:
        """Wait in line until the row is `creating`: the oldest first, within the caps and the rate."""
        engine = self.engine
        while True:
            decision = await engine.driver.ledger(
                engine.book.turn, self.scope.ticket, engine.owner, engine.account, engine.caps
            )
            if isinstance(decision, limits.Go):
                return
            if decision is None:
                raise await self._gone()
            await self._wait(decision.seconds if decision.seconds is not None else POLL, decision.why)

    async def create(self, template: str) -> Acquired:
        """One sandbox, tagged with our ticket, durable as `running` before anybody sees it."""
        engine, request, ticket = self.engine, self.request, self.scope.ticket
        seconds = leases.first_timeout(request.timeout, engine.lease)
        attempt = 0
        while True:
            sent_at = await engine.driver.ledger(engine.book.now)
            self.sent = True
            try:
                sandbox: Any = await engine.driver.sdk.create(
                    template=template,
                    timeout=seconds,
                    metadata={**request.metadata, TICKET: ticket, OWNER: engine.owner},
                    envs=request.envs,
                    allow_internet_access=request.allow_internet_access,
                    idempotency_key=ticket,
                )
            except BackendError as error:
                verdict = failures.create_verdict(error)
                if verdict is failures.Verdict.SLOW_DOWN:
                    await self._slow_down(error, attempt)
                    attempt += 1
                    continue
                sandbox = await self._rescue(error, verdict, seconds)
            record = await engine.driver.ledger(
                engine.book.running, ticket, engine.owner, sandbox.sandbox_id, sent_at=sent_at, remote=seconds
            )
            if record is None:
                raise await self._gone()
            sandbox._me2b_scope = self.scope  # who holds the native object uses the sandbox
            return Acquired(self.scope, sandbox.sandbox_id, sandbox)

    async def _slow_down(self, error: BackendError, attempt: int) -> None:
        """The endpoint has enough: nobody who shares it creates until its time has passed."""
        named = getattr(error, "retry_after", None)
        seconds = named if named is not None else failures.backoff(attempt, base=0.5, cap=30.0)
        await self.engine.driver.ledger(self.engine.book.slow_down, self.engine.account, seconds)
        await self._wait(seconds, str(error), cause=error)

    async def _rescue(self, error: BackendError, verdict: failures.Verdict, seconds: int) -> Any:
        """A create that failed: adopt what it made after all, or raise what it was, with nothing left unknown."""
        engine, ticket = self.engine, self.scope.ticket
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
            return await engine.driver.sdk.adopt(found[0], seconds)
        if verdict is failures.Verdict.REFUSED:
            self.sent = bool(found)  # the release kills what was found, contrary to the answer
            raise error
        raise SandboxCreateError(
            f"{error}; whether a sandbox was made is not known yet: ticket {ticket} stays in the ledger until it is "
            f"found and killed, or its timeout of {seconds} s has passed",
            ticket=ticket,
            status=error.status,
        ) from error

    async def _wait(self, seconds: float, why_: str, cause: BaseException | None = None) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise await self._timed_out(why_) from cause
            seconds = min(seconds, left)
        await self.engine.driver.wait(seconds)

    async def _timed_out(self, why_: str) -> AcquireTimeoutError:
        records = await self.engine.driver.ledger(
            self.engine.book.records, states_=states.SLOT_STATES, account=self.engine.account
        )
        now = await self.engine.driver.ledger(self.engine.book.now)
        holders = [_holder(record, now) for record in records]
        held = "\n  ".join(holders) or "none"
        return AcquireTimeoutError(
            f"no slot within acquire_timeout={self.request.acquire_timeout} s: {why_}. Slots of this account are held "
            f"by:\n  {held}\nRaise the limit or the timeout, or run `me2b reap` if owners are dead.",
            holders=holders,
        )

    async def _gone(self) -> SandboxGoneError:
        """Somebody else has ended our row: a reaper that took this process for dead, or a shutdown."""
        record = await self.engine.driver.ledger(self.engine.book.record, self.scope.ticket)
        reason = record.reason if record else None
        return SandboxGoneError(
            f"the request was ended meanwhile ({reason or 'its row is gone'})",
            sandbox_id=record.sandbox_id if record else None,
            reason=reason,
        )


def _holder(record: SandboxRecord, now: int) -> str:
    age = (now - (record.creating_at or record.queued_at)) / leases.SECOND
    return f"{record.sandbox_id or 'ticket ' + record.ticket} {record.state} for {age:.0f} s, owner {record.owner}"


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
