"""A process that envd started: its output to every reader, its input, its end.

* **Output.** Readers get what the process writes after they came, in order, stdout and stderr apart. The slowest reader
  sets the pace: when it falls behind, the process blocks on a full pipe, so memory stays bounded and nothing is lost.
  With no reader the output is dropped and the process runs on.
* **The end** comes after everything that the process wrote itself. Its children may hold the pipe open and go on
  writing: they get `EOF_GRACE` to finish, and later output of theirs is dropped.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_pb import ProcessConfig, ProcessEvent
from protobuf import Oneof

from managed_e2b.local.envd.pipes import ReadEnd, WriteEnd
from managed_e2b.local.envd.streams import Mailbox
from managed_e2b.local.runtime.base import Exit, Guest, GuestProcess, PtySize

EOF_GRACE = 0.2  # seconds after the exit for children to close the output, as in `cmd > >(tee log)`
DEATH_GRACE = 0.25  # seconds after a SIGKILL that we did not send for its cause to show: the whole sandbox died
STD_CHUNK = 32 * 1024
PTY_CHUNK = 16 * 1024

Kind: TypeAlias = Literal["stdout", "stderr", "pty"]
DATA: Literal["data"] = "data"
END: Literal["end"] = "end"


class InputRefused(Exception):
    """The process has no such input, or not any more. The message says which."""


def data_event(kind: Kind, data: bytes) -> ProcessEvent:
    match kind:
        case "stdout":
            event = ProcessEvent.DataEvent(output=Oneof(kind, data))
        case "stderr":
            event = ProcessEvent.DataEvent(output=Oneof(kind, data))
        case "pty":
            event = ProcessEvent.DataEvent(output=Oneof(kind, data))
    return ProcessEvent(event=Oneof(DATA, event))


def end_event(exit: Exit) -> ProcessEvent:
    """The last event, worded as Go's `ProcessState` does upstream: `exit status 3`, `signal: killed`."""
    if exit.code is not None:
        code, status = exit.code, f"exit status {exit.code}"
    else:
        number = exit.signal or 0
        code, status = -1, f"signal: {(signal.strsignal(number) or str(number)).lower()}"
    end = ProcessEvent.EndEvent(
        exit_code=code, exited=exit.code is not None, status=status, error=status if code != 0 else None
    )
    return ProcessEvent(event=Oneof(END, end))


