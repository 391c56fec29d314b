"""Work that outlives whoever asked for it.

A client that hangs up, or a handler that is cancelled, must leave neither half a sandbox nor one that nobody lists: so
what changes sandboxes runs in tasks of the server, and callers only wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from managed_e2b.local.errors import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """The tasks of one registry."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in a task. What it raises is logged, unless it is an answer to somebody (ApiError)."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even when the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    async def cancel(self) -> None:
        """Cancel all that is left, and wait for its end."""
        if rest := set(self._running):
            for task in rest:
                task.cancel()
            await asyncio.wait(rest)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, ApiError):
            log.error("a change of a sandbox failed", exc_info=error)
