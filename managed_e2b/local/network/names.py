"""The name that a connection says it is for: TLS's SNI, or HTTP's Host, from its first bytes."""

from __future__ import annotations

import asyncio
import ssl

import h11

MAX_HEAD = 64 * 1024
_TLS_HANDSHAKE = 0x16
_CHUNK = 16 * 1024


async def peek(reader: asyncio.StreamReader) -> tuple[bytes, str | None]:
    """What was read, to be sent on, and the name; None when there is none. Waits until one of the two is clear."""
    head = bytearray(await reader.read(_CHUNK))
    look = _Hello() if head[:1] == bytes([_TLS_HANDSHAKE]) else _Request()
    data = bytes(head)
    while data and not look.feed(data) and len(head) < MAX_HEAD:
        data = await reader.read(_CHUNK)
        head += data
    return bytes(head), look.name


class _Request:
    """An HTTP request's head."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    def feed(self, data: bytes) -> bool:
        """Take more; whether there is nothing more to learn."""
        self._http.receive_data(data)
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            return True
        if isinstance(event, h11.Request):
            hosts = [value for name, value in event.headers if name == b"host"]
            self.name = hosts[0].decode("latin-1").rpartition("@")[2].partition(":")[0] if len(hosts) == 1 else None
        return event is not h11.NEED_DATA


class _Hello:
    """TLS's first message, read by OpenSSL, which is stopped as soon as it has seen the name."""

    def __init__(self) -> None:
        self.name: str | None = None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._named
        self._incoming = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, ssl.MemoryBIO(), server_side=True)

    def _named(self, tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int:
        self.name = name
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE

    def feed(self, data: bytes) -> bool:
        """Take more; whether there is nothing more to learn."""
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            return True
        return True
