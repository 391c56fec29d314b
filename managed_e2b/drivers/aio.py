"""The driver of the async face: it really awaits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from .base import CANCEL_GRACE, Background, Wakeup
from .sdk import Sdk

P = ParamSpec("P")
T = TypeVar("T")

_LEDGER_THREADS = 4


class AioDriver:
    """See `engine.driver.Driver`. It is bound to no event loop: each call uses the loop that runs it."""

    def __init__(self, sdk: Sdk, wakeup: Wakeup) -> None:
        self.sdk = sdk
        self._wakeup = wakeup
        self._background = Background()
        self._pool = ThreadPoolExecutor(_LEDGER_THREADS, thread_name_prefix="me2b-ledger")

    async def ledger(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await _outcome(self._submit(functools.partial(function, *args, **kwargs)), None)

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        try:
            return self._pool.submit(function)
        except RuntimeError:  # a pool takes nothing more once the main thread has ended; others still hold sandboxes
            return self._background.start(function)

    async def apart(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(function, *args, **kwargs)

    @property
    def told(self) -> int:
        return self._wakeup.count

    async def wait(self, timeout: float, key: str | None = None, since: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            _tell(loop, woken.set)

        if not self._wakeup.subscribe(wake, key, since):
            return
        try:
            async with asyncio.timeout(timeout):
                await woken.wait()
        except TimeoutError:
            return
        finally:
            self._wakeup.unsubscribe(wake, key)

    def notify(self, key: str | None = None) -> None:
        self._wakeup.notify(key)

    async def finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await _outcome(self._background.start(function, *args, **kwargs), CANCEL_GRACE)

    async def hasten(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        future = self._background.start(function, *args, **kwargs)
        cancelled = await _wait_out(future, CANCEL_GRACE, at_once=True)
        try:
            if cancelled is not None:
                raise cancelled
            return future.result() if future.done() else None
        finally:
            del cancelled, future  # see `_outcome`

    def begin(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._background.start(function, *args, **kwargs)

    def join(self, timeout: float) -> bool:
        return self._background.join(timeout)


async def _outcome(future: Future[T], grace: float | None) -> T:
    """What a thread's future comes to. A cancellation that comes meanwhile is raised instead: see `_wait_out`."""
    cancelled = await _wait_out(future, grace)
    try:
        if cancelled is not None:
            raise cancelled
        return future.result()
    finally:
        # A frame that holds the error passing through it is a cycle with its callers' frames and all that they hold.
        del cancelled, future


async def _wait_out(
    future: Future[Any], grace: float | None, *, at_once: bool = False
) -> asyncio.CancelledError | None:
    """Wait for a thread's future through any number of cancellations; the last of them is returned.

    After the first one, or from the beginning when `at_once`, it waits `grace` seconds longer; to the end when None.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: _tell(loop, done.set))
    cancelled: asyncio.CancelledError | None = None
    deadline = loop.time() + grace if at_once and grace is not None else None
    while not future.done() and (deadline is None or loop.time() < deadline):
        try:
            async with asyncio.timeout_at(deadline):
                await done.wait()
        except TimeoutError:
            break
        except asyncio.CancelledError as error:
            cancelled = error
            if deadline is None and grace is not None:
                deadline = loop.time() + grace
    try:
        return cancelled
    finally:
        del cancelled  # as above


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call on the loop's thread. A loop that has been closed meanwhile has nobody left who waits."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
