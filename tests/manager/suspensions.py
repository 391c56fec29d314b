"""Suspensions: the moments at which a coroutine gives control to the event loop, where alone a cancellation can hit it.

    watched = Suspending(lifecycle.reap(), Cancel(at=3))
    task = asyncio.create_task(watched.run())

The coroutine is driven by hand, so that each of them is seen, those deep inside the SDK included. What other tasks do
(the SDK's, a loop's threads) is not counted: nobody cancels those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

Moment = Literal["early", "late", "burst"]
"""When at a suspension: as it begins, so that what is waited for is given up; when that is done and the coroutine has
not heard of it, so that an answer is lost; or so many times at once as it begins."""


@dataclass(frozen=True)
class Cancel:
    """`times` cancellations, at suspension `at` (from 0) and the ones after it; a burst's are all at the first."""

    at: int
    times: int = 1
    moment: Moment = "early"

    def sent_at(self, number: int) -> int:
        """How many are sent at a suspension."""
        if self.moment == "burst":
            return self.times if number == self.at else 0
        return 1 if self.at <= number < self.at + self.times else 0


class Suspending(Generic[T]):
    """A coroutine whose suspensions are counted, and whose task is cancelled at some of them.

    `hit` does something else than to cancel its task.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        cancel: Cancel | None = None,
        hit: Callable[[], object] | None = None,
    ) -> None:
        self.seen = 0
        """Suspensions so far."""
        self.sent = 0
        """Cancellations so far."""
        self.took = 0.0
        """Seconds from the first of them to the end."""
        self._sent_at: float | None = None
        self._coroutine = coroutine
        self._cancel = cancel
        self._hit = hit

    async def run(self) -> T:
        """What the coroutine returns, or raises. For a task of its own, which is the one that is cancelled."""
        try:
            return await self
        finally:
            if self._sent_at is not None:
                self.took = asyncio.get_running_loop().time() - self._sent_at

    def __await__(self) -> Generator[Any, Any, T]:
        task = asyncio.current_task()
        assert task is not None
        thrown: BaseException | None = None
        while True:
            try:
                waited = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            self._suspended(task, waited)
            thrown = None
            try:
                yield waited
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                thrown = error

    def _suspended(self, task: asyncio.Task[Any], waited: Any) -> None:
        number = self.seen
        self.seen += 1
        for _ in range(self._cancel.sent_at(number) if self._cancel is not None else 0):
            if self._cancel is not None and self._cancel.moment == "late" and waited is not None:
                # Before the task's own callback, which comes when it has the future: the task hears of both at once.
                waited.add_done_callback(lambda _: self._send(task))
            else:
                self._send(task)

    def _send(self, task: asyncio.Task[Any]) -> None:
        self.sent += 1
        if self._sent_at is None:
            self._sent_at = asyncio.get_running_loop().time()
        if self._hit is not None:
            self._hit()
        else:
            task.cancel()


def hesitant(driver: Any) -> None:
    """Let each call of an async driver to a thread begin only when the loop has turned: all of them suspend then.

    Otherwise a quick one has ended before anybody could wait for it, and is a suspension only sometimes.
    """
    driver._pool.submit = _after_a_turn(driver._pool.submit)
    driver._background.start = _after_a_turn(driver._background.start)


def _after_a_turn(start: Callable[..., Any]) -> Callable[..., Any]:
    def begin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        turned = threading.Event()
        asyncio.get_running_loop().call_soon(turned.set)

        def later() -> Any:
            assert turned.wait(30)
            return function(*args, **kwargs)

        return start(later)

    return begin
