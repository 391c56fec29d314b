"""The tools that end streams when they should end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import struct
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b import Sandbox

from managed_e2b.local.connections import WIRE
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


class CutWire:
    """Stands for the connection; remembers that it was broken off."""

    def __init__(self) -> None:
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True


@pytest.mark.parametrize("gone", [True, False], ids=["its sandbox goes", "it fails by itself"])
async def test_the_last_word_of_a_stream_is_kept_back_only_when_its_sandbox_goes(gone):
    calls, exchange, wire = Calls(), Exchange(), CutWire()
    event, last = b"\x00\x00\x00\x00\x02{}", b"\x02\x00\x00\x00\x02{}"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if gone:
            calls.abort("it was killed")
        for body in (event, last):
            await send({"type": "http.response.body", "body": body, "more_body": body is event})

    scope = {"type": "http", "extensions": {WIRE: wire}}
    await calls.serve(app, scope, exchange.receive, exchange.send)
    assert wire.was_cut is gone
    assert [message.get("body") for message in exchange.sent] == ([None, event] if gone else [None, event, last])


def test_a_stream_of_a_sandbox_that_is_killed_breaks_off(server):
    """To a client that knows nothing of Connect: what was said before has arrived, and the answer has no end."""
    sandbox = Sandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url, timeout=60)
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    message = json.dumps({"process": {"cmd": "sleep", "args": ["1000"]}}).encode()
    headers = {
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox._envd_access_token,
    }
    with contextlib.closing(connection):
        connection.request("POST", "/process.Process/Start", b"\0" + struct.pack(">I", len(message)) + message, headers)
        answer = connection.getresponse()
        assert answer.status == 200
        flags, length = struct.unpack(">BI", answer.read(5))
        assert (flags, "start" in json.loads(answer.read(length))["event"]) == (0, True)
        assert sandbox.kill()
        with pytest.raises(http.client.IncompleteRead) as broken:
            answer.read()
    assert broken.value.partial == b""
