"""A cancellation that is swallowed below is raised all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from managed_e2b.drivers.heard import answer


async def swallowing(error: Exception | None = None) -> str:
    """As the SDK's HTTP client does when answer and cancellation come together."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if error is not None:
            raise error from None
    return "answer"


async def cancelled(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(0)  # let it begin
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


@pytest.mark.parametrize("error", [None, ConnectionError("what it made of it")])
async def test_it_is_raised_in_place_of_the_answer_and_of_an_error(error: Exception | None) -> None:
    assert not await cancelled(asyncio.create_task(swallowing())), "without it, it is lost"
    assert await cancelled(asyncio.create_task(answer(swallowing(error))))


async def test_a_timeout_around_it_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await answer(swallowing())


async def test_one_that_was_caught_before_is_none_of_this_call() -> None:
    async def cleans_up() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return str(await answer(asyncio.sleep(0, "cleaned up")))
        return "not cancelled"

    task = asyncio.create_task(cleans_up())
    assert not await cancelled(task)
    assert task.result() == "cleaned up"


async def test_a_timeout_within_the_call_is_the_calls_own() -> None:
    async def tries_twice() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "the second time"
        return "the first time"

    assert await answer(tries_twice()) == "the second time"


async def test_what_needs_no_waiting_is_given_as_it_is() -> None:
    assert await answer(7) == 7
