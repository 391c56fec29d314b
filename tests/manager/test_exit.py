"""However a program ends, what it held is released: at its exit, at SIGTERM, at Ctrl-C. And without noise."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import SandboxLifecycle, State
from managed_e2b.testing.chaos import Chaos
from managed_e2b.testing.server import TestServer

from .conftest import until
from .programs import Programs, programs_on


@pytest.fixture
def programs(server: Any, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(server, tmp_path / "sandboxes.db")


@pytest.fixture
def chaotic(me2b_server: TestServer, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(me2b_server, tmp_path / "sandboxes.db")


def told_of(programs: Programs, owner: str) -> list[tuple[State, str | None, bool]]:
    """State, reason, and whether the owner itself ended it."""
    return [(row.state, row.reason, row.claimed_by == owner) for row in programs.rows(owner)]


# No watchdog: what is released is released by the program itself.
HELD = """
lifecycle = opened(watchdog=False)
handle = entered(lifecycle)
say(lifecycle.owner_id)
"""

ENDS = {
    "at its last line": ("", 0, ""),
    "by sys.exit": ("sys.exit(3)", 3, ""),
    "by an exception": ("raise LookupError('mine')", 1, "LookupError: mine\n"),
}


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_forgot_its_shutdown_leaves_nothing(programs: Programs, face: str, end: str) -> None:
    source, status, told = ENDS[end]
    program = programs.start(HELD + source, face)
    (owner,) = program.said()
    ended, stderr = program.ended()
    assert ended == status
    assert stderr.endswith(told)
    assert stderr.count("Traceback") == bool(told)
    assert programs.running(owner) == []
    assert told_of(programs, owner) == [(State.CLEANED, "shutdown", True)]


def test_an_asyncio_run_that_ends_without_a_shutdown_leaves_nothing(programs: Programs) -> None:
    program = programs.start(
        """
        async def main():
            lifecycle = opened(watchdog=False)
            context = lifecycle.acquire()
            kept.extend([context, await context.__aenter__(), lifecycle])
            say(lifecycle.owner_id)
        asyncio.run(main())
        """,
        "async",
    )
    (owner,) = program.said()
    assert program.ended() == (0, "")
    assert programs.running(owner) == []


@pytest.mark.parametrize("face", ["sync", "async"])
def test_threads_that_outlive_the_main_thread_go_on_and_leave_nothing(programs: Programs, face: str) -> None:
    program = programs.start(
        """
        lifecycle = opened(max_concurrent=1, watchdog=False)
        say(lifecycle.owner_id)
        def work():
            with lifecycle.acquire() as handle:
                say("did", handle.run("sleep 0.5; printf it").stdout)
        async def work_async():
            async with lifecycle.acquire() as handle:
                say("did", (await handle.run("sleep 0.5; printf it")).stdout)
        run = work if FACE == "sync" else lambda: asyncio.run(work_async())
        for _ in range(3):
            threading.Thread(target=run).start()
        """,
        face,
    )
    (owner,) = program.said()
    assert [program.said(), program.said(), program.said()] == [["did", "it"]] * 3
    assert program.ended() == (0, "")
    assert programs.running(owner) == []
    assert [row.state for row in programs.rows(owner)] == [State.CLEANED] * 3


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_daemon_thread_that_is_creating_when_the_program_ends_leaves_nothing(
    chaotic: Programs, me2b_chaos: Chaos, face: str
) -> None:
    me2b_chaos.on("create").after().delay(1.0)
    program = chaotic.start(
        """
        lifecycle = opened(watchdog=False)
        say(lifecycle.owner_id)
        def work():
            if FACE == "sync":
                lifecycle.acquire().__enter__()
            else:
                asyncio.run(lifecycle.acquire().__aenter__())
        threading.Thread(target=work, daemon=True).start()
        sys.stdin.readline()
        """,
        face,
    )
    (owner,) = program.said()
    me2b_chaos.wait_for("create")
    program.tell()
    assert program.ended() == (0, "")
    assert chaotic.running(owner) == []
    assert [row.state for row in chaotic.rows(owner)] == [State.CLEANED]


def test_an_endpoint_that_hangs_holds_an_exit_up_for_a_bounded_time(chaotic: Programs, me2b_chaos: Chaos) -> None:
    hanging = me2b_chaos.on("kill").hang()
    program = chaotic.start(HELD.replace("watchdog=False", ""))
    (owner,) = program.said()
    status, _ = program.ended(seconds=60)
    assert status == 0
    assert len(chaotic.running(owner)) == 1
    me2b_chaos.remove(hanging)
    me2b_chaos.release()
    until(lambda: not chaotic.running(owner), "the watchdog has gone on with it", seconds=60)


# -- SIGTERM ----------------------------------------------------------------------------------------------------

DOING = {
    "sleeping": "time.sleep(60)",
    "deaf, in a command of the SDK": "wait(handle.run('sleep 60'))",
    "waiting for a slot": "entered(lifecycle)",
    "waiting for a thread": "t = threading.Thread(target=threading.Event().wait, daemon=True); t.start(); t.join()",
}


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("doing", DOING)
def test_sigterm_releases_everything_and_the_program_dies_by_it(programs: Programs, face: str, doing: str) -> None:
    held = HELD.replace("watchdog=False", "watchdog=False, max_concurrent=1")
    program = programs.start(f"{held}\nthreading.Timer(0.3, say, ['go']).start()\n{DOING[doing]}", face)
    (owner,) = program.said()
    assert program.said() == ["go"]
    program.signal(signal.SIGTERM)
    assert program.ended() == (-signal.SIGTERM, "")
    assert programs.running(owner) == []
    assert {row.state for row in programs.rows(owner)} == {State.CLEANED}


def test_sigterm_waits_for_no_lock_that_the_main_thread_holds(programs: Programs) -> None:
    program = programs.start(
        HELD
        + """
