"""One create that made several sandboxes: one is used, the others are ended, and none is forgotten."""

from __future__ import annotations

from typing import Any

import e2b
import pytest

from managed_e2b import BackendError, SandboxCreateError, State
from managed_e2b.engine import release

from .conftest import Face, assert_nothing_left, remote_of, settle, states_of


def multiply(lifecycle: Any, server: Any, count: int, *, dead: int) -> list[str]:
    """The next create makes `count` sandboxes, of which the first `dead` are gone at once, and is not answered."""
    sdk = lifecycle._engine.driver.sdk
    create, made = sdk.create, []

    async def lossy(**values: Any) -> Any:
        sdk.create = create
        for number in range(count):
            key = f"{values['idempotency_key']}-{number}"
            made.append((await create(**{**values, "idempotency_key": key})).sandbox_id)
        listed = [item async for page in sdk.pages() for item in page if item.sandbox_id in made]
        for sandbox_id in made[:dead]:
            e2b.Sandbox.kill(sandbox_id, api_key=server.api_key, api_url=server.url)
        lag(sdk, sorted(listed, key=lambda item: made.index(item.sandbox_id)))
        raise BackendError("504", status=504)

    sdk.create = lossy
    return made


def lag(sdk: Any, listed: list[Any]) -> None:
    """The next list is an old one."""
    pages = sdk.pages

    async def stale(metadata: Any = None) -> Any:
        sdk.pages = pages
        yield listed

    sdk.pages = stale


async def test_the_first_that_lives_is_adopted_and_the_rest_are_killed(face: Face, server: Any) -> None:
    lifecycle = face.open()
    made = multiply(lifecycle, server, 5, dead=1)
    async with face.entered(lifecycle.acquire()) as handle:
        assert handle.sandbox_id == made[1]
        assert await remote_of(lifecycle) == [made[1]]
        assert (await settle(handle.run("echo adopted"))).stdout == "adopted\n"
    assert await states_of(lifecycle) == [State.CLEANED]
    await assert_nothing_left(lifecycle)


async def test_when_all_that_was_listed_is_dead_the_create_has_failed(
    face: Face, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    lifecycle = face.open()
    multiply(lifecycle, server, 2, dead=2)
    with pytest.raises(SandboxCreateError):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("nothing lives")
    assert await remote_of(lifecycle) == []


async def test_a_second_one_whose_kill_failed_is_ended_by_reconcile(
    face: Face, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = face.open()
    made = multiply(lifecycle, server, 2, dead=0)
    sdk = lifecycle._engine.driver.sdk
    kill = sdk.kill

    async def failing(sandbox_id: str) -> bool:
        sdk.kill = kill
        raise BackendError("503", status=503)

    sdk.kill = failing
    async with face.entered(lifecycle.acquire()) as handle:
        assert made[1] in caplog.text
        assert sorted(await remote_of(lifecycle)) == sorted(made)
        report = await settle(lifecycle.reconcile())
        assert [(item.sandbox_id, item.ended) for item in report.of("untracked")] == [(made[1], True)]
        assert [item.sandbox_id for item in report.of("running")] == [handle.sandbox_id]
        assert await remote_of(lifecycle) == [handle.sandbox_id]
    await assert_nothing_left(lifecycle)
