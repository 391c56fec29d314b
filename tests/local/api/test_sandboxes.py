"""Sandboxes over the REST API: create, list, info, kill, timeouts, pause and connect."""

from __future__ import annotations

import asyncio
from datetime import datetime


async def test_a_sandbox_lives_and_dies(world):
    sandbox = await world.create(metadata={"run": "7"}, timeout=60)
    assert sandbox["templateID"] == "base"
    assert sandbox["envdVersion"] == "0.6.13"
    assert len(sandbox["envdAccessToken"]) == 64
    info = (await world.api.get(f"/sandboxes/{sandbox['sandboxID']}")).json()
    assert info["state"] == "running"
    assert info["metadata"] == {"run": "7"}
    assert (datetime.fromisoformat(info["endAt"]) - datetime.fromisoformat(info["startedAt"])).total_seconds() == 60
    assert await world.listed() == [sandbox["sandboxID"]]
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204
    assert await world.listed() == []
    gone = await world.api.get(f"/sandboxes/{sandbox['sandboxID']}")
    assert gone.status_code == 404
    assert gone.json() == {
        "code": 404,
        "message": f"Sandbox \"{sandbox['sandboxID']}\" doesn't exist or you don't have access to it",
    }
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 404
