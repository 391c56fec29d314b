"""The connection below a request, which ASGI does not show: to cut it, and to see that the client has left."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import struct

from starlette.types import Receive, Scope, Send

from managed_e2b.local.connections import BoundedProtocol

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time at all


class Connection:
    """One client's connection. `lost` is set when it has ended, by whomever."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.lost = asyncio.Event()

    async def reset(self) -> None:
        """End it with a TCP reset, unless it has ended."""
        if self.lost.is_set():
            return
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()
        await self.lost.wait()

    async def close(self) -> None:
        """End it in order on this level, in the midst of whatever was said on the one above."""
        self._transport.close()
        await self.lost.wait()

    def _socket(self) -> socket.socket:
        found: socket.socket = self._transport.get_extra_info("socket")
        return found


_current: contextvars.ContextVar[Connection] = contextvars.ContextVar("connection")


def current_connection() -> Connection:
    """The connection of the request that is being served. Raises LookupError outside of `ConnectionProtocol`."""
    return _current.get()


class ConnectionProtocol(BoundedProtocol):
    """uvicorn's HTTP/1.1, with the connection within the application's reach."""

    _connection: Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = connection = Connection(transport)
        app = self.app

        async def with_connection(scope: Scope, receive: Receive, send: Send) -> None:
            _current.set(connection)
            await app(scope, receive, send)

        self.app = with_connection

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.lost.set()
