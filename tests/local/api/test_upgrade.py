"""WebSocket and other upgrades to a port of a sandbox: asked as the client asked, then carried as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct

import pytest

from managed_e2b.local import tls

PATIENCE = 10.0
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
)
ASK = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n"


class Service:
    """What listens inside: it agrees to an upgrade and then does what the test says with the two streams."""

    def __init__(self, then, answer: bytes = SWITCH) -> None:
        self.head = b""
        self.ended = asyncio.Event()
        self._then = then
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer)
            await self._then(reader, writer)
        except ConnectionError:
            pass  # the client is gone: what a test of that waits for
        finally:
            writer.close()
            self.ended.set()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@contextlib.asynccontextmanager
async def listening(world, sandbox, service: Service, port: int = 3000, context: ssl.SSLContext | None = None):
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0, ssl=context)
    world.guest(sandbox).ports[port] = server.sockets[0].getsockname()[1]
    async with server:
        yield
        server.close()


@contextlib.asynccontextmanager
async def connected(world):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.server.url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(PATIENCE):
            yield reader, writer
    finally:
        writer.close()


def request(sandbox, headers: str = ASK, port: int = 3000) -> bytes:
    host = f"{port}-{sandbox['sandboxID']}.e2b.app"
    return f"GET /chat?q=1 HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode()


@pytest.fixture
async def sandbox(world):
    return await world.create()


async def test_both_ways_and_what_the_port_is_asked(world, sandbox):
    service = Service(echo)
    async with listening(world, sandbox, service), connected(world) as (reader, writer):
        writer.write(request(sandbox) + b"early")
        assert (await reader.readuntil(b"\r\n\r\n")).lower() == SWITCH.lower()
        assert await reader.readexactly(5) == b"early"
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        writer.write_eof()
        assert await reader.read() == b""
        await service.ended.wait()
    lines = service.head.decode().split("\r\n")
    assert lines[0] == "GET /chat?q=1 HTTP/1.1"
    assert {"Connection: upgrade", "Upgrade: websocket", "Sec-Websocket-Key: a"} <= set(lines)


async def test_by_the_headers_of_the_gateway(world, sandbox):
    headers = "".join(f"{name}: {value}\r\n" for name, value in world.envd_headers(sandbox, 3000).items())
    async with listening(world, sandbox, Service(echo)), connected(world) as (reader, writer):
        writer.write(f"GET / HTTP/1.1\r\nHost: localhost\r\n{ASK}{headers}\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"


async def test_more_than_any_buffer_holds(world, sandbox):
    size = 16 * 1024 * 1024
    async with listening(world, sandbox, Service(echo)), connected(world) as (reader, writer):
        writer.write(request(sandbox))
        await reader.readuntil(b"\r\n\r\n")

        async def send() -> None:
            for _ in range(size // 65536):
                writer.write(bytes(65536))
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        received = 0
        while data := await reader.read(65536):
            received += len(data)
        await sending
        assert received == size


async def test_a_side_that_has_said_its_last_still_hears(world, sandbox):
    async def answer_after_the_end(reader, writer):
        said = await reader.read()
        writer.write(b"you said " + said)

    async with listening(world, sandbox, Service(answer_after_the_end)), connected(world) as (reader, writer):
        writer.write(request(sandbox))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"bye")
        writer.write_eof()
        assert await reader.read() == b"you said bye"


async def test_the_port_that_has_said_its_last_still_hears(world, sandbox):
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def end_first(reader, writer):
        writer.write_eof()
        heard.set_result(await reader.read())

    async with listening(world, sandbox, Service(end_first)), connected(world) as (reader, writer):
        writer.write(request(sandbox))
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        writer.write(b"still here")
        writer.write_eof()
        assert await heard == b"still here"


@pytest.mark.parametrize("how", ["reset", "kill"])
async def test_an_end_on_one_side_ends_the_other(world, sandbox, how):
    service = Service(wait_for_the_end)
    async with listening(world, sandbox, service), connected(world) as (reader, writer):
        writer.write(request(sandbox))
        await reader.readuntil(b"\r\n\r\n")
        if how == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            await world.server.close()
        await service.ended.wait()


async def test_a_port_that_does_not_agree_answers_as_ever(world, sandbox):
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"
    async with listening(world, sandbox, Service(wait_for_the_end, refusal)), connected(world) as (reader, writer):
        writer.write(request(sandbox))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403")
        assert await reader.readexactly(2) == b"no"
        # the connection goes on as HTTP
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")


async def test_refusals_come_before_the_switch(world):
    closed = await world.create(network={"allowPublicTraffic": False})
    token = f"e2b-traffic-access-token: {closed['trafficAccessToken']}\r\n"
    for headers, port, status in ((ASK, 3000, 403), (ASK + token, 3000, 101), (ASK + token, 3001, 502)):
        async with listening(world, closed, Service(echo)), connected(world) as (reader, writer):
            writer.write(request(closed, headers, port))
            assert int((await reader.readuntil(b"\r\n\r\n")).split()[1]) == status


async def test_an_answer_of_101_that_nobody_asked_for_is_an_error(world, sandbox):
    async with listening(world, sandbox, Service(wait_for_the_end)):
        answer = await world.anonymous.get("/", headers=world.envd_headers(sandbox, 3000))
    assert answer.status_code == 502


@pytest.mark.parametrize("headers", ["Connection: Upgrade\r\nUpgrade: h2c\r\n", "Upgrade: websocket\r\n"])
async def test_what_is_no_upgrade_is_plain_http(world, sandbox, headers):
    service = Service(wait_for_the_end, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    async with listening(world, sandbox, service), connected(world) as (reader, writer):
        writer.write(request(sandbox, headers))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert b"pgrade:" not in service.head


async def test_wss(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    world = await serve(clock=None, tls_domain="e2b.app")
    sandbox = await world.create()
    host = f"3000-{sandbox['sandboxID']}.e2b.app"
    service = Service(echo)
    async with listening(world, sandbox, service), connected(world) as (reader, writer):
        writer.write(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await writer.start_tls(
            ssl.create_default_context(cafile=world.server.state().bundle_file), server_hostname=host
        )
        writer.write(request(sandbox))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(b"secret")
        assert await reader.readexactly(6) == b"secret"
        writer.close()
        await service.ended.wait()


async def test_a_port_that_serves_tls_itself(world, tmp_path):
    sandbox = await world.create(network={"httpsPorts": [3000]})
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    context = tls.prepare(tmp_path).context  # of whatever name: it is not verified
    async with listening(world, sandbox, Service(wait_for_the_end, answer), context=context):
        assert (await world.anonymous.get("/", headers=world.envd_headers(sandbox, 3000))).text == "hi"

    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 plain, against what was said of it\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as plain:
        world.guest(sandbox).ports[3000] = plain.sockets[0].getsockname()[1]
        found = await world.anonymous.get("/", headers=world.envd_headers(sandbox, 3000))
    assert (found.status_code, found.json()["message"]) == (502, "The sandbox is running but port is not open")
