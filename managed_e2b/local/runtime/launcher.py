"""The launches under way in the spawner: from the fork that becomes a sandbox to the agent that answers.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from managed_e2b.local.runtime import agent, channel, launch
from managed_e2b.local.runtime.confine import Confinement
from managed_e2b.local.runtime.forks import Forks, Told
from managed_e2b.local.runtime.spares import Spare

_STATUS_LIMIT = 65536

Answer = Callable[[dict[str, Any], list[int]], None]


@dataclass
class Sandbox:
    """A sandbox that was launched and is not buried yet. `bwrap` is the pid of bubblewrap outside, None once reaped."""

    bwrap: int | None
    pidfd: int
    confinement: Confinement
    spare: Spare | None = None  # for the next command
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def dismiss_spare(self) -> None:
        spare, self.spare = self.spare, None
        if spare is not None:
            spare.dismiss()

    def ended(self) -> None:
        """bubblewrap has been reaped: nothing inside runs any more."""
        self.bwrap = None
        for go_on in self.waiters:
            go_on()
        self.waiters.clear()

    def end(self) -> None:
        """Kill it, whatever it is doing. bubblewrap ends after its child, which ends after everything else inside."""
        self.dismiss_spare()
        if self.bwrap is None:
            return
        self.confinement.end()
        if self.pidfd < 0:  # still being made
            os.kill(self.bwrap, signal.SIGKILL)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def when_ended(self, go_on: Callable[[], None]) -> None:
        """End it, and go on when nothing of it runs."""
        if self.bwrap is None:
            go_on()
            return
        self.waiters.append(go_on)
        self.end()


@dataclass
class Launching:
    """One under way: the status pipe has not said "ready" yet. `find` gives its sandbox, unless that was buried."""

    forks: Forks
    find: Callable[[], Sandbox | None]
    answer: Answer
    bwrap: int
    status: int
    info: int
    life: int
    text: bytes = b""

    def watch(self) -> None:
        self.forks.watch(self.status, self._on_status)

    def _on_status(self) -> None:
        data = os.read(self.status, 4096)
        self.text = (self.text + data)[-_STATUS_LIMIT:]
        if data and launch.READY not in self.text:
            return
        self.forks.unwatch(self.status)
        os.close(self.status)
        info = os.read(self.info, 4096)
        os.close(self.info)
        if not data:
            self._failed(self.text.decode("utf-8", "replace").strip() or "bubblewrap ended without a word")
            return
        try:
            inside = launch.child_pid(info)
            pidfd = _open_child(inside, self.bwrap)
        except (OSError, ValueError) as error:
            self._failed(str(error))
            return
        sandbox = self.find()
        if sandbox is None:  # buried meanwhile
            os.close(pidfd)
            os.close(self.life)
            return
        sandbox.pidfd = pidfd
        self._start_agent(inside, pidfd, sandbox.confinement)

    def _start_agent(self, inside: int, pidfd: int, confinement: Confinement) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()

        def done(told: Told) -> None:
            with ours:
                if "errno" in told[0]:
                    os.close(handle)
                    self._failed_with(told[0])
                    return
                self.answer({"value": {"pid": inside}}, [pidfd, self.life, ours.fileno(), handle])
            channel.close_all((self.life, handle))

        with theirs:
            pid = self.forks.fork(lambda report: agent.run(pidfd, theirs, report, parent, confinement), done)
        handle = os.pidfd_open(pid)  # our own child, and not reaped before the next turn of the loop

    def _failed(self, message: str) -> None:
        self._failed_with({"errno": errno.EIO, "message": message, "step": "launch"})

    def _failed_with(self, body: dict[str, Any]) -> None:
        """Tell of it once nothing of the sandbox runs any more. Its directory is the server's to have buried."""
        os.close(self.life)
        sandbox = self.find()
        if sandbox is None:  # buried meanwhile
            self.answer(body, [])
        else:
            sandbox.when_ended(lambda: self.answer(body, []))


def _open_child(pid: int, parent: int) -> int:
    """A pidfd of `pid`, proved to be a child of `parent`, which has not been reaped. Raises OSError(ESRCH)."""
    pidfd = os.pidfd_open(pid)
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    if int(fields[1]) != parent:
        os.close(pidfd)
        raise OSError(errno.ESRCH, "the sandbox ended while it started")
    return pidfd
