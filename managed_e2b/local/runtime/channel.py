"""Messages between the server, the spawner and the file agents: JSON with descriptors, over unix stream sockets.

A frame is a 4-byte big-endian length and that many bytes of a JSON object; descriptors travel beside the frame's
first byte (SCM_RIGHTS) and the object's member `fds` tells how many belong to it. Requests are `{"id", "op",
"args"}`, answers `{"id", "value"}` or `{"id", "errno", "message", "step"}`, and events `{"event", …}`. Strings may
carry undecodable bytes as lone surrogates, as Python's file system encoding does.

A process that can open no more descriptors loses those that are sent to it, but not the connection, on which the life
of every sandbox hangs: the message they belong to becomes the failure EMFILE.

Standard library only, and no asyncio: the spawner stays small because every process of ours begins as a fork of it.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

MAX_FRAME = 16 * 1024 * 1024
MAX_FDS = 16
_HEADER = struct.Struct("!I")
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

Message = dict[str, Any]

LOST: Message = {"errno": errno.EMFILE, "message": os.strerror(errno.EMFILE), "step": "descriptors"}


class ProtocolError(Exception):
    """The other side sent what is not a frame. The connection is of no more use."""


def encode(message: Message, fds: Sequence[int] = ()) -> bytes:
    """One frame. Raises ProtocolError when it would be larger than the other side accepts."""
    body = json.dumps({**message, "fds": len(fds)} if fds else message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME or len(fds) > MAX_FDS:
        raise ProtocolError(f"a message of {len(body)} bytes with {len(fds)} descriptors is too large")
    return _HEADER.pack(len(body)) + body


def ancillary(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """What `sendmsg` takes to pass descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []


def receive(sock: socket.socket, size: int = 65536) -> tuple[bytes, list[int] | None]:
    """Bytes, none at the end of the stream, and (close-on-exec) descriptors of one message; None: they were lost."""
    data, control, flags, _ = sock.recvmsg(size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        return data, None
    return data, list(fds)


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one frame on a blocking socket. The caller keeps its descriptors."""
    send_frame(sock, encode(message, fds), fds)


def send_frame(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send what `encode` made, with the same descriptors."""
    sent = sock.sendmsg([frame], ancillary(fds), socket.MSG_NOSIGNAL)
    if sent < len(frame):
        sock.sendall(frame[sent:], socket.MSG_NOSIGNAL)


class Decoder:
    """Puts frames together again from what `receive` gave."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[list[int] | None] = deque()  # of one message each

    def feed(self, data: bytes, fds: Sequence[int] | None = ()) -> list[tuple[Message, list[int]]]:
        """The messages that are complete now. Their descriptors belong to the caller. Raises ProtocolError."""
        self._data += data
        if fds is None or fds:
            self._fds.append(None if fds is None else list(fds))
        messages: list[tuple[Message, list[int]]] = []
        while len(self._data) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data)
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(self._data) < _HEADER.size + length:
                break
            body = bytes(self._data[_HEADER.size : _HEADER.size + length])
            del self._data[: _HEADER.size + length]
            messages.append(self._message(body))
        return messages

    def _message(self, body: bytes) -> tuple[Message, list[int]]:
        try:
            message = json.loads(body)
        except ValueError as error:
            raise ProtocolError("a frame that is not JSON") from error
        if not isinstance(message, dict):
            raise ProtocolError("a frame that is not an object")
        count = message.pop("fds", 0)
        if count == 0:
            return message, []
        fds = self._fds.popleft() if self._fds else []
        if fds is None:
            return {"id": message.get("id"), **LOST}, []
        if count != len(fds):
            close_all(fds)
            raise ProtocolError("a frame that names descriptors which did not come")
        return message, fds

    def close(self) -> None:
        """Close descriptors of a frame that never became complete."""
        for fds in self._fds:
            close_all(fds or ())
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
