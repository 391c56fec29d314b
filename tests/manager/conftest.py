"""The manager's tests run on both faces, against a real local server with real sandboxes."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from managed_e2b import AsyncSandboxLifecycle, SandboxLifecycle, State
from managed_e2b.local.background import LocalServerError, LocalServerProcess
from managed_e2b.rules import states

T = TypeVar("T")


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServerProcess]:
    process = LocalServerProcess()
    try:
        process.start()
    except LocalServerError as error:
        pytest.skip(f"this host cannot run local sandboxes: {error}")
    yield process
    process.stop()


async def settle(value: Awaitable[T] | T) -> T:
    """The value of a call on either face."""
    if inspect.isawaitable(value):
        return await value
    return value


class Face:
    """Opens lifecycles of one face, and enters and leaves their contexts."""

    def __init__(self, name: str, server: LocalServerProcess, db: Path) -> None:
        self.name = name
        self.db = db
        self._server = server
        self._opened: list[Any] = []

    def open(self, **options: Any) -> Any:
        kind = AsyncSandboxLifecycle if self.name == "async" else SandboxLifecycle
        where = {"e2b_api_url": self._server.url, "e2b_key": self._server.api_key, **options}
        if "backend" in options:
            where = options
        lifecycle = kind(where.pop("db_path", self.db), **where)
        self._opened.append(lifecycle)
        return lifecycle

    @asynccontextmanager
    async def entered(self, context: Any) -> AsyncIterator[Any]:
        """`with` or `async with`, whichever the context is."""
        if self.name == "async":
            async with context as value:
                yield value
        else:
            with context as value:
                yield value

    async def close(self) -> None:
        for lifecycle in self._opened:
            await settle(lifecycle.shutdown())


@pytest.fixture(params=["sync", "async"])
async def face(request: pytest.FixtureRequest, server: LocalServerProcess, tmp_path: Path) -> AsyncIterator[Face]:
    face = Face(request.param, server, tmp_path / "sandboxes.db")
    yield face
    await face.close()


async def remote_of(lifecycle: Any) -> list[str]:
    """What the server runs for this lifecycle: other tests use the same server."""
    return [
        sandbox.sandbox_id
        for sandbox in await settle(lifecycle.list_remote())
        if sandbox.metadata.get("me2b_owner") == lifecycle.owner_id
    ]


async def assert_nothing_left(lifecycle: Any) -> None:
    """Nothing runs, and every row is terminal."""
    lifecycle._engine.driver.join(20)
    assert await remote_of(lifecycle) == []
    rows = await settle(lifecycle.records())
    assert [row for row in rows if row.state not in states.TERMINAL] == []


async def states_of(lifecycle: Any) -> list[State]:
    return [row.state for row in await settle(lifecycle.records())]


def until(condition: Callable[[], T], what: str, seconds: float = 20.0) -> T:
    """Wait for a condition of another process, which has no event to wait on."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)  # between two looks, not for synchronisation
    return value


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command line of a Python program of its own."""

    def make(source: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(source)
        return [sys.executable, str(file)]

    return make
