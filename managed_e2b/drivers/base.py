"""What both drivers share. Their contract is `engine.driver.Driver`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Wakeup:
    """Tells waiters, whatever thread or loop they are in, that something may have changed (a slot came free).

    Who waits under a `key` is woken by that key only: a thousand that stand in line need not all be woken for one slot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[str | None, set[Callable[[], object]]] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """How often it was told so far, by any key."""
        return self._count

    def subscribe(self, callback: Callable[[], object], key: str | None = None, since: int | None = None) -> bool:
        """False, and nothing is subscribed, when it was told after `since`: what was seen then may be so no more."""
        with self._lock:
            if since is not None and since != self._count:
                return False
            self._callbacks.setdefault(key, set()).add(callback)
            return True

    def unsubscribe(self, callback: Callable[[], object], key: str | None = None) -> None:
        with self._lock:
            callbacks = self._callbacks.get(key, set())
            callbacks.discard(callback)
            if not callbacks:
                self._callbacks.pop(key, None)

    def notify(self, key: str | None = None) -> None:
        with self._lock:
            self._count += 1
            callbacks = tuple(self._callbacks.get(key, ()))
        for callback in callbacks:
            callback()


CANCEL_GRACE = 0.08
"""Seconds for which a caller who cancelled still waits for the cleanup before getting control back."""


class Background:
    """Cleanup, each on a thread of its own. The interpreter waits for what has begun before it exits.

    Not a pool: a pool takes nothing more once the main thread has ended, while other threads still hold sandboxes;
    its threads are missing after a fork; and a shutdown would stand in line behind cleanups that hang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._running = threading.local()

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin; it can neither be cancelled nor interrupted from now on."""
        future: Future[T] = Future()

        def body() -> None:
            self._running.future = future
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the one who waits raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            self._open.add(future)
        future.add_done_callback(self._forget)
        try:
            if sys.is_finalizing():  # a coroutine that nobody ended is dropped; a thread would never begin
                raise RuntimeError
            threading.Thread(target=body, name="me2b-cleanup", daemon=False).start()
        except RuntimeError:
            body()  # no thread can be had, as in `atexit`: cleanup that can be interrupted is better than none
        return future

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for all that was begun; whether all of it has ended.

        What is itself begun here, as a shutdown is, waits for the others only.
        """
        with self._lock:
            pending = self._open - {getattr(self._running, "future", None)}
        return not futures.wait(pending, timeout).not_done

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.discard(future)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine over a BlockingDriver to its end, in one step. Raises RuntimeError if it suspended."""
    # In a thread whose event loop is blocked by us (a notebook), that loop must not be asked to end our generators.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        sys.set_asyncgen_hooks(*hooks)
    coroutine.close()
    raise RuntimeError("a coroutine of the engine suspended on the blocking driver: it awaited something else")
