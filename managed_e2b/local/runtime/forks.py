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
from collections.abc import Callable
from typing import Any

from managed_e2b.local.runtime import channel, children

Told = tuple[dict[str, Any], list[int]]  # what a fork reported, and descriptors, which are closed after `done`


class Forks:
    """`on_end` gets the pid and wait status of each child that ended and is no reporting fork of ours."""

    def __init__(self, on_end: Callable[[int, int], None]) -> None:
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._silent: set[int] = set()  # forks that have not reported yet
        self._known: set[int] = set()  # forks whose end means nothing: what they report is all
        self._ended = False

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
            for key, _ in self._selector.select():
                key.data()
        signal.set_wakeup_fd(-1)  # it is closed with us

    def end(self) -> None:
        self._ended = True

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def fork(self, run: Callable[[socket.socket], None], done: Callable[[Told], None]) -> int:
        """Fork with a socket to report on; `done` gets what was told, or a failure, as soon as it is told."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = children.fork(lambda: run(theirs), theirs)
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
        return pid

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
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._known:
                self._known.discard(pid)
            else:
                self._on_end(pid, status)


def _receive(sock: socket.socket) -> Told:
    data, fds = channel.receive(sock)
    if not data:
        return {"errno": errno.EIO, "message": "the helper process died", "step": "fork"}, fds or []
    if fds is None:
        return {**json.loads(data), **channel.LOST}, []
    return json.loads(data), fds
