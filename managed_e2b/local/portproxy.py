"""A port of a sandbox, reached from outside: a streaming HTTP/1.1 reverse proxy over a socket dialled from inside.

One connection a request. Upgrades (WebSocket) are not carried.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterable

import h11
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from managed_e2b.local.model import Sandbox
from managed_e2b.local.runtime.base import GuestError

log = logging.getLogger(__name__)

CHUNK = 64 * 1024

# RFC 9110, 7.6.1: these belong to one connection. `host` is set anew; the last three are for the gateway alone.
_NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade host expect"
    b" e2b-sandbox-id e2b-sandbox-port e2b-traffic-access-token".split()
)

_NOT_RETURNED = _NOT_FORWARDED | {b"transfer-encoding"}  # the server frames the body anew


class PortClosed(Exception):
    """Nothing in the sandbox listens on the port, or it hung up before it answered."""


async def proxy(sandbox: Sandbox, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Carry one request to the port and its answer back, both as they come.

    Raises PortClosed when nothing has been answered, and GuestGone. An answer that breaks off is left unfinished:
    the server then cuts the connection, so that the client does not take it for whole.
    """
    try:
        descriptor = await sandbox.guest.connect(port)
    except GuestError as error:
        if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT):
            raise PortClosed from error
        raise
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        await _Exchange(reader, writer).run(_request(sandbox, port, scope), receive, send)
    finally:
        writer.close()


def _request(sandbox: Sandbox, port: int, scope: Scope) -> h11.Request:
    host = Headers(scope=scope).get("host", "localhost")
    if sandbox.spec.mask_request_host is not None:
        host = sandbox.spec.mask_request_host.replace("${PORT}", str(port))
    query: bytes = scope["query_string"]
    return h11.Request(
        method=scope["method"],
        target=scope["raw_path"] + (b"?" + query if query else b""),
        headers=[
            (b"host", host.encode("latin-1")),
            *_passed_on(scope["headers"], _NOT_FORWARDED),
            (b"connection", b"close"),
        ],
    )


def _passed_on(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """What goes on to the other side. A length beside chunks does not count (RFC 9112, 6.3): it must not go on."""
    found = list(headers)
    if any(name == b"transfer-encoding" for name, _ in found):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in found if name not in dropped]


class _Exchange:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, request: h11.Request, receive: Receive, send: Send) -> None:
        await self._write(request)
        sending = asyncio.create_task(self._send_body(receive))
        answering = asyncio.create_task(self._answer(send))
        try:
            # the sending task ends first only when the client has gone: then nobody reads the answer
            done, _ = await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _send_body(self, receive: Receive) -> None:
        """Send the request's body, then wait for the client to go."""
        whole = False
        while (message := await receive())["type"] == "http.request":
            if whole:
                continue
            # a server may answer and hang up before it has read everything: the answer counts
            with contextlib.suppress(ConnectionError):
                if body := message.get("body", b""):
                    await self._write(h11.Data(data=body))
                if not message.get("more_body", False):
                    whole = True
                    await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def _answer(self, send: Send) -> None:
        started = False
        try:
            while not isinstance(event := await self._next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    started = True
                    headers = _passed_on(event.headers, _NOT_RETURNED)
                    await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                elif isinstance(event, h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        except (h11.RemoteProtocolError, ConnectionError) as error:
            if not started:
                raise PortClosed from error
            log.info("an answer from a sandbox's port broke off")
            return
        await send({"type": "http.response.body", "body": b""})

    async def _next_event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the connection ended before the answer")
        return event
