"""The provider in memory keeps the engine's contract of an SDK, and fails as it is told."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from managed_e2b.engine import driver
from managed_e2b.errors import BackendError, RateLimitedError, SandboxNotRunning
from managed_e2b.testing import FakeProvider, Fault, SteppedClock
from managed_e2b.testing.provider import AFTER, FakeSdk


@pytest.fixture
def provider(stepped_clock: SteppedClock) -> FakeProvider:
    return FakeProvider(stepped_clock, page_size=2)


async def create(provider: FakeProvider, key: str = "k", timeout: int = 60, **metadata: str) -> str:
    made = await provider.sdk("me").create(
        template="base", timeout=timeout, metadata=metadata, envs={}, allow_internet_access=None, idempotency_key=key
    )
    return made.sandbox_id


async def listed(provider: FakeProvider, metadata: Any = None) -> list[str]:
    return [item.sandbox_id async for page in provider.sdk().pages(metadata) for item in page]


def test_it_has_the_calls_that_the_engine_makes() -> None:
    for name, method in inspect.getmembers(driver.Sdk, inspect.isfunction):
        if not name.startswith("_"):
            assert (
                inspect.signature(getattr(FakeSdk, name)).parameters.keys()
                == inspect.signature(method).parameters.keys()
            )


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in (Fault.LIE, Fault.EMPTY)])
async def test_a_fault_strikes_once_before_or_after_the_effect(provider: FakeProvider, fault: Fault) -> None:
    provider.fail("create", fault)
    with pytest.raises(BackendError):
        await create(provider)
    assert len(provider.live) == (fault in AFTER)
    assert await create(provider) == provider.live[0], "the same key makes one sandbox"
    assert [(call.op, call.by, call.ticket, call.fault) for call in provider.calls] == [
        ("create", "me", "k", fault),
        ("create", "me", "k", None),
    ]
    assert provider.peak_live == 1


async def test_a_sandbox_ends_by_the_clock_that_nobody_sets(provider: FakeProvider) -> None:
    sandbox_id, sdk = await create(provider), provider.sdk()
    provider.clock.step(40)
    assert await sdk.set_timeout(sandbox_id, 60)
    provider.clock.step(-1000)
    provider.clock.step(59)
    assert provider.live == [sandbox_id]
    provider.clock.step(1)
    assert (provider.live, await sdk.info(sandbox_id), await sdk.kill(sandbox_id)) == ([], None, False)
    assert not await sdk.set_timeout(sandbox_id, 60)
    with pytest.raises(BackendError, match="there is no"):
        await sdk.adopt(sandbox_id, 60)


async def test_what_is_paused_has_no_end_until_somebody_connects(provider: FakeProvider) -> None:
    sandbox_id, sdk = await create(provider), provider.sdk()
    assert provider.pause(sandbox_id)
    provider.clock.step(1000)
    found = await sdk.info(sandbox_id)
    assert found is not None
    assert (found.state, provider.live, provider.paused) == ("paused", [], [sandbox_id])
    assert await listed(provider) == [sandbox_id]
    native = await sdk.adopt(sandbox_id, 60)
    assert provider.live == [sandbox_id]
    await sdk.write_file(native, "/a", b"1", None)
    assert await sdk.read_file(await sdk.adopt(sandbox_id, 60), "/a", None) == b"1"
    provider.kill(sandbox_id)
    with pytest.raises(SandboxNotRunning):
        await sdk.write_file(native, "/a", b"2", None)


async def test_lists_come_in_pages_and_lie_when_told(provider: FakeProvider) -> None:
    ids = [await create(provider, key, run=key) for key in "abcde"]
    assert await listed(provider) == ids[::-1]
    assert await listed(provider, {"run": "b"}) == [ids[1]]
    provider.fail("list", Fault.LIE)
    assert set(await listed(provider)) < set(ids)
    provider.fail("list", Fault.EMPTY)
    assert await listed(provider) == []
    provider.fail("kill", Fault.LIE)
    assert await provider.sdk().kill(ids[0])
    assert ids[0] in provider.live


async def test_a_cap(stepped_clock: SteppedClock) -> None:
    provider = FakeProvider(stepped_clock, cap=1)
    await create(provider, "a")
    with pytest.raises(RateLimitedError):
        await create(provider, "b")
    assert len(provider.live) == 1


def test_a_lie_that_cannot_be_told_is_refused(provider: FakeProvider) -> None:
    with pytest.raises(ValueError, match="info cannot be answered with LIE"):
        provider.fail("info", Fault.LIE)
    with pytest.raises(ValueError, match="no operation 'nothing'"):
        provider.fail("nothing", Fault.REFUSED)  # type: ignore[arg-type]
    provider.fail("create", Fault.REFUSED)
    provider.calm()
    assert asyncio.run(create(provider)) in provider.live
