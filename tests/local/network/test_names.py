"""The name in a connection's first bytes, however they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest

from managed_e2b.local.network import outside
from managed_e2b.local.network.names import MAX_HEAD, peek


def hello(name: str | None) -> bytes:
    """The first message of a real TLS client."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    if name is None:
        context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


async def peeked(data: bytes, step: int) -> tuple[bytes, str | None]:
    """What `peek` makes of bytes that come `step` at a time and never end."""
    reader = asyncio.StreamReader(limit=2**20)
    looking = asyncio.create_task(peek(reader))
    for begin in range(0, len(data), step):
        reader.feed_data(data[begin : begin + step])
        await asyncio.sleep(0)
    return await asyncio.wait_for(looking, 10)


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("data", "name"),
    [
        (hello("a.Example.com"), "a.Example.com"),
        (hello(None), None),
        (b"GET / HTTP/1.1\r\nHost: a.example.com:8080\r\n\r\nbody", "a.example.com"),
        (b"POST http://x/ HTTP/1.1\r\nhost:a.example.com\r\nContent-Length: 3\r\n\r\nabc", "a.example.com"),
        (b"GET / HTTP/1.0\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", None),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", None),
        (b"\x16\x03\x01\x00\x05hello, this is no TLS at all", None),
        (b"\x00\x01\x02\r\n\r\n", None),
    ],
)
async def test_the_name_and_all_that_was_read(data, name, step):
    head, found = await peeked(data, step)
    assert found == name
    assert data.startswith(head)
    if step > len(data):
        assert head == data


async def test_a_head_without_end_is_given_up():
    head, name = await peeked(b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD * 2), 60_000)
    assert name is None
    assert len(head) <= MAX_HEAD + 60_000


async def test_an_end_before_there_is_a_name():
    for data in (b"", b"GET / HT", hello("a.example.com")[:50]):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        assert await peek(reader) == (data, None)


@pytest.mark.parametrize("name", ["a..example.com", "x" * 64 + ".example.com", ".example.com", "x" * 300])
async def test_what_is_no_name_is_not_found(name):
    with pytest.raises(OSError, match="no name"):
        await outside.resolve(name)
