"""What the templates of the server ask of the gateway: ports that are waited for, requests that need the token."""

from __future__ import annotations

import asyncio

import pytest

from managed_e2b.local import portproxy
from managed_e2b.local.builtin import CODE_INTERPRETER, MCP_GATEWAY
from managed_e2b.local.model import SandboxSpec
from managed_e2b.local.runtime.base import ImageUnavailable
from managed_e2b.local.templates import Settings

PORT = 49999
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWER)
    await writer.drain()
    writer.close()


async def make(world, *, secure=True, **settings):
    """A sandbox, and the headers of a request to its port."""
    spec = SandboxSpec("base", None, 60, settings=Settings(**settings), secure=secure)
    sandbox = await world.server.registry.create(spec)
    return sandbox, {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(PORT)}


async def test_they_are_listed(world):
    listed = {item["templateID"] for item in (await world.api.get("/templates")).json()}
    assert {CODE_INTERPRETER, MCP_GATEWAY, "base"} <= listed


async def test_one_that_cannot_be_made_says_why(world):
    world.runtime.create_error = ImageUnavailable("needs x: pip install x")
    refused = await world.api.post("/v2/sandboxes", json={"templateID": MCP_GATEWAY})
    assert refused.status_code == 501
    assert refused.json() == {"code": 501, "message": "needs x: pip install x"}
    assert refused.headers["should-retry"] == "false"


async def test_a_request_waits_for_a_port_that_is_to_come(world, monkeypatch):
    monkeypatch.setattr(portproxy, "AWAIT_PAUSE", 0.001)
    sandbox, headers = await make(world, awaited_ports=frozenset({PORT}))
    looked = asyncio.Event()
    connect = sandbox.guest.connect

    async def look(port: int) -> int:
        looked.set()
        return await connect(port)

    sandbox.guest.connect = look
    asking = asyncio.create_task(world.anonymous.get("/", headers=headers))
    await looked.wait()
    assert not asking.done()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        sandbox.guest.ports[PORT] = server.sockets[0].getsockname()[1]
        assert (await asking).text == "hi"


async def test_but_not_for_ever_and_not_for_others(world, monkeypatch):
    monkeypatch.setattr(portproxy, "AWAIT_SECONDS", 0.01)
    _, headers = await make(world, awaited_ports=frozenset({PORT}))
    for port in (PORT, PORT + 1):
        refused = await world.anonymous.get("/", headers={**headers, "E2b-Sandbox-Port": str(port)})
        assert refused.status_code == 502
        assert "port is not open" in refused.json()["message"]


@pytest.mark.parametrize("given", [{}, {"X-Access-Token": "x"}, {"E2b-Traffic-Access-Token": "x"}])
async def test_a_guarded_path_needs_the_sandboxs_token(world, given):
    sandbox, headers = await make(world, guarded=frozenset({(PORT, "/execute")}))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        sandbox.guest.ports[PORT] = server.sockets[0].getsockname()[1]
        refused = await world.anonymous.post("/execute", headers={**headers, **given})
        assert refused.status_code == 401
        assert refused.json()["code"] == 401
        assert (await world.anonymous.post("/contexts", headers={**headers, **given})).text == "hi"
        token = {"X-Access-Token": sandbox.access_token}
        assert (await world.anonymous.post("/execute", headers={**headers, **token})).text == "hi"


async def test_one_without_a_token_is_open(world):
    sandbox, headers = await make(world, secure=False, guarded=frozenset({(PORT, "/execute")}))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        sandbox.guest.ports[PORT] = server.sockets[0].getsockname()[1]
        assert (await world.anonymous.post("/execute", headers=headers)).text == "hi"


async def test_a_port_that_hangs_up_at_once_counts_as_closed(world):
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    sandbox, headers = await make(world)
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        sandbox.guest.ports[PORT] = server.sockets[0].getsockname()[1]
        refused = await world.anonymous.post("/", content=b"x" * 1_000_000, headers=headers)
    assert refused.status_code == 502
    assert "port is not open" in refused.json()["message"]
