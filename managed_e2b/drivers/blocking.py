"""The driver of the sync face: everything has finished before it returns."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from .base import CANCEL_GRACE, Background, Wakeup
from .sdk import Sdk

P = ParamSpec("P")
T = TypeVar("T")


class BlockingDriver:
    """See `engine.driver.Driver`. It may be used from many threads at once."""

    def __init__(self, sdk: Sdk, wakeup: Wakeup) -> None:
        self.sdk = sdk
        self._wakeup = wakeup
        self._background = Background()

    async def ledger(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    async def apart(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    @property
    def told(self) -> int:
        return self._wakeup.count

    async def wait(self, timeout: float, key: str | None = None, since: int | None = None) -> None:
        woken = threading.Event()
        if not self._wakeup.subscribe(woken.set, key, since):
            return
        try:
            woken.wait(timeout)
        finally:
            self._wakeup.unsubscribe(woken.set, key)

    def notify(self, key: str | None = None) -> None:
        self._wakeup.notify(key)

    async def finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _SigintDeferred() as sigint:
            future = self._background.start(function, *args, **kwargs)
            future.add_done_callback(lambda _: sigint.told.put("ended"))
            sigint.wait(grace=CANCEL_GRACE)
        while sigint.came:
            sigint.deliver()  # raises KeyboardInterrupt, unless the caller's own handler does something else
            with sigint:
                sigint.wait(grace=CANCEL_GRACE)
        try:
            return future.result()
        finally:
            del future  # a frame that holds the error passing through it keeps all its callers' frames

    async def hasten(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        with _SigintDeferred() as sigint:
            future = self._background.start(function, *args, **kwargs)
            future.add_done_callback(lambda _: sigint.told.put("ended"))
            sigint.wait(grace=CANCEL_GRACE, at_once=True)
        if sigint.came:
            sigint.deliver()
        try:
            return future.result() if future.done() else None
        finally:
            del future  # as above

    def begin(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._background.start(function, *args, **kwargs)

    def join(self, timeout: float) -> bool:
        return self._background.join(timeout)


class _SigintDeferred:
    """Keeps Ctrl-C back while cleanup is waited for; `deliver` then hands it to the handler that was in place.

    Without this a second Ctrl-C, raised between any two instructions of the wait for the cleanup, would end it.
    Off the main thread, where no signal is handled, it does nothing.
    """

    def __init__(self) -> None:
        # SimpleQueue: its put may interrupt its own get, as a signal handler does.
        self.told: queue.SimpleQueue[Literal["ended", "sigint"]] = queue.SimpleQueue()
        self.came = False
        self._ended = False
        self._handler: Any = None

    def __enter__(self) -> _SigintDeferred:
        self.came = False
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, lambda _number, _frame: self.told.put("sigint"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        while not self.told.empty():
            self._take(self.told.get())

    def wait(self, grace: float, *, at_once: bool = False) -> None:
        """Until the cleanup has ended, or `grace` seconds after the first Ctrl-C, or from now on when `at_once`."""
        deadline = time.monotonic() + grace if at_once else None
        while not self._ended:
            if self.came and deadline is None:
                deadline = time.monotonic() + grace
            try:
                self._take(self.told.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return

    def deliver(self) -> None:
        self._handler(signal.SIGINT, None)

    def _take(self, what: Literal["ended", "sigint"]) -> None:
        if what == "ended":
            self._ended = True
        else:
            self.came = True
