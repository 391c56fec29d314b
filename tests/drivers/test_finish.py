"""Cleanup that nothing interrupts: the promise of `Driver.finish`, on both faces."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from managed_e2b.drivers import AioDriver, BlockingDriver, Wakeup, run
from managed_e2b.drivers.base import CANCEL_GRACE

SDK: Any = None


@pytest.fixture
def aio() -> AioDriver:
    return AioDriver(SDK, Wakeup())


@pytest.fixture
def blocking() -> BlockingDriver:
    return BlockingDriver(SDK, Wakeup())


def test_run_takes_a_coroutine_to_its_end_on_the_same_thread(blocking: BlockingDriver) -> None:
    async def engine(number: int) -> tuple[int, int]:
        return await blocking.ledger(lambda: number + 1), await blocking.ledger(threading.get_ident)

    assert run(engine(1)) == (2, threading.get_ident())


def test_run_passes_exceptions_as_they_are_and_refuses_to_suspend() -> None:
    async def fails() -> None:
        raise KeyError("x")

    async def suspends() -> None:
        await asyncio.sleep(0)

    with pytest.raises(KeyError):
        run(fails())
    with pytest.raises(RuntimeError, match="suspended on the blocking driver"):
        run(suspends())


async def test_run_works_inside_a_running_loop(blocking: BlockingDriver) -> None:
    assert run(blocking.ledger(lambda: 7)) == 7


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancels_during_cleanup_are_honoured_after_it(aio: AioDriver, times: int) -> None:
    begun, go, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def cleanup() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(10)
        ended.set()

    task = asyncio.create_task(aio.finish(cleanup))
    await begun.wait()
    for _ in range(times):
        task.cancel(f"cancel {times}")
        await asyncio.sleep(0)  # let the task see it
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.wait(5)
    assert aio.join(5)


async def test_a_caller_who_cancels_is_free_soon_and_the_cleanup_goes_on(aio: AioDriver) -> None:
    begun, go, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def cleanup() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(10)
        ended.set()

    task = asyncio.create_task(aio.finish(cleanup))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set(), "it gave control back while the cleanup hangs"
    assert not aio.join(0)
    go.set()
    assert aio.join(5)
    assert ended.is_set()


def test_a_loop_that_is_torn_down_does_not_take_the_cleanup_with_it(aio: AioDriver) -> None:
    go, ended = threading.Event(), threading.Event()

    def cleanup() -> None:
        go.wait(10)
        ended.set()

    async def main() -> None:
        task = asyncio.create_task(aio.finish(cleanup))
        await asyncio.sleep(0)
        assert not task.done()  # asyncio.run cancels it when main returns

    asyncio.run(main())
    go.set()
    assert aio.join(5)
    assert ended.is_set()


async def test_a_timeout_around_a_cleanup_stays_a_timeout(aio: AioDriver) -> None:
    go = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await aio.finish(go.wait, 10)
    go.set()
    assert aio.join(5)


async def test_a_ledger_call_is_never_abandoned(aio: AioDriver) -> None:
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    written: list[str] = []

    def write() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(10)
        written.append("row")

    task = asyncio.create_task(aio.ledger(write))
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(CANCEL_GRACE / 2)
    assert not task.done(), "whatever the grace: a write has happened when its caller goes on"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written == ["row"]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("handler", ["default", "own"])
def test_ctrl_c_during_cleanup_is_honoured_and_the_cleanup_goes_on(
    blocking: BlockingDriver, times: int, handler: str
) -> None:
    go, ended = threading.Event(), threading.Event()
    seen = threading.Semaphore(0)

    def own(_number: int, _frame: object) -> None:
        seen.release()
        if times == 1:
            raise KeyboardInterrupt

    def cleanup() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        go.wait(10)
        ended.set()

    before = signal.signal(signal.SIGINT, own if handler == "own" else signal.default_int_handler)
    try:
        if handler == "own" and times > 1:  # a handler that raises nothing interrupts nothing
            threading.Thread(target=lambda: seen.acquire(timeout=5) and go.set()).start()
            run(blocking.finish(cleanup))
        else:
            with pytest.raises(KeyboardInterrupt):
                run(blocking.finish(cleanup))
            assert not ended.is_set(), "it gave control back while the cleanup hangs"
        assert signal.getsignal(signal.SIGINT) is (own if handler == "own" else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)
        go.set()
    assert blocking.join(5)
    assert ended.is_set()


def test_ctrl_c_is_raised_after_a_cleanup_that_ends_soon(blocking: BlockingDriver) -> None:
    ended = threading.Event()

    def cleanup() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(blocking.finish(cleanup))
    finally:
        signal.signal(signal.SIGINT, before)
    assert blocking.join(5)
    assert ended.is_set()


@pytest.mark.parametrize("face", ["aio", "blocking"])
async def test_what_cleanup_returns_and_raises_comes_out(face: str, aio: AioDriver, blocking: BlockingDriver) -> None:
    driver = aio if face == "aio" else blocking

    def fails() -> None:
        raise ValueError("x")

    assert await driver.finish(lambda: 3) == 3
    with pytest.raises(ValueError, match="x"):
        await driver.finish(fails)


@pytest.mark.parametrize("key", [None, "a ticket"])
@pytest.mark.parametrize("face", ["aio", "blocking"])
async def test_a_waiter_is_woken_from_another_thread(
    face: str, key: str | None, aio: AioDriver, blocking: BlockingDriver
) -> None:
    driver = aio if face == "aio" else blocking
    subscribed = threading.Event()
    subscribe = driver._wakeup.subscribe

    def telling(*args: Any) -> bool:
        done = subscribe(*args)
        subscribed.set()
        return done

    driver._wakeup.subscribe = telling  # type: ignore[method-assign]

    def wake() -> None:
        assert subscribed.wait(5)
        driver.notify("another")
        driver.notify(key)

    thread = threading.Thread(target=wake)
    thread.start()
    await driver.wait(30, key)  # the test's own timeout is shorter
    thread.join()
    assert driver._wakeup._callbacks == {}


@pytest.mark.parametrize("face", ["aio", "blocking"])
async def test_what_was_told_between_the_look_and_the_wait_is_not_missed(
    face: str, aio: AioDriver, blocking: BlockingDriver
) -> None:
    driver = aio if face == "aio" else blocking
    seen = driver.told
    driver.notify()
    await driver.wait(300, since=seen)  # the test's own timeout is shorter
    assert driver._wakeup._callbacks == {}
