"""Boundaries: the moments before and after each call that a lifecycle makes to the ledger or to the backend.

A crash can fall between any two of them, so a proof that nothing leaks visits them all. ::

    steps = Steps()
    steps.watch(lifecycle)
    with lifecycle.acquire():
        ...
    print(steps.seen)             # ["before enqueue", "after enqueue", "before turn", …]

With `act`, a function is called at some of them: it may raise, cancel a task, or kill the process.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

SDK_CALLS = frozenset({"create", "adopt", "kill", "info", "set_timeout", "run", "write_file", "read_file"})
"""Calls to the backend; a page of a list is one too."""


class Steps:
    """Counts the boundaries of one lifecycle, on whatever thread they fall: the release has threads of its own."""

    def __init__(self, act: Callable[[int], object] | None = None) -> None:
        """`act(n)` is called at boundary number n, from 0, on the thread that is there."""
        self.seen: list[str] = []
        self._act = act
        self._lock = threading.Lock()

    def watch(self, lifecycle: Any) -> None:
        """Count the calls of a lifecycle, of either face, from now on."""
        lifecycle._engine.driver = _CountedDriver(lifecycle._engine.driver, self)
        lifecycle._cleaner.driver = _CountedDriver(lifecycle._cleaner.driver, self)

    def at(self, boundary: str) -> None:
        """One boundary."""
        with self._lock:
            number = len(self.seen)
            self.seen.append(boundary)
        if self._act is not None:
            self._act(number)


class _CountedDriver:
    """A driver whose calls are counted; all else is the driver's own."""

    def __init__(self, driver: Any, steps: Steps) -> None:
        self._driver = driver
        self._steps = steps
        self.sdk = _CountedSdk(driver.sdk, steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    async def ledger(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Inside the call, which a cancellation does not interrupt: the boundary is where the write is.
        def counted() -> Any:
            self._steps.at(f"before {function.__name__}")
            result = function(*args, **kwargs)
            self._steps.at(f"after {function.__name__}")
            return result

        return await self._driver.ledger(counted)


class _CountedSdk:
    def __init__(self, sdk: Any, steps: Steps) -> None:
        self._sdk = sdk
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._sdk, name)
        return self._counted(name, value) if name in SDK_CALLS else value

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self._steps.at(f"before {name}")
            result = await call(*args, **kwargs)
            self._steps.at(f"after {name}")
            return result

        return counted

    async def pages(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self._steps.at("before list")
        async for page in self._sdk.pages(*args, **kwargs):
            self._steps.at("after list")
            yield page
            self._steps.at("before list")
