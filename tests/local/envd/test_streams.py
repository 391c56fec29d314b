"""The tools that end streams when they should end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from managed_e2b.local.envd.streams import Calls, Mailbox, attached, attended, keepalive_interval


async def test_a_mailbox_delivers_in_order_and_then_ends():
    mailbox: Mailbox[int] = Mailbox()
    for number in range(3):
        mailbox.put(number)
    mailbox.close()
    mailbox.put(99)
    assert [item async for item in mailbox] == [0, 1, 2]


async def test_an_error_comes_after_what_was_put_before_it():
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close(ConnectError(Code.UNAVAILABLE, "gone"))
    mailbox.close()  # only the first counts
    assert await anext(mailbox) == 1
    with pytest.raises(ConnectError, match="gone"):
        await anext(mailbox)


async def test_silence_is_told_and_does_not_end_the_stream():
    mailbox: Mailbox[int] = Mailbox(interval=0.01)
    assert await anext(mailbox) is None
    waiting = asyncio.ensure_future(anext(mailbox))
    mailbox.put(7)
    assert await waiting in (7, None)


async def test_a_full_mailbox_tells_when_there_is_room():
    mailbox: Mailbox[bytes] = Mailbox(limit=10)
    rooms = []
    mailbox.on_room = lambda: rooms.append(mailbox.full)
    mailbox.put(b"x" * 6, 6)
    assert not mailbox.full
    mailbox.put(b"x" * 6, 6)
    assert mailbox.full
    await anext(mailbox)
    assert rooms == [False]
    await anext(mailbox)
    assert rooms == [False]


async def test_closing_a_full_mailbox_frees_its_producer():
    mailbox: Mailbox[bytes] = Mailbox(limit=1)
    rooms = []
    mailbox.on_room = lambda: rooms.append(mailbox.full)
    mailbox.put(b"xx", 2)
    mailbox.close()
    assert rooms == [False]
    assert not mailbox.full


class Exchange:
    """One ASGI call by hand: the request is complete at once, the client leaves when told."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Any] = []
        self._asked = False

    async def receive(self) -> Any:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def serve(self, calls: Calls, app: Any) -> asyncio.Task[None]:
        return asyncio.create_task(calls.serve(app, {"type": "http"}, self.receive, self.send))


async def test_a_silent_stream_ends_when_its_client_leaves_or_the_sandbox_goes():
    for end, code in (("leave", Code.CANCELED), ("abort", Code.UNAVAILABLE)):
        calls, exchange, waiting = Calls(), Exchange(), asyncio.Event()
        errors = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            mailbox: Mailbox[int] = Mailbox()
            waiting.set()  # noqa: B023
            with attached(mailbox):
                try:
                    await anext(mailbox)
                except ConnectError as error:
                    errors.append(error)  # noqa: B023

        serving = exchange.serve(calls, app)
        await waiting.wait()
        assert len(calls) == 1
        exchange.left.set() if end == "leave" else calls.abort("it was killed")
        await serving
        assert [error.code for error in errors] == [code]
        assert len(calls) == 0


async def test_work_is_interrupted_when_the_sandbox_goes():
    calls, exchange, waiting = Calls(), Exchange(), asyncio.Event()
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ConnectError, match="it was paused"):
            await attended(work())

    serving = exchange.serve(calls, app)
    await waiting.wait()
    calls.abort("it was paused")
    await serving
    assert cancelled.is_set()


async def test_work_that_ends_gives_its_result_or_its_error():
    async def fails() -> None:
        raise OSError("broken")

    assert await attended(asyncio.sleep(0, "done")) == "done"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await attended(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(OSError, match="broken"):
            await attended(fails())

    await Exchange().serve(Calls(), app)


async def test_a_cancelled_call_never_says_that_it_ended_well():
    exchange, waiting = Exchange(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            await send({"type": "http.response.body", "body": b"a clean end", "more_body": False})

    serving = exchange.serve(Calls(), app)
    await waiting.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert exchange.sent == []


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 90), ("50", 50), ("0", 90), ("-3", 90), ("soon", 90), ("inf", 90), ("nan", 90), ("", 90)],
)
def test_keepalive_interval(header: str | None, seconds: float):
    headers = {} if header is None else {"keepalive-ping-interval": header}
    assert keepalive_interval(SimpleNamespace(request_headers=headers)) == seconds  # type: ignore[arg-type]
