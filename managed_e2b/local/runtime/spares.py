"""Forks made ahead: to put a process into control groups can take the kernel ten milliseconds, so it is done before
anybody waits for it.

Standard library only.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from managed_e2b.local.runtime import channel, children

# More might have to wait until a spare reads it, and one that is frozen with its sandbox does not.
_MAX_ORDER = 32 * 1024


class Spare:
    """A child that has done the first part of its work, or is doing it, and waits to hear the rest. To be used once."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line

    def order(self, message: dict[str, Any], fds: Sequence[int]) -> bool:
        """Let it go on. False: it is no more, or the order is too long; it has done nothing then."""
        with self._line:
            frame = channel.encode(message, fds)
            if len(frame) > _MAX_ORDER:
                return False
            try:
                channel.send_frame(self._line, frame, fds)
            except (BrokenPipeError, ConnectionResetError):
                return False
            return True

    def dismiss(self) -> None:
        """It ends by itself."""
        self._line.close()


def make(prepare: Callable[[], None], go_on: Callable[[dict[str, Any], list[int]], None], keep: Sequence[int]) -> Spare:
    """Fork one: it calls `prepare`, and `go_on` with what is ordered. `keep`: descriptors that it needs."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        children.keep_only([theirs.fileno(), *keep])
        children.detach_signals()
        prepare()
        order = _wait(theirs)
        if order is not None:
            go_on(*order)

    with theirs:
        try:
            return Spare(children.fork(run), ours)
        except BaseException:
            ours.close()
            raise


def _wait(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    decoder = channel.Decoder()
    while True:
        data, fds = channel.receive(line)
        if not data:
            return None
        messages = decoder.feed(data, fds)
        if messages:
            line.close()
            return messages[0]
