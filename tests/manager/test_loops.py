"""One async lifecycle, its contexts and its handles, used by several event loops and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from managed_e2b import AsyncSandboxLifecycle, State

from .conftest import Face, until


def in_a_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a loop of a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(coroutine)))
    thread.start()
    thread.join(60)
    return results[0]


@pytest.mark.parametrize("elsewhere", [asyncio.run, in_a_thread], ids=["a later loop", "a loop of another thread"])
def test_a_sandbox_made_in_one_loop_is_used_and_ended_in_another(
    server: Any, tmp_path: Any, elsewhere: Callable[[Coroutine[Any, Any, Any]], Any]
) -> None:
    """A sandbox's object was bound to the loop that had made it: elsewhere its use failed, and it was left running."""
    lifecycle: AsyncSandboxLifecycle = Face("async", server, tmp_path / "x.db").open()
    context = lifecycle.acquire()

    async def made() -> Any:
        handle = await context.__aenter__()
        assert (await handle.run("echo here")).stdout == "here\n"
        await handle.stage_in({"a.txt": "words"})
        return handle

    handle = asyncio.run(made())

    async def used() -> None:
        assert (await handle.run("cat /task/a.txt")).stdout == "words"
        await handle.stage_in({"b.txt": "more"})
        assert await handle.stage_out(["a.txt", "b.txt"]) == {"a.txt": b"words", "b.txt": b"more"}
        results = await asyncio.gather(*(handle.run(f"echo {number}") for number in range(8)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]
        assert (await handle.sandbox.commands.run("echo native")).stdout == "native\n"
        await context.__aexit__(None, None, None)

    elsewhere(used())
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "it is released")
    remote = asyncio.run(lifecycle.list_remote())
    assert handle.sandbox_id not in [item.sandbox_id for item in remote]
    asyncio.run(lifecycle.shutdown())


def test_a_handle_is_used_by_two_loops_at_once(server: Any, tmp_path: Any) -> None:
    lifecycle: AsyncSandboxLifecycle = Face("async", server, tmp_path / "x.db").open()

    async def main() -> None:
        async with lifecycle.acquire() as handle:

            async def many() -> list[str]:
                results = await asyncio.gather(*(handle.run("echo here") for _ in range(8)))
                return [result.stdout for result in results]

            here, there = await asyncio.gather(many(), asyncio.to_thread(in_a_thread, many()))
            assert here == there == ["here\n"] * 8
        await lifecycle.shutdown()

    asyncio.run(main())
