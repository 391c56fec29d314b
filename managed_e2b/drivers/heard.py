"""Cancellations that the SDK swallows.

Its HTTP client (pyqwest 0.12) takes a cancellation that reaches a task together with an answer for nothing: the call
returns as if nobody had cancelled. Who waits for the task's end would wait for as long as it then goes on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heard() -> Iterator[Callable[[], None]]:
    """Raise a cancellation that comes within the block and is swallowed there, whatever else the block comes to.

    What it gives is the check itself, for the middle of a long block. Only where an event loop runs.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0

    def check() -> None:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError

    try:
        yield check
    except Exception:
        check()
        raise
    check()


async def answer(result: Any) -> Any:
    """What a call of the SDK of either face comes to, or the cancellation that came meanwhile."""
    if not inspect.isawaitable(result):
        return result
    with heard():
        return await result
