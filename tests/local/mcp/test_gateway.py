"""The stand-in for the MCP gateway, as a program: what it refuses, what it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from managed_e2b.local.mcp import gateway
from managed_e2b.local.mcp.recipe import GatewayRecipe, servers

KNOWN = {"exa": ["apiKey"], "time": []}
TOKEN = "secret-token"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    server = gateway.Gateway(TOKEN, ["exa"], ("127.0.0.1", 0))
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}", headers=headers) as client:
        yield client
    server.shutdown()
    serving.join()
    server.server_close()


def ask(client: httpx.Client, method: str, params: object = None, **headers: str) -> httpx.Response:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return client.post("/mcp", json=message, headers=headers)


def test_the_sdk_tells_which_servers_there_are():
    known = servers()
    assert known["exa"] == ["apiKey"]
    assert known["duckduckgo"] == []
    assert gateway.STAND_IN not in known


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"invalid_server": {}}', "unknown MCP server 'invalid_server'"),
        ('{"exa": {}}', "'exa' needs apiKey"),
        ('{"exa": []}', "'exa' is not a JSON object"),
    ],
)
def test_bad_configurations_are_refused(config, said):
    with pytest.raises(gateway.Failed, match=said):
        gateway.parse(config, KNOWN)


def test_good_ones_are_taken():
    config = {"exa": {"apiKey": "x"}, "time": {}, "github/a/b": {"runCmd": "x"}, gateway.STAND_IN: {"start": "ok"}}
    assert gateway.parse(json.dumps(config), KNOWN) == config
    gateway.check({"exa": None}, KNOWN)


def test_an_unknown_wish_of_a_test_is_refused():
    with pytest.raises(gateway.Failed, match="'explode'"):
        gateway._rehearse({"start": "explode"})


def test_a_session(client):
    hello = ask(client, "initialize", {"protocolVersion": "2025-03-26", "capabilities": {}})
    assert hello.json()["result"]["protocolVersion"] == "2025-03-26"
    session = {"mcp-session-id": hello.headers["mcp-session-id"]}
    noted = client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
    assert (noted.status_code, noted.content) == (202, b"")
    assert ask(client, "ping", **session).json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
    (tool,) = ask(client, "tools/list", **session).json()["result"]["tools"]
    called = ask(client, "tools/call", {"name": tool["name"], "arguments": {}}, **session).json()["result"]
    assert json.loads(called["content"][0]["text"]) == {"servers": ["exa"], "standIn": True}
    assert client.delete("/mcp", headers=session).status_code == 200
    assert ask(client, "ping", **session).status_code == 404


def test_a_version_it_does_not_know_gets_its_own(client):
    hello = ask(client, "initialize", {"protocolVersion": "1999-01-01"})
    assert hello.json()["result"]["protocolVersion"] == gateway.VERSIONS[0]


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, "Bearer \xff"])
def test_who_lacks_the_token_gets_nothing(client, authorization):
    refused = client.post("/mcp", json={}, headers={"Authorization": authorization.encode("latin-1")})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in refused.text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"[]", 400, -32600),
        (b"{}", 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "nope"}', 200, -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": []}', 200, -32602),
    ],
)
def test_what_it_does_not_understand(client, body, status, code):
    answer = client.post("/mcp", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_other_paths_and_methods(client, monkeypatch):
    assert client.get("/mcp").status_code == 405
    assert client.post("/", json={}).status_code == 404
    assert client.post("/mcp", content=iter([b"{}"])).status_code == 411
    monkeypatch.setattr(gateway, "_MAX_BODY", 1)
    assert client.post("/mcp", json={}).status_code == 413


def test_the_layer_holds_the_program_and_what_it_reads(tmp_path):
    recipe = GatewayRecipe()
    recipe.fill(tmp_path)
    assert json.loads((tmp_path / f"root{gateway.SERVERS_FILE}").read_text()) == servers()
    assert (tmp_path / "usr/local/bin/mcp-gateway").stat().st_mode & 0o111
    assert recipe.digest() == GatewayRecipe().digest()
