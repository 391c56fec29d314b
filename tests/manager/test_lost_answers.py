"""Answers that never came, or were not true: the sandbox is adopted or killed, never forgotten."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from managed_e2b import (
    BackendError,
    LedgerError,
    SandboxCreateError,
    SandboxLeakError,
    SandboxLifecycle,
    State,
    TemplateNotFoundError,
)
from managed_e2b.engine import release

from .conftest import Face, assert_nothing_left, remote_of, settle, states_of, until


def lose(lifecycle: Any, error: BackendError, *, effect: bool = True) -> list[str]:
    """The next create takes effect (or not), and its answer is `error`. Returns the ids that were made."""
    sdk = lifecycle._engine.driver.sdk
    create, made = sdk.create, []

    async def lossy(**values: Any) -> Any:
        if effect:
            made.append((await create(**values)).sandbox_id)
        sdk.create = create
        raise error

    sdk.create = lossy
    return made


@pytest.mark.parametrize(
    "error", [BackendError("504", status=504), BackendError("reset"), BackendError("500", status=500)], ids=str
)
async def test_a_create_whose_answer_was_lost_is_found_by_its_ticket_and_adopted(
    face: Face, error: BackendError
) -> None:
    lifecycle = face.open(lease=60)
    made = lose(lifecycle, error)
    async with face.entered(lifecycle.acquire(timeout=120)) as handle:
        assert await remote_of(lifecycle) == made == [handle.sandbox_id], "one, not two"
        assert (await settle(handle.run("echo adopted"))).stdout == "adopted\n"
    assert await states_of(lifecycle) == [State.CLEANED]
    await assert_nothing_left(lifecycle)


async def test_a_create_that_was_refused_and_took_effect_all_the_same_is_killed(face: Face) -> None:
    lifecycle = face.open()
    made = lose(lifecycle, TemplateNotFoundError("404", status=404))
    with pytest.raises(TemplateNotFoundError):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("refused")
    assert len(made) == 1
    assert await states_of(lifecycle) == [State.CLEANED]
    await assert_nothing_left(lifecycle)


async def test_a_refusal_stays_the_error_though_the_lookup_fails_too(face: Face) -> None:
    lifecycle = face.open()
    made = lose(lifecycle, TemplateNotFoundError("404", status=404))
    pages = lifecycle._engine.driver.sdk.pages

    async def failing(*args: Any) -> Any:
        lifecycle._engine.driver.sdk.pages = pages
        raise BackendError("503", status=503)
        yield

    lifecycle._engine.driver.sdk.pages = failing
    with pytest.raises(TemplateNotFoundError):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("refused")
    assert len(made) == 1
    assert await states_of(lifecycle) == [State.CLEANED]
    await assert_nothing_left(lifecycle)


async def test_a_lost_create_that_made_nothing_keeps_its_row_until_that_is_proved(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    lifecycle = face.open()
    lose(lifecycle, BackendError("504", status=504), effect=False)
    with pytest.raises(SandboxCreateError, match="not known yet") as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("lost")
    (row,) = await settle(lifecycle.records())
    assert (row.ticket, row.state, row.sandbox_id) == (caught.value.ticket, State.CLEANING, None)


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_delete_that_fails_at_first_is_tried_again(face: Face, failures: int) -> None:
    lifecycle = face.open()
    sdk = lifecycle._cleaner.driver.sdk
    kill, calls = sdk.kill, 0

    async def failing(sandbox_id: str) -> bool:
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise BackendError("503", status=503)
        return bool(await kill(sandbox_id))

    sdk.kill = failing
    async with face.entered(lifecycle.acquire()):
        pass
    assert calls == failures + 1
    assert await states_of(lifecycle) == [State.CLEANED]


async def test_a_204_that_did_nothing_is_no_proof(face: Face) -> None:
    lifecycle = face.open()
    sdk = lifecycle._cleaner.driver.sdk
    kill, calls = sdk.kill, 0

    async def lying(sandbox_id: str) -> bool:
        nonlocal calls
        calls += 1
        return True if calls == 1 else bool(await kill(sandbox_id))

    sdk.kill = lying
    async with face.entered(lifecycle.acquire()):
        pass
    assert calls == 2
    await assert_nothing_left(lifecycle)


async def test_what_a_release_could_not_prove_the_keeper_goes_on_with(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "PATIENCE", 0.0)
    lifecycle = face.open()
    sdk = lifecycle._cleaner.driver.sdk
    kill, down = sdk.kill, True

    async def failing(sandbox_id: str) -> bool:
        if down:
            raise BackendError("503", status=503)
        return bool(await kill(sandbox_id))

    sdk.kill = failing
    async with face.entered(lifecycle.acquire()) as handle:
        pass
    (row,) = await settle(lifecycle.records())
    assert row.state is State.CLEANING
    assert "503" in (row.last_error or "")
    assert await remote_of(lifecycle) == [handle.sandbox_id]
    down = False
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has cleaned it")
    await assert_nothing_left(lifecycle)


def test_a_shutdown_is_bounded_though_the_endpoint_hangs(server: Any, tmp_path: Any) -> None:
    lifecycle = SandboxLifecycle(tmp_path / "x.db", e2b_api_url=server.url, e2b_key=server.api_key)
    handles = [lifecycle.acquire().__enter__() for _ in range(2)]
    hanging, go = threading.Semaphore(0), threading.Event()
    sdk = lifecycle._cleaner.driver.sdk
    kill = sdk.kill

    async def hang(sandbox_id: str) -> bool:
        hanging.release()
        assert go.wait(60)
        return bool(await kill(sandbox_id))

    sdk.kill = hang
    with pytest.raises(SandboxLeakError) as caught:
        lifecycle.shutdown(timeout=0.1)  # returns while the kills hang
    assert set(caught.value.sandbox_ids) == {handle.sandbox_id for handle in handles}
    assert all(hanging.acquire(timeout=10) for _ in handles), "both were tried at once"
    go.set()
    with SandboxLifecycle(tmp_path / "x.db", e2b_api_url=server.url, e2b_key=server.api_key) as watcher:
        until(lambda: len(watcher.records([State.CLEANED])) == 2, "the kills went on")


async def test_what_a_reap_could_not_prove_is_gone_on_with(face: Face) -> None:
    lifecycle = face.open(opening_reap=False)
    dead = face.open()
    context = dead.acquire()
    handle = await settle(context.__aenter__() if face.name == "async" else context.__enter__())
    dead._keeper.stop(10)
    dead._book.close_owner(dead.owner_id)
    down = True

    def fail_while_down(sdk: Any) -> None:
        kill = sdk.kill

        async def failing(sandbox_id: str) -> bool:
            if down:
                raise BackendError("503", status=503)
            return bool(await kill(sandbox_id))

        sdk.kill = failing

    fail_while_down(lifecycle._engine.driver.sdk)
    fail_while_down(lifecycle._cleaner.driver.sdk)
    for _ in range(2):
        assert [item.sandbox_id for item in (await settle(lifecycle.reap())).pending] == [handle.sandbox_id]
    down = False
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the reaper's keeper has cleaned it")


async def test_a_release_that_the_ledger_refused_is_gone_on_with(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle = face.open()
    claim, refusals = lifecycle._book.claim, 3

    def refusing(*args: Any, **kwargs: Any) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise LedgerError("database is locked")
        return claim(*args, **kwargs)

    monkeypatch.setattr(lifecycle._book, "claim", refusing)
    with pytest.raises(LedgerError):
        async with face.entered(lifecycle.acquire()) as handle:
            pass
    assert handle.sandbox_id, "held to the end"
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has cleaned it")
    await assert_nothing_left(lifecycle)
