"""Many long commands at once, and long ones that are come back to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import e2b
import pytest

from .conftest import Face, settle

COUNT = 150
"""Commands at once: more than the streams that one HTTP/2 connection most often takes."""


@pytest.mark.timeout(300)
async def test_a_hundred_and_fifty_commands_at_once_all_start_and_give_their_results(
    face: Face, request: pytest.FixtureRequest
) -> None:
    """Commands beyond the hundredth waited for a place on the connection that all shared, and failed."""
    boxes = COUNT if request.config.getoption("--exhaustive") else 10
    lifecycle = face.open(max_concurrent=boxes)
    loop = asyncio.get_running_loop()
    started = 0
    everybody = asyncio.Event()

    def begun(_text: str) -> None:
        nonlocal started
        started += 1
        if started == COUNT:
            everybody.set()

    with ThreadPoolExecutor(COUNT) as pool:

        def beside(call: Callable[[], Any]) -> Any:
            """A call of either face, to be awaited."""
            return call() if face.name == "async" else loop.run_in_executor(pool, call)

        async with contextlib.AsyncExitStack() as stack:
            handles = [await stack.enter_async_context(face.entered(lifecycle.acquire())) for _ in range(boxes)]

            def command(handle: Any) -> Any:
                told = lambda text: loop.call_soon_threadsafe(begun, text)  # noqa: E731
                return beside(lambda: handle.run("echo started; sleep 1000; exit 7", timeout=None, on_stdout=told))

            running = asyncio.gather(*(command(handle) for handle in handles * (COUNT // boxes)))
            async with asyncio.timeout(120):
                await everybody.wait()
            for handle in handles:
                assert (await settle(handle.run("pkill -x sleep"))).ok
            results = await running
            assert [(result.stdout, result.exit_code, result.output_lost) for result in results] == [
                ("started\n", 7, False)
            ] * COUNT


async def test_a_job_in_the_background_is_come_back_to_by_its_pid_and_gives_output_and_exit_code(face: Face) -> None:
    """The way back to a command by its pid was lost after two minutes."""
    async with face.entered(face.open().acquire()) as handle:
        native = handle.sandbox.commands
        line = "echo first; until [ -e /tmp/go ]; do sleep 0.05; done; echo last; exit 5"
        job = await settle(native.run(line, background=True, timeout=0))
        await settle(job.disconnect())
        assert job.pid in [process.pid for process in await settle(native.list())]
        again = await settle(native.connect(job.pid, timeout=0))
        await settle(handle.run("touch /tmp/go"))
        with pytest.raises(e2b.CommandExitException) as caught:
            await settle(again.wait())
        assert (caught.value.stdout, caught.value.exit_code) == ("last\n", 5)
