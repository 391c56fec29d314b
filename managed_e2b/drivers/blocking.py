"""The driver of the sync face: everything has finished before it returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

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

    async def wait(self, timeout: float) -> None:
        woken = threading.Event()
        self._wakeup.subscribe(woken.set)
        try:
            woken.wait(timeout)
        finally:
            self._wakeup.unsubscribe(woken.set)

    def notify(self) -> None:
        self._wakeup.notify()

    async def finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future: Future[T] | None = None
        interrupted: KeyboardInterrupt | None = None
        deadline: float | None = None
        while True:
            try:
                future = future or self._background.start(function, *args, **kwargs)
                # `wait` leaves the future alone when it is interrupted, `result` would not tell its own timeout.
                futures.wait([future], None if deadline is None else max(0.0, deadline - time.monotonic()))
                break
            except KeyboardInterrupt as error:
                interrupted = error
                deadline = deadline or time.monotonic() + CANCEL_GRACE
        if interrupted is not None:
            raise interrupted
        return future.result()

    def join(self, timeout: float) -> bool:
        return self._background.join(timeout)
