"""The path of one sandbox, and what it leaves: nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from managed_e2b import (
    AcquireTimeoutError,
    Me2bError,
    RateLimitedError,
    SandboxGoneError,
    SandboxHandle,
    SandboxLifecycle,
    State,
    StateTransitionError,
    TemplateNotFoundError,
)

from .conftest import Face, assert_nothing_left, remote_of, settle, states_of, until


async def test_a_sandbox_is_there_in_the_block_and_proved_dead_after_it(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire(timeout=120, metadata={"run": "7"})) as handle:
        assert (await settle(handle.run("echo hi"))).stdout == "hi\n"
        assert await remote_of(lifecycle) == [handle.sandbox_id]
        (row,) = await settle(lifecycle.records())
        assert (row.state, row.sandbox_id, row.metadata) == (State.RUNNING, handle.sandbox_id, {"run": "7"})
        assert handle.sandbox.sandbox_id == handle.sandbox_id
    assert await states_of(lifecycle) == [State.CLEANED]
    await assert_nothing_left(lifecycle)


async def test_the_backend_gets_the_lease_as_its_timeout_and_never_more_than_the_hard_limit(face: Face) -> None:
    lifecycle = face.open(lease=60)
    for timeout, expected in ((600, 60), (30, 30)):
        async with face.entered(lifecycle.acquire(timeout=timeout)) as handle:
            (remote,) = [item for item in await settle(lifecycle.list_remote()) if item.sandbox_id == handle.sandbox_id]
            assert abs((remote.end_at - remote.started_at) / 1_000_000 - expected) < 5


async def test_an_exception_in_the_block_comes_out_as_it_is_and_the_row_tells_why(face: Face) -> None:
    lifecycle = face.open()
    error = LookupError("mine")
    with pytest.raises(LookupError) as caught:
        async with face.entered(lifecycle.acquire()):
            raise error
    assert caught.value is error
    (row,) = await settle(lifecycle.records())
    assert (row.state, row.reason) == (State.CLEANED, "raised LookupError")
    await assert_nothing_left(lifecycle)


async def test_a_released_handle_says_so(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        pass
    for use in (
        lambda: handle.run("true"),
        lambda: handle.stage_in({"x": "y"}),
        lambda: handle.stage_out(["x"]),
        lambda: handle.run_script("x.py"),
    ):
        with pytest.raises(SandboxGoneError, match="released") as caught:
            await settle(use())
        assert caught.value.sandbox_id == handle.sandbox_id


async def test_a_sandbox_killed_by_somebody_else_is_gone_not_a_timeout(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        await settle(handle.sandbox.kill())
        with pytest.raises(SandboxGoneError):
            await settle(handle.run("true"))
    await assert_nothing_left(lifecycle)


async def test_no_more_at_once_than_max_concurrent_and_the_others_wait_their_turn(face: Face) -> None:
    lifecycle = face.open(max_concurrent=2)
    peak: list[int] = []
    lock = threading.Lock()
    inside = 0

    def entered(step: int) -> None:
        nonlocal inside
        with lock:
            inside += step
            peak.append(inside)

    async def one() -> None:
        async with face.entered(lifecycle.acquire()) as handle:
            entered(1)
            await settle(handle.run("true"))
            entered(-1)

    if face.name == "async":
        await asyncio.gather(*(one() for _ in range(6)))
    else:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, one()) for _ in range(6)))
    assert max(peak) <= 2
    assert await states_of(lifecycle) == [State.CLEANED] * 6
    await assert_nothing_left(lifecycle)


async def test_acquire_timeout_names_who_holds_the_slots(face: Face) -> None:
    lifecycle = face.open(max_concurrent=1)
    async with face.entered(lifecycle.acquire()) as handle:
        with pytest.raises(AcquireTimeoutError) as caught:
            async with face.entered(lifecycle.acquire(acquire_timeout=0.05)):
                pytest.fail("two at once")
        assert handle.sandbox_id in str(caught.value)
        assert len(caught.value.holders) == 1
    assert await states_of(lifecycle) == [State.CLEANED, State.CLEANED]
    assert [row.reason for row in await settle(lifecycle.records())] == ["released", "gave up waiting"]


async def test_a_template_that_does_not_exist_is_told_and_nothing_stays_open(face: Face) -> None:
    lifecycle = face.open()
    with pytest.raises(TemplateNotFoundError, match=r"no template 'nosuch'.*e2b template list"):
        async with face.entered(lifecycle.acquire(template="nosuch")):
            pytest.fail("made from nothing")
    assert await states_of(lifecycle) == [State.CREATE_FAILED]
    await assert_nothing_left(lifecycle)


async def test_a_429_slows_the_line_down_and_is_not_the_callers_problem(face: Face) -> None:
    lifecycle = face.open()
    sdk = lifecycle._engine.driver.sdk
    create, calls = sdk.create, 0

    async def limited(**values: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RateLimitedError("429", retry_after=0.2)
        return await create(**values)

    sdk.create = limited
    async with face.entered(lifecycle.acquire()) as handle:
        assert await remote_of(lifecycle) == [handle.sandbox_id]
    assert calls == 2


async def test_shutdown_releases_what_is_held_and_ends_the_lifecycle(face: Face) -> None:
    lifecycle = face.open()
    context = lifecycle.acquire()
    handle = await settle(context.__aenter__() if face.name == "async" else context.__enter__())
    watcher = face.open()
    assert handle.sandbox_id in [item.sandbox_id for item in await settle(watcher.list_remote())]
    await settle(lifecycle.shutdown())
    await settle(lifecycle.shutdown())
    assert handle.sandbox_id not in [item.sandbox_id for item in await settle(watcher.list_remote())]
    (row,) = await settle(watcher.records())
    assert (row.state, row.reason) == (State.CLEANED, "shutdown")
    with pytest.raises(Me2bError, match="shut down"):
        lifecycle.acquire()
    with pytest.raises(SandboxGoneError):
        await settle(handle.run("true"))


async def test_a_context_is_entered_once(face: Face) -> None:
    lifecycle = face.open()
    context = lifecycle.acquire()
    async with face.entered(context) as handle:
        with pytest.raises(StateTransitionError, match="entered before"):
            async with face.entered(context):
                pytest.fail("one context, two sandboxes")
        assert await remote_of(lifecycle) == [handle.sandbox_id]
    await assert_nothing_left(lifecycle)


def test_a_generator_that_is_closed_in_its_block_releases_though_the_handle_is_kept(server: Any, tmp_path: Any) -> None:
    def boxes() -> Iterator[SandboxHandle]:
        with lifecycle.acquire() as handle:
            yield handle

    with SandboxLifecycle(tmp_path / "x.db", e2b_api_url=server.url, e2b_key=server.api_key) as lifecycle:
        generator = boxes()
        handle = next(generator)
        generator.close()
        until(lambda: lifecycle.records([State.CLEANED]), "the keeper has released it")
        with pytest.raises(SandboxGoneError):
            handle.run("true")


def test_a_context_entered_in_one_loop_may_be_left_in_another(server: Any, tmp_path: Any) -> None:
    lifecycle = Face("async", server, tmp_path / "x.db").open()
    context = lifecycle.acquire()
    handle = asyncio.run(context.__aenter__())
    assert asyncio.run(handle.run("echo here")).stdout == "here\n"
    asyncio.run(context.__aexit__(None, None, None))
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has released it")
    asyncio.run(lifecycle.shutdown())


async def test_a_context_that_was_made_before_a_shutdown_makes_nothing_after_it(face: Face) -> None:
    lifecycle = face.open()
    context = lifecycle.acquire()
    await settle(lifecycle.shutdown())
    with pytest.raises(Me2bError, match="shut down"):
        async with face.entered(context):
            pytest.fail("made by a lifecycle that is shut down")
    assert await states_of(face.open()) == []


async def test_the_lifecycle_is_a_context_manager(face: Face) -> None:
    async with face.entered(face.open()) as lifecycle, face.entered(lifecycle.acquire()) as handle:
        assert handle.sandbox_id
    with pytest.raises(Me2bError, match="shut down"):
        lifecycle.acquire()


async def test_backend_local_starts_a_server_and_stops_it(face: Face) -> None:
    lifecycle = face.open(backend="local", db_path=face.db.with_name("local.db"))
    assert lifecycle.endpoint.startswith("http://127.0.0.1:")
    async with face.entered(lifecycle.acquire()) as handle:
        assert (await settle(handle.run("id -un"))).stdout == "user\n"
    await assert_nothing_left(lifecycle)


def test_an_async_lifecycle_is_bound_to_no_loop(server: Any, tmp_path: Any) -> None:
    face = Face("async", server, tmp_path / "loops.db")
    lifecycle = face.open()

    async def use() -> str:
        async with lifecycle.acquire() as handle:
            return str((await handle.run("echo here")).stdout)

    outputs = [asyncio.run(use()), asyncio.run(use())]
    thread = threading.Thread(target=lambda: outputs.append(asyncio.run(use())))
    thread.start()
    thread.join()
    assert outputs == ["here\n"] * 3
    asyncio.run(assert_nothing_left(lifecycle))
    asyncio.run(face.close())
