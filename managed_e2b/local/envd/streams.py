"""Streams that end when they should: the client left, the sandbox died, nobody may be left waiting.

connectrpc's server notices a client that left only when the handler yields its next message, it does not enforce
deadlines, and a cancelled task ends its stream *cleanly*, which a client must read as "finished". So envd wraps every
RPC in a `Call` (`Calls.serve`) that knows when it has to end, and handlers wait only through the two tools below, which
wake at once when it does:

* `Mailbox`, for server streams. A producer `put`s events and `close`s it; the handler attaches it and iterates::

      mailbox: Mailbox[Event] = Mailbox(keepalive_interval(ctx))
      with self.watchers.subscribe(mailbox), attached(mailbox):
          yield start                                  # the headers go out with the first message
          async for event in mailbox:                  # None: nothing came for an interval, send a keepalive
              yield to_response(event)

  The iteration stops after `close()`. It raises after `close(error)`, `ConnectError(CANCELED)` when the client left and
  `ConnectError(UNAVAILABLE)` when the sandbox was killed, paused or died: never a clean end in these cases. What was
  put before is delivered first. The `with` blocks are left at once, also for a stream that has been silent for hours.
  On the wire the sandbox's end is a connection that breaks off, as E2B resets the stream: only then do all SDKs ask
  whether the sandbox is still there, and say that it was killed.

* `attended(awaitable)`, for everything else that may take long in a handler: waits for it, cancels it and raises when
  the call has to end.

Memory stays bounded by the producer: it stops when `mailbox.full`, and `on_room` tells when to go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from managed_e2b.local.connections import WIRE, Wire

T = TypeVar("T")

KEEPALIVE_HEADER = "keepalive-ping-interval"
KEEPALIVE_DEFAULT = 90.0  # seconds, upstream's
_END_OF_STREAM = b"\x02"  # the envelope's flags
MAILBOX_LIMIT = 256 * 1024  # bytes a stream may have waiting before its producer has to stop


class Call:
    """One RPC in progress. `ended` is resolved, with the error to raise, once the call has no business going on."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[ConnectError] = asyncio.get_running_loop().create_future()

    def end(self, error: ConnectError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    @property
    def sandbox_gone(self) -> bool:
        """Whether it has to end because its sandbox was killed, paused or died."""
        return self.ended.done() and self.ended.result().code is Code.UNAVAILABLE


_current: ContextVar[Call | None] = ContextVar("call", default=None)


class Calls:
    """All RPCs in progress at one envd."""

    def __init__(self) -> None:
        self._open: set[Call] = set()

    def __len__(self) -> int:
        return len(self._open)

    def abort(self, message: str) -> None:
        """End all calls in progress with `unavailable` and this message. Later calls are not affected."""
        for call in self._open:
            call.end(ConnectError(Code.UNAVAILABLE, message))

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one RPC of a connectrpc application as a `Call`."""
        call = Call()
        task = asyncio.current_task()
        wire: Wire | None = scope.get("extensions", {}).get(WIRE)
        ahead: asyncio.Task[Message] | None = None

        async def look() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                call.end(ConnectError(Code.CANCELED, "the client left"))
            return message

        async def watched_receive() -> Message:
            """The request as it comes, read one message ahead: else a disconnect shows only to a handler that asks."""
            nonlocal ahead
            ahead = ahead or asyncio.create_task(look())
            await asyncio.wait([ahead])
            message, ahead = ahead.result(), asyncio.create_task(look())
            return message

        async def honest_send(message: Message) -> None:
            """Let no cancelled call say that it ended well."""
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            if wire is not None and call.sandbox_gone and _ends_stream(message):
                wire.cut()
                return
            await send(message)

        self._open.add(call)
        token = _current.set(call)
        try:
            await app(scope, watched_receive, honest_send)
        finally:
            _current.reset(token)
            self._open.discard(call)
            if ahead is not None:
                ahead.cancel()


def _ends_stream(message: Message) -> bool:
    """Whether it has the last envelope of a stream, in which the Connect protocol keeps the error."""
    body: bytes = message.get("body", b"")
    return message["type"] == "http.response.body" and body[:1] == _END_OF_STREAM


class Mailbox(Generic[T]):
    """Events on their way to one client, in order. Iterate it once; None stands for a silent `interval` (seconds)."""

    def __init__(self, interval: float = KEEPALIVE_DEFAULT, *, limit: int = MAILBOX_LIMIT) -> None:
        self.on_room: Callable[[], None] | None = None  # called when `full` has become false
        self._interval = interval
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._size = 0
        self._closed = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None

    @property
    def full(self) -> bool:
        """Whether the producer should stop for now. A closed mailbox is never full: it takes nothing in."""
        return self._size >= self._limit and not self._closed

    def put(self, item: T, size: int = 0) -> None:
        """Add an event of so many bytes. After `close` it is dropped."""
        if self._closed:
            return
        self._items.append((item, size))
        self._size += size
        self._ring(True)

    def close(self, error: Exception | None = None) -> None:
        """No more events: the reader gets what is there and then the end, or the error. Only the first call counts."""
        if self._closed:
            return
        was_full = self.full
        self._closed, self._error = True, error
        self._ring(True)
        if was_full and self.on_room is not None:
            self.on_room()

    def __aiter__(self) -> Mailbox[T]:
        return self

    async def __anext__(self) -> T | None:
        while not self._items:
            if self._closed:
                raise self._error or StopAsyncIteration
            if not await self._rung():
                return None
        was_full = self.full
        item, size = self._items.popleft()
        self._size -= size
        if was_full and not self.full and self.on_room is not None:
            self.on_room()
        return item

    async def _rung(self) -> bool:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(self._interval, self._ring, False)
        try:
            return await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _ring(self, something: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(something)


@contextmanager
def attached(mailbox: Mailbox[Any]) -> Iterator[None]:
    """Close the mailbox, with the reason, as soon as the current call has to end."""
    call = _current.get()
    if call is None:  # called directly, not through `Calls.serve`
        yield
        return

    def close(ended: asyncio.Future[ConnectError]) -> None:
        mailbox.close(ended.result())

    call.ended.add_done_callback(close)
    try:
        yield
    finally:
        call.ended.remove_done_callback(close)
        mailbox.close()


async def attended(awaitable: Awaitable[T]) -> T:
    """Wait for it, unless the current call has to end before: then it is cancelled and the reason raised."""
    call = _current.get()
    if call is None:
        return await awaitable
    work = asyncio.ensure_future(awaitable)
    waits: set[asyncio.Future[Any]] = {work, call.ended}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise call.ended.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def keepalive_interval(ctx: RequestContext[Any, Any]) -> float:
    """How long a stream may be silent, in seconds, as the client asks for; what is no positive number is not heeded."""
    try:
        interval = float(ctx.request_headers.get(KEEPALIVE_HEADER) or KEEPALIVE_DEFAULT)
    except ValueError:
        return KEEPALIVE_DEFAULT
    return interval if 0 < interval < float("inf") else KEEPALIVE_DEFAULT
