"""What really differs between sync and async, and nothing more.

The engine is written once as `async def` and suspends only through a driver. `AioDriver` really awaits;
every awaitable of `BlockingDriver` has finished before it returns, so that `run` drives a coroutine of the
engine to its end in one step, on the caller's own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from .sdk import Sdk

P = ParamSpec("P")
T = TypeVar("T")


class Wakeup:
    """Tells waiters, whatever thread or loop they are in, that something may have changed (a slot came free)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: set[Callable[[], object]] = set()

    def subscribe(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks.add(callback)

    def unsubscribe(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks.discard(callback)

    def notify(self) -> None:
        with self._lock:
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()


class Driver(Protocol):
    """How the engine waits. One instance serves one lifecycle."""

    sdk: Sdk

    async def ledger(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short blocking function. Once begun it is never abandoned: a cancellation is raised after its end."""
        ...

    async def wait(self, wakeup: Wakeup, timeout: float) -> None:
        """Wait until `wakeup` is notified or `timeout` seconds have passed, whichever is first."""
        ...

    async def finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run cleanup that nothing interrupts, on a thread of its own, and wait for its end.

        It takes a blocking callable, never a coroutine: a loop that is being torn down cancels every task it
        has, cleanup included, but cannot cancel a thread. Cancellations and Ctrl-C that arrive meanwhile are
        remembered; the last one is raised when the cleanup is done, or `CANCEL_GRACE` seconds after it came:
        the cleanup then goes on in the background, and `join` waits for it.
        """
        ...

    def join(self, timeout: float) -> bool:
        """Wait (blocking) up to `timeout` seconds for cleanup that goes on in the background; whether all ended."""
        ...


CANCEL_GRACE = 0.08
"""Seconds for which a caller who cancelled still waits for the cleanup before getting control back."""


_CLEANERS = 32


class Background:
    """The threads that run cleanup. The interpreter waits for what they have begun before it exits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_CLEANERS, thread_name_prefix="me2b-cleanup")
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin; it can neither be cancelled nor interrupted from now on."""
        with self._lock:
            future = self._pool.submit(function, *args, **kwargs)
            self._open.add(future)
        future.add_done_callback(self._forget)
        return future

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for all that was begun; whether all of it has ended."""
        with self._lock:
            pending = set(self._open)
        return not futures.wait(pending, timeout).not_done

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.discard(future)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine over a BlockingDriver to its end, in one step. Raises RuntimeError if it suspended."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a coroutine of the engine suspended on the blocking driver: it awaited something else")
