"""Shutting down: all is ended within a bound, and what is left is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from managed_e2b import BackendError, SandboxCreateError, SandboxLeakError, State
from managed_e2b.engine import release

from .conftest import Face, remote_of, settle, until
from .orphans import entered


async def test_everything_is_ended_and_nothing_is_left(face: Face) -> None:
    lifecycle = face.open(max_concurrent=3)
    contexts = [lifecycle.acquire() for _ in range(3)]
    for context in contexts:
        await entered(face, context)
    assert await settle(lifecycle.shutdown()) == ()
    assert await settle(lifecycle.shutdown()) == (), "once more does nothing"
    watcher = face.open(opening_reap=False)
    rows = await settle(watcher.records())
    assert [(row.state, row.reason) for row in rows] == [(State.CLEANED, "shutdown")] * 3
    assert await remote_of(lifecycle) == []


async def test_a_create_that_was_never_answered_is_told(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    lifecycle = face.open()

    async def lost(**values: Any) -> Any:
        raise BackendError("504", status=504)

    lifecycle._engine.driver.sdk.create = lost
    with pytest.raises(SandboxCreateError) as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("lost")
    (row,) = await settle(lifecycle.shutdown(timeout=1.0))
    assert (row.ticket, row.sandbox_id, row.state) == (caught.value.ticket, None, State.CLEANING)


async def test_what_another_thread_is_ending_meanwhile_is_not_told_as_a_leak(face: Face) -> None:
    lifecycle = face.open()
    hanging, go = threading.Event(), threading.Event()
    sdk = lifecycle._cleaner.driver.sdk
    kill = sdk.kill

    async def slow(sandbox_id: str) -> bool:
        hanging.set()
        assert go.wait(30)
        return bool(await kill(sandbox_id))

    sdk.kill = slow
    handle = await entered(face, context := lifecycle.acquire())
    other = threading.Thread(target=lifecycle._cleaner.clean, args=(handle.ticket, "released"))
    other.start()
    until(hanging.is_set, "the other thread is at it")
    end_all = lifecycle._end_all

    def then_go(deadline: float) -> None:
        end_all(deadline)
        go.set()  # the other thread's release ends only after ours were refused

    lifecycle._end_all = then_go
    lifecycle._engine.driver.join = lambda timeout: other.join(timeout)
    assert await settle(lifecycle.shutdown()) == ()
    assert await remote_of(lifecycle) == []
    del context


async def test_what_cannot_be_proved_dead_is_an_error_with_its_ids_and_a_keeper_that_hangs_costs_nothing(
    face: Face,
) -> None:
    lifecycle = face.open(max_concurrent=2)
    contexts = [lifecycle.acquire() for _ in range(2)]
    stuck, fine = [await entered(face, context) for context in contexts]
    hanging, go = threading.Event(), threading.Event()
    sdk = lifecycle._cleaner.driver.sdk
    kill = sdk.kill

    async def hang(sandbox_id: str) -> bool:
        if sandbox_id == stuck.sandbox_id:
            hanging.set()
            assert go.wait(60)
        return bool(await kill(sandbox_id))

    sdk.kill = hang
    lifecycle._cleaner.abandoned.append(stuck.ticket)
    until(hanging.is_set, "the keeper hangs in its sweep")
    with pytest.raises(SandboxLeakError) as caught:
        await settle(lifecycle.shutdown(timeout=1.0))
    assert caught.value.sandbox_ids == (stuck.sandbox_id,), "the other one had its turn"
    assert fine.sandbox_id not in await remote_of(lifecycle)
    go.set()
    watcher = face.open()
    until(lambda: len(watcher._book.records(states_=[State.CLEANED])) == 2, "it goes on")


async def test_a_second_call_waits_for_the_first_and_tells_what_nobody_heard(face: Face) -> None:
    lifecycle = face.open()
    handle = await entered(face, context := lifecycle.acquire())
    hanging, go = threading.Event(), threading.Event()
    sdk = lifecycle._cleaner.driver.sdk
    kill = sdk.kill

    async def hang(sandbox_id: str) -> bool:
        hanging.set()
        assert go.wait(60)
        return bool(await kill(sandbox_id))

    sdk.kill = hang
    first = threading.Thread(target=lifecycle._shutdown, args=(1.0,))  # as one that nobody waits for any more
    first.start()
    until(hanging.is_set, "the first call is at it")
    with pytest.raises(SandboxLeakError) as caught:
        await settle(lifecycle.shutdown(timeout=30))
    assert caught.value.sandbox_ids == (handle.sandbox_id,)
    first.join(5)
    assert await settle(lifecycle.shutdown()) == (), "it has been told"
    go.set()
    watcher = face.open()
    until(lambda: watcher._book.records(states_=[State.CLEANED]), "it goes on")
    del context
