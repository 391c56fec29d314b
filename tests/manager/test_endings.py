"""A sandbox that has ended says how, to whoever uses it and in the ledger. What is not known is not said."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import e2b
import pytest

from managed_e2b import (
    SandboxExpiredError,
    SandboxGoneError,
    SandboxLapsedError,
    SandboxLifecycle,
    SandboxLostError,
    SandboxPausedError,
    SandboxReleasedError,
    SandboxUnreachableError,
    State,
)
from managed_e2b.engine import host
from managed_e2b.ledger.store import host_clock
from managed_e2b.models import Host
from managed_e2b.rules.leases import SECOND
from managed_e2b.testing import Chaos, TestServer

from .conftest import Face, remote_of, settle, states_of, until
from .programs import Programs
from .proxy import Proxy

DAYS = 3 * 24 * 3600 * SECOND


@pytest.fixture(params=["sync", "async"])
async def face(request: pytest.FixtureRequest, me2b_server: TestServer, tmp_path: Path) -> AsyncIterator[Face]:
    face = Face(request.param, me2b_server, tmp_path / "sandboxes.db")
    yield face
    await face.close()


@pytest.fixture
def programs(me2b_server: TestServer, tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(me2b_server, tmp_path / "sandboxes.db")
    yield programs
    programs.close()


def options(server: TestServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


async def row_of(lifecycle: Any, handle: Any) -> Any:
    (row,) = [row for row in await settle(lifecycle.records()) if row.ticket == handle.ticket]
    return row


async def test_a_sandbox_that_dies_early_under_a_command_is_lost_and_no_timeout(face: Face, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("create").first().dies_at(1.5)
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        with pytest.raises(SandboxLostError, match="lost by the provider, or killed outside") as caught:
            await settle(handle.run("sleep 60", timeout=30))
        error = caught.value
        assert isinstance(error, e2b.SandboxNotFoundException)
        assert not isinstance(error, TimeoutError)
        assert (error.ending, error.sandbox_id, error.ticket) == ("lost", handle.sandbox_id, handle.ticket)
        row = await row_of(lifecycle, handle)
        assert (row.state, row.reason, row.ended_at) == (State.CLEANED, error.reason, error.ended_at)
        assert row.reason.startswith("lost: ")
        assert error.started_at == row.running_at
        assert error.noticed_at is not None
        assert error.__cause__ is not None
        with pytest.raises(SandboxLostError) as again:
            await settle(handle.run("true"))
        assert again.value.reason == error.reason
    assert (await row_of(lifecycle, handle)).reason == error.reason  # leaving the block does not rewrite it
    assert me2b_chaos.journal().count("create") == 1  # and nothing took its place


@pytest.mark.parametrize(
    "call",
    [
        lambda handle: handle.run("true"),
        lambda handle: handle.run("cat", stdin="x"),
        lambda handle: handle.stage_in({"x": "y"}),
        lambda handle: handle.stage_out(["x"]),
    ],
    ids=["run", "stdin", "stage_in", "stage_out"],
)
async def test_every_call_says_that_somebody_killed_it(
    face: Face, me2b_server: TestServer, call: Callable[[Any], Any]
) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        assert e2b.Sandbox.kill(handle.sandbox_id, **options(me2b_server))
        with pytest.raises(SandboxLostError):
            await settle(call(handle))
    assert await states_of(lifecycle) == [State.CLEANED]


async def test_the_keeper_notices_what_nobody_asks_for(face: Face, me2b_server: TestServer) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire()) as handle:
        e2b.Sandbox.kill(handle.sandbox_id, **options(me2b_server))
        until(lambda: lifecycle._book.record(handle.ticket).state is State.CLEANED, "its row has ended")
        assert (await row_of(lifecycle, handle)).reason.startswith("lost: ")
        with pytest.raises(SandboxLostError):
            await settle(handle.run("true"))


async def test_a_sandbox_that_somebody_paused_is_paused_and_works_again_when_it_runs(
    face: Face, me2b_server: TestServer
) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire()) as handle:
        await settle(handle.run("echo kept > /tmp/kept"))
        e2b.Sandbox.pause(handle.sandbox_id, **options(me2b_server))
        with pytest.raises(SandboxPausedError) as caught:
            await settle(handle.run("true"))
        assert isinstance(caught.value, getattr(e2b, "SandboxNotRunningException", e2b.TimeoutException))
        assert not isinstance(caught.value, e2b.NotFoundException)
        assert (await row_of(lifecycle, handle)).state is State.PAUSED
        with pytest.raises(SandboxPausedError):
            await settle(handle.stage_in({"x": "y"}))
        e2b.Sandbox.connect(handle.sandbox_id, **options(me2b_server))
        assert (await settle(handle.run("cat /tmp/kept"))).stdout == "kept\n"
        row = await row_of(lifecycle, handle)
        assert (row.state, row.reason) == (State.RUNNING, None)
    row = await row_of(lifecycle, handle)
    assert (row.state, row.reason) == (State.CLEANED, "released")
    assert await remote_of(lifecycle) == []


async def test_a_pause_under_a_command_is_no_death(face: Face, me2b_server: TestServer) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        started = threading.Event()

        def pause() -> None:
            started.wait(20)
            e2b.Sandbox.pause(handle.sandbox_id, **options(me2b_server))

        helper = threading.Thread(target=pause)
        helper.start()
        with pytest.raises(SandboxPausedError):
            await settle(handle.run("echo started; sleep 60", on_stdout=lambda _: started.set()))
        helper.join(20)


async def test_the_keeper_leaves_alone_what_somebody_paused(face: Face, me2b_server: TestServer) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire()) as handle:
        e2b.Sandbox.pause(handle.sandbox_id, **options(me2b_server))
        until(lambda: lifecycle._book.record(handle.ticket).state is State.PAUSED, "its row says so")
        assert e2b.Sandbox.get_info(handle.sandbox_id, **options(me2b_server)).state is e2b.SandboxState.PAUSED
        history = lifecycle._book.history(handle.ticket)
        assert [(state, detail) for _, state, _, detail in history if detail] == [
            (State.PAUSED, "paused: at the backend, by somebody else or at the end of its lease")
        ]


async def test_the_hard_timeout_is_told_apart(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire(timeout=2)) as handle:
        with pytest.raises(SandboxExpiredError, match="timeout of 2 s"):
            await settle(handle.run("sleep 60", timeout=30))
    assert (await row_of(lifecycle, handle)).reason.startswith("expired: ")


async def test_a_lease_that_was_not_renewed_is_told_apart(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        # As after a renewal by one second that was the last, because the owner was suspended.
        now = lifecycle._book.now()
        await settle(handle.sandbox.set_timeout(1))
        lifecycle._book.extended(handle.ticket, now + SECOND)
        with pytest.raises(SandboxLapsedError, match="was not renewed"):
            await settle(handle.run("sleep 60", timeout=30))
    assert (await row_of(lifecycle, handle)).reason.startswith("lapsed: ")


async def test_a_released_handle_says_so_and_asks_nobody(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        pass
    asked = len(me2b_chaos.journal().requests)
    for call in (lambda: handle.run("true"), lambda: handle.stage_in({"x": "y"}), lambda: handle.stage_out(["x"])):
        with pytest.raises(SandboxReleasedError) as caught:
            await settle(call())
        assert (caught.value.ticket, caught.value.reason) == (handle.ticket, "released")
    assert len(me2b_chaos.journal().requests) == asked


# -- what is not known --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 429, 500, 502, 503, 504])
async def test_a_dead_sandbox_that_nobody_can_ask_for_is_not_called_dead(
    face: Face, me2b_server: TestServer, me2b_chaos: Chaos, status: int
) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        e2b.Sandbox.kill(handle.sandbox_id, **options(me2b_server))
        rule = me2b_chaos.on("info").status(status, retry=False)
        with pytest.raises(SandboxUnreachableError, match="does not say whether it runs") as caught:
            await settle(handle.run("true"))
        assert caught.value.running is None
        assert not isinstance(caught.value, SandboxGoneError)
        assert me2b_chaos.hits(rule) > 0
        row = await row_of(lifecycle, handle)
        assert (row.state, row.reason) == (State.RUNNING, None)
        me2b_chaos.remove(rule)
        with pytest.raises(SandboxLostError):
            await settle(handle.run("true"))


async def test_an_endpoint_that_is_not_there_proves_nothing(face: Face, me2b_server: TestServer) -> None:
    with Proxy(me2b_server.url) as proxy:
        lifecycle = face.open(e2b_api_url=proxy.url)
        async with face.entered(lifecycle.acquire()) as handle:
            proxy.refuse()
            with pytest.raises(SandboxUnreachableError) as caught:
                await settle(handle.run("true"))
            assert caught.value.running is None
            assert (await row_of(lifecycle, handle)).state is State.RUNNING
            proxy.accept()
            assert (await settle(handle.run("echo fine"))).stdout == "fine\n"


async def test_an_agent_that_is_down_in_a_sandbox_that_runs_is_told_as_that(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        rule = me2b_chaos.on("process.*", "health", "files.*").status(
            502, message="The sandbox is running but port is not open"
        )
        for call in (lambda: handle.run("true"), lambda: handle.stage_in({"x": "y"})):
            with pytest.raises(SandboxUnreachableError, match="it runs, says the backend") as caught:
                await settle(call())
            assert caught.value.running is True
            assert isinstance(caught.value, getattr(e2b, "SandboxUnreachableException", e2b.TimeoutException))
        me2b_chaos.remove(rule)
        assert (await row_of(lifecycle, handle)).state is State.RUNNING
        assert (await settle(handle.run("echo fine"))).stdout == "fine\n"


async def test_a_gateway_that_calls_a_living_sandbox_dead_is_not_believed(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        me2b_chaos.on("process.start").first().status(502, message="The sandbox was not found")
        me2b_chaos.on("process.list").first().status(502, message="The sandbox was not found")
        with pytest.raises(SandboxUnreachableError) as caught:
            await settle(handle.run("true"))
        assert caught.value.running is True
        assert (await settle(handle.run("echo fine"))).stdout == "fine\n"


# -- owners that looked dead --------------------------------------------------------------------------------

ELSEWHERE = Host("another machine", "another boot", "another namespace")

SUSPENDED = """
from managed_e2b import SandboxGoneError
lifecycle = opened(lease=60, stale_timeout=2)
handle = entered(lifecycle)
asked = []
for sdk in {lifecycle._engine.driver.sdk, lifecycle._cleaner.driver.sdk}:
    for name in ("kill", "set_timeout"):
        def noted(*args, name=name, real=getattr(sdk, name)):
            asked.append((name, args[0]))
            return real(*args)
        setattr(sdk, name, noted)
