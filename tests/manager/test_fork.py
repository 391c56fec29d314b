"""After a fork the child owns nothing of its parent's, and may use sandboxes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import State

from .conftest import until
from .programs import Programs, is_running, programs_on


@pytest.fixture
def programs(server: Any, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(server, tmp_path / "sandboxes.db")


USED = """
lifecycle = opened(lease=10)
handle = entered(lifecycle)
assert wait(handle.run("printf before")).stdout == "before"
say(lifecycle.owner_id, handle.sandbox_id)

def printed(command):
    return wait(handle.run(command)).stdout

SCRIPT = "cat /task/file; printf ' '; for i in 1 2 3; do printf $i; sleep 0.1; done"

def own():
    "In a child: a sandbox of its own, on the parent's ledger."
    global loop
    loop = asyncio.new_event_loop()
    mine = opened()
    context = mine.acquire(acquire_timeout=20)
    if FACE == "async":
        async def use():
            async with context as it:
                await it.stage_in({"file": "staged"})
                return (await it.run(SCRIPT)).stdout
        out = wait(use())
    else:
        with context as it:
            it.stage_in({"file": "staged"})
            out = it.run(SCRIPT).stdout
    wait(mine.shutdown())
    return out

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

LEAVE = {"os._exit": "os._exit(7)", "sys.exit": "sys.exit(7)", "exception": "raise SystemExit(7)"}


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("leave", LEAVE)
def test_the_end_of_a_child_ends_nothing_of_its_parents(programs: Programs, face: str, leave: str) -> None:
    program = programs.start(
        f"""{USED}
if (child := os.fork()) == 0:
    # Python's own trap: an event loop that a child frees takes its descriptors out of the epoll that the parent uses.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))
    {LEAVE[leave]}
say("child", ended(child))
say(printed("printf 'still here'"))
wait(lifecycle.shutdown())
""",
        face,
    )
    owner, sandbox_id = program.said()
    assert program.said() == ["child", "7"]
    assert program.said() == ["still", "here"]
    assert program.ended() == (0, "")
    rows = programs.rows(owner)
    assert [(row.sandbox_id, row.state, row.reason) for row in rows] == [(sandbox_id, State.CLEANED, "shutdown")]


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_child_of_a_parent_that_has_used_the_sdk_acquires_one_of_its_own(programs: Programs, face: str) -> None:
    program = programs.start(
        f"""{USED}
for generation in range(2):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        say(own())
        if (grandchild := os.fork()) == 0:
            signal.alarm(60)
            say(own())
            os._exit(0)
        os._exit(ended(grandchild))
    assert ended(child) == 0
    say(printed("printf parent"))
wait(lifecycle.shutdown())
""",
        face,
    )
    program.said()
    for _ in range(2):
        assert [program.said(), program.said(), program.said()] == [["staged", "123"], ["staged", "123"], ["parent"]]
    assert program.ended() == (0, "")


@pytest.mark.parametrize("face", ["sync", "async"])
def test_the_parents_things_say_in_the_child_whose_they_are(programs: Programs, face: str) -> None:
    program = programs.start(
        f"""{USED}
from managed_e2b import Me2bError
if (child := os.fork()) == 0:
    signal.alarm(60)
    loop = asyncio.new_event_loop()
    for use in (lifecycle.acquire, lambda: wait(handle.run("true"))):
        try:
            use()
        except Me2bError as error:
            say("parent" in str(error), "fork" in str(error))
    wait(lifecycle.shutdown())
    os._exit(0)
assert ended(child) == 0
say(printed("printf parent"))
wait(lifecycle.shutdown())
""",
        face,
    )
    program.said()
    assert [program.said(), program.said(), program.said()] == [["True", "True"], ["True", "True"], ["parent"]]
    assert program.ended() == (0, "")


def test_a_child_that_outlives_its_parent_renews_nothing(programs: Programs) -> None:
    program = programs.start(
        f"""{USED.replace("lease=10", "lease=10, watchdog=False")}
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
assert wait(handle.run("true")).ok
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    owner, _ = program.said()
    until(lambda: not is_running(program.pid), "the parent is dead")
    assert len(programs.running(owner)) == 1
    until(lambda: not programs.running(owner), "the backend has ended it", seconds=40)


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_use_sandboxes_and_forget_their_shutdown(
    programs: Programs, face: str, method: str, tmp_path: Path
) -> None:
    # In a module of its own: what spawned workers import.
    (tmp_path / "work.py").write_text(
        """
import asyncio, os
from managed_e2b import AsyncSandboxLifecycle, SandboxLifecycle
from managed_e2b.ledger import open_engine, Ledger

def work(number):
    where = dict(e2b_api_url=os.environ["TEST_URL"], e2b_key=os.environ["TEST_KEY"], watchdog=False)
    if os.environ["TEST_FACE"] == "async":
        lifecycle = AsyncSandboxLifecycle(os.environ["TEST_DB"], **where)
        asyncio.run(lifecycle.acquire().__aenter__())
    else:
        lifecycle = SandboxLifecycle(os.environ["TEST_DB"], **where)
        lifecycle.acquire().__enter__()
    print(lifecycle.owner_id, flush=True)
"""
    )
    program = programs.start(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
import work
{USED if method == "fork" else ""}
context = multiprocessing.get_context({method!r})
workers = [context.Process(target=work.work, args=(number,)) for number in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
{"assert printed('printf parent') == 'parent'; wait(lifecycle.shutdown())" if method == "fork" else ""}
""",
        face,
    )
    if method == "fork":
        program.said()
    owners = [program.said()[0], program.said()[0]]
    assert program.ended(60) == (0, "")
    assert programs.running(*owners) == []
    assert [row.state for row in programs.rows(*owners)] == [State.CLEANED] * 2


def test_a_fork_in_the_middle_of_a_crowd_of_writers(programs: Programs) -> None:
    program = programs.start(
        """
        from managed_e2b.ledger import Ledger, open_engine
        from managed_e2b.engine import host
        def owner(book, name):
            book.open_owner(name, host.here(), os.getpid(), 1, "test", 1, 1)
        book = Ledger(open_engine(os.environ["TEST_DB"]))
        owner(book, "parent")
        stop = threading.Event()
        def write():
            while not stop.is_set():
                book.beat("parent")
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        def child(number):
            signal.alarm(10)
            own = Ledger(open_engine(os.environ["TEST_DB"]))
            owner(own, f"child {number}")
            assert own.beat(f"child {number}")
            own.close()
            os._exit(0)
        statuses = set()
        for number in range(30):
            if (pid := os.fork()) == 0:
                child(number)
            statuses.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop.set()
        for thread in threads:
            thread.join()
        say(*statuses, book.beat("parent"))
        """
    )
    assert program.said(100) == ["0", "True"]
    assert program.ended() == (0, "")