class RunningProcess:
    """Constructed with the first reader's mailbox, so that no output is lost before it attaches."""

    def __init__(
        self, config: ProcessConfig, tag: str | None, guest: Guest, process: GuestProcess, gone_message: str
    ) -> None:
        self.config = config
        self.tag = tag
        self.pid = process.pid
        self.exit: Exit | None = None
        self._guest = guest
        self._process = process
        self._gone_message = gone_message
        self._mailboxes: set[Mailbox[ProcessEvent]] = set()
        self._room = asyncio.Event()
        self._end: ProcessEvent | None = None
        self._killed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tty = WriteEnd(process.pty_fd) if process.pty_fd is not None else None
        self._stdin = WriteEnd(process.stdin_fd) if process.stdin_fd is not None else None

    @property
    def readers(self) -> int:
        return len(self._mailboxes)

    @contextmanager
    def reader(self, mailbox: Mailbox[ProcessEvent]) -> Iterator[None]:
        """Give the mailbox the output from now on, and the end. Of a process that has ended, only the end."""
        if self._end is not None:
            mailbox.put(self._end)
            mailbox.close()
            yield
            return
        mailbox.on_room = self._room.set
        self._mailboxes.add(mailbox)
        try:
            yield
        finally:
            self._mailboxes.discard(mailbox)
            self._room.set()

    async def run(self, on_end: Callable[[RunningProcess], None]) -> None:
        """Carry the output until the process has ended and nobody holds its pipes any more.

        `on_end` is called once the end event is out. Cancelling lets go of everything without a word to the readers.
        """
        fds: list[tuple[Kind, int | None, int]] = [
            ("stdout", self._process.stdout_fd, STD_CHUNK),
            ("stderr", self._process.stderr_fd, STD_CHUNK),
            ("pty", self._process.pty_fd, PTY_CHUNK),
        ]
        sources = [(kind, ReadEnd(fd, chunk)) for kind, fd, chunk in fds if fd is not None]
        ends = [end for _, end in sources]
        try:
            async with asyncio.TaskGroup() as pumps:
                carrying = [pumps.create_task(self._carry(kind, end)) for kind, end in sources]
                self.exit = await self._process.wait()
                self._close_input()
                if carrying:
                    await asyncio.wait(carrying, timeout=EOF_GRACE)
                for end in ends:
                    end.last_call()
            await self._finish(self.exit)
            self._cancel_timer()
            on_end(self)
            await asyncio.gather(*(end.discard() for end in ends if not end.at_end))
        finally:
            self._cancel_timer()
            self._close_input()
            self._process.close()

    def expire_after(self, seconds: float, starter: Mailbox[ProcessEvent]) -> None:
        """Kill the process when it still runs then; the stream that started it ends with `deadline_exceeded`."""

        def expire() -> None:
            starter.close(ConnectError(Code.DEADLINE_EXCEEDED, "the command ran past its timeout and was killed"))
            if self.exit is None:
                self.kill()

        self._timer = asyncio.get_running_loop().call_later(seconds, expire)

    def kill(self) -> None:
        """SIGKILL the process and everything that came from it: a killed command leaves no children working."""
        self._killed = True
        self._process.kill_tree()

    def terminate(self) -> None:
        """SIGTERM to the process group."""
        self._process.signal(signal.SIGTERM, group=True)

    async def wait(self) -> None:
        """Wait until the process is gone; its output may still be on its way."""
        await self._process.wait()

    def resize(self, size: PtySize) -> None:
        """Raises InputRefused for a process without a terminal."""
        if self._tty is None:
            raise InputRefused("tty not assigned to process")
        self._process.resize(size)

    async def write_stdin(self, data: bytes) -> None:
        """Raises InputRefused, and OSError when the process does not read any more."""
        if self._tty is not None:
            raise InputRefused("tty assigned to process — input should be written to the pty, not the stdin")
        if self._stdin is None:
            raise InputRefused("stdin not enabled or closed")
        await self._stdin.write(data)

    async def write_pty(self, data: bytes) -> None:
        """Raises InputRefused, and OSError when the terminal is gone."""
        if self._tty is None:
            raise InputRefused("tty not assigned to process — input should be written to the stdin, not the tty")
        await self._tty.write(data)

    async def close_stdin(self) -> None:
        """End of input for the process; again is fine. Raises InputRefused for a terminal."""
        if self._tty is not None:
            raise InputRefused("cannot close stdin for PTY process — send Ctrl+D (0x04) instead")
        if self._stdin is not None:
            stdin = self._stdin
            await stdin.finish()
            self._stdin = None
            self._process.close_stdin()

    async def _carry(self, kind: Kind, end: ReadEnd) -> None:
        while data := await end.read():
            event = data_event(kind, data)
            for mailbox in self._mailboxes:
                mailbox.put(event, len(data))
            while any(mailbox.full for mailbox in self._mailboxes):
                self._room.clear()
                await self._room.wait()

    async def _finish(self, exit: Exit) -> None:
        if exit.signal == signal.SIGKILL and not self._killed:
            # When nothing shows, something inside killed it: an end like any other.
            with suppress(TimeoutError):
                async with asyncio.timeout(DEATH_GRACE):
                    await self._guest.dead.wait()
        end = None if self._guest.dead.is_set() else end_event(exit)
        self._end = end
        for mailbox in self._mailboxes:
            if end is not None:
                mailbox.put(end)
                mailbox.close()
            else:
                mailbox.close(ConnectError(Code.UNAVAILABLE, self._gone_message))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_input(self) -> None:
        for end in (self._stdin, self._tty):
            if end is not None:
                end.close()
        if self._stdin is not None:
            self._stdin = None
            self._process.close_stdin()
