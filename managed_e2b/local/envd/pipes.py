"""Our ends of a process's pipes and terminal as coroutines: non-blocking descriptors, no threads, nothing polled.

Neither class owns its descriptor; whoever does closes it after the end is done with (`GuestProcess.close`).
"""

from __future__ import annotations

import asyncio
import os

LEFTOVER = 1 << 20  # bytes; no pipe or terminal holds more than this for a writer that is gone


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ReadEnd:
    """Where a process's output comes out."""

    def __init__(self, fd: int, chunk: int) -> None:
        self.at_end = False  # every writer has closed
        self._fd = fd
        self._chunk = chunk
        self._leftover: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The next bytes, at most a chunk; b"" at the end, or after `last_call` when nothing is waiting."""
        while not self.at_end:
            if self._leftover is not None and self._leftover <= 0:
                return b""
            try:
                data = os.read(self._fd, self._chunk)
            except BlockingIOError:
                if self._leftover is not None:
                    return b""
                await self._readable()
                continue
            except OSError:  # EIO: a terminal whose last process is gone
                data = b""
            if data and self._leftover is not None:
                self._leftover -= len(data)
            self.at_end = not data
            await asyncio.sleep(0)  # a pipe that is never empty must not keep the loop
            return data
        return b""

    def last_call(self) -> None:
        """Wait for no more writers: what is in the pipe now is still read, and then that is the end."""
        self._leftover = LEFTOVER
        if self._waiter is not None:
            _resolve(self._waiter)

    async def discard(self) -> None:
        """Read and drop until every writer has closed, so that none of them is stopped or killed by a full pipe."""
        self._leftover = None
        while await self.read():
            pass

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        loop.add_reader(self._fd, _resolve, waiter)
        try:
            await waiter
        finally:
            loop.remove_reader(self._fd)
            self._waiter = None


class WriteEnd:
    """Where a process's input goes in. Writes are in order: each waits for the one before."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closed = False
        self._turn = asyncio.Lock()
        self._waiter: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Write all of it, waiting while the pipe is full. Raises OSError when nobody can read it any more.

        Cancelled in the middle, a part has been written.
        """
        async with self._turn:
            rest = memoryview(data)
            while rest:
                if self._closed:
                    raise BrokenPipeError("closed")
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    await self._writable()

    async def finish(self) -> None:
        """Close after the writes that were asked for before. The descriptor may be closed afterwards."""
        async with self._turn:
            self.close()

    def close(self) -> None:
        """Close now: a write that waits fails. The descriptor may be closed afterwards."""
        self._closed = True
        if self._waiter is not None:
            # At once, not when the waiter wakes: by then the number may be another file's.
            asyncio.get_running_loop().remove_writer(self._fd)
            _resolve(self._waiter)

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        loop.add_writer(self._fd, _resolve, waiter)
        try:
            await waiter
        finally:
            if not self._closed:
                loop.remove_writer(self._fd)
            self._waiter = None
