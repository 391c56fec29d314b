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
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import e2b
import pytest
from connectrpc.errors import ConnectError

from managed_e2b import AcquireTimeoutError, AsyncSandboxLifecycle, SandboxGoneError, State
from managed_e2b.drivers.base import CANCEL_GRACE
from managed_e2b.engine import commands, foreign, release
from managed_e2b.engine.base import OWNER, TICKET
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import SandboxRecord
from managed_e2b.rules import states
from managed_e2b.testing import Chaos, TestServer

from .conftest import until
from .orphans import creating_row, owner_row, queued_row, running_row
from .programs import Programs, programs_on
from .suspensions import Cancel, Moment, Suspending, hesitant

WAYS: list[tuple[int, Moment]] = [
    (1, "early"), (1, "late"), (2, "early"), (2, "late"), (3, "early"), (3, "late"), (3, "burst"),
]  # fmt: skip

SAMPLE = len(WAYS)
"""Without --exhaustive each suspension is hit in one way, the next one in the next way."""

COMMAND = "sleep 5151"


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

    async def close(self) -> None:
        for lifecycle in self._opened:
            await lifecycle.shutdown()

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
    await world.close()
    assert world.untracked() == []
    with capsys.disabled():
        sys.stdout.write(f" [{suspensions} suspensions, {runs} cancelled, longest until free {longest * 1000:.0f} ms]")


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
        assert status == (-signal.SIGINT if sent else 0), stderr
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


def read(db: Path) -> list[SandboxRecord]:
    book = Ledger(open_engine(db))
    try:
        return book.records()
    finally:
        book.close()