say(lifecycle.owner_id, handle.sandbox_id)
sys.stdin.readline()
try:
    wait(handle.run("true"))
except SandboxGoneError as error:
    say(type(error).__name__, error.sandbox_id, error.reason.replace(" ", "_"))
wait(lifecycle.shutdown())
say(asked)
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_owner_that_wakes_up_after_it_was_reaped_learns_it_and_touches_nothing(
    kind: str, programs: Programs, me2b_server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = programs.start(SUSPENDED, kind)
    owner, sandbox_id = program.said()
    monkeypatch.setattr(host, "here", lambda: ELSEWHERE)
    where = {"e2b_api_url": me2b_server.url, "e2b_key": me2b_server.api_key, "watchdog": False}
    with SandboxLifecycle(programs.db, **where) as observer, observer.acquire() as bystander:
        assert observer.reap().items == ()  # it lives: its heart beats
        program.signal(signal.SIGSTOP)
        until(
            lambda: [item.sandbox_id for item in observer.reap().cleaned] == [sandbox_id], "it looks dead and is reaped"
        )
        assert programs.running(owner) == []
        program.signal(signal.SIGCONT)
        program.tell()
        assert program.said() == ["SandboxReapedError", sandbox_id, "its_owner_is_dead"]
        assert program.said() == ["[]"]
        assert program.ended()[0] == 0
        assert bystander.run("echo fine").stdout == "fine\n"


# -- clocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [DAYS, -DAYS], ids=["ahead", "behind"])
async def test_a_clock_that_jumps_ends_nothing_that_lives(face: Face, jump: int) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire(timeout=600)) as handle:
        first = await row_of(lifecycle, handle)
        lifecycle._book._clock = lambda: host_clock() + jump
        until(lambda: lifecycle._book.record(handle.ticket).remote_expiry > first.remote_expiry, "its lease is renewed")
        renewed = await row_of(lifecycle, handle)
        assert renewed.remote_expiry - first.remote_expiry < 60 * SECOND
        assert (await settle(lifecycle.reap())).items == ()
        assert (await settle(handle.run("echo fine"))).stdout == "fine\n"
        with SandboxLifecycle(face.db, **lifecycle_options(face)) as other:
            assert other.reap().items == ()
    assert await states_of(lifecycle) == [State.CLEANED]


