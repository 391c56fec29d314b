"""Leases: renewed while the owner lives, never past the hard limit, and the backend's own end when nobody lives."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from managed_e2b import AsyncSandboxLifecycle, BackendError, SandboxGoneError, SandboxLifecycle, State
from managed_e2b.engine.complaints import Complaints
from managed_e2b.engine.keeper import Keeper
from managed_e2b.rules import leases

from .conftest import Face, remote_of, settle, until


async def test_a_silent_command_longer_than_the_lease_goes_on(face: Face) -> None:
    lifecycle = face.open(lease=10)
    async with face.entered(lifecycle.acquire(timeout=600)) as handle:
        (first,) = await settle(lifecycle.records())
        assert (await settle(handle.run("sleep 12; echo done", timeout=60))).stdout == "done\n"
        (row,) = await settle(lifecycle.records())
        assert row.remote_expiry > first.remote_expiry
        assert await remote_of(lifecycle) == [handle.sandbox_id]


async def test_a_cleanup_that_hangs_or_fails_oddly_costs_the_living_nothing(face: Face) -> None:
    lifecycle = face.open(lease=10, stale_timeout=40)
    sdk = lifecycle._cleaner.driver.sdk
    hanging, go, odd = threading.Event(), threading.Event(), True
    set_timeout = sdk.set_timeout

    async def hang(sandbox_id: str) -> bool:
        hanging.set()
        go.wait(60)
        raise BackendError("503", status=503)

    async def odd_once(sandbox_id: str, seconds: int) -> bool:
        nonlocal odd
        if odd:
            odd = False
            raise AttributeError("no SDK raises this")
        return bool(await set_timeout(sandbox_id, seconds))

    sdk.kill, sdk.set_timeout = hang, odd_once
    async with face.entered(lifecycle.acquire(timeout=600)) as handle:
        (first,) = await settle(lifecycle.records())
        lifecycle._cleaner.abandoned.append(first.ticket)  # the sweep hangs in its DELETE, the row is `cleaning`
        other = lifecycle.acquire(timeout=600)
        async with face.entered(other) as living:
            until(hanging.is_set, "the sweep hangs")
            until(
                lambda: [
                    row
                    for row in lifecycle._book.records(states_=[State.RUNNING])
                    if row.sandbox_id == living.sandbox_id and row.remote_expiry > first.remote_expiry + 5_000_000
                ],
                "the other's lease is renewed",
            )
            del sdk.kill
            go.set()
    assert handle.sandbox_id != living.sandbox_id


async def test_the_hard_timeout_ends_a_sandbox_whose_owner_lives(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire(timeout=2)) as handle:
        with pytest.raises(SandboxGoneError) as caught:
            await settle(handle.run("sleep 30", timeout=60))
        assert caught.value.sandbox_id == handle.sandbox_id
        assert await remote_of(lifecycle) == []
    assert [row.state for row in await settle(lifecycle.records())] == [State.CLEANED]


@pytest.mark.timeout(120)
def test_with_nobody_left_the_backend_ends_it_within_one_lease(
    server: Any, tmp_path: Any, program: Callable[[str], list[str]]
) -> None:
    source = f"""
    import os
    from managed_e2b import SandboxLifecycle
    lifecycle = SandboxLifecycle({str(tmp_path / "x.db")!r}, e2b_api_url={server.url!r}, e2b_key={server.api_key!r},
                                 lease=10, watchdog=False)
    print(lifecycle.acquire(timeout=600).__enter__().sandbox_id, flush=True)
    os.kill(os.getpid(), 9)
    """
    run = subprocess.run(program(textwrap.dedent(source)), capture_output=True, text=True, timeout=60)
    sandbox_id = run.stdout.strip()
    assert sandbox_id
    # Another ledger: it knows nothing of the dead owner, and reaps nothing.
    with SandboxLifecycle(tmp_path / "other.db", e2b_api_url=server.url, e2b_key=server.api_key) as watcher:
        until(
            lambda: sandbox_id not in [item.sandbox_id for item in watcher.list_remote()],
            "the backend has ended it",
            seconds=30,
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_owns_nothing(server: Any, tmp_path: Any, program: Callable[[str], list[str]]) -> None:
    source = f"""
    import os, sys
    from managed_e2b import Me2bError, SandboxLifecycle
    lifecycle = SandboxLifecycle({str(tmp_path / "x.db")!r}, e2b_api_url={server.url!r}, e2b_key={server.api_key!r})
    with lifecycle.acquire() as handle:
        child = os.fork()
        if child == 0:
            try:
                lifecycle.acquire()
            except Me2bError as error:
                assert "after a fork" in str(error)
                lifecycle.shutdown()  # at once, and nothing is shut down
                sys.exit(7)  # leaves the parent's `with` block, in the child
            sys.exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert handle.run("echo still here").stdout == "still here\\n"
    lifecycle.shutdown()
    print("fine")
    """
    run = subprocess.run(program(textwrap.dedent(source)), capture_output=True, text=True, timeout=60)
    assert run.stdout == "fine\n", run.stderr


def test_a_forked_child_may_open_its_own(server: Any, tmp_path: Any, program: Callable[[str], list[str]]) -> None:
    source = f"""
    import os, sys
    from managed_e2b import SandboxLifecycle
    where = dict(e2b_api_url={server.url!r}, e2b_key={server.api_key!r})
    lifecycle = SandboxLifecycle({str(tmp_path / "x.db")!r}, **where)
    child = os.fork()
    if child == 0:
        with SandboxLifecycle({str(tmp_path / "x.db")!r}, **where) as own:
            with own.acquire() as handle:
                ok = handle.run("true").ok
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    lifecycle.shutdown()
    """
    run = subprocess.run(program(textwrap.dedent(source)), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", [SandboxLifecycle, AsyncSandboxLifecycle])
def test_opening_and_closing_leaves_no_thread_and_no_descriptor(kind: Any, server: Any, tmp_path: Any) -> None:
    source = f"""
    import asyncio, inspect, os, threading
    from managed_e2b import {kind.__name__}
    def once():
        lifecycle = {kind.__name__}({str(tmp_path / "x.db")!r}, e2b_api_url={server.url!r}, e2b_key={server.api_key!r})
        result = lifecycle.shutdown()
        if inspect.isawaitable(result):
            async def wait(): await result
            asyncio.run(wait())
    def count():
        for thread in threading.enumerate():
            if thread.name in ("me2b-cleanup", "me2b-sigterm"):
                thread.join(10)  # it has done its work, and ends
        keepers = [t for t in threading.enumerate() if t.name.startswith("me2b-")]
        return len(keepers), len(os.listdir("/proc/self/fd"))
    once(); once()
    before = count()
    for _ in range(20):
        once()
    print(before == count(), before, count())
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=90)
    assert run.stdout.startswith("True"), run.stdout + run.stderr


def test_the_beats_of_owners_are_spread_and_each_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Stop:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            return now > 100

    class Book:
        def beat(self, owner: str) -> bool:
            nonlocal now
            beats.append(now)
            now += 11.0 if len(beats) == 3 else 0.5  # the third waits for a writer, longer than its interval
            return True

    monkeypatch.setattr("managed_e2b.engine.keeper.time", SimpleNamespace(monotonic=lambda: now))
    for owner in ("one", "another"):
        now, beats = 0.0, list[float]()
        engine: Any = SimpleNamespace(book=Book(), owner=owner, lease=300, complaints=Complaints())
        keeper = Keeper(engine, lambda coroutine: None, stale_after=40, reaps=False)  # a beat every 10 s
        keeper._stop = Stop()  # type: ignore[assignment]
        keeper._threads[0].run()
        phase = leases.first_beat(owner, 10.0)
        assert beats == pytest.approx([phase + 10 * number for number in range(10) if number != 3])
    assert leases.first_beat("one", 10.0) != leases.first_beat("another", 10.0)
