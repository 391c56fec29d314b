"""The server's side of the spawner and of the file agents: requests with answers, over one socket each, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import channel
from managed_e2b.local.runtime.base import GuestError, GuestGone, Reply

_PACKAGE = Path(__file__).resolve().parents[2]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class OperationFailed(GuestError):
    """As GuestError, and the step at which it failed (`exec`, `cwd`, `setns`, `launch`…)."""

    def __init__(self, number: int, message: str, step: str) -> None:
        super().__init__(number, message)
        self.step = step


class Link:
    """Requests over a connected stream socket, any number of them at once.

    `on_event` gets messages that answer nothing; `on_end` is called once, when the other side is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_event: Callable[[channel.Message], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._on_end = on_end
        self._decoder = channel.Decoder()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        """Raises OperationFailed as the other side did, and GuestGone when it is no more."""
        return await self.submit(op, fds, **args)[1]

    def submit(self, op: str, fds: Sequence[int] = (), **args: Any) -> tuple[int, asyncio.Future[Reply]]:
        """Send a request now; its id and its answer to be. The descriptors stay the caller's."""
        number = next(self._ids)
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if self.closed:
            answer.set_exception(GuestGone("the sandbox is gone"))
            return number, answer
        frame = channel.encode({"id": number, "op": op, "args": args}, fds)
        self._unsent.append((memoryview(frame), [os.dup(fd) for fd in fds]))
        self._waiting[number] = answer
        self._flush()
        return number, answer

    def _flush(self) -> None:
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                sent = self._sock.sendmsg([frame], channel.ancillary(fds), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self.close()
                return
            channel.close_all(fds)
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data, fds = channel.receive(self._sock)
            messages = self._decoder.feed(data, fds)
        except BlockingIOError:
            return
        except (OSError, channel.ProtocolError):
            self.close()
            return
        if not data:
            self.close()
            return
        for message, received in messages:
            self._deliver(message, received)

    def _deliver(self, message: channel.Message, fds: list[int]) -> None:
        answer = self._waiting.pop(message.get("id", 0), None)
        if answer is None:
            channel.close_all(fds)
            if self._on_event is not None and "event" in message:
                self._on_event(message)
        elif answer.done():  # its caller was cancelled
            channel.close_all(fds)
        elif "errno" in message:
            channel.close_all(fds)
            answer.set_exception(OperationFailed(message["errno"], message["message"], message["step"]))
        else:
            answer.set_result(Reply(message.get("value"), fds))

    def close(self) -> None:
        """May be called again. Whoever still waits for an answer gets GuestGone."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._decoder.close()
        for _, fds in self._unsent:
            channel.close_all(fds)
        self._unsent.clear()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(GuestGone("the sandbox is gone"))
                answer.exception()  # a caller that went away must not make asyncio complain
        self._waiting.clear()
        if self._on_end is not None:
            self._on_end()


class SpawnerLink:
    """The spawner as a child of this process, with no environment but PATH and no descriptor but its socket."""

    def __init__(self, process: asyncio.subprocess.Process, link: Link) -> None:
        self._process = process
        self.link = link
        self.pid = process.pid

    @classmethod
    async def start(cls, on_event: Callable[[channel.Message], None], on_end: Callable[[], None]) -> SpawnerLink:
        """Raises OSError when the host allows no process or descriptor more."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    "-B",
                    str(_PACKAGE / "local" / "runtime" / "spawner_main.py"),
                    str(theirs.fileno()),
                    str(_PACKAGE.parent),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={"PATH": _PATH},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C on the server's terminal is the server's to handle
                )
            undo.pop_all()
        return cls(process, Link(ours, on_event, on_end))

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        return await self.link.call(op, fds, **args)

    async def close(self) -> None:
        """End it and wait for its end."""
        self.link.close()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def gone(error: OperationFailed) -> bool:
    """Whether an operation failed because there is no sandbox (any more) to do it in."""
    return error.errno == errno.ESRCH and error.step in ("spawner", "setns", "spawn")
