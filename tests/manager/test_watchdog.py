"""A program that is killed leaves nothing: its companion ends what it held, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from managed_e2b import SandboxLifecycle, State
from managed_e2b.testing.chaos import Chaos
from managed_e2b.testing.server import TestServer
from managed_e2b.watchdog.__main__ import Watch
from managed_e2b.watchdog.companion import CALM, Companion
from managed_e2b.watchdog.estate import Estate

from .conftest import until
from .programs import Programs, is_running, programs_on


@pytest.fixture
def programs(server: Any, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(server, tmp_path / "sandboxes.db")


HOLD = """
lifecycle = opened()
ids = [entered(lifecycle).sandbox_id for _ in range(3)]
say(lifecycle.owner_id, watchdog(), *ids)
"""

HELD_BY = {
    "nobody": "",
    "a forked child": "os.fork() or signal.pause()",
    # No hook of Python's runs in this one: every descriptor stays open in it.
    "a child forked from C": "ctypes.CDLL(None).fork() or ctypes.CDLL(None).pause()",
}


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("inherited", HELD_BY)
def test_a_killed_program_leaves_nothing_and_touches_nobody(
    programs: Programs, face: str, inherited: str, request: pytest.FixtureRequest, record_property: Callable[..., None]
) -> None:
    with (
        SandboxLifecycle(
            programs.db, e2b_api_url=programs.server.url, e2b_key=programs.server.api_key, opening_reap=False
        ) as bystander,
        bystander.acquire() as handle,
    ):
        program = programs.start(f"{HOLD}\n{HELD_BY[inherited]}\nsignal.pause()", face)
        owner, watchdog, *ids = program.said()
        request.addfinalizer(lambda: _kill_group(program.pid))
        assert sorted(programs.running(owner)) == sorted(ids)
        program.kill()
        killed = time.monotonic()
        until(lambda: not programs.running(owner), "the server runs nothing of it")
        record_property("seconds until the server ran nothing", round(time.monotonic() - killed, 2))
        until(lambda: not is_running(int(watchdog)), "the watchdog has ended")
        assert handle.run("echo untouched").stdout == "untouched\n"
        rows = [row for row in bystander.records() if row.owner == owner]
        assert [(row.state, row.reason) for row in rows] == [(State.CLEANED, "its owner is dead")] * 3
        assert {row.claimed_by for row in rows}.isdisjoint({None, owner, bystander.owner_id})


def test_of_three_owners_only_the_killed_ones_sandboxes_are_ended(programs: Programs) -> None:
    a, b, c = [programs.start(f"{HOLD}\nsys.stdin.readline()\nos._exit(0)") for _ in range(3)]
    (owner, _, *_), (owner_b, _, *of_b), (owner_c, _, *of_c) = a.said(), b.said(), c.said()
    a.kill()
    until(lambda: not programs.running(owner), "nothing of the killed one runs")
    with SandboxLifecycle(programs.db, e2b_api_url=programs.server.url, e2b_key=programs.server.api_key) as reaper:
        for _ in range(10):
            assert reaper.reap().items == ()
    assert sorted(programs.running(owner_b, owner_c)) == sorted(of_b + of_c)


def test_two_lifecycles_of_one_program_share_a_watchdog_and_are_both_reaped(programs: Programs) -> None:
    program = programs.start(
        """
        first, second = opened(), opened()
        entered(first); one = watchdog()
        entered(second)
        say(first.owner_id, second.owner_id, one == watchdog())
        signal.pause()
        """
    )
    first, second, shared = program.said()
    assert shared == "True"
    program.kill()
    until(lambda: not programs.running(first, second), "nothing of both runs")


def test_a_killed_watchdog_is_replaced_at_the_next_acquire_and_knows_all(programs: Programs) -> None:
    program = programs.start(
        """
        one, two = opened(), opened()
        entered(one); entered(two)
        say(one.owner_id, two.owner_id, watchdog())
        sys.stdin.readline()
        entered(two)
        say(watchdog())
        signal.pause()
        """
    )
    one, two, first = program.said()
    os.kill(int(first), signal.SIGKILL)
    until(lambda: not is_running(int(first)), "the watchdog is dead")
    program.tell()
    (second,) = program.said()
    assert second != first
    assert is_running(int(second))
    program.kill()
    until(lambda: not programs.running(one, two), "the second one has ended what both held")


def test_a_killed_watchdog_is_replaced_though_nobody_acquires(programs: Programs) -> None:
    program = programs.start(
        """
        lifecycle = opened(); entered(lifecycle)
        say(lifecycle.owner_id, watchdog())
        while sys.stdin.readline():
            say(watchdog())
        """
    )
    owner, first = program.said()
    os.kill(int(first), signal.SIGKILL)

    def is_replaced() -> bool:
        program.tell()
        return program.said()[0] not in (first, "None")

    until(is_replaced, "there is another one")
    program.kill()
    until(lambda: not programs.running(owner), "it has ended what was held")


def test_one_that_is_killed_again_and_again_is_replaced_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr("managed_e2b.watchdog.companion.time", SimpleNamespace(monotonic=lambda: now))
    companion = Companion()
    companion.watch("owner", {"owner": "owner"})

    def kill() -> None:
        pid = companion.pid
        assert pid is not None
        until(lambda: _ignores(pid, signal.SIGTERM), "the watchdog is up")
        until(lambda: companion.look() or companion._came_up, "it is known to be up")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid), "the watchdog is dead")
        companion.look()

    try:
        kill()
        assert companion.pid is not None, "the first time it is replaced at once"
        for pause in (1, 2, 4):
            kill()
            assert companion.pid is None
            now += pause - 0.5
            companion.watch("another", {"owner": "another"})
            assert companion.pid is None, "not by an acquire either"
            now += 0.5
            companion.look()
        assert len(caplog.messages) == 1
        assert "has ended 3 times in a row" in caplog.messages[0]
        now += CALM
        kill()
        assert companion.pid is not None, "it had lived for long enough"
        assert len(caplog.messages) == 1
    finally:
        for owner in ("owner", "another"):
            companion.dismiss(owner)
    assert companion.pid is None
    companion.look()
    assert companion.pid is None, "nobody needs one"


def test_signals_for_the_program_and_its_group_do_not_reach_the_watchdog(programs: Programs) -> None:
    program = programs.start(
        f"""
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
{HOLD}
signal.pause()
"""
    )
    owner, watchdog, *_ = program.said()
    until(lambda: _ignores(int(watchdog), signal.SIGTERM), "the watchdog is up")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        program.signal(number, group=True)
        os.kill(int(watchdog), number)
    assert os.getsid(int(watchdog)) == int(watchdog)
    program.kill()
    until(lambda: not programs.running(owner), "it was there to the end")


def test_a_program_that_becomes_another_one_is_gone(programs: Programs) -> None:
    program = programs.start(f"{HOLD}\nos.execv(sys.executable, [sys.executable, '-c', 'input()'])")
    owner, *_ = program.said()
    until(lambda: not programs.running(owner), "what it held is ended")
    assert is_running(program.pid)


def test_it_is_small_idle_and_shows_no_secret(programs: Programs) -> None:
    program = programs.start(f"{HOLD}\nsignal.pause()")
    _, watchdog, *_ = program.said()
    until(lambda: _ignores(int(watchdog), signal.SIGTERM), "the watchdog is up")
    process = Path(f"/proc/{watchdog}")
    for file in ("cmdline", "environ"):
        shown = (process / file).read_bytes()
        assert programs.server.api_key.encode() not in shown
        assert str(programs.db).encode() not in shown
    assert os.readlink(process / "cwd") == "/"
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 15 * 1024
    assert int(status["Threads"]) == 1
    assert {os.readlink(process / "fd" / name) for name in ("1", "2")} == {os.devnull}


@pytest.mark.parametrize("options", ["watchdog=False", "backend='local', e2b_api_url=None, e2b_key=None"])
def test_none_is_started_where_none_is_wanted_or_needed(programs: Programs, options: str) -> None:
    program = programs.start(
        f"lifecycle = opened({options}); entered(lifecycle); say(watchdog()); lifecycle.shutdown()"
    )
    assert program.said() == ["None"]
    assert program.ended() == (0, "")


def test_a_goodbye_ends_it_and_leaves_no_process_behind(programs: Programs) -> None:
    program = programs.start(
        """
        lifecycle = opened(); entered(lifecycle); first = watchdog()
        wait(lifecycle.shutdown())
        say(first, watchdog())
        try:
            os.wait()
        except ChildProcessError:
            say("no child")
        again = opened(); entered(again); say(watchdog()); wait(again.shutdown())
        """
    )
    first, after = program.said()
    assert after == "None"
    assert not is_running(int(first))
    assert program.said() == ["no", "child"]
    assert program.said() != [first]
    assert program.ended() == (0, "")


@pytest.mark.parametrize("interpreter", ["/nonexistent/python", "/bin/false", ""])
def test_one_that_cannot_be_started_is_a_warning(
    interpreter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", interpreter)
    companion = Companion()
    until(lambda: companion.watch("owner", {"owner": "owner"}) or caplog.messages, "it has been noticed")
    companion.watch("other", {"owner": "other"})
    companion.dismiss("owner")
    assert len(caplog.messages) == 1
    assert "no watchdog" in caplog.messages[0]
    assert companion.pid is None


def test_one_that_does_not_read_is_ended_before_it_takes_our_end_of_the_line_for_a_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    companion = Companion()
    companion.watch("owner", {"owner": "owner"})
    pid = companion.pid
    assert pid is not None
    until(lambda: _ignores(pid, signal.SIGTERM), "the watchdog is up")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: companion.watch(uuid.uuid4().hex, {"owner": "x" * 4096}) or caplog.messages, "its buffer is full")
    assert "no watchdog" in caplog.messages[0]
    assert not is_running(pid)


# -- the process, from inside -----------------------------------------------------------------------------------


def _watched(*messages: dict[str, Any], hold: bool = False) -> dict[str, Any]:
    """What a watch knows after these messages and the owner's end. `hold`: the socket's other end stays open."""
    ours, theirs = socket.socketpair()
    gone_read, gone_write = os.pipe()  # becomes readable as a pidfd does
    watch = Watch(theirs.fileno(), gone_read)
    thread = threading.Thread(target=watch.run)
    try:
        ours.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        if not hold:
            ours.close()
        os.write(gone_write, b"x")
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        ours.close()
        theirs.close()
        os.close(gone_read)
        os.close(gone_write)
    return watch.registered


@pytest.mark.parametrize("hold", [False, True])
def test_what_was_said_before_the_end_counts(hold: bool) -> None:
    one, two = {"owner": "1"}, {"owner": "2"}
    assert _watched({"register": one}, {"register": two}, {"goodbye": "1"}, hold=hold) == {"2": two}
    assert _watched({"register": one}, {"goodbye": "1"}, hold=hold) == {}
    assert _watched({"goodbye": "never heard of"}, hold=hold) == {}


# -- what it does at a death ------------------------------------------------------------------------------------


@pytest.fixture
def chaotic(me2b_server: TestServer, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(me2b_server, tmp_path / "sandboxes.db")


def test_an_endpoint_that_fails_for_a_while_is_tried_again(chaotic: Programs, me2b_chaos: Chaos) -> None:
    program = chaotic.start(f"{HOLD}\nsignal.pause()")
    owner, watchdog, *_ = program.said()
    me2b_chaos.on("kill").first(30).status(503)
    program.kill()
    until(lambda: not is_running(int(watchdog)), "the watchdog has finished", seconds=60)
    assert chaotic.running(owner) == []
    assert [row.state for row in chaotic.rows(owner)] == [State.CLEANED] * 3
    assert me2b_chaos.journal().double_kills() == []


def test_what_a_shutdown_could_not_end_it_goes_on_with(chaotic: Programs, me2b_chaos: Chaos) -> None:
    stubborn = me2b_chaos.on("kill").status(503)
    program = chaotic.start(
        """
        from managed_e2b import SandboxLeakError
        lifecycle = opened(); entered(lifecycle)
        try:
            wait(lifecycle.shutdown(timeout=0.5))
        except SandboxLeakError:
            say(lifecycle.owner_id, "left something")
        sys.stdin.readline()
        """
    )
    owner, *said = program.said()
    assert said == ["left", "something"]
    me2b_chaos.remove(stubborn)
    until(lambda: not chaotic.running(owner), "the watchdog has gone on, while the program lives")
    assert is_running(program.pid)


def test_a_ledger_that_has_been_removed_is_not_made_anew_and_the_sandboxes_are_ended(programs: Programs) -> None:
    program = programs.start(f"{HOLD}\nsignal.pause()")
    owner, watchdog, *_ = program.said()
    for file in programs.db.parent.glob("sandboxes.db*"):
        file.unlink()
    program.kill()
    until(lambda: not programs.running(owner), "they are found by their owner's id")
    until(lambda: not is_running(int(watchdog)), "the watchdog has ended")
    assert not programs.db.exists()


def test_no_secret_is_told() -> None:
    endpoint = {"api_key": "e2b_secret", "api_url": None, "sandbox_url": None, "domain": None}
    estate = Estate.of(
        {"owner": "o", "ledger": "postgresql://me:secret@db/x", "account": "a", "lease": 300, "endpoint": endpoint}
    )
    assert "secret" not in repr(estate)


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
