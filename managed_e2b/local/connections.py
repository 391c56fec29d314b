"""A client's connection below its requests: how many there may be, how long a head may take, how one leaves HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from collections.abc import AsyncIterator

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 30.0
"""Seconds from a connection's begin, or from a request's first byte, until the head of the request must be there."""
HANDSHAKE_TIMEOUT = 15.0
"""Seconds for a TLS handshake."""
WIRE = "me2b.wire"
"""The ASGI extension with which every request has its connection: a `Wire`."""

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


def most_connections() -> int:
    """Half of the descriptors that this process may have: the rest is for sandboxes."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def backlog() -> int:
    """How many connections may wait to be accepted. asyncio accepts as many at once, before one of them can be cut."""
    return min(2048, most_connections() // 2)  # a burst of a thousand clients should not have to try again


class BoundedProtocol(H11Protocol):
    """uvicorn's connection; one too many is cut at once, before anything is read, and so is one that tells too slowly.

    Without the bound, any process of this host could take all descriptors by connecting, which needs no key: then no
    command could start and no connection be accepted, and asyncio would write a traceback for each try.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
            return
        app, wire = self.app, Wire(self)

        async def with_wire(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "extensions": {**scope.get("extensions", {}), WIRE: wire}}, receive, send)

        self.app = with_wire
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._expect_head()
        else:
            self.stop_timers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timers()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

    def stop_timers(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would speak WebSocket itself; here the application decides, by `Wire`


class Wire:
    """The connection of the one request under way.

    `streams` and `tunnel` leave HTTP, as an `Upgrade` or a `CONNECT` asks: only for a request without a body to which
    nothing has been answered.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """The connection as it is, to read and to write; it is closed at the end of the block."""
        outer = self._protocol
        transport, early = self._take()
        reader = asyncio.StreamReader()
        inner = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(inner)
        inner.connection_made(transport)
        reader.feed_data(early)
        try:
            yield reader, asyncio.StreamWriter(transport, inner, reader, outer.loop)
        finally:
            outer.connection_lost(None)  # what its new protocol heard of, it did not

    async def tunnel(self, context: ssl.SSLContext | None) -> None:
        """Say that the tunnel is there, and serve HTTP at its other end: over TLS with a `context`, else plain.

        Raises OSError (ssl.SSLError among them) when no TLS came to be; the connection is closed then.
        """
        outer = self._protocol
        transport, early = self._take()
        inner = type(outer)(outer.config, outer.server_state, outer.app_state)
        transport.write(_ESTABLISHED)
        received = _Early(early)
        try:
            if context is None:
                transport.set_protocol(received)
            elif early:
                raise ssl.SSLError("the client began with TLS before it had an answer")
            else:
                transport = await _start_tls(outer.loop, transport, received, context)
        except BaseException:
            outer.connection_lost(None)
            raise
        outer.connections.discard(outer)
        received.hand_over(transport, inner)

    def cut(self) -> None:
        """Break the answer off: what was sent still arrives, and then the connection ends before the answer does."""
        self._protocol.cycle.disconnected = True  # for uvicorn: what is sent after this goes nowhere, and is no error
        self._protocol.transport.close()

    def _take(self) -> tuple[asyncio.Transport, bytes]:
        """Take the connection from uvicorn, with what the client has sent already after the request."""
        protocol = self._protocol
        protocol.cycle.disconnected = True  # so that it answers nothing, and misses no answer
        protocol.stop_timers()
        protocol.flow.resume_reading()
        return protocol.transport, bytes(protocol.conn.trailing_data[0])


class _Early(asyncio.Protocol):
    """Keeps what arrives until the real protocol is there: asyncio may deliver data before `start_tls` returns."""

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        self._lost = False

    def data_received(self, data: bytes) -> None:
        self._data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def hand_over(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        if self._lost:
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(bytes(self._data))


async def _start_tls(
    loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, protocol: asyncio.Protocol, context: ssl.SSLContext
) -> asyncio.Transport:
    secured = await loop.start_tls(
        transport, protocol, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_TIMEOUT
    )
    if secured is None:
        raise ConnectionResetError("the client left during the handshake")
    return secured
