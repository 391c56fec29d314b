"""Real sandboxes of this host, one runtime a module. Where the host cannot run any, the tests say what it lacks."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from managed_e2b.local.runtime.base import Command, Exit, PtySize, RuntimeUnavailable, User
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.guest import BubblewrapGuest
from managed_e2b.local.runtime.process import BubblewrapProcess

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEADLINE = 30.0


async def read_all(fd: int) -> bytes:
    """What a descriptor gives until its end."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while True:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(fd, lambda ready=ready: None if ready.done() else ready.set_result(None))
            try:
                await ready
            finally:
                loop.remove_reader(fd)
            continue
        except OSError:  # a terminal whose last process has ended
            return bytes(data)
        if not chunk:
            return bytes(data)
        data += chunk


async def eventually(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = DEADLINE) -> None:
    """Wait until a condition of the world outside holds; fail when it does not."""
    deadline = time.monotonic() + seconds
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Result:
    exit: Exit
    out: str
    err: str

    @property
    def code(self) -> int | None:
        return self.exit.code


class Box:
    """A sandbox under test."""

    def __init__(self, guest: BubblewrapGuest, runtime: BubblewrapRuntime) -> None:
        self.guest = guest
        self.runtime = runtime

    async def start(
        self,
        script: str,
        *,
        user: str | User = "user",
        env: dict[str, str] | None = None,
        cwd: str = "/",
        stdin: bool = False,
        pty: PtySize | None = None,
    ) -> BubblewrapProcess:
        who = user if isinstance(user, User) else await self.guest.user(user)
        given = {"PATH": PATH, "HOME": who.home, "USER": who.name, **(env or {})}
        return await self.guest.spawn(Command(["/bin/bash", "-c", script], given, cwd, who, stdin, pty))

    async def run(
        self, script: str, *, user: str | User = "user", env: dict[str, str] | None = None, cwd: str = "/"
    ) -> Result:
        """Run a script to its end, and to the end of its output."""
        process = await self.start(script, user=user, env=env, cwd=cwd)
        try:
            assert process.stdout_fd is not None
            assert process.stderr_fd is not None
            async with asyncio.timeout(DEADLINE):
                out, err, exit = await asyncio.gather(
                    read_all(process.stdout_fd), read_all(process.stderr_fd), process.wait()
                )
        finally:
            process.close()
        return Result(exit, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def host_processes_of(guest: BubblewrapGuest) -> list[int]:
    """Host pids of all processes in the sandbox's pid namespace, by that of its first process."""
    return _in_namespace(pid_namespace(guest))


def pid_namespace(guest: BubblewrapGuest) -> int:
    return os.stat(f"/proc/{guest.host_pid}/ns/pid").st_ino


def _in_namespace(namespace: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                    found.append(int(name))
            except OSError:
                continue
    return found


def alive_in(namespace: int) -> list[int]:
    """Host pids of what still runs in a pid namespace."""
    return _in_namespace(namespace)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """On disk where this host can, as users have it; `tmp_path` may lie in memory."""
    return Path(tempfile.mkdtemp(prefix="me2b-runtime-tests-"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(data_dir: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime(data_dir)
    try:
        await runtime.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make_box(runtime: BubblewrapRuntime) -> AsyncIterator[Callable[[], Awaitable[Box]]]:
    made: list[BubblewrapGuest] = []

    async def make() -> Box:
        guest = await runtime.create(f"t{secrets.token_hex(6)}")
        made.append(guest)
        return Box(guest, runtime)

    yield make
    for guest in made:
        await guest.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def box(make_box: Callable[[], Awaitable[Box]]) -> Box:
    return await make_box()


@pytest.fixture
def two_ids(runtime: BubblewrapRuntime) -> None:
    """For tests of what needs root and `user` to be two."""
    if not runtime.ids.full:
        pytest.skip("this host has one id for a sandbox: install newuidmap and give this user a range in /etc/subuid")
