"""A TCP proxy in front of a server, for faults of the network between: cut, frozen and refused connections.

It runs on an event loop in a thread of its own, so that a test of the sync face may block. ::

    with Proxy(server.url) as proxy:
        ...                      # use proxy.url
        proxy.cut("reset")       # what is open now
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

Cut = Literal["reset", "close", "drop"]
"""`reset`: RST. `close`: a proper end, with TLS's close_notify where there is TLS. `drop`: FIN without one."""

_AT_ONCE = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes on to the server at `target`; its own end speaks TLS when it is given a context.

    `replace`: bytes that the server's answers shall have in place of others, as many.
    """

    def __init__(
        self, target: str, tls: ssl.SSLContext | None = None, replace: tuple[bytes, bytes] = (b"", b"")
    ) -> None:
        assert len(replace[0]) == len(replace[1]), "a length was announced"
        self._replace = replace
        self._deaf = False
        parts = urlsplit(target)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port)
        self._tls = tls
        self._open: set[_Connection] = set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def accept(self) -> None:
        """Take connections (again), on the same port."""
        self._call(self._listen())

    def refuse(self) -> None:
        """Refuse new connections and reset those that are open."""
        self._call(self._close())

    def cut(self, how: Cut) -> int:
        """End the connections that are open now; how many they were."""
        return self._call(self._cut(how))

    def freeze(self) -> int:
        """Let nothing pass any more on the connections that are open now; how many they are. New ones work."""
        return self._call(self._freeze())

    def deafen(self) -> None:
        """Let nothing pass any more, on connections that are open and on new ones, which are taken."""
        self._call(self._hear(False))

    def hear(self) -> None:
        """Let pass what was held up, and everything from now on."""
        self._call(self._hear(True))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port, ssl=self._tls)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        await self._cut("reset")

    async def _cut(self, how: Cut) -> int:
        connections = list(self._open)
        for connection in connections:
            connection.cut(how)
        await asyncio.gather(*(connection.ended.wait() for connection in connections))
        return len(connections)

    async def _freeze(self) -> int:
        for connection in self._open:
            connection.passing.clear()
        return len(self._open)

    async def _hear(self, hears: bool) -> None:
        self._deaf = not hears
        for connection in self._open:
            (connection.passing.set if hears else connection.passing.clear)()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, self._replace)
        if self._deaf:
            connection.passing.clear()
        self._open.add(connection)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            connection.there = there_writer
            try:
                async with asyncio.TaskGroup() as group:
                    connection.pumps = [
                        group.create_task(connection.pump(reader, there_writer)),
                        group.create_task(connection.pump(there_reader, writer)),
                    ]
            finally:
                there_writer.transport.abort()
        except OSError:
            writer.transport.abort()  # the server is gone, and the client learns it
        finally:
            if not connection.is_cut:
                writer.close()
            self._open.discard(connection)
            connection.ended.set()


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, replace: tuple[bytes, bytes]) -> None:
        self._replace = replace
        self.there: asyncio.StreamWriter | None = None
        self.pumps: list[asyncio.Task[None]] = []
        self.passing = asyncio.Event()
        self.passing.set()
        self.ended = asyncio.Event()
        self.is_cut = False
        self._client = client

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self.passing.wait()
                writer.write(data.replace(*self._replace) if self._replace[0] and writer is self._client else data)
                await writer.drain()
        except ConnectionError:
            pass  # the end of one side is the end of the other
        for pump in self.pumps:
            pump.cancel()

    def cut(self, how: Cut) -> None:
        self.is_cut = True
        for pump in self.pumps:
            pump.cancel()
        connection = self._client.get_extra_info("socket")
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._client.transport.abort()
        elif how == "drop":
            connection.shutdown(socket.SHUT_RDWR)
            self._client.transport.abort()
        else:
            self._client.close()
