"""One process inside a sandbox, as the server holds it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from managed_e2b.local.runtime import linux
from managed_e2b.local.runtime.base import Exit, PtySize


class BubblewrapProcess:
    """`base.GuestProcess`. Holds a pidfd: no signal hits a recycled number; and the namespace that marks its tree."""

    def __init__(
        self,
        pid: int,
        host_pid: int,
        pidfd: int,
        marker: int,
        stdio: dict[str, int],
        exit: asyncio.Future[Exit],
        kill_marked: Callable[[int], None],
    ) -> None:
        self.pid = pid
        self.stdin_fd = stdio.get("stdin")
        self.stdout_fd = stdio.get("stdout")
        self.stderr_fd = stdio.get("stderr")
        self.pty_fd = stdio.get("pty")
        self._host_pid = host_pid
        self._pidfd: int | None = pidfd
        self._marker: int | None = marker
        self._exit = exit
        self._kill_marked = kill_marked
        for fd in stdio.values():
            os.set_blocking(fd, False)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    def signal(self, number: int, *, group: bool = False) -> bool:
        if self._pidfd is None or self._exit.done():
            return False
        try:
            if group:
                self._signal_group(self._pidfd, number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def _signal_group(self, pidfd: int, number: int) -> None:
        group = os.getpgid(self._host_pid)  # that of another leader, unless it made its own
        signal.pidfd_send_signal(pidfd, 0)  # still there, so the number was still its own
        os.killpg(group, number)

    def kill_tree(self) -> None:
        self.signal(signal.SIGKILL)
        if self._marker is not None:
            self._kill_marked(self._marker)

    def resize(self, size: PtySize) -> None:
        if self.pty_fd is not None:
            linux.resize_pty(self.pty_fd, size.cols, size.rows)

    def close_stdin(self) -> None:
        if self.stdin_fd is not None:
            os.close(self.stdin_fd)
            self.stdin_fd = None

    def close(self) -> None:
        self.close_stdin()
        for name in ("stdout_fd", "stderr_fd", "pty_fd", "_pidfd", "_marker"):
            fd = getattr(self, name)
            if fd is not None:
                setattr(self, name, None)
                os.close(fd)
