"""The spawner's loop: descriptors to watch, forks that report, and children that end.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from managed_e2b.local.runtime import channel, children, spares
from managed_e2b.local.runtime.spares import Spare

Told = tuple[dict[str, Any], list[int]]  # what a fork reported, and descriptors, which are closed after `done`


class Forks:
    """`on_end` gets the pid and wait status of each child that ended and is no reporting fork of ours."""

    def __init__(self, on_end: Callable[[int, int], None]) -> None:
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._silent: set[int] = set()  # forks that have not reported yet
        self._known: set[int] = set()  # forks whose end means nothing: what they report is all
        self._ended = False
        self._chores: deque[Callable[[], None]] = deque()
        self._alarm: tuple[float, Callable[[], None]] | None = None

    @property
    def pending(self) -> bool:
        """Whether a fork may still report a child that we do not know of."""
        return bool(self._silent)

    def run(self) -> None:
        """Serve what is watched until `end`."""
        reader, writer = socket.socketpair()
        for side in (reader, writer):
            side.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.watch(reader.fileno(), lambda: self._reap(reader))
        while not self._ended:
            events = self._selector.select(self._patience())
            for key, _ in events:
                key.data()
            if not events:
                self._rest()
        signal.set_wakeup_fd(-1)  # it is closed with us

    def end(self) -> None:
        self._ended = True

    def when_idle(self, chore: Callable[[], None]) -> None:
        """Do this once nobody waits for anything else."""
        self._chores.append(chore)

    def set_alarm(self, when: float, chore: Callable[[], None]) -> None:
        """Do this at that monotonic time, or later when there is more to do. There is one alarm: the last one set."""
        self._alarm = (when, chore)

    def _patience(self) -> float | None:
        if self._chores:
            return 0
        return None if self._alarm is None else max(0.0, self._alarm[0] - time.monotonic())

    def _rest(self) -> None:
        if self._chores:
            with contextlib.suppress(OSError):  # what is made ahead can be done without
                self._chores.popleft()()
        elif self._alarm is not None and self._alarm[0] <= time.monotonic():
            _, chore = self._alarm
            self._alarm = None
            chore()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def fork(self, run: Callable[[socket.socket], None], done: Callable[[Told], None]) -> int:
        """Fork with a socket to report on; `done` gets what was told, or a failure, as soon as it is told."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = children.fork(lambda: run(theirs), theirs)
        self._expect(pid, ours, done)
        return pid

    def spare(
        self, prepare: Callable[[], None], go_on: Callable[[dict[str, Any], list[int]], None], keep: Sequence[int]
    ) -> Spare:
        """A fork made ahead, see `spares.make`, whose end means nothing."""
        spare = spares.make(prepare, go_on, keep)
        self._known.add(spare.pid)
        return spare

    def let_go(self, pid: int) -> None:
        """A spare that becomes something else: its end is to be told."""
        self._known.discard(pid)

    def order(self, spare: Spare, message: dict[str, Any], done: Callable[[Told], None]) -> bool:
        """`fork`, with a spare that gets a message and its socket to report on. False: it did nothing."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if not spare.order(message, [theirs.fileno()]):
                ours.close()
                return False
        self._expect(spare.pid, ours, done)
        return True

    def _expect(self, pid: int, ours: socket.socket, done: Callable[[Told], None]) -> None:
        self._silent.add(pid)
        self._known.add(pid)

        def on_message() -> None:
            body, fds = _receive(ours)
            self.unwatch(ours.fileno())
            ours.close()
            try:
                done((body, fds))
            finally:
                channel.close_all(fds)
                self._silent.discard(pid)

        self.watch(ours.fileno(), on_message)

    def reap_no_more(self) -> None:
        """Leave all children, those that have ended too, to the kernel: a sandbox waits for the last of its own."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _reap(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wake.recv(4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid in self._known:  # a command that it started has stopped its own group, and it is in there
                    os.kill(pid, signal.SIGCONT)
            elif pid in self._known:
                self._known.discard(pid)
            else:
                self._on_end(pid, status)


def _receive(sock: socket.socket) -> Told:
    data, fds = channel.receive(sock)
    if not data:
        # Nobody but the kernel kills it, in a sandbox whose memory is full.
        return {
            "errno": errno.ENOMEM,
            "message": "it was killed while it began: out of memory",
            "step": "fork",
        }, fds or []
    if fds is None:
        return {**json.loads(data), **channel.LOST}, []
    return json.loads(data), fds