@pytest.mark.parametrize("jump", [DAYS, -DAYS], ids=["ahead", "behind"])
async def test_the_hard_timeout_holds_through_a_jump_of_the_clock(face: Face, jump: int) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire(timeout=3)) as handle:
        lifecycle._book._clock = lambda: host_clock() + jump
        with pytest.raises(SandboxExpiredError):
            await settle(handle.run("sleep 60", timeout=30))


@pytest.mark.parametrize("jump", [DAYS, -DAYS], ids=["ahead", "behind"])
def test_the_dead_are_reaped_whatever_their_clock_said(jump: int, programs: Programs, me2b_server: TestServer) -> None:
    source = f"""
    from managed_e2b.ledger import store
    real = store.host_clock
    store.host_clock = lambda: real() + {jump}
    lifecycle = opened(watchdog=False)
    say(lifecycle.owner_id, entered(lifecycle).sandbox_id)
    sys.stdin.readline()
    """
    living, dead = programs.start(source), programs.start(source)
    (owner, kept), (_, due) = living.said(), dead.said()
    dead.kill()
    with SandboxLifecycle(programs.db, opening_reap=False, **lifecycle_options(programs)) as observer:
        assert [item.sandbox_id for item in observer.reap().cleaned] == [due]
        assert programs.running(owner) == [kept]


def lifecycle_options(holder: Any) -> dict[str, Any]:
    server = holder._server if isinstance(holder, Face) else holder.server
    return {"e2b_api_url": server.url, "e2b_key": server.api_key, "watchdog": False}
