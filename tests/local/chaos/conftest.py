"""A server with chaos in this process: real HTTP in front of guests that are Python objects, on a stepped clock."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from managed_e2b.local.chaos.rules import Rule, Script
from managed_e2b.local.server import LocalServer
from managed_e2b.testing import SteppedClock
from managed_e2b.testing.chaos import On

from ..api.conftest import API_KEY, PATIENCE, FakeEnvd, FakeGuest, FakeRuntime


@dataclass
class World:
    """The server, what stands behind it, and a client that has its key."""

    server: LocalServer
    runtime: FakeRuntime
    clock: SteppedClock
    api: httpx.AsyncClient

    async def play(self, *rules: Rule, seed: int = 0) -> None:
        """Put these rules in force, in place of all others."""
        script = Script(seed=seed, rules=rules)
        answer = await self.api.put("/me2b/chaos", content=script.model_dump_json())
        assert answer.status_code == 204, answer.text

    async def create(self, **metadata: str) -> httpx.Response:
        self.clock.step(0.001)  # so that starts differ
        return await self.api.post("/v2/sandboxes", json={"templateID": "base", "metadata": metadata})

    async def created(self, **metadata: str) -> str:
        answer = await self.create(**metadata)
        assert answer.status_code == 201, answer.text
        sandbox_id: str = answer.json()["sandboxID"]
        return sandbox_id

    async def listed(self, **params: Any) -> list[str]:
        return [item["sandboxID"] for item in (await self.list(**params)).json()]

    async def list(self, **params: Any) -> httpx.Response:
        answer = await self.api.get("/v2/sandboxes", params=params)
        assert answer.status_code == 200, answer.text
        return answer

    @property
    def alive(self) -> list[str]:
        """What really runs."""
        return [guest.sandbox_id for guest in self.runtime.alive]

    def guest(self, sandbox_id: str) -> FakeGuest:
        return next(guest for guest in self.runtime.guests if guest.sandbox_id == sandbox_id)

    async def journal(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.api.get("/me2b/chaos/journal")).json()
        return found

    async def entries(self, op: str) -> list[dict[str, Any]]:
        return [entry for entry in (await self.journal())["requests"] if entry["op"] == op]


async def until(condition: Callable[[], Awaitable[Any] | Any]) -> None:
    """Wait for what the server does by itself; the condition may ask it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            await asyncio.sleep(0.005)  # between two looks


def rule(*ops: str) -> On[Rule]:
    """The language of `Chaos.on`, for a value."""
    return On(lambda made: made, ops=ops)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    runtime, clock = FakeRuntime(), SteppedClock()
    async with AsyncExitStack() as stack:
        server = LocalServer(
            api_key=API_KEY, runtime=runtime, envd=FakeEnvd, clock=clock, chaos=Script(), internet=False
        )
        await stack.enter_async_context(server)
        client = httpx.AsyncClient(
            base_url=server.url, headers={"X-API-KEY": API_KEY}, trust_env=False, timeout=PATIENCE
        )
        yield World(server, runtime, clock, await stack.enter_async_context(client))
    assert not runtime.alive
