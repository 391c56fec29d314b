"""Moving the content of files between HTTP and a sandbox: in chunks, off the event loop, with flat memory."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.types import Receive

from managed_e2b.local.envd.streams import attended

P = ParamSpec("P")
T = TypeVar("T")

CHUNK = 1 << 20  # bytes read or written at a time
IDLE = 60.0  # seconds for which a client may send nothing of its upload
LINGER = 30.0  # seconds for which the rest of a refused upload is taken in
GZIP_WINDOW = 31  # zlib: the largest window, in a gzip wrapper

# Disks may block, and a loop that serves all sandboxes must not. Threads are made when they are needed.
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="me2b-files")


class ClientGone(Exception):
    """The client left in the middle of its request: there is nobody to answer."""


class UploadStalled(Exception):
    """The client has sent nothing for too long."""


class BadBody(Exception):
    """The body is not what its headers say."""


class HeldFd:
    """A descriptor used by worker threads. It is closed when no thread uses it any more, also after a cancellation:
    a number that was closed too early could be another file by the time the thread writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._last: Future[Any] | None = None

    async def run(self, function: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function(fd, …)` in a thread. One at a time."""
        self._last = work = _threads.submit(function, self._fd, *args, **kwargs)
        return await attended(asyncio.wrap_future(work))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._last is None:
            os.close(fd)
        else:
            self._last.add_done_callback(lambda _: os.close(fd))


class FileWriter:
    """Writes what comes in pieces of any size, a chunk at a time. Raises the OSError of the write."""

    def __init__(self, fd: int) -> None:
        self._held = HeldFd(fd)
        self._waiting = bytearray()

    async def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) >= CHUNK:
            await self.flush()

    async def flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            await self._held.run(_write_all, data)

    def close(self) -> None:
        """Let go of the file; what was not flushed is not written."""
        self._held.close()


def _write_all(fd: int, data: bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])


async def read_chunks(held: HeldFd, start: int, end: int | None) -> AsyncIterator[bytes]:
    """The content from `start` to `end`, or to wherever the file ends when that is None or comes earlier."""
    while end is None or start < end:
        data = await held.run(os.pread, CHUNK if end is None else min(CHUNK, end - start), start)
        if not data:
            return
        start += len(data)
        yield data


class RequestBody:
    """The body of a request as it comes. Iterating again goes on where it was left.

    Raises ClientGone, UploadStalled, and what `attended` raises when the call has to end.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._complete = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._complete:
            if data := await attended(self._next()):
                yield data

    async def discard(self) -> None:
        """Take in what is left, whatever became of the call, but not for long: a client that is still sending could not
        read an answer."""
        try:
            async with asyncio.timeout(LINGER):
                while not self._complete:
                    await self._next()
        except (TimeoutError, UploadStalled):
            return  # it gets the answer all the same, and the connection is closed

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(IDLE):
                message = await self._receive()
        except TimeoutError:
            raise UploadStalled(f"nothing came for {IDLE:.0f} seconds") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._complete = not message.get("more_body", False)
        return bytes(message.get("body", b""))


async def gunzip(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The content of a gzip stream of one or several members, a bounded piece at a time. Raises BadBody."""
    inflater = zlib.decompressobj(GZIP_WINDOW)
    empty = True
    async for data in body:
        while data:
            if inflater.eof:
                inflater = zlib.decompressobj(GZIP_WINDOW)
            try:
                piece = inflater.decompress(data, CHUNK)
            except zlib.error as error:
                raise BadBody(f"error decompressing request body: {error}") from None
            empty = False
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if piece:
                yield piece
    if empty or not inflater.eof:
        raise BadBody("error decompressing request body: unexpected end of the gzip stream")


async def gzipped(content: AsyncIterator[bytes], held: HeldFd) -> AsyncIterator[bytes]:
    """The content as a gzip stream, compressed in the thread of its file."""
    deflater = zlib.compressobj(wbits=GZIP_WINDOW)
    async for data in content:
        if piece := await held.run(lambda _, data: deflater.compress(data), data):
            yield piece
    yield deflater.flush()
