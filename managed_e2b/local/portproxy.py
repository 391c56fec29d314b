"""A port of a sandbox, reached from outside: a streaming HTTP/1.1 reverse proxy over a socket dialled from inside.

One connection a request. An upgrade (WebSocket) is asked of the port as the client asked for it; when the port agrees,
what follows is carried both ways as it is, until both sides have said their last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Iterable

import h11
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from managed_e2b.local.connections import HANDSHAKE_TIMEOUT, WIRE, Wire
from managed_e2b.local.model import Sandbox
from managed_e2b.local.pumps import CHUNK, carry
from managed_e2b.local.runtime.base import GuestError

log = logging.getLogger(__name__)

# RFC 9110, 7.6.1: these belong to one connection. `host` is set anew; the last three are for the gateway alone.
_NOT_FORWARDED = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade host expect"
    b" e2b-sandbox-id e2b-sandbox-port e2b-traffic-access-token".split()
)

_NOT_RETURNED = _NOT_FORWARDED | {b"transfer-encoding"}  # the server frames the body anew
_SWITCHED = 101
AWAIT_SECONDS = 60.0
"""How long a request waits for a port that something will listen on, see `templates.Settings`."""
AWAIT_PAUSE = 0.05  # seconds between two looks: one costs a few milliseconds


class PortClosed(Exception):
    """Nothing in the sandbox listens on the port, or it hung up before it answered."""


async def proxy(sandbox: Sandbox, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Carry one request to the port and its answer back, both as they come.

    Raises PortClosed when nothing has been answered, and GuestGone. An answer that breaks off is left unfinished:
    the server then cuts the connection, so that the client does not take it for whole.
    """
    descriptor = await _dial(sandbox, port)
    upgrade = _upgrade(scope)
    reader, writer = await _open(sandbox, port, descriptor)
    try:
        exchange = _Exchange(reader, writer, scope["extensions"][WIRE] if upgrade else None)
        await exchange.run(_request(sandbox, port, scope, upgrade), receive, send)
    finally:
        writer.close()


async def _dial(sandbox: Sandbox, port: int) -> int:
    """Raises PortClosed: at once or, where something is to listen soon, after a while."""
    time = asyncio.get_running_loop().time
    end = time() + (AWAIT_SECONDS if port in sandbox.spec.settings.awaited_ports else 0)
    while True:
        try:
            return await sandbox.guest.connect(port)
        except GuestError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT):
                raise
            if time() >= end:
                raise PortClosed from error
        await asyncio.sleep(AWAIT_PAUSE)


async def _open(sandbox: Sandbox, port: int, descriptor: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The dialled socket as streams, with TLS on it where the sandbox serves that. Raises PortClosed."""
    connection = socket.socket(fileno=descriptor)
    if port not in sandbox.spec.https_ports:
        return await asyncio.open_connection(sock=connection)
    # what is dialled is the sandbox itself: there is no name to verify, and upstream does not either
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return await asyncio.open_connection(
            sock=connection, ssl=context, server_hostname="", ssl_handshake_timeout=HANDSHAKE_TIMEOUT
        )
    except OSError as error:
        raise PortClosed from error


def _upgrade(scope: Scope) -> bytes | None:
    """The protocol that a request asks to go on with, if any."""
    headers = Headers(scope=scope)
    tokens = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    if "upgrade" not in tokens or "upgrade" not in headers or "h2c" in headers["upgrade"].lower():
        return None
    if "content-length" in headers or "transfer-encoding" in headers:
        return None  # no protocol in use has a body before its switch
    return headers["upgrade"].encode("latin-1")


def _request(sandbox: Sandbox, port: int, scope: Scope, upgrade: bytes | None) -> h11.Request:
    host = Headers(scope=scope).get("host", "localhost")
    if sandbox.spec.mask_request_host is not None:
        host = sandbox.spec.mask_request_host.replace("${PORT}", str(port))
    query: bytes = scope["query_string"]
    last = [(b"connection", b"upgrade"), (b"upgrade", upgrade)] if upgrade else [(b"connection", b"close")]
    headers = [(b"host", host.encode("latin-1")), *_passed_on(scope["headers"], _NOT_FORWARDED), *last]
    return h11.Request(
        method=scope["method"],
        target=scope["raw_path"] + (b"?" + query if query else b""),
        headers=[(_usual(name), value) for name, value in headers],
    )


def _usual(name: bytes) -> bytes:
    """A header's name as most write it, and as upstream does; ASGI has it in lower case."""
    return b"-".join(part.capitalize() for part in name.split(b"-"))


def _passed_on(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """What goes on to the other side. A length beside chunks does not count (RFC 9112, 6.3): it must not go on."""
    found = list(headers)
    if any(name == b"transfer-encoding" for name, _ in found):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in found if name not in dropped]


class _Exchange:
    """`wire`: the client's connection, when the client asks for an upgrade."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire | None) -> None:
        self._reader = reader
        self._writer = writer
        self._wire = wire
        self._http = h11.Connection(h11.CLIENT)

    async def run(self, request: h11.Request, receive: Receive, send: Send) -> None:
        try:
            await self._write(request)
        except ConnectionError as error:  # it was about to end when it was dialled
            raise PortClosed from error
        if self._wire is not None:
            await self._write(h11.EndOfMessage())  # it has no body; the answer may come before uvicorn says so
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
        whole = self._wire is not None
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
                elif isinstance(event, h11.InformationalResponse) and event.status_code == _SWITCHED:
                    await self._switch(event)
                    return
                elif isinstance(event, h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        except (h11.RemoteProtocolError, ConnectionError) as error:
            if not started:
                raise PortClosed from error
            log.info("an answer from a sandbox's port broke off")
            return
        await send({"type": "http.response.body", "body": b""})

    async def _switch(self, answer: h11.InformationalResponse) -> None:
        """The port agreed to the upgrade: carry its answer, and then bytes."""
        if self._wire is None:
            raise h11.RemoteProtocolError("an upgrade that nobody asked for")
        async with self._wire.streams() as (reader, writer):
            writer.write(_head(answer) + bytes(self._http.trailing_data[0]))
            try:
                await carry((reader, writer), (self._reader, self._writer))
            except OSError:
                log.debug("an upgraded connection broke off")

    async def _next_event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the connection ended before the answer")
        return event


def _head(answer: h11.InformationalResponse) -> bytes:
    lines = [b"HTTP/1.1 %d %s" % (answer.status_code, answer.reason), *(b"%s: %s" % pair for pair in answer.headers)]
    return b"\r\n".join([*lines, b"", b""])
