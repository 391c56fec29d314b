"""A cancellation at every suspension of everything that talks to the backend: once, twice, three times.

A suspension is each moment at which the task gives control to the event loop, those inside the SDK included. Whatever
was cancelled there: the caller's cancellation is honoured, nothing is left running that nobody uses, and every sandbox
that the server ever made has its row.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectrpc.errors import ConnectError

from managed_e2b.engine import commands, foreign, release
from managed_e2b.rules import states
from managed_e2b.testing import Chaos, TestServer

from .cancellable import COMMAND, SCENARIOS, STREAM, Scenario, World, read
from .programs import Programs, programs_on
from .suspensions import Cancel, Moment, Suspending

WAYS: list[tuple[int, Moment]] = [
    (1, "early"), (1, "late"), (2, "early"), (2, "late"), (3, "early"), (3, "late"), (3, "burst"),
]  # fmt: skip

SAMPLE = len(WAYS)
"""Without --exhaustive each suspension is hit in one way, the next one in the next way."""


# -- the cancellations --------------------------------------------------------------------------------------


@pytest.fixture
async def world(
    me2b_server: TestServer, me2b_chaos: Chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    # What a create that was cut off has made is there by then, or left to the keeper, who is waited for.
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.2)
    monkeypatch.setattr(commands, "LOOKS", (0.0, 0.1, 0.1))
    monkeypatch.setattr(foreign, "PATIENCE", 0.1)
    world = World(me2b_server, me2b_chaos, tmp_path)
    yield world
    await world.close()


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """From one suspension that is hit to the next."""
    return 1 if request.config.getoption("--exhaustive") else SAMPLE


async def once(world: World, scenario: Scenario, cancel: Cancel | None) -> Suspending[Any]:
    """One run. When it was cancelled it has ended as cancelled, and nothing of it goes on, on the loop either."""
    async with scenario(world) as step:
        before = asyncio.all_tasks()
        watched = Suspending(step, cancel)
        task = asyncio.create_task(watched.run())
        await asyncio.wait([task])
        if watched.sent:
            assert task.cancelled(), f"{cancel}: the cancellation was swallowed: {task}"
        else:
            task.result()
        async with asyncio.timeout(20):
            while left := asyncio.all_tasks() - before - {task}:
                await asyncio.wait(left)
    return watched


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_a_cancellation_at_every_suspension_leaves_nothing(
    scenario: Scenario, world: World, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    complaints: list[Any] = []

    def complain(_loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        # Python 3.11's `wait_for`, in which the SDK opens a stream, drops what a cancelled request came to.
        if not isinstance(told.get("exception"), ConnectError):
            complaints.append(told)

    asyncio.get_running_loop().set_exception_handler(complain)
    suspensions = (await once(world, scenario, None)).seen
    runs, longest = 0, 0.0
    for index, way in enumerate(WAYS):
        number = index % stride
        while number < suspensions or stride == 1:
            run = await once(world, scenario, Cancel(number, *way))
            if not run.sent and number >= suspensions:
                break
            runs += bool(run.sent)
            longest = max(longest, run.took)
            suspensions = max(suspensions, run.seen)
            number += stride
    assert runs >= 1
    gc.collect()  # a task whose exception nobody took complains when it goes
    assert complaints == []
    unproved = await world.close()
    assert world.untracked() == []
    with capsys.disabled():
        told = f"{suspensions} suspensions, {runs} cancelled, longest until free {longest * 1000:.0f} ms"
        sys.stdout.write(f" [{told}, {unproved} rows left to the time that proves them]")


# -- inside the SDK -----------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
async def test_a_command_cancelled_at_every_suspension_of_the_task_that_reads_its_stream_is_ended(
    world: World, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cancellation of a task that waits for another goes to that one, whatever it is at."""
    loop = asyncio.get_running_loop()
    reading: list[Suspending[Any]] = []

    async def follow(handle: Any, cancel: Cancel | None) -> asyncio.Task[Any]:
        caller = asyncio.create_task(handle.run(STREAM))

        def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            if getattr(coroutine, "__qualname__", "").endswith("CommandHandle._handle_events"):
                reading.append(Suspending(coroutine, cancel, hit=caller.cancel))
                coroutine = reading[-1].run()
            return asyncio.Task(coroutine, loop=loop, **options)

        loop.set_task_factory(factory)
        try:
            await asyncio.wait([caller])
        finally:
            loop.set_task_factory(None)
        return caller

    async with world.lifecycle.acquire() as handle:
        assert (await follow(handle, None)).result().stdout == "1\n2\n3\n4\n"
        await handle.run(f"pkill -f '^{COMMAND}'", check=True)
        suspensions, runs = reading[-1].seen, 0
        for index, way in enumerate(WAYS):
            for number in range(index % stride, suspensions, stride):
                caller = await follow(handle, Cancel(number, *way))
                if not reading[-1].sent:  # it came in fewer pieces this time
                    await handle.run(f"pkill -f '^{COMMAND}'", check=True)
                    break
                assert caller.cancelled(), f"{number}, {way}: {caller}"
                runs += 1
                assert world.lifecycle._engine.driver.join(30)
                found = await handle.run(f"pgrep -f '^{COMMAND}'")
                assert (found.exit_code, found.stdout) == (1, ""), "a command that was given up goes on"
    world.assert_whole(world.lifecycle)
    with capsys.disabled():
        sys.stdout.write(f" [{suspensions} suspensions, {runs} cancelled]")


