"""Bodies arrive in pieces of any size; what comes out must not depend on where they are cut."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_e2b.local.envd.multipart import Part, PartEnd, multipart_parts
from managed_e2b.local.envd.transfer import CHUNK, BadBody, gunzip

CONTENT_TYPE = 'multipart/form-data; boundary="the boundary"'
cuts = st.lists(st.integers(1, 40), min_size=1, max_size=20)


async def pieces(body: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    position = turn = 0
    while position < len(body):
        size = sizes[turn % len(sizes)]
        yield body[position : position + size]
        position, turn = position + size, turn + 1


async def parts_of(body: bytes, sizes: list[int]) -> list[tuple[bytes, bytes | None, bytes]]:
    parts: list[tuple[bytes, bytes | None, bytes]] = []
    async for event in multipart_parts(pieces(body, sizes), CONTENT_TYPE):
        if isinstance(event, Part):
            parts.append((event.name, event.filename, b""))
        elif event is not PartEnd:
            name, filename, data = parts[-1]
            parts[-1] = (name, filename, data + event)
    return parts


awkward = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"\r\n", b"\r\n--", b"\r\n--the boundar", b"--the boundary", b"\r\r\n\n", b"\r\n--the bounda\r\n--"]
    ),
)


@settings(deadline=None, database=None)
@given(st.lists(awkward, max_size=4), cuts)
def test_parts_come_out_as_they_went_in(contents, sizes):
    body = b"".join(
        b'--the boundary\r\nX: y\r\nContent-Disposition: form-data; name="file"; filename="d/%d"\r\n\r\n%s\r\n'
        % (i, content)
        for i, content in enumerate(contents)
    )
    parts = asyncio.run(parts_of(body + b"--the boundary--\r\n", sizes))
    assert parts == [(b"file", b"d/%d" % i, content) for i, content in enumerate(contents)]


@settings(deadline=None, database=None)
@given(st.binary(max_size=200), cuts)
def test_what_is_no_multipart_is_refused_and_never_a_crash(body, sizes):
    try:
        asyncio.run(parts_of(body, sizes))
    except BadBody:
        return
    assert b"--the boundary--" in body


async def inflated(body: bytes, sizes: list[int]) -> list[bytes]:
    return [piece async for piece in gunzip(pieces(body, sizes))]


@settings(deadline=None, database=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3), cuts)
def test_gzip_comes_out_as_it_went_in(members, sizes):
    body = b"".join(gzip.compress(member) for member in members)
    assert b"".join(asyncio.run(inflated(body, sizes))) == b"".join(members)


@settings(deadline=None, database=None)
@given(st.binary(max_size=200), cuts)
def test_what_is_no_gzip_is_refused_and_never_a_crash(body, sizes):
    with pytest.raises(BadBody):
        asyncio.run(inflated(b"\0" + body, sizes))


async def test_a_bomb_comes_out_in_bounded_pieces():
    out = await inflated(gzip.compress(bytes(50_000_000)), [1 << 16])
    assert sum(map(len, out)) == 50_000_000
    assert max(map(len, out)) <= CHUNK
