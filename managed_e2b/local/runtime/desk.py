"""How the spawner answers: what its operations have in common. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from managed_e2b.local.runtime import channel, children, linux
from managed_e2b.local.runtime.forks import Forks, Told

Operation = Callable[[int, dict[str, Any], list[int]], None]
"""Gets the id of the request, which it is to answer sooner or later, its arguments, and its descriptors, which are
closed when it returns."""


class BadRequest(Exception):
    """A request that cannot be understood or that names a sandbox which is not there."""


class Desk:
    """The server at one side, our forks at the other. `maintenance` is a user namespace with the sandboxes' id map, to
    build and remove their files in; -1: not made yet.
    """

    def __init__(self, server: socket.socket, on_end: Callable[[int, int], None]) -> None:
        self.forks = Forks(on_end)
        self.maintenance = -1
        self._server = server

    def answer(self, request: Any, body: dict[str, Any], fds: list[int] | None = None) -> None:
        self.send({"id": request, **body}, fds or [])

    def send(self, message: channel.Message, fds: list[int]) -> None:
        try:
            channel.send(self._server, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self.forks.end()

    def relay(self, request: int) -> Callable[[Told], None]:
        """Pass on the value, or the failure, that a fork told."""
        return lambda told: self.answer(request, *told)

    def clean(self, work: Callable[[], Any]) -> None:
        """Run `work` in a fork, as who we are; how it ends is nobody's concern."""
        self.forks.fork(self._as_we_are(work), lambda told: None)

    def maintain(
        self,
        request: int,
        work: Callable[[], Any],
        before: Callable[[], Any] = lambda: None,
        keep: Sequence[int] = (),
    ) -> None:
        """Run `work` in a fork, as root of the maintenance namespace; `before`, as who we are.

        `keep`: descriptors that it needs.
        """
        if self.maintenance < 0:
            raise BadRequest("not configured")
        fd = self.maintenance

        def run(report: socket.socket) -> None:
            children.keep_only([fd, report.fileno(), *keep])
            children.detach_signals()
            before()
            linux.setns(fd, linux.CLONE_NEWUSER)
            children.become_root()
            os.umask(0o022)
            children.tell(report, {"value": work()})

        self.forks.fork(run, self.relay(request))

    def work(self, request: int, work: Callable[[], Any]) -> None:
        """Run `work` in a fork, as who we are, and answer with what it returns."""
        self.forks.fork(self._as_we_are(work), self.relay(request))

    @staticmethod
    def _as_we_are(work: Callable[[], Any]) -> Callable[[socket.socket], None]:
        def run(report: socket.socket) -> None:
            children.keep_only([report.fileno()])
            children.detach_signals()
            children.tell(report, {"value": work()})

        return run
