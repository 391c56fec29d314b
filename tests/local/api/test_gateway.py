"""One origin: which request goes where, and what is answered for a sandbox or a port that is not there."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from managed_e2b.local.envd.signatures import sign


async def raw(world, text: str) -> tuple[int, bytes]:
    """Send a request exactly as written; the answer's status and body."""
    host, port = world.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.replace("\n", "\r\n").encode("latin-1"))
    await writer.drain()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_headers_name_a_sandbox(world):
    sandbox = await world.create()
    answer = await world.anonymous.get("/anything", headers=world.envd_headers(sandbox))
    assert answer.json() == {"envd": sandbox["sandboxID"], "path": "/anything", "method": "GET"}
    assert (await world.anonymous.get("/health", headers=world.envd_headers(sandbox))).status_code == 204


@pytest.mark.parametrize("domain", ["localhost", "e2b.app", "127.0.0.1.nip.io"])
async def test_the_host_names_a_sandbox(world, domain):
    sandbox = await world.create()
    headers = {"Host": f"49983-{sandbox['sandboxID']}.{domain}:7820"}
    assert (await world.anonymous.get("/x", headers=headers)).json()["envd"] == sandbox["sandboxID"]


async def test_an_absolute_target_names_a_sandbox_or_the_control_plane(world):
    sandbox = await world.create()
    head = "Host: ignored\nConnection: close\n"
    target = f"http://49983-{sandbox['sandboxID']}.e2b.app/a%20b?q=1"
    status, body = await raw(world, f"GET {target} HTTP/1.1\n{head}\n")
    assert status == 200
    assert b'"path": "/a b"' in body
    status, body = await raw(world, f"GET http://api.e2b.app/me2b/stats HTTP/1.1\n{head}\n")
    assert status == 401
    status, body = await raw(world, f"GET http://api.e2b.app/health HTTP/1.1\n{head}\n")
    assert status == 204


async def test_a_signed_url_names_the_sandbox_that_made_it(world):
    await world.create()
    sandbox = await world.create()
    token = sandbox["envdAccessToken"]
    for expiration in (None, 12):
        params = {
            "path": "a b.txt",
            "username": "user",
            "signature": sign(token, "a b.txt", "read", "user", expiration),
        }
        if expiration is not None:
            params["signature_expiration"] = str(expiration)
        answer = await world.anonymous.get("/files", params=params)
        assert answer.json()["envd"] == sandbox["sandboxID"]
        assert (await world.anonymous.post("/files", params=params)).status_code == 401  # signed for reading
    params = {"path": "x", "signature": sign(token, "x", "write", "", None)}
    assert (await world.anonymous.post("/files", params=params)).json()["method"] == "POST"


async def test_a_signature_of_nobody(world):
    await world.create()
    answer = await world.anonymous.get("/files", params={"path": "x", "signature": "v1_nonsense\u1234"})
    assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "invalid signature"})
    assert (await world.anonymous.get("/files", params={"path": "x"})).status_code == 401  # the control plane


async def test_a_sandbox_that_is_not_there(world):
    headers = {"E2b-Sandbox-Id": "inowhere", "E2b-Sandbox-Port": "49983"}
    answer = await world.anonymous.get("/health", headers=headers)
    assert answer.status_code == 502
    assert answer.json() == {"sandboxId": "inowhere", "message": "The sandbox was not found", "code": 502}


async def test_a_port_that_is_closed(world):
    sandbox = await world.create()
    answer = await world.anonymous.get("/", headers=world.envd_headers(sandbox, 8000))
    assert answer.status_code == 502
    message = "The sandbox is running but port is not open"
    assert answer.json() == {"sandboxId": sandbox["sandboxID"], "message": message, "code": 502, "port": 8000}


