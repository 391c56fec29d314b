"""What `test_cancellation` cancels: each call of the async face that talks to the backend, in a world of its own.

A scenario makes all ready, yields the coroutine to cancel, and checks afterwards what was left.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import e2b
import pytest

from managed_e2b import AcquireTimeoutError, AsyncSandboxLifecycle, SandboxGoneError, State
from managed_e2b.drivers.base import CANCEL_GRACE
from managed_e2b.engine.base import OWNER, TICKET
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import SandboxRecord
from managed_e2b.rules import states
from managed_e2b.testing import Chaos, TestServer

from .conftest import until
from .orphans import creating_row, owner_row, queued_row, running_row
from .suspensions import hesitant

COMMAND = "sleep 5151"
"""What runs on when nobody ends it."""

STREAM = f"{COMMAND} >/dev/null 2>&1 & for n in 1 2 3 4; do echo $n; sleep 0.01; done"
"""Some output, and a process that would go on."""


class World:
    """A server, the lifecycles on it, and what ought to run there."""

    def __init__(self, server: TestServer, chaos: Chaos, directory: Path) -> None:
        self.server = server
        self.chaos = chaos
        self.held = 0
        """Sandboxes that somebody uses meanwhile."""
        self.planted: set[str] = set()
        """Sandboxes that nobody acquired."""
        self._directory = directory
        self._opened: list[AsyncSandboxLifecycle] = []
        self.lifecycle = self.open()

    @property
    def where(self) -> dict[str, str]:
        return {"api_key": self.server.api_key, "api_url": self.server.url}

    def open(self, **options: Any) -> AsyncSandboxLifecycle:
        """A lifecycle with a ledger of its own."""
        db = self._directory / f"{len(self._opened)}.db"
        lifecycle = AsyncSandboxLifecycle(
            db, e2b_api_url=self.server.url, e2b_key=self.server.api_key, opening_reap=False, watchdog=False,
            **{"max_concurrent": 1000, **options},
        )  # fmt: skip
        hesitant(lifecycle._engine.driver)
        self._opened.append(lifecycle)
        return lifecycle

    async def close(self) -> int:
        """Shut all lifecycles down. How many rows are left for the time that proves them: of creates that were cut."""
        return sum([len(await lifecycle.shutdown()) for lifecycle in self._opened])

    async def plant(self, **metadata: str) -> str:
        """A sandbox that the lifecycle did not acquire."""
        sandbox = await e2b.AsyncSandbox.create("base", timeout=600, metadata=metadata, **self.where)
        self.planted.add(sandbox.sandbox_id)
        return sandbox.sandbox_id

    async def orphan(self, owner: str, *, answered: bool = True) -> str:
        """A sandbox of an owner that is dead; with its id in its row when its create was answered. Its ticket."""
        book, account = self.lifecycle._book, self.lifecycle._engine.account
        ticket = creating_row(book, owner, account)
        sandbox_id = await self.plant(**{TICKET: ticket, OWNER: owner})
        if answered:
            assert book.running(ticket, owner, sandbox_id, sent_at=book.now(), remote=300) is not None
        return ticket

    def untracked(self) -> list[str]:
        """What the server ever made for a ticket whose row does not have it. Only when all is closed."""
        made = [request for request in self.chaos.journal("create").requests if request.ticket and request.sandbox_id]
        rows: dict[str, str | None] = {}
        for number in range(len(self._opened)):
            rows |= {row.ticket: row.sandbox_id for row in read(self._directory / f"{number}.db")}
        return [
            request.sandbox_id
            for request in made
            if request.sandbox_id not in (rows.get(request.ticket), *self.planted)
        ]

    def is_quiet(self) -> bool:
        """Nothing runs but what is held."""
        return self.server.live() == self.held

    def unexplained(self, rows: list[SandboxRecord]) -> list[SandboxRecord]:
        """Open rows but those in use, and but those of creates that may have made something, for all that is known."""
        return [
            row
            for row in rows
            if row.state not in states.TERMINAL
            and not (row.state is State.RUNNING and self.held)
            and not (row.state is State.CLEANING and row.sandbox_id is None and row.reason)
        ]

    def assert_whole(self, lifecycle: AsyncSandboxLifecycle) -> None:
        """Nothing is left running, and no row is open, but what is used."""
        assert lifecycle._engine.driver.join(30)
        until(self.is_quiet, f"{self.held} sandboxes run")
        until(lambda: not self.unexplained(lifecycle._book.records()), "no row is open without a reason")


def read(db: Path) -> list[SandboxRecord]:
    book = Ledger(open_engine(db))
    try:
        return book.records()
    finally:
        book.close()


Step: TypeAlias = Coroutine[Any, Any, Any]
Scenario = Callable[[World], AbstractAsyncContextManager[Step]]
"""Makes all ready and yields what is to be cancelled; then it checks, and tidies up."""


# -- what is cancelled --------------------------------------------------------------------------------------


async def leave(context: Any, error: BaseException | None = None) -> None:
    await context.__aexit__(type(error) if error is not None else None, error, None)


async def visit(lifecycle: AsyncSandboxLifecycle, **request: Any) -> None:
    """Enter, and leave at once."""
    async with lifecycle.acquire(timeout=600, **request):
        pass


@asynccontextmanager
async def acquire(world: World) -> AsyncIterator[Step]:
    yield visit(world.lifecycle)
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def acquire_that_waits_in_line(world: World) -> AsyncIterator[Step]:
    lifecycle = world.open(max_concurrent=1)
    first = lifecycle.acquire()
    await first.__aenter__()
    leaving: list[asyncio.Task[None]] = []

    async def wait_in_line() -> None:
        leaving.append(asyncio.create_task(leave(first)))
        await visit(lifecycle)

    yield wait_in_line()
    await asyncio.gather(*leaving)
    world.assert_whole(lifecycle)
    await lifecycle.shutdown()


@asynccontextmanager
async def acquire_that_gives_up(world: World) -> AsyncIterator[Step]:
    lifecycle = world.open(max_concurrent=1)

    async def give_up() -> None:
        with pytest.raises(AcquireTimeoutError):
            await visit(lifecycle, acquire_timeout=0.05)

    async with lifecycle.acquire():
        yield give_up()
        world.held = 1
        world.assert_whole(lifecycle)
        world.held = 0
    await lifecycle.shutdown()


@asynccontextmanager
async def acquire_that_is_refused_at_first(world: World) -> AsyncIterator[Step]:
    world.chaos.on("create").first().status(429, retry_after=0)
    lifecycle = world.open()
    yield visit(lifecycle)
    world.assert_whole(lifecycle)
    world.chaos.calm()
    await lifecycle.shutdown()


@asynccontextmanager
async def acquire_that_connects(world: World) -> AsyncIterator[Step]:
    """The answer to the create is lost: it is looked for by its ticket, and adopted."""
    world.chaos.on("create").first().after().drop()
    yield visit(world.lifecycle)
    world.assert_whole(world.lifecycle)
    world.chaos.calm()


@asynccontextmanager
async def acquire_of_a_create_that_fails_after_its_effect(world: World) -> AsyncIterator[Step]:
    world.chaos.on("create").first().after().status(400, retry=False)

    async def fail() -> None:
        with pytest.raises(Exception, match="create a sandbox"):
            await visit(world.lifecycle)

    yield fail()
    world.assert_whole(world.lifecycle)
    world.chaos.calm()


@asynccontextmanager
async def end_of_a_block(world: World) -> AsyncIterator[Step]:
    context = world.lifecycle.acquire()
    await context.__aenter__()
    yield leave(context)
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def end_of_a_block_whose_kill_does_nothing_at_first(world: World) -> AsyncIterator[Step]:
    context = world.lifecycle.acquire()
    await context.__aenter__()
    world.chaos.on("kill").first().pretend()
    yield leave(context)
    world.assert_whole(world.lifecycle)
    world.chaos.calm()


@asynccontextmanager
async def end_of_a_block_that_keeps_its_sandbox(world: World) -> AsyncIterator[Step]:
    lifecycle = world.open()
    context = lifecycle.acquire(keep_on_error=True)
    await context.__aenter__()
    yield leave(context, ValueError("of the block"))
    assert lifecycle._engine.driver.join(30)
    until(lambda: world.server.live() == len(lifecycle._book.records(states_=[State.RUNNING])), "it is kept, or not")
    await lifecycle.shutdown()
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def in_a_block(world: World, step: Callable[[Any], Step]) -> AsyncIterator[Step]:
    """A call of a handle; no process of its command survives a cancellation of it."""
    async with world.lifecycle.acquire() as handle:
        await handle.stage_in({"there": "x" * 100_000})
        yield step(handle)
        assert world.lifecycle._engine.driver.join(30)
        found = await handle.run(f"pgrep -f '^{COMMAND}'")
        assert (found.exit_code, found.stdout) == (1, ""), "a command that was given up goes on"
    world.assert_whole(world.lifecycle)


def run(world: World) -> AbstractAsyncContextManager[Step]:
    return in_a_block(world, lambda handle: handle.run("echo begun; cat; echo ended >&2", stdin=b"x" * 100_000))


def run_past_its_timeout(world: World) -> AbstractAsyncContextManager[Step]:
    return in_a_block(world, lambda handle: handle.run(f"{COMMAND} & {COMMAND}", timeout=0.2))


def run_whose_callback_raises(world: World) -> AbstractAsyncContextManager[Step]:
    def fail(_chunk: str) -> None:
        raise ValueError("of the caller")

    async def step(handle: Any) -> None:
        with pytest.raises(ValueError, match="of the caller"):
            await handle.run(f"echo begun; {COMMAND}", on_stdout=fail)

    return in_a_block(world, step)


@asynccontextmanager
async def run_whose_stream_is_cut(world: World) -> AsyncIterator[Step]:
    world.chaos.on("process.start").where(**{}).nth(1).cut(after_events=1)
    async with in_a_block(world, lambda handle: handle.run("sleep 0.1; echo ended")) as step:
        yield step
    world.chaos.calm()


def stage_in(world: World) -> AbstractAsyncContextManager[Step]:
    return in_a_block(world, lambda handle: handle.stage_in({"a": "x", "b/c": b"y" * 100_000}))


def stage_out(world: World) -> AbstractAsyncContextManager[Step]:
    return in_a_block(world, lambda handle: handle.stage_out(["there", "there"]))


@asynccontextmanager
async def call_of_a_handle_whose_sandbox_was_killed(world: World) -> AsyncIterator[Step]:
    async with world.lifecycle.acquire() as handle:
        await e2b.AsyncSandbox.kill(handle.sandbox_id, **world.where)

        async def fail() -> None:
            with pytest.raises(SandboxGoneError):
                await handle.run("true")

        yield fail()
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def list_remote(world: World) -> AsyncIterator[Step]:
    yield world.lifecycle.list_remote()
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def reap(world: World) -> AsyncIterator[Step]:
    """Rows of a dead owner: one runs, one was never answered, one waits in line."""
    book = world.lifecycle._book
    owner = owner_row(book, dead=True)
    await world.orphan(owner)
    await world.orphan(owner, answered=False)
    queued_row(book, owner, world.lifecycle._engine.account)
    yield world.lifecycle.reap()
    await world.lifecycle.reap()
    assert book.records(states_=set(State) - states.TERMINAL, owner=owner) == [], "the next one has ended all"
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def reap_with_purge_foreign(world: World) -> AsyncIterator[Step]:
    """Sandboxes that nobody knows; the first kill does nothing, so that its proof is waited for."""
    await world.plant()
    await world.plant(run="7")
    world.chaos.on("kill").first().pretend()
    yield world.lifecycle.reap(purge_foreign=True)
    world.chaos.calm()
    await world.lifecycle.reap(purge_foreign=True)
    world.assert_whole(world.lifecycle)


@asynccontextmanager
async def reconcile(world: World) -> AsyncIterator[Step]:
    """A row whose sandbox has vanished, a sandbox whose row has ended, and one in use."""
    lifecycle, book = world.lifecycle, world.lifecycle._book
    async with lifecycle.acquire() as handle:
        vanished = running_row(book, lifecycle.owner_id, lifecycle._engine.account, f"gone{uuid.uuid4().hex}")
        ended = queued_row(book, lifecycle.owner_id, lifecycle._engine.account)
        assert book.give_up(ended, lifecycle.owner_id, "test") is not None
        left = await world.plant(**{TICKET: ended, OWNER: lifecycle.owner_id})
        yield lifecycle.reconcile()
        await lifecycle.reconcile()
        assert (await handle.run("echo in use")).stdout == "in use\n"
        rows = {row.ticket: row.state for row in book.records(owner=lifecycle.owner_id)}
        assert rows[vanished] is State.CLEANED
        assert left not in [item.sandbox_id for item in await lifecycle.list_remote()]
    world.assert_whole(lifecycle)


@asynccontextmanager
async def shutdown(world: World, slow: bool = False) -> AsyncIterator[Step]:
    """The next call of it waits for what the first one has begun."""
    lifecycle = world.open()
    contexts = [lifecycle.acquire() for _ in range(2)]
    for context in contexts:
        await context.__aenter__()
    if slow:
        world.chaos.on("kill").delay(3 * CANCEL_GRACE)
    yield lifecycle.shutdown()
    assert await lifecycle.shutdown() == ()
    assert world.is_quiet(), "when the second call returns, all has ended"
    world.chaos.calm()


def shutdown_that_goes_on(world: World) -> AbstractAsyncContextManager[Step]:
    """It takes longer than who cancels it has to wait."""
    return shutdown(world, slow=True)


SCENARIOS: list[Scenario] = [
    acquire,
    acquire_that_waits_in_line,
    acquire_that_gives_up,
    acquire_that_is_refused_at_first,
    acquire_that_connects,
    acquire_of_a_create_that_fails_after_its_effect,
    end_of_a_block,
    end_of_a_block_whose_kill_does_nothing_at_first,
    end_of_a_block_that_keeps_its_sandbox,
    run,
    run_past_its_timeout,
    run_whose_callback_raises,
    run_whose_stream_is_cut,
    stage_in,
    stage_out,
    call_of_a_handle_whose_sandbox_was_killed,
    list_remote,
    reap,
    reap_with_purge_foreign,
    reconcile,
    shutdown,
    shutdown_that_goes_on,
]
