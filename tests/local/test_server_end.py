"""The end of the HTTP server: no connection outlives it, whenever it came and whatever its client does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from managed_e2b.local import server
from managed_e2b.local.connections import BoundedProtocol

PATIENCE = 30
"""Seconds: only a hang takes that long."""
App = Callable[[Any, Any, Any], Awaitable[None]]


async def _serve(app: App, protocol: type[BoundedProtocol] = BoundedProtocol) -> tuple[Any, asyncio.Task[None], int]:
    listener = server._listen(0)
    http = server._Http(app, protocol)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    await http.ready(serving)
    return http, serving, listener.getsockname()[1]


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asked for anything")


async def test_a_client_that_came_as_the_server_was_told_to_stop_is_let_go_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Last(BoundedProtocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            http.stop()  # accepted, but uvicorn is told of it one turn of the loop later

    http, serving, port = await _serve(_refuse, Last)
    reader, writer = await asyncio.open_connection(server.HOST, port)
    await asyncio.wait_for(serving, PATIENCE)
    assert not http.server_state.connections
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    assert not caplog.records, "nobody was waited for in vain"
    writer.close()


async def test_a_client_that_does_not_read_its_answer_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE", 0.1)
    full = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        body = {"type": "http.response.body", "body": bytes(2**26), "more_body": True}  # more than sockets hold
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(body)
        full.set()
        await send(body)

    http, serving, port = await _serve(endless)
    _, writer = await asyncio.open_connection(server.HOST, port)
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(full.wait(), PATIENCE)
    http.stop()
    await asyncio.wait_for(serving, PATIENCE)
    assert not http.server_state.connections
    writer.transport.abort()
    await asyncio.sleep(0)  # the client's end, too, is closed in the loop's next turn
