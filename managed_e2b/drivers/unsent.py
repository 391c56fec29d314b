"""Requests that the SDK's HTTP client gave up before it had sent them: made again, whatever they do.

Many requests that meet no open connection each begin to make one. Over HTTP/2 the first that is made serves them all,
up to the number of streams that the server allows (most often 100); pyqwest 0.12 fails the others. Nothing of those
has left this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .heard import answer

try:
    from pyqwest import WriteError
except ImportError:  # older SDKs have another HTTP client, which waits
    WriteError = None  # type: ignore[assignment, misc]

TRIES = 32
"""How often a request is made: each round opens a connection more, so a hundred more requests find their place."""

_CAUSES = 8
"""The most exceptions of a chain that are looked through."""


async def sent(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call of the SDK of either face, again while it was not sent. Raises what it raises."""
    for attempt in itertools.count(1):
        try:
            return await answer(call(*args, **kwargs))
        except Exception as error:
            if attempt >= TRIES or not was_not_sent(error):
                raise


def was_not_sent(error: BaseException) -> bool:
    """Whether the client says that the request never reached a connection. It has no type for that, only this word."""
    link: BaseException | None = error
    for _ in range(_CAUSES):
        if link is None or WriteError is None:
            return False
        if isinstance(link, WriteError) and "client error (Canceled)" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return False
