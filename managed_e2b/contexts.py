"""What `acquire` of the two faces returns: a sandbox for the body of a `with`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from .drivers import run as _run
from .drivers.sdk import SDK_VERSION
from .engine.acquire import acquire
from .engine.base import Acquired, Engine
from .errors import StateTransitionError
from .handle import AsyncSandboxHandle, SandboxHandle
from .models import AcquireRequest


class _Visit:
    """One way through `acquire`, for both faces. Once left, the sandbox is released, whatever held it."""

    def __init__(self, engine: Engine, request: AcquireRequest, check_open: Callable[[], None]) -> None:
        self._engine = engine
        self._check_open = check_open
        self._path: AbstractAsyncContextManager[Acquired] = acquire(engine, request, SDK_VERSION)
        self._begun = False
        self._acquired: Acquired | None = None

    async def enter(self) -> Acquired:
        if self._begun:
            raise StateTransitionError(
                "this context was entered before: each `acquire()` is one sandbox, call it again"
            )
        self._check_open()
        self._begun = True
        self._acquired = await self._path.__aenter__()
        return self._acquired

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        acquired, self._acquired = self._acquired, None
        proved = False
        try:
            await self._path.__aexit__(kind, error, traceback)
            proved = acquired is None or acquired.released or acquired.kept
        finally:
            if acquired is not None and not proved:
                # The release failed, or could not be waited for: a generator that holds the `with` is being closed,
                # perhaps by the collector, or a loop that ended has closed `acquire` itself. The keeper goes on.
                acquired.released = True
                self._engine.abandoned.append(acquired.ticket)


class SandboxContext:
    """What `SandboxLifecycle.acquire` returns. Entered once."""

    def __init__(self, engine: Engine, request: AcquireRequest, check_open: Callable[[], None]) -> None:
        self._engine = engine
        self._visit = _Visit(engine, request, check_open)

    def __enter__(self) -> SandboxHandle:
        return SandboxHandle(self._engine, _run(self._visit.enter()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _run(self._visit.leave(kind, error, traceback))


class AsyncSandboxContext:
    """What `AsyncSandboxLifecycle.acquire` returns. Entered once."""

    def __init__(self, engine: Engine, request: AcquireRequest, check_open: Callable[[], None]) -> None:
        self._engine = engine
        self._visit = _Visit(engine, request, check_open)

    async def __aenter__(self) -> AsyncSandboxHandle:
        return AsyncSandboxHandle(self._engine, await self._visit.enter())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._visit.leave(kind, error, traceback)
