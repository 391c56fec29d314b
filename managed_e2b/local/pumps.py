"""Two connections made one: bytes copied both ways."""

from __future__ import annotations

import asyncio

CHUNK = 64 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def carry(one: Streams, other: Streams) -> None:
    """Copy both ways until both have ended; the end of one way is passed on alone. Neither is open afterwards.

    Raises OSError when one side breaks.
    """
    copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.gather(*copies)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one[1].close()
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if not writer.can_write_eof():  # TLS: its end is the end of both ways
        await writer.drain()
        raise ConnectionAbortedError("the other side cannot be half closed")
    writer.write_eof()
