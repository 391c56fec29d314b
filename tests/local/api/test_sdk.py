"""The unmodified SDK against the control plane: what it sends is understood, what it reads is there."""

from __future__ import annotations

import asyncio

import pytest
from e2b import AsyncSandbox, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, SandboxException, SandboxNotFoundException


@pytest.fixture
def options(world):
    return {"api_key": world.server.api_key, "api_url": world.server.url, "sandbox_url": world.server.url}


async def test_a_life(world, options):
    metadata = {"a b": "c&d=%", "ü": "+"}
    sandbox = await AsyncSandbox.create("base", timeout=60, metadata=metadata, **options)
    assert await sandbox.is_running()
    info = await sandbox.get_info()
    assert (info.metadata, info.state, info.template_id) == (metadata, SandboxState.RUNNING, "base")
    assert (info.end_at - info.started_at).total_seconds() == 60
    found = await AsyncSandbox.list(query=SandboxQuery(metadata=metadata), **options).next_items()
    assert [item.sandbox_id for item in found] == [sandbox.sandbox_id]
    await sandbox.set_timeout(100)
    assert ((await sandbox.get_info()).end_at - info.started_at).total_seconds() == 100
    assert await sandbox.pause()
    assert not await sandbox.pause()
    assert not await sandbox.is_running()
    assert (await sandbox.get_info()).state == SandboxState.PAUSED
    await AsyncSandbox.connect(sandbox.sandbox_id, **options)
    assert await sandbox.is_running()
    assert len(await sandbox.get_metrics()) == 1
    assert await sandbox.kill()
    assert not await sandbox.kill()
    assert not await sandbox.is_running()
    with pytest.raises(SandboxNotFoundException):
        await sandbox.get_info()
    with pytest.raises(SandboxNotFoundException):
        await AsyncSandbox.connect(sandbox.sandbox_id, **options)


async def test_pages(world, options):
    made = []
    for _ in range(5):
        made.append((await AsyncSandbox.create("base", **options)).sandbox_id)
        world.clock.step(1)
    paginator, seen = AsyncSandbox.list(limit=2, **options), []
    while paginator.has_next:
        seen += [item.sandbox_id for item in await paginator.next_items()]
    assert seen == made[::-1]


async def test_an_idempotency_key(world, options):
    first, second = await asyncio.gather(
        *(AsyncSandbox.create("base", idempotency_key="ticket-1", **options) for _ in range(2))
    )
    assert first.sandbox_id == second.sandbox_id
    assert len(world.runtime.guests) == 1


async def test_errors_arrive_as_the_sdks_own(world, options, runtime_unavailable):
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create("base", **{**options, "api_key": "e2b_" + "1" * 40})
    with pytest.raises(SandboxException, match="template 'nowhere' not found"):
        await AsyncSandbox.create("nowhere", **options)
    with pytest.raises(SandboxException, match="Timeout cannot be greater than 24 hours"):
        await AsyncSandbox.create("base", timeout=100_000, **options)
    with pytest.raises(SandboxException, match="not available on the local server"):
        await AsyncSandbox.create(
            "base", network={"rules": {"a.b": [{"transform": {"headers": {"A": "b"}}}]}}, **options
        )
    assert not await AsyncSandbox.kill("inowhere", **options)
