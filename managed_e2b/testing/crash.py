"""The crash harness: a program that acquires and releases one sandbox, and dies, or is interrupted, at one boundary.

    scenario = Scenario("sync", db_path, server.url, server.api_key, watchdog=False)
    for number, boundary in enumerate(boundaries(scenario)):
        crash(scenario, number)       # a process of its own, ended by SIGKILL at that boundary
        ...                           # look at what it left, and who repairs it

Each run is a fresh process, forked from a small server process that has everything imported.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from ..lifecycle import AsyncSandboxLifecycle, SandboxLifecycle
from .steps import Steps

RUN_TIMEOUT = 60.0
"""Seconds for one run."""


@dataclass(frozen=True)
class Scenario:
    """One sandbox, from the opening of a lifecycle to its shutdown. `lease` and `timeout` are in seconds."""

    face: Literal["sync", "async"]
    db_path: str
    url: str
    api_key: str
    lease: int = 300
    timeout: int = 600
    watchdog: bool = False

    def open(self) -> Any:
        """A lifecycle of its face, without an opening reap: it does nothing beside its own path."""
        kind = SandboxLifecycle if self.face == "sync" else AsyncSandboxLifecycle
        return kind(
            self.db_path,
            e2b_api_url=self.url,
            e2b_key=self.api_key,
            lease=self.lease,
            watchdog=self.watchdog,
            opening_reap=False,
            label="crash scenario",
        )


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (minus the signal's number when one killed it) and the boundaries it passed."""

    exit_code: int
    boundaries: tuple[str, ...]


def boundaries(scenario: Scenario) -> tuple[str, ...]:
    """The boundaries of a run that nothing disturbs, in order."""
    ended = _run(scenario, None, signal.SIGKILL, 0)
    if ended.exit_code != 0:
        raise RuntimeError(f"the undisturbed run failed with {ended.exit_code} after {ended.boundaries}")
    return ended.boundaries


def crash(scenario: Scenario, at: int) -> Ended:
    """Run it in a process that SIGKILLs itself at boundary number `at`."""
    return _run(scenario, at, signal.SIGKILL, 1)


def interrupt(scenario: Scenario, at: int, times: int = 1) -> Ended:
    """Run it in a process that gets `times` SIGINT, at boundary number `at` and the ones after it."""
    return _run(scenario, at, signal.SIGINT, times)


def _run(scenario: Scenario, at: int | None, number: signal.Signals, times: int) -> Ended:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(scenario, at, number, times, sender))
    process.start()
    sender.close()
    seen: list[str] = []
    try:
        while True:
            if not receiver.poll(RUN_TIMEOUT):
                raise TimeoutError(f"a run did not end within {RUN_TIMEOUT} s; it came to {seen}")
            seen.append(receiver.recv())
    except (EOFError, ConnectionResetError):
        process.join(RUN_TIMEOUT)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
    assert process.exitcode is not None
    return Ended(process.exitcode, tuple(seen))


def _main(scenario: Scenario, at: int | None, number: signal.Signals, times: int, told: Connection) -> None:
    def act(boundary: int) -> None:
        told.send(steps.seen[boundary])
        if at is not None and at <= boundary < at + times:
            os.kill(os.getpid(), number)

    steps = Steps(act)
    try:
        if scenario.face == "sync":
            _sync(scenario, steps)
        else:
            asyncio.run(_async(scenario, steps))
    except KeyboardInterrupt:
        os._exit(_end(scenario))


def _sync(scenario: Scenario, steps: Steps) -> None:
    lifecycle = scenario.open()
    steps.watch(lifecycle)
    with lifecycle, lifecycle.acquire(timeout=scenario.timeout) as handle:
        handle.run("true")


async def _async(scenario: Scenario, steps: Steps) -> None:
    lifecycle = scenario.open()
    steps.watch(lifecycle)
    async with lifecycle, lifecycle.acquire(timeout=scenario.timeout) as handle:
        await handle.run("true")


def _end(scenario: Scenario) -> int:
    """After a Ctrl-C the program leaves as an interpreter would: what is open is shut down at exit."""
    from ..exits import exits

    exits.at_exit()
    return 128 + signal.SIGINT
