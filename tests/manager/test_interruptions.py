"""An exception, a Ctrl-C or a cancellation at every step of `acquire`, on both faces: nothing is left running.

A step is one call to the ledger, the backend or the wait for a turn. Each is hit once before and once after it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest

from managed_e2b import SandboxLifecycle, State
from managed_e2b.rules import states

from .conftest import Face, remote_of, settle, until

Side = Literal["before", "after"]


class Boom(Exception):
    """Raised by the tripwire."""


class Tripwire:
    """A driver that counts its steps and does something at one of them."""

    def __init__(self, driver: Any, hit: Callable[[], None], at: tuple[int, Side] | None) -> None:
        self._driver = driver
        self._hit = hit
        self._at = at
        self.steps: list[str] = []
        self.sdk = _Sdk(self, driver.sdk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    async def ledger(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.step(function.__name__, self._driver.ledger(function, *args, **kwargs))

    async def step(self, name: str, call: Any) -> Any:
        number = len(self.steps)
        self.steps.append(name)
        if self._at == (number, "before"):
            try:
                self._hit()
            except BaseException:
                call.close()
                raise
        result = await call
        if self._at == (number, "after"):
            self._hit()
        return result


class _Sdk:
    def __init__(self, wire: Tripwire, sdk: Any) -> None:
        self._wire = wire
        self._sdk = sdk

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._sdk, name)
        if name not in ("create", "run"):
            return value
        return lambda *args, **kwargs: self._wire.step(name, value(*args, **kwargs))


def raise_boom() -> None:
    raise Boom


def interrupt() -> None:
    raise KeyboardInterrupt


def cancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def one_run(face: Face, lifecycle: Any, hit: Callable[[], None], at: tuple[int, Side] | None) -> Tripwire:
    real = lifecycle._engine.driver
    wire = Tripwire(real, hit, at)
    lifecycle._engine.driver = wire
    try:
        async with face.entered(lifecycle.acquire(timeout=60)) as handle:
            await settle(handle.run("true"))
    finally:
        lifecycle._engine.driver = real
    return wire


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("face", "hit", "error"),
    [
        ("sync", raise_boom, Boom),
        ("async", raise_boom, Boom),
        ("sync", interrupt, KeyboardInterrupt),
        ("async", cancel, asyncio.CancelledError),
    ],
    indirect=["face"],
)
async def test_nothing_is_left_whatever_step_is_hit(
    face: Face, hit: Callable[[], None], error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle = face.open(max_concurrent=1000)
    steps = (await one_run(face, lifecycle, raise_boom, None)).steps
    assert {"enqueue", "turn", "create", "running", "run"} <= set(steps)
    hits = 0
    for number in range(len(steps)):
        for side in ("before", "after"):
            last = number == len(steps) - 1 and side == "after"
            if last and error is asyncio.CancelledError:
                continue  # nothing suspends any more between the last step and the release
            run = one_run(face, lifecycle, hit, (number, side))
            with pytest.raises(error):
                # What is cancelled must not be the test; a Ctrl-C in a task would end the loop.
                await (asyncio.create_task(run) if hit is cancel else run)
            hits += 1
    lifecycle._engine.driver.join(30)
    deadline = asyncio.get_running_loop().time() + 20
    while left := await remote_of(lifecycle):
        assert asyncio.get_running_loop().time() < deadline, f"left running: {left}"
        await asyncio.sleep(0.1)  # between two looks at another process
    rows = await settle(lifecycle.records())
    # The first run and each hit have a row, but the one that was hit before `enqueue`: a cancelled ledger call is
    # carried out all the same.
    assert len(rows) == hits + (hit is cancel)
    assert all(row.state in states.TERMINAL or row.sandbox_id is None for row in rows)
    with capsys.disabled():
        sys.stdout.write(f" [{face.name}, {error.__name__}: {len(steps)} steps, {hits} hits]")


SCRIPT = """
import sys
from managed_e2b import SandboxLifecycle
lifecycle = SandboxLifecycle({db!r}, e2b_api_url={url!r}, e2b_key={key!r})
with lifecycle.acquire(timeout=120) as handle:
    print(handle.sandbox_id, flush=True)
    handle.run("sleep 1000", timeout=None)
"""


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGKILL, "its owner is dead")])
def test_a_process_that_dies_in_the_block_leaves_nothing(
    number: signal.Signals, reason: str, server: Any, tmp_path: Any, program: Callable[[str], list[str]]
) -> None:
    db = str(tmp_path / "sandboxes.db")
    source = SCRIPT.format(db=db, url=server.url, key=server.api_key)
    process = subprocess.Popen(program(source), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    sandbox_id = process.stdout.readline().strip()
    assert sandbox_id
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    with SandboxLifecycle(db, e2b_api_url=server.url, e2b_key=server.api_key) as lifecycle:
        # The opening reap is on its way; ours meets it or comes first.
        lifecycle.reap()
        until(
            lambda: sandbox_id not in [item.sandbox_id for item in lifecycle.list_remote()],
            "the sandbox of the dead process is gone",
        )
        (row,) = until(lambda: [row for row in lifecycle.records() if row.state is State.CLEANED], "the row is cleaned")
        assert (row.sandbox_id, row.reason) == (sandbox_id, reason)


def test_a_live_owners_sandbox_is_never_reaped(server: Any, tmp_path: Any, program: Callable[[str], list[str]]) -> None:
    db = str(tmp_path / "sandboxes.db")
    source = SCRIPT.format(db=db, url=server.url, key=server.api_key)
    process = subprocess.Popen(program(source), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        sandbox_id = process.stdout.readline().strip()
        with SandboxLifecycle(db, e2b_api_url=server.url, e2b_key=server.api_key) as lifecycle:
            for _ in range(3):
                assert lifecycle.reap().items == ()
            assert sandbox_id in [item.sandbox_id for item in lifecycle.list_remote()]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with SandboxLifecycle(db, e2b_api_url=server.url, e2b_key=server.api_key) as lifecycle:
            lifecycle.reap()


def test_what_nobody_holds_any_more_is_released(server: Any, tmp_path: Any) -> None:
    with SandboxLifecycle(tmp_path / "x.db", e2b_api_url=server.url, e2b_key=server.api_key) as lifecycle:
        handle = lifecycle.acquire().__enter__()
        sandbox = handle.sandbox
        del handle
        assert sandbox.commands.run("echo in use").stdout == "in use\n", "who holds the native object uses it"
        (row,) = lifecycle.records()
        assert row.state is State.RUNNING
        del sandbox
        (row,) = until(lambda: [row for row in lifecycle.records() if row.state is State.CLEANED], "it is released")
        assert row.reason == "abandoned: nobody holds its handle"


def test_a_thread_that_outlives_the_main_thread_releases_its_sandbox(
    server: Any, tmp_path: Any, program: Callable[[str], list[str]]
) -> None:
    db = str(tmp_path / "sandboxes.db")
    source = f"""
import threading
from managed_e2b import SandboxLifecycle
lifecycle = SandboxLifecycle({db!r}, e2b_api_url={server.url!r}, e2b_key={server.api_key!r})
entered = threading.Event()

def work():
    with lifecycle.acquire() as handle:
        entered.set()
        threading.main_thread().join()
        assert handle.run("true").ok

threading.Thread(target=work).start()
entered.wait()
"""
    run = subprocess.run(program(source), capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    with SandboxLifecycle(db, e2b_api_url=server.url, e2b_key=server.api_key, opening_reap=False) as lifecycle:
        assert [(row.state, row.reason) for row in lifecycle.records()] == [(State.CLEANED, "released")]
