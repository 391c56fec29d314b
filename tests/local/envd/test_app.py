"""What answers on envd's port besides its services, and who gets in."""

from __future__ import annotations

import json

import httpx
import pytest

UNAUTHORIZED = {
    "code": 401,
    "message": "unauthorized access, please provide a valid access token or method signing if supported",
}


@pytest.mark.parametrize("token", [None, "", "wrong", "token-of-the-sandbox2", "\u00e9".encode()])
@pytest.mark.parametrize("path", ["/process.Process/List", "/metrics", "/envs", "/anything"])
async def test_nobody_gets_in_without_the_token(served, path, token):
    headers = {} if token is None else {"X-Access-Token": token}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, trust_env=False) as http:
        answer = await http.post(path, json={})
    assert (answer.status_code, answer.json()) == (401, UNAUTHORIZED)


async def test_a_sandbox_without_a_token_is_open(served, wire):
    served.envd._ctx.access_token = None
    wire.http.headers.clear()
    assert (await wire.call("List", {})).status_code == 200


async def test_health_needs_no_token(served, sandbox):
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 204
        assert (await http.post("/health")).status_code == 405
    assert await sandbox.is_running()


async def test_metrics(wire):
    metrics = (await wire.http.get("/metrics")).json()
    assert metrics.pop("ts") > 0
    assert metrics == {
        "cpu_count": 2,
        "cpu_used_pct": 12.5,
        "mem_total": 7 << 20,
        "mem_used": 3 << 20,
        "mem_cache": 0,
        "mem_total_mib": 7,
        "mem_used_mib": 3,
        "disk_used": 1,
        "disk_total": 2,
    }


async def test_environment(wire):
    assert (await wire.http.get("/envs")).json() == {"OF_THE_SANDBOX": "yes"}


@pytest.mark.parametrize("path", ["/", "/init", "/process.Other/List", "/files2"])
async def test_unknown_paths(wire, path):
    answer = await wire.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["code"] == 404


async def test_the_binary_codec_is_served_too(wire):
    answer = await wire.http.post("/process.Process/List", headers={"Content-Type": "application/proto"})
    assert answer.status_code == 200


async def test_requests_that_make_no_sense(wire):
    async def post(body: bytes, kind: str, path: str = "List") -> httpx.Response:
        return await wire.http.post(f"/process.Process/{path}", content=body, headers={"Content-Type": kind})

    for nonsense in (b"not json", b"[]", b"\xff", b"[" * 100_000):
        assert (await post(nonsense, "application/json")).json()["code"] == "invalid_argument"
    for nonsense in (b'{"pty": {"size": {"cols": -1}}}', b'{"process": 3}', b'{"process": {"pid": "x"}}'):
        answer = await post(nonsense, "application/json", "Update")
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert (await post(b"\xff\xff", "application/proto", "Update")).status_code == 400
    many = json.dumps({"process": {"pid": 1}, "unknown": "[" * 1000}).encode()
    assert (await post(many, "application/json", "Update")).status_code == 404, "brackets in a text are text"
    assert (await post(b"{}", "text/plain")).status_code == 415
    assert (await post(b"{}", "application/json", "NoSuchMethod")).status_code == 404
    assert (await post(b'{"unknown": 1}', "application/json")).status_code == 200