busy = dict(time=time, lock=lifecycle._busy_lock, say=say, __name__="managed_e2b.ledger.store")
exec('''
def hold():
    with lock:
        say("held")
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            pass
''', busy)
busy["hold"]()
time.sleep(60)
"""
    )
    (owner,) = program.said()
    assert program.said() == ["held"]
    program.signal(signal.SIGTERM)
    assert program.ended() == (-signal.SIGTERM, "")
    assert told_of(programs, owner) == [(State.CLEANED, "shutdown", True)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_callers_own_is_respected(programs: Programs, when: str) -> None:
    mine = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    program = programs.start(f"{mine if when == 'before' else ''}\n{HELD}\n{mine}\nsay('set')\ntime.sleep(60)")
    (owner,) = program.said()
    assert program.said() == ["set"]
    program.signal(signal.SIGTERM)
    assert program.ended() == (5, "")
    assert programs.running(owner) == []


def test_a_handler_of_the_callers_event_loop_is_respected(programs: Programs) -> None:
    program = programs.start(
        """
        async def main():
            lifecycle = opened(watchdog=False)
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
            async with lifecycle, lifecycle.acquire() as handle:
                say(lifecycle.owner_id)
                await told.wait()
                say("gracefully", (await handle.run("printf alive")).stdout)
        asyncio.run(main())
        """,
        "async",
    )
    (owner,) = program.said()
    program.signal(signal.SIGTERM)
    assert program.said() == ["gracefully", "alive"]
    assert program.ended() == (0, "")
    assert programs.running(owner) == []


@pytest.mark.parametrize("face", ["sync", "async"])
def test_sigterms_default_is_back_after_the_last_shutdown(programs: Programs, face: str) -> None:
    program = programs.start(
        """
        def disposition():
            return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1)
        def keep(state):
            signal.set_wakeup_fd(state[1], warn_on_full_buffer=False)
            return state
        first, second = opened(), opened()
        open_ = keep(disposition())
        wait(first.shutdown())
        half = keep(disposition())
        wait(second.shutdown())
        say(open_ == half, open_[0], open_[1] >= 0, *disposition())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        third = opened()
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
        wait(third.shutdown())
        ours = [thread for thread in threading.enumerate() if "sigterm" in thread.name]
        for thread in ours:
            thread.join(10)
        names = [thread.name for thread in ours if thread.is_alive()]
        say("threads", *names)
        """,
        face,
    )
    assert program.said() == ["True", "False", "True", "True", "-1"]
    assert program.said() == ["True"]
    assert program.said() == ["threads"]
    assert program.ended() == (0, "")


# -- SIGINT -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["sync", "async"])
def test_an_interrupt_between_the_request_for_a_sandbox_and_its_answer(
    chaotic: Programs, me2b_chaos: Chaos, face: str
) -> None:
    me2b_chaos.on("create").after().delay(2.0)
    program = chaotic.start(
        """
        lifecycle = opened(watchdog=False)
        say(lifecycle.owner_id)
        async def main():
            async with lifecycle.acquire():
                say("never")
        if FACE == "async":
            asyncio.run(main())
        with lifecycle.acquire():
            say("never")
        """,
        face,
    )
    (owner,) = program.said()
    me2b_chaos.wait_for("create")
    program.signal(signal.SIGINT, group=True)
    status, stderr = program.ended()
    assert status == -signal.SIGINT
    assert stderr.endswith("KeyboardInterrupt\n")
    with SandboxLifecycle(
        chaotic.db, e2b_api_url=chaotic.server.url, e2b_key=chaotic.server.api_key, opening_reap=False
    ) as next_one:
        next_one.reap()
    assert chaotic.running(owner) == []
    (row,) = chaotic.rows(owner)
    assert (row.state, row.reason) == (State.CLEANED, "interrupted" if face == "sync" else "cancelled")


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_crowd_of_workers_that_is_killed_gives_its_slots_back_to_the_next(
    programs: Programs, number: signal.Signals, face: str
) -> None:
    program = programs.start(
        """
        for _ in range(4):
            if os.fork() == 0:
                loop = asyncio.new_event_loop()  # what wakes the parent's is shared by all that inherit it
                lifecycle = opened(account_limit=4)
                entered(lifecycle)
                say(lifecycle.owner_id)
                signal.pause()
        signal.pause()
        """,
        face,
    )
    owners = [program.said()[0] for _ in range(4)]
    assert len(programs.running(*owners)) == 4
    program.signal(number, group=True)
    program.ended()
    with SandboxLifecycle(
        programs.db,
        e2b_api_url=programs.server.url,
        e2b_key=programs.server.api_key,
        account_limit=4,
        max_concurrent=4,
    ) as relaunched:
        contexts = [relaunched.acquire(acquire_timeout=60) for _ in range(4)]
        handles = [context.__enter__() for context in contexts]
        assert len({handle.sandbox_id for handle in handles}) == 4
    until(lambda: not programs.running(*owners), "nothing of the crowd runs")