@pytest.mark.parametrize(
    "headers",
    [
        {"E2b-Sandbox-Id": "i1"},
        {"E2b-Sandbox-Port": "49983"},
        {"E2b-Sandbox-Id": "../etc", "E2b-Sandbox-Port": "49983"},
        {"E2b-Sandbox-Id": "", "E2b-Sandbox-Port": "49983"},
        {"E2b-Sandbox-Id": "I1", "E2b-Sandbox-Port": "49983"},
        {"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "0"},
        {"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "65536"},
        {"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "-1"},
        {"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "49983\xb2"},
        [("E2b-Sandbox-Id", "i1"), ("E2b-Sandbox-Id", "i2"), ("E2b-Sandbox-Port", "49983")],
    ],
)
async def test_broken_routing_headers_are_refused(world, headers):
    pairs = headers.items() if isinstance(headers, dict) else headers
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    answer = await world.anonymous.get("/health", headers=encoded)
    assert answer.status_code == 400
    assert answer.json()["code"] == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7820", "127.0.0.1.evil.example", "localhost.evil.com"])
async def test_other_host_names_are_refused(world, host):
    sandbox = await world.create()
    for headers in ({}, world.envd_headers(sandbox)):
        answer = await world.api.get("/health", headers={"Host": host, **headers})
        assert (answer.status_code, answer.json()["code"]) == (403, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:7820", "127.0.0.1:1", "[::1]:7820", "api.localhost"])
async def test_loopback_names_are_served(world, host):
    assert (await world.anonymous.get("/health", headers={"Host": host})).status_code == 204


async def test_nothing_is_tunnelled(world):
    status, _ = await raw(world, "CONNECT e2b.app:443 HTTP/1.1\nHost: e2b.app:443\nConnection: close\n\n")
    assert status == 405


# --- ports


@contextlib.asynccontextmanager
async def listening(handle):
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader, writer):
    """Answer with the request's own head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = b""
    if b"transfer-encoding: chunked" in head.lower():
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif b"content-length: " in head.lower():
        body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    answer = head + body
    writer.write(b"HTTP/1.1 201 Made\r\nX-Own: yes\r\nDate: then\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
    await writer.drain()
    writer.close()


async def test_a_port_is_reached(world):
    sandbox = await world.create()
    async with listening(echo) as port:
        world.guest(sandbox).ports[8000] = port
        headers = {"Host": f"8000-{sandbox['sandboxID']}.localhost"}
        answer = await world.anonymous.post("/a%20b?q=1", headers=headers, content=b"hello")
        assert answer.status_code == 201
        assert answer.headers["x-own"] == "yes"
        assert answer.headers["date"] == "then"
        assert answer.text.startswith("POST /a%20b?q=1 HTTP/1.1\r\n")
        assert f"host: {headers['Host']}\r\n" in answer.text.lower()
        assert answer.text.endswith("hello")

        async def chunks():
            yield b"one"
            yield b"two"

        answer = await world.anonymous.put("/", headers=world.envd_headers(sandbox, 8000), content=chunks())
        assert answer.text.endswith("onetwo")
        assert "e2b-sandbox-id" not in answer.text.lower()


async def test_the_servers_key_goes_into_no_sandbox(world):
    sandbox, key = await world.create(), world.server.api_key
    async with listening(echo) as port:
        world.guest(sandbox).ports[8000] = port
        headers = world.envd_headers(sandbox, 8000)
        for given in ({"X-API-KEY": key}, {"Authorization": f"Bearer {key}"}):
            assert key not in (await world.anonymous.get("/", headers={**headers, **given})).text
        own = {"X-API-KEY": "the app's own", "Authorization": "Bearer of the app"}
        text = (await world.anonymous.get("/", headers={**headers, **own})).text
        assert "the app's own" in text
        assert "Bearer of the app" in text


async def test_a_length_beside_chunks_does_not_count(world):
    sandbox = await world.create()

    async def both_lengths(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        )
        writer.close()

    async with listening(both_lengths) as port:
        world.guest(sandbox).ports[8000] = port
        answer = await world.anonymous.get("/", headers=world.envd_headers(sandbox, 8000))
        assert (answer.text, "content-length" in answer.headers) == ("hello", False)


async def test_an_answer_of_a_port_comes_as_it_is_made(world):
    sandbox = await world.create()
    more = asyncio.Event()

    async def slow(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()

    async with listening(slow) as port:
        world.guest(sandbox).ports[8000] = port
        headers = world.envd_headers(sandbox, 8000)
        async with world.anonymous.stream("GET", "/", headers=headers) as answer:
            chunks = answer.aiter_bytes()
            assert await anext(chunks) == b"one"
            more.set()
            assert await anext(chunks) == b"two"


async def test_a_port_whose_client_left_is_hung_up(world):
    sandbox = await world.create()
    closed = asyncio.Event()

    async def endless(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst")
        await writer.drain()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with listening(endless) as port:
        world.guest(sandbox).ports[8000] = port
        async with world.anonymous.stream("GET", "/", headers=world.envd_headers(sandbox, 8000)) as answer:
            assert await anext(answer.aiter_bytes()) == b"first"
        async with asyncio.timeout(10):
            await closed.wait()


@pytest.mark.parametrize("reply", [b"", b"not http at all\r\n\r\n"])
async def test_a_port_that_does_not_answer_is_closed(world, reply):
    sandbox = await world.create()

    async def rude(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async with listening(rude) as port:
        world.guest(sandbox).ports[8000] = port
        answer = await world.anonymous.get("/", headers=world.envd_headers(sandbox, 8000))
        assert answer.status_code == 502
        assert "port is not open" in answer.json()["message"]


async def test_an_answer_that_breaks_off_is_not_ended_cleanly(world, caplog):
    sandbox = await world.create()

    async def broken(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        writer.close()

    async with listening(broken) as port:
        world.guest(sandbox).ports[8000] = port
        with pytest.raises(httpx.RemoteProtocolError):
            await world.anonymous.get("/", headers=world.envd_headers(sandbox, 8000))


async def test_ports_may_need_a_token_and_another_host_name(world):
    network = {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}
    sandbox = await world.create(network=network)
    async with listening(echo) as port:
        world.guest(sandbox).ports[8000] = port
        headers = world.envd_headers(sandbox, 8000)
        assert (await world.anonymous.get("/", headers=headers)).status_code == 403
        wrong = {**headers, "e2b-traffic-access-token": "wrong"}
        assert (await world.anonymous.get("/", headers=wrong)).status_code == 403
        right = {**headers, "e2b-traffic-access-token": sandbox["trafficAccessToken"]}
        answer = await world.anonymous.get("/", headers=right)
        assert answer.status_code == 201
        assert "host: localhost:8000\r\n" in answer.text.lower()
        assert sandbox["trafficAccessToken"] not in answer.text
    assert (await world.anonymous.get("/health", headers=world.envd_headers(sandbox))).status_code == 204
