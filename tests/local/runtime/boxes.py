"""Tools to run things in real sandboxes and to look at them from outside."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from managed_e2b.local.runtime.base import Command, Exit, PtySize, User
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


async def first_output(process: BubblewrapProcess) -> bytes:
    """What a process writes first."""
    assert process.stdout_fd is not None
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(process.stdout_fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        async with asyncio.timeout(DEADLINE):
            await ready
    finally:
        loop.remove_reader(process.stdout_fd)
    return os.read(process.stdout_fd, 4096)


async def file_text(box: Box, path: str) -> str:
    """What is in a file of a sandbox, by way of no process of it."""
    (fd,) = (await box.guest.call("open_read", path=path)).fds
    try:
        return os.read(fd, 65536).decode()
    finally:
        os.close(fd)


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

    async def prints(self, script: str, wanted: str) -> None:
        """Run a script until it prints what is wanted."""

        async def done() -> bool:
            result = await self.run(script)
            assert "not found" not in result.err
            return result.out.strip() == wanted

        await eventually(done)


def processes_in(namespace: int) -> list[int]:
    """Host pids of what runs in a pid namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                    found.append(int(name))
            except OSError:
                continue
    return found


def pid_namespace(guest: BubblewrapGuest) -> int:
    """The number of a sandbox's pid namespace: its processes can be found by it, also once the sandbox is forgotten."""
    return os.stat(f"/proc/{guest.host_pid}/ns/pid").st_ino