# -- Ctrl-C -------------------------------------------------------------------------------------------------

PROGRAM = """
    import functools
    sys.path.insert(0, {here!r})
    from suspensions import Cancel, Suspending

    async def main():
        async with opened(watchdog=False, opening_reap=False) as lifecycle, lifecycle.acquire(timeout=600) as handle:
            await handle.run("true")

    async def run():
        global watched
        loop = asyncio.get_running_loop()
        # When the loop has control, as it has nearly always when a person presses it.
        hit = functools.partial(loop.call_soon, os.kill, os.getpid(), signal.SIGINT)
        watched = Suspending(main(), {cancel}, hit)
        await watched.run()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(run())
    finally:
        say(watched.seen, watched.sent)
"""


@pytest.fixture
def programs(me2b_server: TestServer, me2b_chaos: Chaos, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(me2b_server, tmp_path / "sandboxes.db")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_at_every_suspension_leaves_nothing(
    times: int, programs: Programs, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of its own, on `asyncio.run`: the first one cancels it, the next ones break the loop."""

    def interrupted(cancel: Cancel | None) -> tuple[int, int]:
        """Suspensions that it came to, and interrupts that it got. Nothing of it is left when it has ended."""
        program = programs.start(PROGRAM.format(here=str(Path(__file__).parent), cancel=cancel), "async")
        status, stderr = program.ended()
        seen, sent = map(int, program.said())
        # 1: an extension module that runs Python code at the exit makes the interpreter forget what ended the program.
        assert status in ((-signal.SIGINT, 1) if sent else (0,)), stderr
        assert ("KeyboardInterrupt" in stderr) is bool(sent)
        assert programs.server.live() == 0, f"{cancel} left something running"
        return seen, sent

    suspensions, _ = interrupted(None)
    runs, number = 0, times % min(stride, 4)
    while number < suspensions or stride == 1:
        seen, sent = interrupted(Cancel(number, times))
        if not sent and number >= suspensions:
            break
        suspensions, runs = max(suspensions, seen), runs + bool(sent)
        number += min(stride, 4)
    rows = read(programs.db)
    made = {request.sandbox_id for request in programs.server.chaos.journal("create").requests if request.sandbox_id}
    assert made <= {row.sandbox_id for row in rows}
    assert [row for row in rows if row.state not in states.TERMINAL and row.sandbox_id is not None] == []
    with capsys.disabled():
        sys.stdout.write(f" [x{times}: {suspensions} suspensions, {runs} interrupted]")


def test_a_program_that_leaves_a_coroutine_in_its_block_ends(programs: Programs) -> None:
    """As after a Ctrl-C that broke the loop's own end: the interpreter drops the coroutine when it goes."""
    program = programs.start(
        """
        async def main():
            async with opened(watchdog=False) as lifecycle, lifecycle.acquire():
                entered.set()
                await asyncio.Event().wait()

        entered = asyncio.Event()
        coroutine = main()
        task = loop.create_task(coroutine)
        loop.run_until_complete(entered.wait())
        loop.close()
        """,
        "async",
    )
    status, _ = program.ended()
    assert status == 0
    assert programs.server.live() == 0
