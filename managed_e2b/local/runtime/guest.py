"""One sandbox that runs under bubblewrap, as the server holds it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

from managed_e2b.local.runtime import channel
from managed_e2b.local.runtime.base import Command, Exit, GuestError, GuestGone, Reply, Usage, User
from managed_e2b.local.runtime.limits import Limits
from managed_e2b.local.runtime.link import Link, OperationFailed, SpawnerLink, gone
from managed_e2b.local.runtime.process import BubblewrapProcess


class BubblewrapGuest:
    """`base.Guest`. Its life hangs on three things at once: the first process's pidfd, the life pipe, the spawner."""

    def __init__(
        self,
        sandbox_id: str,
        directory: str,
        private: Sequence[str],
        spawner: SpawnerLink,
        host_pid: int,
        fds: Sequence[int],
        expect_exit: Callable[[int], asyncio.Future[Exit]],
        keep: Callable[[str, Sequence[str]], Awaitable[None]],
        on_buried: Callable[[BubblewrapGuest], None],
        kept: Limits,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.dead = asyncio.Event()
        self.host_pid = host_pid  # of the first process, as the host sees it
        self.directory = directory
        self._private = list(private)
        self._spawner = spawner
        self._expect_exit = expect_exit
        self._keep = keep
        self._kept = kept  # limits that this host enforces
        self._frozen = False
        self._on_buried = on_buried
        self._pidfd, self._life, agent_socket, self._agent_pidfd = fds
        self._agent = Link(socket.socket(fileno=agent_socket), on_end=self._on_agent_end)
        self._burial = asyncio.Lock()
        self._buried = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cpu_seen = (time.monotonic(), 0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_death)

    def _on_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._agent.close()
        self.dead.set()

    def _on_agent_end(self) -> None:
        # Without its agent a sandbox would be half alive. If this is the sandbox's own end, the signal hits nobody.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self) -> bool:
        if self._buried or self.dead.is_set():
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _raise(self, error: OperationFailed) -> NoReturn:
        if gone(error) or self._ended():
            raise GuestGone(f"sandbox {self.sandbox_id} is gone") from error
        raise error

    async def _ask(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        try:
            return await self._spawner.call(op, fds, sandbox=self.sandbox_id, **args)
        except OperationFailed as error:
            self._raise(error)

    async def spawn(self, command: Command) -> BubblewrapProcess:
        if self._ended():
            raise GuestGone(f"sandbox {self.sandbox_id} is gone")
        starting = self._background(self._spawn(command))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)  # it may have started: nobody will ever hear of it
            raise

    async def _spawn(self, command: Command) -> BubblewrapProcess:
        user, pty = command.user, command.pty
        number, answer = self._spawner.link.submit(
            "spawn",
            sandbox=self.sandbox_id,
            argv=list(command.argv),
            env=dict(command.env),
            cwd=command.cwd,
            uid=user.uid,
            gid=user.gid,
            groups=list(user.groups),
            stdin=command.stdin,
            pty=[pty.cols, pty.rows] if pty else None,
        )
        exit = self._expect_exit(number)  # before the answer: the process may end before we look at it
        try:
            reply = await answer
        except BaseException as error:
            exit.cancel()
            if isinstance(error, OperationFailed):
                if error.errno == errno.EMFILE:
                    self._abandon(number)
                self._raise(error)
            raise
        pidfd, marker, *ends = reply.fds
        stdio = dict(zip(reply.value["stdio"], ends, strict=True))
        return BubblewrapProcess(
            reply.value["pid"], reply.value["child"], pidfd, marker, stdio, exit, self._kill_marked
        )

    def _kill_marked(self, marker: int) -> None:
        self._tell("kill_marked", [marker])

    def _abandon(self, job: int) -> None:
        """The command may have started, and its descriptors were lost on the way: it must not run on unseen."""
        self._tell("abandon", job=job)

    def _tell(self, op: str, fds: Sequence[int] = (), **args: Any) -> None:
        _, answer = self._spawner.link.submit(op, fds, sandbox=self.sandbox_id, **args)
        # Its failure means that the sandbox is gone, and with it every process.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        return await self._agent.call(op, fds, **args)

    async def user(self, name: str) -> User:
        try:
            found = (await self.call("user", name=name)).value
        except GuestError as error:
            if error.errno == errno.ENOENT:
                raise KeyError(name) from error
            raise
        return User(name, found["uid"], found["gid"], tuple(found["groups"]), found["home"], found["shell"])

    async def connect(self, port: int) -> int:
        (fd,) = (await self._ask("dial", port=port)).fds
        return fd

    async def way_out(self) -> tuple[int, int]:
        stream, datagrams = (await self.call("way_out")).fds
        return stream, datagrams

    async def freeze(self) -> None:
        await self._ask("freeze", frozen=True)
        self._frozen = True

    async def thaw(self) -> None:
        await self._ask("freeze", frozen=False)
        self._frozen = False

    async def commit(self, image: str) -> None:
        await asyncio.shield(self._background(self._commit(image)))  # what stands still must go on again

    async def _commit(self, image: str) -> None:
        frozen = self._frozen
        if not frozen:
            await self.freeze()
        try:
            await self._keep(image, self._private)
        finally:
            if not frozen:
                with contextlib.suppress(GuestGone):
                    await self.thaw()

    async def usage(self) -> Usage:
        """CPU is the mean since the call before."""
        seen = (await self._ask("usage", directories=self._private)).value
        now, (before, spent) = time.monotonic(), self._cpu_seen
        self._cpu_seen = (now, seen["cpu_ns"])
        used = max(0, seen["cpu_ns"] - spent) / 1e9 / max(now - before, 0.001)
        cpus = len(os.sched_getaffinity(0))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Usage(
            cpu_count=min(cpus, math.ceil(self._kept.cpus or cpus)),
            cpu_used_pct=round(100 * used, 2),
            mem_used=seen["memory"],
            mem_total=min(memory, self._kept.memory or memory),
            mem_cache=seen["cache"],
            disk_used=seen["disk"],
            disk_total=seen["disk"] + seen["disk_free"],
        )

    async def kill(self) -> None:
        async with self._burial:
            if self._buried:
                return
            for pidfd in (self._pidfd, self._agent_pidfd):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await self.dead.wait()
            await _readable(self._agent_pidfd)
            with contextlib.suppress(GuestGone):  # its spawner is dead: the next one removes the directory
                await self._spawner.call("bury", sandbox=self.sandbox_id, directory=self.directory)
            self._buried = True
            channel.close_all((self._pidfd, self._agent_pidfd, self._life))
            self._on_buried(self)

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _abandon(task: asyncio.Task[BubblewrapProcess]) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    process = task.result()
    process.kill_tree()
    process.close()


async def _readable(fd: int) -> None:
    """Wait until a descriptor is readable; of a pidfd: until the process has ended."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        loop.remove_reader(fd)
