"""`Sandbox.create(mcp=...)` against the template: it works, or nothing is left."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException, SandboxQuery

from managed_e2b.local.background import LocalServerProcess


@pytest.fixture(scope="module")
def options(server: LocalServerProcess) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture
def mark() -> dict[str, str]:
    """Metadata to find the sandboxes of a test by: the server is shared."""
    return {"test": str(uuid.uuid4())}


def left(mark: dict[str, str], options: dict[str, Any]) -> list[Any]:
    return Sandbox.list(query=SandboxQuery(metadata=mark), **options).next_items()


def test_it_serves_who_has_the_token(server: LocalServerProcess, options: dict[str, Any]) -> None:
    box = Sandbox.create(mcp={"exa": {"apiKey": "x"}}, **options)
    try:
        token = box.get_mcp_token()
        assert token is not None
        assert Sandbox.connect(box.sandbox_id, **options).get_mcp_token() == token
        assert box.commands.run("stat -c '%a %u' /etc/mcp-gateway/.token", user="root").stdout == "600 0\n"
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "50005"}
        ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert box.get_mcp_url().endswith("/mcp")
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
            assert client.post("/mcp", json=ask).status_code == 401
            client.headers["Authorization"] = f"Bearer {token}"
            assert client.post("/mcp", json=ask).json()["result"]["tools"]
    finally:
        box.kill()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"nobody": {}}, "unknown MCP server 'nobody'"),
        ({"exa": {}}, "'exa' needs apiKey"),
        ({"me2bStandIn": {"start": "fail", "message": "out of luck"}}, "out of luck"),
        ({"me2bStandIn": {"start": "crash"}}, ""),
    ],
)
def test_a_gateway_that_fails_takes_its_sandbox_with_it(
    options: dict[str, Any], mark: dict[str, str], config: dict[str, Any], said: str
) -> None:
    with pytest.raises(SandboxException, match=f"Failed to start MCP gateway: .*{said}"):
        Sandbox.create(mcp=cast(Any, config), metadata=mark, **options)
    assert left(mark, options) == []


async def test_a_create_that_is_cancelled_while_the_gateway_hangs(
    options: dict[str, Any], mark: dict[str, str]
) -> None:
    hanging = cast(Any, {"me2bStandIn": {"start": "hang"}})
    creating = asyncio.create_task(AsyncSandbox.create(mcp=hanging, metadata=mark, **options))
    async with asyncio.timeout(30):
        while not (found := await asyncio.to_thread(left, mark, options)):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        box = await AsyncSandbox.connect(found[0].sandbox_id, **options)
        while not any("mcp-gateway" in " ".join(each.args) for each in await box.commands.list()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert await asyncio.to_thread(left, mark, options) == []


def test_base_has_none(options: dict[str, Any], mark: dict[str, str]) -> None:
    with pytest.raises(SandboxException, match="Failed to start MCP gateway"):
        Sandbox.create("base", mcp={"exa": {"apiKey": "x"}}, metadata=mark, **options)
    assert left(mark, options) == []


def test_without_its_token_it_does_not_start(options: dict[str, Any]) -> None:
    box = Sandbox.create("mcp-gateway", **options)
    try:
        bare = box.commands.run("mcp-gateway --config '{}' || true", user="root")
        assert "GATEWAY_ACCESS_TOKEN is not set" in bare.stderr
        if box.commands.run("id -u").stdout != "0\n":  # on a host with one id for a sandbox, everybody is root
            other = box.commands.run("mcp-gateway --config '{}' || true", envs={"GATEWAY_ACCESS_TOKEN": "t"})
            assert "must be run as root" in other.stderr
        assert box.commands.run("mcp-gateway pull exa duckduckgo", user="root").exit_code == 0
        assert "unknown MCP server 'x'" in box.commands.run("mcp-gateway pull x || true", user="root").stderr
    finally:
        box.kill()
